"""Real devices, played: the states are what the driver and PyTorch themselves said meanwhile.

Beside each recording stands a file of moments, written down without us (``tests/gpu``).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.model.devices import DeviceState
from gpumemwidget.testing import RecordingPlayer, ReplayBackend, ReplayMonitor, load_recording

DEVICES = Path(__file__).parents[1] / "data" / "h200-devices"
NAMES = ("one-gpu", "two-gpus", "expandable")
MIB = 1 << 20


class Session:
    """A recording in the middle of its moments."""

    def __init__(self, name: str) -> None:
        truth = json.loads((DEVICES / f"{name}-moments.json").read_text())
        self.own_pid: int = truth["own_pid"]
        self.moments: list[dict[str, Any]] = truth["moments"]
        self.player = RecordingPlayer(load_recording(DEVICES / f"{name}.json.gz"))
        backend, monitor = ReplayBackend(self.player), ReplayMonitor(self.player)
        self.hardware = Hardware([backend], monitor)

    def take(self, moment: dict[str, Any]) -> dict[str, DeviceState]:
        """What stands at a moment, which must not lie behind."""
        self.player.advance(moment["event"] - self.player.position)
        return {state.info.device: state for state in self.hardware.take_device_states()}


@pytest.fixture(params=NAMES)
def session(request: pytest.FixtureRequest) -> Session:
    """Each of the recordings, at its beginning."""
    return Session(request.param)


def test_whole_devices_are_what_the_driver_said(session: Session) -> None:
    """To the byte, touched or not: driver, used and free, which are the total."""
    for moment in session.moments:
        states = session.take(moment)
        for device, told in moment["nvml"].items():
            use = states[device].use
            assert use.total_bytes == told["total_bytes"], moment["name"]
            assert use.driver_bytes == told["reserved_bytes"], moment["name"]
            assert use.used_bytes == told["used_bytes"], moment["name"]
            assert use.free_bytes == told["free_bytes"], moment["name"]
            assert use.driver_bytes + use.used_bytes + use.free_bytes == use.total_bytes


def test_processes_are_those_of_the_driver(session: Session) -> None:
    """Each once with its bytes; this one is told by its number wherever it is listed."""
    for moment in session.moments:
        states = session.take(moment)
        for device, told in moment["nvml"].items():
            listed = states[device].processes
            assert {(each.pid, each.n_bytes) for each in listed} == {
                (pid, n_bytes) for pid, n_bytes in told["processes"]
            }, moment["name"]
            own = {each.pid for each in listed if each.relation == "own"}
            assert own == {each.pid for each in listed if each.pid == session.own_pid}
            # What belongs to nobody is little: what CUDA takes for itself.
            unlisted = states[device].use.used_bytes - sum(each.n_bytes for each in listed)
            assert 0 <= unlisted < 32 * MIB, moment["name"]


def test_counters_are_what_pytorch_said(session: Session) -> None:
    """Of the devices that are in use, and no others; this process has what PyTorch has there."""
    for moment in session.moments:
        states = session.take(moment)
        gpus = {device: each for device, each in states.items() if device != "host"}
        assert {device for device, each in gpus.items() if each.reading} == set(moment["torch"])
        for device, told in moment["torch"].items():
            reading = states[device].reading
            assert reading.allocated_bytes == told["allocated_bytes"], moment["name"]
            assert reading.reserved_bytes == told["reserved_bytes"], moment["name"]
            own = sum(each.n_bytes for each in states[device].processes if each.relation == "own")
            assert own > reading.reserved_bytes
            assert states[device].is_at_one_moment
            assert states[device].notes == ()
            blocks = sum(each.n_bytes for each in states[device].segments)
            assert blocks == reading.reserved_bytes


def test_pinned_memory_is_what_pytorch_said(session: Session) -> None:
    """Unknown before its first use, which PyTorch counts as nothing.

    What tensors hold of it was not counted well by the release that was recorded.
    """
    for moment in session.moments:
        pinned = session.take(moment)["host"].pinned
        # Before CUDA is in use it was not asked.
        told = moment.get("pinned", {"allocated_bytes": 0})
        taken = 0 if pinned is None else pinned.reserved_bytes
        assert taken == told["allocated_bytes"], moment["name"]
        assert pinned is None or pinned.allocated_bytes is None


def test_a_neighbour_and_a_child_come_and_go() -> None:
    """Both are told apart by the tree of processes, for as long as they are there."""
    session = Session("one-gpu")
    seen = []
    for moment in session.moments:
        state = session.take(moment)["cuda:0"]
        seen.append(tuple(each.relation for each in state.processes))
        children = {child.pid: dict(child.devices) for child in session.hardware.list_children()}
        assert children == {
            each.pid: {"cuda:0": each.n_bytes}
            for each in state.processes
            if each.relation == "child"
        }

    # None, the neighbour, this process too, the child too, and the child gone.
    assert list(dict.fromkeys(seen)) == [
        (),
        ("other",),
        ("own", "other"),
        ("own", "child", "other"),
    ]
    assert seen[-1] == ("own", "other")
