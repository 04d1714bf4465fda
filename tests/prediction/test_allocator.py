"""The simulated allocator does what PyTorch's does, from any state and with any settings."""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumemwidget.allocator.caching import CachingAllocator, DeviceFullError
from gpumemwidget.allocator.rules import AllocatorSettings, parse_settings
from gpumemwidget.errors import BadInputError
from gpumemwidget.model.traces import TraceAction
from tests.prediction import recorded
from tests.tracing.recordings import CELLS, play
from tools.recordings import load_recording

MIB = 1 << 20
GIB = 1 << 30
DATA = Path(__file__).parent.parent / "data"
#: Real recordings with snapshots: pools of CUDA graphs, blocks that other streams use, segments
#: that grow.
SNAPSHOTS = sorted(
    path.relative_to(DATA).as_posix()
    for pattern in ("h100-blocks.json.gz", "h100-traces/*.json.gz", "h200-devices/*.json.gz")
    for path in DATA.glob(pattern)
)


def make(total_mib: int = 1000, **settings: Any) -> CachingAllocator:
    return CachingAllocator(total_mib * MIB, settings=AllocatorSettings(**settings))


def note_driver(allocator: CachingAllocator) -> list[tuple[str, int]]:
    """What the allocator takes from the driver and gives back from now on, in MiB."""
    noted: list[tuple[str, int]] = []

    def note(action: TraceAction, _: int, n_bytes: int, *__: Any) -> None:
        if action.word.startswith("segment"):
            noted.append((action.word.removeprefix("segment_"), n_bytes // MIB))

    allocator.on_event = note
    return noted


# -- Recorded histories ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", recorded.NAMES)
def test_recorded_runs_are_repeated_exactly(name: str) -> None:
    """Allocated and reserved bytes of each step of real models, and their peaks, to the byte."""
    simulated, real = recorded.replay_steps(name)

    assert simulated == real
    assert len(real) == 3


# The history of "ring" has lost its oldest events.
@pytest.mark.parametrize("name", sorted(CELLS.keys() - {"ring"}))
def test_recorded_cells_are_repeated_event_by_event(name: str) -> None:
    """From a real snapshot on, each address, segment and page is the real allocator's."""
    trace, _ = play(name)

    noted, allocator = recorded.simulate_trace(trace)

    # How much memory was free at an error depends on what else was on that GPU.
    simulated, real = (
        [
            (action, 0 if action is TraceAction.OOM else address, *rest)
            for action, address, *rest in entries
        ]
        for entries in (noted, recorded.list_events(trace))
    )
    assert simulated == real
    after = [(segment.address, segment.n_bytes) for segment in trace.after]
    found = [(segment.address, segment.n_bytes) for segment in allocator.list_segments("cuda:0")]
    assert found == after


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_recorded_snapshots_are_restored(name: str) -> None:
    """What a real snapshot shows is what the restored allocator shows."""
    recording = load_recording(DATA / name)
    devices = sorted({info.device for info in recording.devices} - {"host"})

    for event in recording.events:
        for device in devices:
            segments = [each for each in event.segments or () if each.device == device]
            own = tuple([replace(each, device="cuda:0") for each in segments])

            allocator = CachingAllocator.from_snapshot(own, total_bytes=140 * GIB)

            assert allocator.list_segments("cuda:0") == recorded.drop_stacks(own)
            check_counters(allocator)


# -- A restored state ------------------------------------------------------------------------------


def test_a_restored_block_is_found_by_its_address_and_freed() -> None:
    """Addresses are kept, so a live tensor's block can be freed, and cached holes are used."""
    live = make()
    first, second, third = (live.allocate(n * MIB) for n in (20, 22, 24))
    live.free(second)

    allocator = CachingAllocator.from_snapshot(live.list_segments("cuda:0"), total_bytes=1000 * MIB)
    hole = allocator.allocate(22 * MIB)
    allocator.free(allocator.active_blocks[first.address])
    allocator.empty_cache()

    assert hole.address == second.address
    assert sorted(allocator.active_blocks) == [second.address, third.address]
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (46 * MIB, 46 * MIB)


def test_a_restored_block_that_waits_is_freed_with_the_other_stream() -> None:
    """A block that another stream uses is no hole until the streams are waited for."""
    live = make()
    live.free(live.allocate(30 * MIB), is_used_elsewhere=True)

    allocator = CachingAllocator.from_snapshot(live.list_segments("cuda:0"), total_bytes=1000 * MIB)
    allocator.allocate(30 * MIB)
    allocator.synchronize()
    allocator.allocate(30 * MIB)

    assert allocator.reserved_bytes == 60 * MIB


def test_streams_and_private_pools_share_no_holes() -> None:
    """Each stream and each private pool only takes what it has freed itself."""
    allocator = make()
    homes: list[dict[str, Any]] = [{}, {"stream": 7}, {"pool_id": (0, 1)}]
    for home in homes:
        allocator.free(allocator.allocate(30 * MIB, **home))
    restored = CachingAllocator.from_snapshot(allocator.list_segments("cuda:0"), total_bytes=GIB)

    for home in homes:
        restored.allocate(30 * MIB, **home)
    before_bytes = restored.reserved_bytes
    restored.allocate(30 * MIB, stream=7)

    assert before_bytes == 90 * MIB
    assert restored.reserved_bytes == 120 * MIB


def test_a_private_pool_is_kept() -> None:
    """An emptied cache leaves the pool of a CUDA graph alone."""
    allocator = make()
    allocator.free(allocator.allocate(30 * MIB, pool_id=(0, 1)))

    allocator.empty_cache()

    assert allocator.reserved_bytes == 30 * MIB


def test_blocks_are_freed_once() -> None:
    """A block that is free already is refused, and so is one that does not wait."""
    allocator = make()
    block = allocator.allocate(1)
    with pytest.raises(BadInputError, match="free it first"):
        allocator.complete_free(block)
    allocator.free(block)

    with pytest.raises(BadInputError, match="free each block once"):
        allocator.free(block)


# -- A device that is full -------------------------------------------------------------------------


def test_a_full_device_gives_its_cache_back_and_tries_again() -> None:
    """First what waits for other streams is freed, then all unused segments go."""
    allocator = make(100)
    allocator.free(allocator.allocate(40 * MIB), is_used_elsewhere=True)
    allocator.free(allocator.allocate(30 * MIB))
    noted = note_driver(allocator)

    allocator.allocate(90 * MIB)

    assert noted == [("free", 30), ("free", 40), ("alloc", 90)]
    assert allocator.to_stats()["num_alloc_retries"] == 1
    with pytest.raises(DeviceFullError, match="of 104857600 bytes 94371840 are reserved"):
        allocator.allocate(11 * MIB)
    assert allocator.to_stats()["num_ooms"] == 1


def test_other_processes_leave_less_room() -> None:
    """Memory that others hold can't be reserved."""
    allocator = make(100)
    allocator.outside_bytes = 60 * MIB

    allocator.allocate(40 * MIB)

    with pytest.raises(DeviceFullError, match="of 41943040 bytes 41943040 are reserved"):
        allocator.allocate(1)


def test_an_expandable_segment_gives_pages_to_another() -> None:
    """Free pages in the middle are unmapped for a stream that has none."""
    allocator = make(100, is_expandable=True)
    blocks = [allocator.allocate(20 * MIB) for _ in range(5)]
    allocator.free(blocks[1])
    allocator.free(blocks[2])
    noted = note_driver(allocator)

    allocator.allocate(40 * MIB, stream=7)

    assert noted == [("unmap", 40), ("map", 40)]


# -- Settings --------------------------------------------------------------------------------------


def test_max_split_keeps_large_blocks_whole() -> None:
    """A block from the limit on serves no smaller request, and is not split for a larger one."""
    allocator = make(max_split_bytes=40 * MIB)
    allocator.free(allocator.allocate(60 * MIB))

    small = allocator.allocate(30 * MIB)
    whole = allocator.allocate(45 * MIB)

    assert (small.n_bytes, whole.n_bytes) == (30 * MIB, 60 * MIB)
    assert allocator.reserved_bytes == 90 * MIB


@pytest.mark.parametrize(("rounding_mib", "reserved_mib"), [(20, 146), (56, 100)])
def test_max_non_split_rounding_limits_what_a_whole_block_wastes(
    rounding_mib: int, reserved_mib: int
) -> None:
    """A request above ``max_split_size_mb`` takes a block that is larger by less than that."""
    allocator = make(max_split_bytes=40 * MIB, max_non_split_rounding_bytes=rounding_mib * MIB)
    allocator.free(allocator.allocate(100 * MIB))

    allocator.allocate(45 * MIB)

    assert allocator.reserved_bytes == reserved_mib * MIB


def test_max_split_lets_only_large_segments_go_first() -> None:
    """With a limit, enough of the segments above it are given back before all others are."""
    allocator = make(200, max_split_bytes=40 * MIB)
    for block in [allocator.allocate(n * MIB) for n in (30, 50, 60, 50)]:
        allocator.free(block)
    noted = note_driver(allocator)

    allocator.allocate(90 * MIB)

    assert noted == [("free", 60), ("free", 50), ("alloc", 90)]
    assert allocator.to_stats()["num_alloc_retries"] == 0


@pytest.mark.parametrize(
    ("divisions", "n_bytes", "block_bytes"),
    [
        (((0, 4),), 4800 * 1024, 5 * MIB),
        (((0, 4),), 70 * MIB, 80 * MIB),
        (((0, 4),), 700, 1024),
        (((0, 1), (64 * MIB, 2)), 70 * MIB, 96 * MIB),
        (((0, 1), (64 * MIB, 2)), 5 * MIB + 1, 5 * MIB + 512),
        # From 256 MiB on without steps.
        (((64 * MIB, 2), (256 * MIB, 0)), 300 * MIB + 1, 300 * MIB + 512),
    ],
)
def test_requests_are_rounded_to_parts_of_a_power_of_two(
    divisions: tuple[tuple[int, int], ...], n_bytes: int, block_bytes: int
) -> None:
    """With ``roundup_power2_divisions``, each size has its own number of parts."""
    allocator = make(roundup_divisions=divisions)

    assert allocator.allocate(n_bytes).n_bytes == block_bytes


def test_large_segments_have_the_size_that_is_set() -> None:
    """``large_segment_size_mb`` is for requests of 1 to 10 MiB, and for pages."""
    plain, growing = (
        make(large_segment_bytes=12 * MIB, is_expandable=is_expandable)
        for is_expandable in (False, True)
    )
    for allocator in (plain, growing):
        allocator.allocate(2 * MIB)
        allocator.allocate(13 * MIB)

    assert (plain.reserved_bytes, growing.reserved_bytes) == (26 * MIB, 24 * MIB)


@pytest.mark.parametrize("is_expandable", [False, True])
def test_a_limit_counts_whole_segments(is_expandable: bool) -> None:
    """PyTorch refuses by the segment that a request would take, even where one page would do."""
    allocator = make(allowed_bytes=35 * MIB, is_expandable=is_expandable)
    allocator.allocate(19 * MIB)

    with pytest.raises(DeviceFullError, match="of 36700160 bytes 20971520 are reserved"):
        allocator.allocate(5 * MIB)
    allocator.allowed_bytes = 40 * MIB
    allocator.allocate(5 * MIB)

    assert allocator.reserved_bytes == 40 * MIB


def test_an_expandable_segment_grows_where_it_can() -> None:
    """A gap is filled before the end grows, and the block at the end is taken last."""
    allocator = make(is_expandable=True)
    blocks = [allocator.allocate(n * MIB) for n in (40, 40, 25)]
    allocator.free(blocks[1])
    noted = note_driver(allocator)

    inner = allocator.allocate(14 * MIB)  # the end has 15 MiB, the hole 40
    allocator.empty_cache()
    filling = allocator.allocate(25 * MIB)

    assert inner.address == blocks[1].address
    assert filling.address == inner.end
    assert noted == [("unmap", 20), ("map", 20)]


def test_settings_may_change_while_blocks_are_there() -> None:
    """Once ``expandable_segments`` is off, no block of expandable segments is taken."""
    growing = make(is_expandable=True)
    growing.free(growing.allocate(30 * MIB))

    allocator = CachingAllocator.from_snapshot(
        growing.list_segments("cuda:0"), total_bytes=1000 * MIB
    )
    allocator.allocate(30 * MIB)

    assert allocator.reserved_bytes == 70 * MIB
    assert [segment.page_bytes is not None for segment in allocator.list_segments("cuda:0")] == [
        True,
        False,
    ]


# -- Any program -----------------------------------------------------------------------------------

SIZES = (1, 513, 100_000, MIB, MIB + 1, 5 * MIB, 10 * MIB, 20 * MIB, 21 * MIB, 45 * MIB, 70 * MIB)
SETTINGS = st.sampled_from(
    [
        AllocatorSettings(),
        AllocatorSettings(is_expandable=True),
        AllocatorSettings(max_split_bytes=40 * MIB),
        AllocatorSettings(roundup_divisions=((0, 4),)),
        AllocatorSettings(allowed_bytes=250 * MIB),
    ]
)
ALLOCATE = st.tuples(
    st.just("allocate"),
    st.sampled_from(SIZES),
    st.sampled_from([0, 7]),
    st.sampled_from([(0, 0), (0, 1)]),
)
FREE = st.tuples(st.just("free"), st.integers(0, 50), st.booleans())
PROGRAMS = st.lists(
    st.one_of(
        ALLOCATE, ALLOCATE, FREE, FREE, st.tuples(st.sampled_from(["synchronize", "empty_cache"]))
    ),
    max_size=60,
)


def run(allocator: CachingAllocator, program: list[tuple[Any, ...]]) -> None:
    """Carry a program out; its frees are of any block in use, by their places in the addresses."""
    for action, *values in program:
        if action == "allocate":
            n_bytes, stream, pool_id = values
            with contextlib.suppress(DeviceFullError):
                allocator.allocate(n_bytes, stream=stream, pool_id=pool_id)
        elif action == "free":
            used = sorted(
                (block.pool.stream, block.address, block)
                for block in allocator.active_blocks.values()
                if block.state == "active_allocated"
            )
            if used:
                place, is_used_elsewhere = values
                allocator.free(used[place % len(used)][2], is_used_elsewhere=is_used_elsewhere)
        else:
            getattr(allocator, action)()


def check_counters(allocator: CachingAllocator) -> None:
    """Count all blocks anew, and compare."""
    segments = allocator.list_segments("cuda:0")
    blocks = [block for segment in segments for block in segment.blocks]
    states = {block.address: block.state for block in blocks if block.state != "inactive"}
    in_use = [block.n_bytes for block in blocks if block.state == "active_allocated"]
    stats = allocator.to_stats()

    assert stats["allocated_bytes"]["all"]["current"] == sum(in_use)
    assert stats["reserved_bytes"]["all"]["current"] == sum(block.n_bytes for block in blocks)
    for name in ("allocated_bytes", "reserved_bytes"):
        statistic = stats[name]["all"]
        assert statistic["current"] == statistic["allocated"] - statistic["freed"]
        assert statistic["peak"] >= statistic["current"] >= 0
    assert {address: each.state for address, each in allocator.active_blocks.items()} == states
    for lower, upper in pairwise(blocks):
        assert lower.address + lower.n_bytes <= upper.address
    for segment in segments:
        for lower, upper in pairwise(segment.blocks):
            assert lower.address + lower.n_bytes == upper.address
            assert {lower.state, upper.state} != {"inactive"}  # free neighbours are joined


@given(PROGRAMS, SETTINGS)
def test_counters_are_those_of_a_recount(
    program: list[tuple[Any, ...]], settings: AllocatorSettings
) -> None:
    """After any program, all counters are the sums over all blocks."""
    allocator = CachingAllocator(300 * MIB, settings=settings)

    run(allocator, program)

    check_counters(allocator)
    assert allocator.reserved_bytes <= (allocator.allowed_bytes or allocator.total_bytes)


@given(PROGRAMS, SETTINGS)
def test_any_state_is_restored(program: list[tuple[Any, ...]], settings: AllocatorSettings) -> None:
    """An allocator from a snapshot shows that snapshot, and counts what the first one counts."""
    live = CachingAllocator(300 * MIB, settings=settings)
    run(live, program)
    segments = live.list_segments("cuda:0")

    restored = CachingAllocator.from_snapshot(segments, total_bytes=300 * MIB, settings=settings)

    assert restored.list_segments("cuda:0") == segments
    check_counters(restored)
    assert restored.allocated_bytes == live.allocated_bytes
    assert restored.reserved_bytes == live.reserved_bytes


@given(PROGRAMS, PROGRAMS, st.booleans())
def test_a_restored_allocator_goes_on_in_the_same_way(
    before: list[tuple[Any, ...]], program: list[tuple[Any, ...]], is_expandable: bool
) -> None:
    """Whatever a program does next, the restored allocator has the same segments and blocks."""
    settings = AllocatorSettings(is_expandable=is_expandable)
    # A snapshot does not show how many addresses below the first page are unmapped, so with
    # expandable segments nothing is unmapped before: the cache is not emptied, nor the device full.
    total_bytes = 10 * GIB if is_expandable else 300 * MIB
    live = CachingAllocator(total_bytes, settings=settings)
    run(live, [step for step in before if not is_expandable or step[0] != "empty_cache"])
    restored = CachingAllocator.from_snapshot(
        live.list_segments("cuda:0"), total_bytes=total_bytes, settings=settings
    )
    restored.next_address = live.next_address

    run(live, program)
    run(restored, program)

    assert restored.list_segments("cuda:0") == live.list_segments("cuda:0")


# -- The text of ``PYTORCH_ALLOC_CONF`` ------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("", AllocatorSettings()),
        (
            "max_split_size_mb:128, expandable_segments : True",
            AllocatorSettings(max_split_bytes=128 * MIB, is_expandable=True),
        ),
        (
            "expandable_segments:True,expandable_segments:False",
            AllocatorSettings(is_expandable=False),
        ),
        (
            "garbage_collection_threshold:0.8,per_process_memory_fraction:0.25",
            AllocatorSettings(allowed_bytes=4 * GIB),
        ),
        (
            "max_non_split_rounding_mb:30",
            AllocatorSettings(max_non_split_rounding_bytes=30 * MIB),
        ),
        (
            # As in PyTorch, the one is the other's default.
            "large_segment_size_mb:12",
            AllocatorSettings(large_segment_bytes=12 * MIB, max_non_split_rounding_bytes=12 * MIB),
        ),
        ("roundup_power2_divisions:4", AllocatorSettings(roundup_divisions=((0, 4),))),
        (
            # Interval by interval: 64 MiB and less, 128, 256, 512, 1024, and above.
            "roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:4,>:1]",
            AllocatorSettings(
                roundup_divisions=(
                    *((0, 8), (128 * MIB, 2), (256 * MIB, 4), (512 * MIB, 2)),
                    *((1024 * MIB, 4), (2048 * MIB, 1)),
                )
            ),
        ),
        (
            # The interval of 1024 MiB is not named, and so not divided.
            "roundup_power2_divisions:[128:8,512:1,2048:8,>:2]",
            AllocatorSettings(
                roundup_divisions=(
                    *((0, 8), (256 * MIB, 0), (512 * MIB, 1), (1024 * MIB, 0)),
                    *((2048 * MIB, 8), (4096 * MIB, 2)),
                )
            ),
        ),
        (
            "backend:native,pinned_use_background_threads:True,max_split_size_mb:64,new:[1,2]",
            AllocatorSettings(max_split_bytes=64 * MIB),
        ),
    ],
)
def test_each_option_is_read(text: str, settings: AllocatorSettings) -> None:
    """Known options set their fields, the others nothing."""
    assert parse_settings(text, total_bytes=16 * GIB) == settings


@pytest.mark.parametrize(
    "text",
    [
        "max_split_size_mb",
        "max_split_size_mb:many",
        "expandable_segments:yes",
        "per_process_memory_fraction:most",
        "roundup_power2_divisions:[many:2]",
    ],
)
def test_what_cannot_be_read_is_refused(text: str) -> None:
    """The error names the option, its value, and what to do."""
    with pytest.raises(BadInputError, match=re.escape(f"{text!r} in PYTORCH_ALLOC_CONF")):
        parse_settings(text, total_bytes=16 * GIB)
