"""The history is switched on for a cell, and left as it was found: over simulated allocators.

The same on a real GPU: ``tests/gpu/test_trace.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpumemwidget.backends.cuda.backend import CudaBackend
from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.model.devices import HardwareNote, HardwareNoteKind
from gpumemwidget.model.traces import AllocatorTrace, NoteKind, TraceAction, TraceNote
from gpumemwidget.testing import SimulatedGpus, simulate_torch
from tests.backends.children import run_in_fork
from tests.backends.late_cuda import delay_cuda

MIB = 1 << 20
IS_USERS = TraceNote(NoteKind.HISTORY_IS_USERS)
REFUSED = HardwareNote(
    HardwareNoteKind.HISTORY_REFUSED, "CUDA error: an illegal memory access was encountered"
)


class Gpu:
    """A simulated GPU, its torch, and our backend over it."""

    def __init__(self, n_devices: int = 1, *, is_initialized: bool = True) -> None:
        self.allocator = SimulatedGpus(n_devices)
        self.torch: Any = simulate_torch(self.allocator)
        if not is_initialized:
            delay_cuda(self.torch)
        self.memory = self.torch.cuda.memory
        self.allocator.touch(0)
        self.backend = CudaBackend(self.torch)
        self.binding = self.torch._C._cuda_record_memory_history

    def make(self, n_bytes: int, device: int = 0) -> int:
        """Allocate, on this line."""
        return self.allocator.allocate(n_bytes, device)

    def trace(self, **options: Any) -> list[AllocatorTrace]:
        return list(self.backend.end_trace(**options))

    @property
    def is_clean(self) -> bool:
        """Whether no history runs and torch's binding is its own."""
        binding = self.torch._C._cuda_record_memory_history
        return not self.allocator.is_history_on and binding == self.binding


@pytest.fixture
def gpu() -> Gpu:
    return Gpu()


def list_sizes(trace: AllocatorTrace) -> list[int]:
    """What was asked for, of each allocation."""
    events = trace.events
    return [
        size
        for code, size in zip(events.actions, events.sizes, strict=True)
        if code == TraceAction.ALLOC
    ]


# -- A trace -----------------------------------------------------------------------------------


def test_no_lines_of_frees_are_taken(gpu: Gpu) -> None:
    """To take one while an error unwinds a call of C++ would lose the error."""
    before = gpu.make(100)
    gpu.backend.start_trace(n_events=100)
    kept = gpu.make(100)
    gpu.allocator.free(before)
    gpu.allocator.free(kept)

    (trace,) = gpu.trace()

    # What torch gives is the allocation's, where that is known.
    assert list(trace.events.stacks) == [1, 0, 0, 1, 1]


def test_the_ring_is_bounded_for_all_devices_together() -> None:
    """Each of two has half of it; the newest events are there."""
    gpu = Gpu(2)
    gpu.make(1, device=1)
    gpu.backend.start_trace(n_events=20)
    for size in range(1, 101):
        gpu.make(size)
    gpu.make(7, device=1)

    first, second = gpu.trace()

    assert list_sizes(first) == list(range(91, 101))
    assert not first.is_whole
    assert list_sizes(second) == [7]
    assert second.is_whole


def test_a_device_that_comes_into_use_is_traced_from_its_first_event() -> None:
    """It stands with nothing at the start."""
    gpu = Gpu(2)
    gpu.backend.start_trace(n_events=100)
    gpu.make(5, device=1)

    first, second = gpu.trace()

    assert list_sizes(first) == []
    assert (list_sizes(second), second.before, second.is_whole) == ([5], (), True)


def test_cuda_that_begins_within_the_trace_is_not_begun_by_it() -> None:
    """The history starts with the user's own first call, once, whatever was traced before."""
    gpu = Gpu(is_initialized=False)
    gpu.backend.start_trace(n_events=100)
    assert gpu.backend.end_trace() == ()
    gpu.backend.start_trace(n_events=100)
    assert len(gpu.torch.cuda._queued_calls) == 1
    assert gpu.is_clean

    gpu.torch.cuda.init()
    gpu.make(9)
    (trace,) = gpu.trace()

    assert list_sizes(trace) == [9]
    assert trace.is_whole
    assert gpu.is_clean


def test_nothing_waits_for_cuda_after_unloading() -> None:
    """What was queued is taken out again, and others' calls stay."""
    gpu = Gpu(is_initialized=False)
    calls = gpu.torch.cuda._queued_calls
    others = (print, ["traceback"])
    calls.append(others)
    gpu.backend.start_trace(n_events=100)
    late = calls[1][0]

    gpu.backend.close()
    late()

    assert calls == [others]
    assert gpu.is_clean


def test_torch_that_comes_within_the_trace_joins_it() -> None:
    """The user's import within a traced cell begins nothing of its own."""
    gpu = Gpu()
    hardware = Hardware([])
    hardware.start_trace()

    hardware._join(gpu.torch)
    gpu.make(11)
    (trace,) = hardware.end_trace()

    assert list_sizes(trace) == [11]
    assert not gpu.allocator.is_history_on
    hardware.close()


# -- What can't be traced ----------------------------------------------------------------------


def test_other_allocators_say_why(gpu: Gpu) -> None:
    """Nothing is started then."""
    gpu.memory.get_allocator_backend = lambda: "cudaMallocAsync"

    (note,) = gpu.backend.start_trace(n_events=100)

    assert note == HardwareNote(HardwareNoteKind.NO_HISTORY, "cudaMallocAsync")
    assert gpu.trace() == []
    assert gpu.is_clean


def _refuse(*_: Any, **__: Any) -> Any:
    raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")


def test_a_start_that_cuda_refuses_leaves_nothing(gpu: Gpu) -> None:
    """Whether at the switch or at the snapshot."""
    gpu.memory.memory_snapshot = _refuse

    (note,) = gpu.backend.start_trace(n_events=100)

    assert note == REFUSED
    assert gpu.is_clean


def test_an_interrupt_in_the_start_leaves_nothing(gpu: Gpu) -> None:
    """Ctrl-C while torch imports what it takes, or reads what stands."""

    def interrupt(**_: object) -> None:
        raise KeyboardInterrupt

    gpu.memory.memory_snapshot = interrupt

    hardware = Hardware([gpu.backend])

    with pytest.raises(KeyboardInterrupt):
        hardware.start_trace()

    assert hardware.end_trace() == ()
    assert gpu.is_clean


def test_an_end_that_cuda_refuses_switches_off(gpu: Gpu) -> None:
    """There is no trace, and a note says why."""
    gpu.backend.start_trace(n_events=100)
    gpu.memory._snapshot = _refuse

    assert gpu.backend.end_trace() == ()

    assert gpu.backend.take_notes() == (REFUSED,)
    assert gpu.is_clean


# -- The user's own history --------------------------------------------------------------------


def test_a_history_of_the_users_is_used_and_left(gpu: Gpu) -> None:
    """Ours is the part since the start; nothing of his is cut or set."""
    gpu.memory._record_memory_history("all", context="all", max_entries=30)
    gpu.make(1)
    gpu.backend.start_trace(n_events=5)
    for size in range(2, 12):
        gpu.make(size)

    (trace,) = gpu.trace()
    gpu.backend.close()

    assert list_sizes(trace) == list(range(2, 12))
    assert trace.is_whole
    assert trace.notes == (IS_USERS,)
    assert gpu.allocator.is_history_on
    raw = gpu.memory._snapshot()["device_traces"][0]
    assert raw[1]["size"] == 1
    for _ in range(100):
        gpu.make(3)
    assert len(gpu.memory._snapshot()["device_traces"][0]) == 30


def test_a_history_of_the_users_without_events_is_not_whole(gpu: Gpu) -> None:
    """The note says how to have one of our own."""
    gpu.memory._record_memory_history("state", context="state")
    gpu.backend.start_trace(n_events=100)
    gpu.make(1)

    (trace,) = gpu.trace()

    assert trace.notes == (IS_USERS,)
    assert (len(trace.events), trace.is_whole) == (0, False)


@pytest.mark.parametrize("enabled", ["all", "state", None])
def test_what_is_set_within_the_cell_is_anothers(gpu: Gpu, enabled: str | None) -> None:
    """Our events are dropped for it, as a note says, and what was set stays."""
    gpu.backend.start_trace(n_events=100)
    gpu.make(1)
    gpu.memory._record_memory_history(enabled)
    gpu.make(2)

    (trace,) = gpu.trace()

    assert list_sizes(trace) == ([2] if enabled == "all" else [])
    assert not trace.is_whole
    assert trace.notes == (TraceNote(NoteKind.HISTORY_WAS_SET),)
    assert gpu.allocator.is_history_on == (enabled is not None)
    assert gpu.torch._C._cuda_record_memory_history == gpu.binding


def _record_own(gpu: Gpu, max_entries: int) -> list[list[tuple[str, int]]]:
    """A cell that records its own history, looks twice, and switches it off: what it has seen."""
    seen = []
    gpu.make(5)
    gpu.memory._record_memory_history("all", max_entries=max_entries)
    kept = gpu.make(7 * MIB)
    seen.append(list_entries(gpu))
    gpu.allocator.free(kept)
    gpu.make(9)
    seen.append(list_entries(gpu))
    gpu.memory._record_memory_history(None)
    seen.append(list_entries(gpu))
    return seen


def list_entries(gpu: Gpu) -> list[tuple[str, int]]:
    """The entries that the user finds in a snapshot of theirs."""
    (events,) = gpu.memory._snapshot()["device_traces"]
    return [(each["action"], each["size"]) for each in events]


@pytest.mark.parametrize("max_entries", [1000, 3])
def test_a_cell_that_records_a_history_finds_its_own(max_entries: int) -> None:
    """Entry by entry what it finds without us, whatever bound it has set."""
    alone, traced = Gpu(), Gpu()
    expected = _record_own(alone, max_entries)

    traced.backend.start_trace(n_events=100)
    found = _record_own(traced, max_entries)
    (trace,) = traced.trace()

    assert found == expected
    assert len(expected[1]) >= 3
    assert not trace.is_whole
    assert traced.is_clean


# -- Blocks ------------------------------------------------------------------------------------


def test_events_of_a_history_are_never_fetched_with_the_blocks(gpu: Gpu) -> None:
    """Torch is told to leave them out; one that can't is not asked while there are any."""
    asked: list[bool] = []

    def take_snapshot(*, include_traces: bool = True) -> Any:
        asked.append(include_traces)
        return gpu.allocator.take_snapshot()["segments"]

    gpu.memory.memory_snapshot = take_snapshot
    gpu.make(1)
    gpu.backend.read_segments()
    gpu.memory.memory_snapshot = lambda: gpu.allocator.take_snapshot()["segments"]
    old = CudaBackend(gpu.torch)

    without_history = old.read_segments()
    gpu.memory._record_memory_history("all")
    with_history = old.read_segments()

    assert asked == [False]
    assert (len(without_history), with_history) == (1, ())
    assert old.take_notes() == (HardwareNote(HardwareNoteKind.BLOCKS_COSTLY, "2.11.0"),)


def test_a_file_that_cant_be_written_is_a_note(gpu: Gpu, tmp_path: Path) -> None:
    """The trace is given all the same."""
    gpu.backend.start_trace(n_events=100)
    gpu.make(77)

    (trace,) = gpu.trace(snapshot_to=tmp_path / "missing" / "snapshot.pickle")

    assert list_sizes(trace) == [77]
    (note,) = gpu.backend.take_notes()
    assert "can't be written" in note.text
    assert note.text.endswith("choose another file")
    assert gpu.is_clean


# -- The file ----------------------------------------------------------------------------------


# -- Threads and children ----------------------------------------------------------------------


def test_a_forked_child_leaves_the_history_alone(gpu: Gpu) -> None:
    """There CUDA can't be used, and says that it is not initialised."""
    gpu.backend.start_trace(n_events=100)

    def end_in_child() -> object:
        gpu.torch.cuda.is_initialized = lambda: False
        gpu.torch.cuda._lazy_call = print
        gpu.memory._record_memory_history = _refuse
        traces = gpu.backend.end_trace()
        gpu.backend.close()
        return [traces, gpu.backend.take_notes()]

    answer = run_in_fork(end_in_child)
    gpu.make(5)

    (trace,) = gpu.trace()

    assert answer == [[], []]
    assert list_sizes(trace) == [5]
