"""Traces on a real GPU: they come to what the counters say, and change nothing of the user's."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch

from gpumemwidget.allocator.replay import replay
from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.model.devices import HOST, Reading
from gpumemwidget.model.traces import AllocatorTrace, NoteKind, Origin, TraceAction
from gpumemwidget.tracing.device_trace import describe_device
from gpumemwidget.tracing.sources import Source, Sources
from tests.gpu.conftest import needs_two
from tests.gpu.processes import MIB, run_python
from tests.gpu.workloads import WORKLOADS
from tests.ownership.notebook import Notebook

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

memory: Any = torch.cuda.memory


@pytest.fixture
def hardware(hardware: Hardware) -> Iterator[Hardware]:
    """This machine's GPUs and its host memory; no history runs before or after."""
    torch.ones(1, device="cuda")
    assert not torch._C._cuda_isHistoryEnabled()
    yield hardware
    hardware.close()
    is_on = torch._C._cuda_isHistoryEnabled()
    if is_on:
        memory._record_memory_history(None)
    assert not is_on


class Traced:
    """What a trace around some code gave."""

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware

    def __enter__(self) -> Traced:
        assert self._hardware.start_trace() == ()
        self.start = _by_device(self._hardware.start_span())
        return self

    def __exit__(self, *_: object) -> None:
        self.end = _by_device(self._hardware.read_exact())
        self.traces = {trace.device: trace for trace in self._hardware.end_trace()}
        assert self._hardware.take_notes() == ()

    @property
    def trace(self) -> AllocatorTrace:
        return self.traces["cuda:0"]

    @property
    def actions(self) -> list[str]:
        return [TraceAction(code).word for code in self.trace.events.actions]

    def check(self, device: str = "cuda:0") -> None:
        """The events, played, come to the counters, to the byte."""
        trace = self.traces[device]
        found = replay(trace)
        assert trace.is_whole
        assert found.agrees
        allocated = list(accumulate(found.changes, initial=found.start_allocated_bytes))
        reserved = list(accumulate(found.reserved_changes, initial=found.start_reserved_bytes))
        end = self.end[device]
        if device in self.start:
            assert allocated[0] == self.start[device].allocated_bytes
            assert reserved[0] == self.start[device].reserved_bytes
        assert (max(allocated), allocated[-1]) == (end.allocated_peak_bytes, end.allocated_bytes)
        assert (max(reserved), reserved[-1]) == (end.reserved_peak_bytes, end.reserved_bytes)


def _by_device(readings: tuple[Reading, ...]) -> dict[str, Reading]:
    return {each.device: each for each in readings if each.device != HOST}


def make(n_bytes: int) -> torch.Tensor:
    return torch.empty(n_bytes, dtype=torch.uint8, device="cuda")


# -- What is told ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WORKLOADS)
def test_events_come_to_the_counters_and_lines_to_the_peak(
    name: str, notebook: Notebook, hardware: Hardware
) -> None:
    """Whatever is run: peak and end to the byte, and 99% of the peak has a line."""
    for number, source in enumerate(WORKLOADS[name]):
        told = "\n__filename = __import__('sys')._getframe().f_code.co_filename"
        is_failing = name.startswith("OOM") and number > 0
        with Traced(hardware) as traced:
            notebook.run(source if is_failing else source + told)
        traced.check()
        error = notebook.ip.last_execution_result.error_in_exec
        assert (error is not None) == (is_failing and name == "OOM"), error
        if is_failing:
            continue
        filename = notebook.ip.user_ns["__filename"]
        cell = Source(f"In [{number}]", filename, "cell", source + told)
        described = describe_device(
            traced.trace, sources=Sources(cell), start_us=traced.trace.start_us
        )
        peak_bytes = sum(part.n_bytes for part in described.peak)
        outside = [part for part in described.peak if part.origin is Origin.OUTSIDE_LINES]
        assert peak_bytes == traced.end["cuda:0"].allocated_peak_bytes
        assert sum(part.n_bytes for part in outside) <= 0.01 * peak_bytes, described.peak


def test_streams_and_threads_add_up(hardware: Hardware) -> None:
    """Blocks that wait for another stream, and those of other threads, are told as they are."""

    def work(n_bytes: int) -> None:
        for _ in range(50):
            kept = [make(n_bytes + place) for place in range(5)]
            del kept[::2]

    with Traced(hardware) as traced:
        side = torch.cuda.Stream()
        x = make(4 * MIB)
        with torch.cuda.stream(side):
            y = x.clone()
        x.record_stream(side)
        del x
        z = make(4 * MIB)
        threads = [threading.Thread(target=work, args=(size,)) for size in (900, MIB, 3 * MIB)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        torch.cuda.synchronize()
        w = make(100)

    traced.check()
    assert len(set(traced.trace.events.streams)) == 2
    del y, z, w


def test_what_the_user_resets_and_empties_changes_nothing(hardware: Hardware) -> None:
    """``empty_cache``, resets of the peaks and a snapshot of the user's own, in mid-trace."""
    with Traced(hardware) as traced:
        x = make(64 * MIB)
        del x
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        memory._snapshot()
        y = make(8 * MIB)

    traced.check()
    assert "segment_free" in traced.actions
    del y


def test_expandable_segments_add_up() -> None:
    """Segments that grow and shrink."""
    run_python(
        _SCRIPT
        + """
torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
hardware = detect_hardware()
with Traced(hardware) as traced:
    x = [make(3_000_000 + n) for n in range(20)]
    del x[3], x[5]
    torch.cuda.empty_cache()
    y = make(64 << 20)
    del y
    torch.cuda.empty_cache()
    z = make(32 << 20)
traced.check()
assert "segment_map" in traced.actions and "segment_unmap" in traced.actions
assert traced.trace.rules.is_expandable
"""
    )


# -- Graph capture -----------------------------------------------------------------------------


def test_a_trace_may_begin_and_end_within_a_capture(hardware: Hardware) -> None:
    """Neither breaks the capture, and what the graph computes is right."""
    x = torch.ones(MIB, device="cuda")
    begun, ended = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(begun):
        y = x * 2
        assert hardware.start_trace() == ()
        y = y + 1
    with torch.cuda.graph(ended):
        z = x * 3
        (trace,) = hardware.end_trace()
        z = z + 1
    begun.replay()
    ended.replay()
    torch.cuda.synchronize()

    assert (y[0].item(), z[0].item()) == (3, 4)
    assert trace.is_whole
    assert replay(trace).agrees


# -- The file for torch's viewer ---------------------------------------------------------------


def test_torchs_own_viewer_reads_the_file(hardware: Hardware, tmp_path: Path) -> None:
    """Its summary of memory is that of the counters, and its pages are drawn."""
    from torch.cuda import _memory_viz

    path = tmp_path / "snapshot.pickle"
    assert hardware.start_trace() == ()
    kept = [make(n * MIB) for n in range(1, 5)]
    (trace,) = hardware.end_trace(snapshot_to=path)

    with path.open("rb") as file:
        snapshot = pickle.load(file)
    assert snapshot["device_traces"][0]
    assert sum(each["total_size"] for each in snapshot["segments"]) == sum(
        each.n_bytes for each in trace.after
    )
    assert "Active Memory Timeline" in _memory_viz.trace_plot(snapshot)
    assert _memory_viz.segment_plot(snapshot)
    assert "MiB" in _memory_viz.segsum(snapshot)
    assert [each.name for each in tmp_path.iterdir()] == ["snapshot.pickle"]
    del kept


# -- The user's own history --------------------------------------------------------------------


def test_a_history_of_the_users_is_used_and_left_as_it_is(hardware: Hardware) -> None:
    """Our span of it is told; his ring keeps what it had, its bound and its stacks."""
    memory._record_memory_history("all", context="alloc", stacks="python", max_entries=40)
    earlier = make(MIB)
    n_before = len(memory._snapshot()["device_traces"][0])

    with Traced(hardware) as traced:
        inner = make(2 * MIB)

    traced.check()
    assert 2 * MIB in traced.trace.events.sizes
    assert MIB not in traced.trace.events.sizes
    (note,) = traced.trace.notes
    assert note.kind is NoteKind.HISTORY_IS_USERS
    assert torch._C._cuda_isHistoryEnabled()
    kept = memory._snapshot()["device_traces"][0]
    assert len(kept) > n_before
    assert kept[0]["action"] in ("segment_alloc", "alloc")
    assert kept[0]["frames"]
    for _ in range(50):
        make(1000)
    assert len(memory._snapshot()["device_traces"][0]) == 40
    hardware.close()
    assert torch._C._cuda_isHistoryEnabled()
    memory._record_memory_history(None)
    del earlier, inner


def test_a_history_of_the_users_that_has_lost_our_start_is_not_whole(hardware: Hardware) -> None:
    """His ring is as small as he made it."""
    memory._record_memory_history("all", stacks="python", max_entries=20)

    with Traced(hardware) as traced:
        for _ in range(50):
            make(1000)

    assert not traced.trace.is_whole
    assert len(traced.trace.events) == 20
    memory._record_memory_history(None)


@pytest.mark.parametrize(("enabled", "context"), [("state", "state"), ("all", None)])
def test_a_history_that_keeps_no_lines_says_so(
    hardware: Hardware, enabled: str, context: str | None
) -> None:
    """It is used all the same, for what it tells."""
    memory._record_memory_history(enabled, context=context, stacks="python")
    with Traced(hardware) as traced:
        kept = make(MIB)
    memory._record_memory_history(None)

    assert MIB in traced.trace.events.sizes
    assert traced.trace.notes[0].kind is NoteKind.HISTORY_IS_USERS
    del kept


def test_what_the_user_sets_within_the_cell_is_his(hardware: Hardware) -> None:
    """He starts one of his own, or stops ours: his choice stays, and the trace says so."""
    with Traced(hardware) as traced:
        one = make(MIB)
        memory._record_memory_history("all", stacks="python", max_entries=100)
        two = make(2 * MIB)
    assert not traced.trace.is_whole
    assert 2 * MIB in traced.trace.events.sizes
    assert traced.trace.notes[0].kind is NoteKind.HISTORY_WAS_SET
    assert torch._C._cuda_isHistoryEnabled()
    memory._record_memory_history(None)

    with Traced(hardware) as traced:
        memory._record_memory_history(None)
    assert not traced.trace.is_whole
    assert not torch._C._cuda_isHistoryEnabled()
    del one, two


def _work_and_look() -> list[list[tuple[str, int, bool]]]:
    """A cell that records its own history, works, looks, and works again: the entries it found."""
    seen = []
    first = [make(MIB) for _ in range(20)]
    memory._record_memory_history("all", context="all", stacks="python", max_entries=500)
    second = [make(3 * MIB) for _ in range(20)]
    seen.append(_list_entries())
    del first
    third = [make(1000) for _ in range(200)]
    seen.append(_list_entries())
    del second, third
    seen.append(_list_entries())
    memory._record_memory_history(None)
    seen.append(_list_entries())
    return seen


def _list_entries() -> list[tuple[str, int, bool]]:
    return [
        (each["action"], each["size"], bool(each.get("frames")))
        for each in memory._snapshot()["device_traces"][0]
        # What the cache has to give depends on what was there before.
        if not each["action"].startswith("segment")
    ]


def test_a_cell_that_records_a_history_finds_its_own(hardware: Hardware) -> None:
    """Entry by entry what it finds without us."""
    _work_and_look()
    expected = _work_and_look()

    with Traced(hardware) as traced:
        found = _work_and_look()

    assert found == expected
    assert len(expected[1]) > 200
    assert not traced.trace.is_whole
    assert not torch._C._cuda_isHistoryEnabled()


def test_a_second_start_drops_the_first(hardware: Hardware) -> None:
    """A trace whose cell never ended does not run on."""
    hardware.start_trace()
    one = make(MIB)

    with Traced(hardware) as traced:
        two = make(2 * MIB)

    traced.check()
    assert MIB not in traced.trace.events.sizes
    assert not torch._C._cuda_isHistoryEnabled()
    del one, two


# -- Processes of their own --------------------------------------------------------------------

_SCRIPT = """
import torch
from gpumemwidget.backends.hardware import detect_hardware
from tests.gpu.test_trace import Traced, make
"""


def test_a_device_that_is_first_used_in_the_cell_is_traced_from_its_first_event() -> None:
    """CUDA is not initialised by a trace; when the user does so, it runs."""
    out = run_python(
        _SCRIPT
        + """
hardware = detect_hardware()
assert hardware.start_trace() == ()
assert not torch.cuda.is_initialized()
assert hardware.end_trace() == ()
with Traced(hardware) as traced:
    assert not torch.cuda.is_initialized()
    x = make(1 << 20)
traced.check()
print(traced.actions, traced.trace.before)
assert not torch._C._cuda_isHistoryEnabled()
hardware.close()
"""
    )

    assert out.splitlines()[-1] == "['segment_alloc', 'alloc'] ()"


def test_torch_imported_within_the_cell_is_traced() -> None:
    """The trace began before there was torch."""
    run_python(
        """
from gpumemwidget.backends.hardware import detect_hardware
hardware = detect_hardware()
assert hardware.start_trace() == ()
import torch
x = torch.ones(1000, device="cuda")
(trace,) = hardware.end_trace()
assert trace.is_whole and len(trace.events) >= 2, trace
hardware.close()
"""
    )


def test_other_allocators_say_why_there_is_no_trace() -> None:
    """CUDA's own asynchronous one keeps no history."""
    out = run_python(
        """
import os
os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "backend:cudaMallocAsync"
import torch
from gpumemwidget.backends.hardware import detect_hardware
x = torch.ones(1000, device="cuda")
hardware = detect_hardware()
print(hardware.start_trace(), hardware.end_trace())
"""
    )

    assert out.count("NO_HISTORY") == 1
    assert out.count("text='cudaMallocAsync'") == 1


@needs_two
def test_each_device_has_its_trace() -> None:
    """One that was used before, and one that is first used within the trace."""
    run_python(
        _SCRIPT
        + """
x = make(1 << 20)
hardware = detect_hardware()
with Traced(hardware) as traced:
    y = make(1 << 21)
    z = torch.ones(1 << 22, device="cuda:1")
    del y
assert sorted(traced.traces) == ["cuda:0", "cuda:1"]
traced.check("cuda:0")
traced.check("cuda:1")
assert traced.traces["cuda:1"].before == ()
with Traced(hardware) as traced:
    y = make(1 << 21)
    del z
traced.check("cuda:0")
traced.check("cuda:1")
"""
    )
