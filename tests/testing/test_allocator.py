"""The simulated allocator counts as PyTorch's does."""

from __future__ import annotations

import contextlib
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumemwidget.allocator.replay import replay
from gpumemwidget.backends.cuda.backend import CudaBackend
from gpumemwidget.backends.snapshot import parse_segments
from gpumemwidget.device_parts import divide_unallocated
from gpumemwidget.errors import BadInputError
from gpumemwidget.model.traces import TraceAction
from gpumemwidget.testing import DeviceFullError, SimulatedGpus, simulate_torch

MIB = 1024 * 1024
SIZES = (1, 511, 512, 513, 100_000, MIB, MIB + 1, 5 * MIB, 10 * MIB, 20 * MIB, 70 * MIB)


def read(allocator: SimulatedGpus, name: str) -> int:
    return allocator.stats(0)[name]["all"]["current"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("n_bytes", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),
    ],
)
def test_sizes_are_rounded_as_pytorch_rounds_them(
    n_bytes: int, allocated: int, reserved: int
) -> None:
    """Requests to 512 bytes, and segments of 2 MiB, 20 MiB, or their own in steps of 2 MiB."""
    allocator = SimulatedGpus()

    allocator.allocate(n_bytes)

    assert read(allocator, "allocated_bytes") == allocated
    assert read(allocator, "reserved_bytes") == reserved


def test_a_full_device_flushes_tries_again_and_fails() -> None:
    """Room in the cache is used after a retry; without room the failure is counted."""
    allocator = SimulatedGpus(total_bytes=100 * MIB)
    allocator.free(allocator.allocate(60 * MIB))
    handle = allocator.allocate(80 * MIB)
    retried = allocator.stats(0)

    with pytest.raises(DeviceFullError, match="no room for 41943040 bytes"):
        allocator.allocate(40 * MIB)
    failed = allocator.stats(0)

    assert (retried["num_alloc_retries"], retried["num_ooms"]) == (1, 0)
    assert (failed["num_alloc_retries"], failed["num_ooms"]) == (2, 1)
    assert failed["allocated_bytes"]["all"]["current"] == 80 * MIB
    allocator.free(handle)


@pytest.mark.parametrize("device", [-1, "cuda:1", "cuda:"])
def test_devices_that_are_not_there_are_refused(device: int | str) -> None:
    """The error names the device and how many there are."""
    with pytest.raises(BadInputError, match=f"there is no device {device!r}: there are 1 "):
        SimulatedGpus().allocate(1, device)


def test_blocks_are_freed_once() -> None:
    """A handle that is unknown or used up is refused."""
    allocator = SimulatedGpus()
    handle = allocator.allocate(1)
    allocator.free(handle)

    with pytest.raises(BadInputError, match="free each once"):
        allocator.free(handle)
    with pytest.raises(BadInputError, match="at least 1"):
        allocator.allocate(0)


def run(allocator: SimulatedGpus, program: list[tuple[str, int]], handles: list[int]) -> None:
    """Carry a program out; the blocks in use are those of ``handles``."""
    for action, argument in program:
        if action == "allocate":
            with contextlib.suppress(DeviceFullError):
                handles.append(allocator.allocate(argument))
        elif action == "free" and handles:
            allocator.free(handles.pop(argument % len(handles)))
        elif action != "free":
            getattr(allocator, action)()


PROGRAMS = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), st.sampled_from(SIZES)),
        st.tuples(st.just("free"), st.integers(0, 50)),
        st.tuples(st.just("empty_cache"), st.just(0)),
        st.tuples(st.just("reset_peak"), st.just(0)),
    ),
    max_size=60,
)


@given(PROGRAMS)
def test_counters_agree_with_each_other(program: list[tuple[str, int]]) -> None:
    """After any program no peak is below what is in use, and the totals lead to that."""
    allocator = SimulatedGpus(total_bytes=300 * MIB)
    handles: list[int] = []
    run(allocator, program, handles)

    stats = allocator.stats()
    for name in ("allocated_bytes", "reserved_bytes"):
        whole = stats[name]["all"]
        assert whole["peak"] >= whole["current"] >= 0
        assert whole["current"] == whole["allocated"] - whole["freed"]
    assert (read(allocator, "allocated_bytes") > 0) == bool(handles)


@given(PROGRAMS, st.booleans())
def test_the_cache_gives_what_was_foretold(
    program: list[tuple[str, int]], is_expandable: bool
) -> None:
    """After any program the snapshot is what the counters say, and tells what emptying gives."""
    allocator = SimulatedGpus(total_bytes=300 * MIB, expandable=is_expandable)
    run(allocator, program, [])
    segments = parse_segments(allocator.take_snapshot()["segments"])
    foretold = divide_unallocated(segments)
    before = read(allocator, "reserved_bytes")

    allocator.empty_cache()

    assert foretold.reserved_bytes == before <= 300 * MIB
    assert foretold.allocated_bytes == read(allocator, "allocated_bytes")
    assert foretold.releasable_bytes == before - read(allocator, "reserved_bytes")
    assert {each.page_bytes is not None for each in segments} <= {is_expandable}
    left = parse_segments(allocator.take_snapshot()["segments"])
    ends = [each.address + each.n_bytes for each in left]
    assert all(end <= after.address for end, after in zip(ends, left[1:], strict=False))


def test_segments_grow_and_give_pages_back() -> None:
    """One range a pool, page by page; what is left between gaps are segments of their own."""
    allocator = SimulatedGpus(total_bytes=300 * MIB, expandable=True)
    allocator.record_history()
    handles = [allocator.allocate(n_bytes) for n_bytes in (30 * MIB, 30 * MIB, 30 * MIB, 1)]
    grown = parse_segments(allocator.take_snapshot()["segments"])
    allocator.free(handles[1])

    allocator.empty_cache()

    left = parse_segments(allocator.take_snapshot()["segments"])
    allocator.allocate(25 * MIB)
    assert [(each.n_bytes, each.page_bytes, len(each.blocks)) for each in grown] == [
        (100 * MIB, 20 * MIB, 4),
        (2 * MIB, 2 * MIB, 2),
    ]
    start = grown[0].address
    assert [(each.address - start, each.n_bytes) for each in left[:-1]] == [
        (0, 40 * MIB),
        (60 * MIB, 40 * MIB),
    ]
    events = [
        (each["action"], each["size"])
        for each in allocator.take_snapshot()["device_traces"][0]
        if each["action"].startswith("segment")
    ]
    assert events == [
        *(("segment_map", n_bytes * MIB) for n_bytes in (40, 20, 40, 2)),
        ("segment_unmap", 20 * MIB),
        ("segment_map", 20 * MIB),
    ]
    assert allocator.take_snapshot()["allocator_settings"]["expandable_segments"] is True


@given(PROGRAMS, PROGRAMS, st.booleans())
def test_events_come_to_the_counters(
    before: list[tuple[str, int]], program: list[tuple[str, int]], is_expandable: bool
) -> None:
    """After any program the history, played again, gives what was counted, to the byte."""
    allocator = SimulatedGpus(total_bytes=300 * MIB, expandable=is_expandable)
    allocator.touch(0)
    backend = CudaBackend(simulate_torch(allocator))
    handles: list[int] = []
    run(allocator, before, handles)
    backend.start_trace(n_events=10_000)
    (start,) = backend.start_span()
    run(allocator, [each for each in program if each[0] != "reset_peak"], handles)
    (end,) = backend.read_exact()
    (trace,) = backend.end_trace()

    found = replay(trace)

    assert found.agrees
    allocated = list(accumulate(found.changes, initial=found.start_allocated_bytes))
    reserved = list(accumulate(found.reserved_changes, initial=found.start_reserved_bytes))
    assert (allocated[0], allocated[-1]) == (start.allocated_bytes, end.allocated_bytes)
    assert (reserved[0], reserved[-1]) == (start.reserved_bytes, end.reserved_bytes)
    assert max(allocated) == end.allocated_peak_bytes
    assert max(reserved) == end.reserved_peak_bytes
    n_ooms = trace.events.actions.count(TraceAction.OOM)
    assert n_ooms == end.num_ooms - start.num_ooms


@pytest.mark.gpu
def test_real_allocator_counts_the_same() -> None:
    """On a GPU, PyTorch's allocator gives the same figures for the same program."""
    import torch

    device = torch.cuda.device_count() - 1
    torch.zeros(1, device=f"cuda:{device}")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    simulated = SimulatedGpus(1)
    real: list[torch.Tensor] = []
    handles: list[int] = []
    base = torch.cuda.memory_stats_as_nested_dict(device)

    def difference(name: str) -> int:
        now = torch.cuda.memory_stats_as_nested_dict(device)
        return now[name]["all"]["current"] - base[name]["all"]["current"]

    for n_bytes in (5 * MIB, MIB + 1, 70 * MIB, 11 * MIB, 20 * MIB, 3 * MIB):
        real.append(torch.empty(n_bytes, dtype=torch.uint8, device=f"cuda:{device}"))
        handles.append(simulated.allocate(n_bytes))
        for name in ("allocated_bytes", "reserved_bytes"):
            assert difference(name) == read(simulated, name), (n_bytes, name)
    for place in (1, 3, 0):
        del real[place]
        simulated.free(handles.pop(place))
        for name in ("allocated_bytes", "reserved_bytes"):
            assert difference(name) == read(simulated, name), (place, name)
    assert set(simulated.stats()) <= set(torch.cuda.memory_stats_as_nested_dict(device))
