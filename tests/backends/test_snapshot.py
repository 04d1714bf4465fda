"""Snapshots: torch's dictionaries become records, and go through a file unchanged."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpumemwidget.backends.cuda.backend import CudaBackend
from gpumemwidget.backends.cuda.history_control import HistoryControl
from gpumemwidget.backends.cuda.snapshot import parse_segments
from gpumemwidget.model.segments import Frame
from gpumemwidget.testing import SimulatedGpus, simulate_torch

DATA = Path(__file__).parents[1] / "data"
MIB = 1 << 20


def make_raw_segment(*blocks: dict[str, Any], **values: Any) -> dict[str, Any]:
    """A segment at 4096, whose blocks lie side by side."""
    ends = list(accumulate((block["size"] for block in blocks), initial=4096))
    placed = [{**block, "address": at} for block, at in zip(blocks, ends, strict=False)]
    total = ends[-1] - 4096
    return {"device": 0, "address": 4096, "total_size": total, "blocks": placed, **values}


def test_every_state_of_every_release_is_understood() -> None:
    """``active_awaiting_free`` is what newer releases document and older ones never said."""
    states = ("active_allocated", "active_pending_free", "active_awaiting_free", "inactive")
    raw = [{"size": 512, "requested_size": 5, "state": state} for state in states]

    (segment,) = parse_segments([make_raw_segment(*raw)])

    assert [block.state for block in segment.blocks] == [
        "active_allocated",
        "active_pending_free",
        "active_pending_free",
        "inactive",
    ]
    assert [block.requested_bytes for block in segment.blocks] == [5, 5, 5, None]
    assert [block.address for block in segment.blocks] == [4096, 4608, 5120, 5632]
    assert (segment.is_private, segment.pool_id) == (False, (0, 0))
    assert segment.page_bytes is None


def test_stacks_are_pythons_alone() -> None:
    """What C++ did is left out: the innermost line of Python comes first."""
    stack = [
        {"filename": "??", "line": 0, "name": "c10::malloc"},
        {"filename": "/build/ceval.c", "line": 7, "name": "_PyEval"},
        {"filename": "/tmp/ipykernel_1/2.py", "line": 3, "name": "train"},
        {"filename": "<frozen runpy>", "line": 4, "name": "run"},
    ]
    block = {"size": 512, "state": "active_allocated", "frames": stack}

    (segment,) = parse_segments([make_raw_segment(block, segment_pool_id=(0, 3))])

    assert segment.blocks[0].frames == (
        Frame("/tmp/ipykernel_1/2.py", 3, "train"),
        Frame("<frozen runpy>", 4, "run"),
    )
    assert (segment.is_private, segment.pool_id) == (True, (0, 3))


class Traced:
    """A simulated torch whose user records a history, and that counts what it was asked for."""

    def __init__(self, allocator: SimulatedGpus, *, is_recorded: bool) -> None:
        self.torch = simulate_torch(allocator)
        self.torch._C._cuda_isHistoryEnabled = lambda: is_recorded
        self.asked: list[bool] = []
        self._allocator = allocator

    def snapshot_of_today(self, *, include_traces: bool = True) -> Any:
        self.asked.append(include_traces)
        return self._allocator.snapshot()

    def snapshot_of_old(self) -> Any:
        self.asked.append(True)
        return self._allocator.snapshot()


def test_events_of_a_history_are_never_fetched() -> None:
    """Where torch can leave them out it is told to; where not, blocks are read without a history.

    While one is recorded there is a note instead, once.
    """
    allocator = SimulatedGpus()
    allocator.allocate(MIB)
    today, old, quiet = (
        Traced(allocator, is_recorded=True),
        Traced(allocator, is_recorded=True),
        Traced(allocator, is_recorded=False),
    )
    today.torch.cuda.memory.memory_snapshot = today.snapshot_of_today
    old.torch.cuda.memory.memory_snapshot = old.snapshot_of_old
    quiet.torch.cuda.memory.memory_snapshot = quiet.snapshot_of_old
    backends = [CudaBackend(each.torch) for each in (today, old, quiet)]

    found = [backend.read_segments() for backend in backends]
    again = backends[1].read_segments()
    notes = [backend.take_notes() for backend in backends]
    for backend in backends:
        backend.close()

    assert today.asked == [False]
    assert old.asked == []
    assert quiet.asked == [True]
    assert found[0] == found[2] != ()
    assert found[1] == again == ()
    assert notes == [
        (),
        (
            "the allocator's blocks are not read while a memory history is recorded: PyTorch "
            "2.11.0 would fetch all of its events with them",
        ),
        (),
    ]


def test_an_allocator_that_keeps_no_blocks_is_a_note() -> None:
    """A pluggable allocator raises: nothing is read, and it is said."""
    allocator = SimulatedGpus()
    allocator.touch()
    torch = simulate_torch(allocator)

    def refuse(*, include_traces: bool = True) -> None:
        raise RuntimeError("CUDAPluggableAllocator does not yet support snapshot\nmore")

    torch.cuda.memory = SimpleNamespace(memory_snapshot=refuse)
    backend = CudaBackend(torch)

    found = backend.read_segments()
    notes = backend.take_notes()
    backend.close()

    assert found == ()
    assert notes == (
        "the allocator's blocks can't be read: CUDAPluggableAllocator does not yet support "
        "snapshot",
    )


@pytest.mark.parametrize(
    ("settings", "environment", "page_bytes"),
    [
        ("", "", 20 << 20),
        ("", "expandable_segments:True,large_segment_size_mb:40", 40 << 20),
        ("large_segment_size_mb: 64", "large_segment_size_mb:40", 64 << 20),
        ("expandable_segments:True", "large_segment_size_mb:40", 40 << 20),
    ],
)
def test_the_size_of_large_segments_is_read(
    monkeypatch: pytest.MonkeyPatch, settings: str, environment: str, page_bytes: int
) -> None:
    """What was set last, else what the environment says; it is about large requests alone."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", environment)
    allocator = SimulatedGpus(expandable=True)
    torch = simulate_torch(allocator)
    torch._C._accelerator_getAllocatorSettings = lambda: settings
    for n_bytes in (100, 3 << 20):
        allocator.allocate(n_bytes)

    segments = HistoryControl(torch).read_segments([0])

    assert sorted(each.page_bytes for each in segments) == [2 << 20, page_bytes]
