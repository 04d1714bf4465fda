"""The breakdowns of two real GPUs, played back: all of each, as the driver and PyTorch said it.

The recordings, and what was asked directly at each of their moments, are made by
``python -m tools.record_devices``.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.device_parts import build_breakdown
from gpumemwidget.model.breakdowns import Breakdown, PartKey
from gpumemwidget.model.devices import DeviceState
from tools.recordings import RecordingPlayer, ReplayBackend, ReplayMonitor, load_recording

FOLDER = Path(__file__).parents[1] / "data" / "h200-devices"
MIB = 1024**2
RESERVED: tuple[PartKey, ...] = (
    *("allocated", "rounding", "pending", "releasable", "fragmented", "pools"),
)
USED: tuple[PartKey, ...] = (*RESERVED, "outside", "children", "others", "unlisted")


@dataclass(frozen=True)
class Moment:
    """One device at one moment of a recording."""

    state: DeviceState
    breakdown: Breakdown
    #: What the driver and PyTorch said: ``None`` where PyTorch had nothing there.
    nvml: Any
    torch: Any

    def sum_parts(self, *keys: PartKey) -> int:
        return sum(part.n_bytes for part in self.breakdown.parts if part.key in keys)


@functools.cache
def play(session: str) -> tuple[int, dict[tuple[str, str], Moment]]:
    """The recorded process's number, and the moments by their names and devices."""
    told = json.loads((FOLDER / f"{session}-moments.json").read_text(encoding="utf-8"))
    player = RecordingPlayer(load_recording(FOLDER / f"{session}.json.gz"))
    hardware = Hardware([ReplayBackend(player)], ReplayMonitor(player))
    moments = {}
    for moment in told["moments"]:
        player.advance(moment["event"] - player.position)
        for state in hardware.take_device_states():
            device = state.info.device
            if device not in moment["nvml"]:
                continue
            breakdown = build_breakdown(state)
            assert breakdown is not None
            nvml, torch = moment["nvml"][device], moment["torch"].get(device)
            moments[moment["name"], device] = Moment(state, breakdown, nvml, torch)
    return told["own_pid"], moments


SESSIONS = ("one-gpu", "two-gpus", "expandable")


@pytest.mark.parametrize("session", SESSIONS)
def test_they_are_all_of_the_device(session: str) -> None:
    """To the byte, at every moment, and as the driver said to the byte: nobody else was there."""
    _, moments = play(session)

    assert len(moments) >= 6
    for moment in moments.values():
        breakdown, nvml = moment.breakdown, moment.nvml
        assert sum(part.n_bytes for part in breakdown.parts) == breakdown.total_bytes
        assert min(part.n_bytes for part in breakdown.parts) > 0
        assert not any(part.merged for part in breakdown.parts)
        assert breakdown.doubts == ()
        assert moment.state.is_at_one_moment
        assert breakdown.total_bytes == nvml["total_bytes"]
        assert breakdown.used_bytes == nvml["used_bytes"] == moment.sum_parts(*USED)
        assert moment.sum_parts("driver") == nvml["reserved_bytes"]
        assert moment.sum_parts("free") == nvml["free_bytes"]


@pytest.mark.parametrize("session", SESSIONS)
def test_they_are_what_pytorch_has(session: str) -> None:
    """Allocated and reserved to the byte, and nothing of a device that was not touched."""
    _, moments = play(session)

    touched = [moment for moment in moments.values() if moment.torch is not None]
    assert len(touched) >= 6
    for moment in moments.values():
        torch = moment.torch or {"allocated_bytes": 0, "reserved_bytes": 0}
        assert moment.sum_parts("allocated", "rounding") == torch["allocated_bytes"]
        assert moment.sum_parts(*RESERVED) == torch["reserved_bytes"]
        assert (moment.state.reading is None) is (moment.torch is None)


@pytest.mark.parametrize("session", SESSIONS)
def test_each_process_has_what_the_driver_said(session: str) -> None:
    """This process is what PyTorch has and what is outside; the others are parts by their pids."""
    own_pid, moments = play(session)

    for moment in moments.values():
        listed = dict(moment.nvml["processes"])
        own_bytes = listed.pop(own_pid, 0)
        assert moment.sum_parts(*RESERVED, "outside") == own_bytes
        parts = [
            part
            for whole in moment.breakdown.parts
            if whole.key in ("children", "others")
            for part in whole.parts
        ]
        assert {part.process.pid: part.n_bytes for part in parts if part.process} == listed


@pytest.mark.parametrize(
    ("session", "device", "before", "after"),
    [
        ("one-gpu", "cuda:0", "the child has ended", "the cache was emptied"),
        ("two-gpus", "cuda:0", "others have freed", "the cache was emptied"),
        ("two-gpus", "cuda:1", "others have freed", "the cache was emptied"),
        ("expandable", "cuda:0", "another process is there", "the cache was emptied"),
    ],
)
def test_what_was_releasable_came_back(session: str, device: str, before: str, after: str) -> None:
    """``empty_cache`` gave back as much as was said, and what another stream had done with."""
    _, moments = play(session)
    was, now = moments[before, device], moments[after, device]

    freed_bytes = was.torch["reserved_bytes"] - now.torch["reserved_bytes"]

    assert was.sum_parts("releasable", "pending") == freed_bytes > 0
    assert was.nvml["used_bytes"] - now.nvml["used_bytes"] == freed_bytes
    assert now.sum_parts("releasable", "pending") == 0
    assert now.sum_parts("fragmented") == was.sum_parts("fragmented")
    assert now.sum_parts("free") - was.sum_parts("free") == freed_bytes


def test_a_pool_goes_with_its_graph() -> None:
    """What is in pools stays through ``empty_cache``, until the graph and the pool are gone."""
    _, moments = play("one-gpu")
    kept = moments["the cache was emptied", "cuda:0"]
    dead = moments["graph and pool are gone", "cuda:0"]
    after = moments["the cache was emptied again", "cuda:0"]

    assert kept.sum_parts("pools") == 66 * MIB
    assert after.sum_parts("pools") == 0
    # Whether a pool's graph is still there the allocator does not tell.
    freed_bytes = dead.torch["reserved_bytes"] - after.torch["reserved_bytes"]
    assert dead.sum_parts("releasable") < freed_bytes == dead.sum_parts("releasable", "pools")


def test_who_comes_and_goes_changes_their_part_alone() -> None:
    """Another process's 5 GiB are in its own part, and taken from what is free."""
    _, moments = play("one-gpu")
    before = moments["a limit", "cuda:0"]
    more = moments["the other takes more", "cuda:0"]
    less = moments["the other has freed all", "cuda:0"]

    for now, n_bytes in ((more, 5 << 30), (less, -(3 << 30))):
        assert now.sum_parts("others") - before.sum_parts("others") == n_bytes
        assert before.sum_parts("free") - now.sum_parts("free") == n_bytes
        for key in (*RESERVED, "outside", "children", "driver"):
            assert now.sum_parts(key) == before.sum_parts(key)
    assert more.breakdown.limit_bytes == 37_527_470_080
    assert moments["pinned memory", "cuda:0"].breakdown.limit_bytes is None
