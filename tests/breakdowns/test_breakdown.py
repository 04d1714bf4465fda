"""The breakdown: parts that are all of a device, to the byte, whatever could be read of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumemwidget.device_parts import build_breakdown, divide_unallocated
from gpumemwidget.model.breakdowns import Breakdown, BreakdownDoubt, BreakdownPart, PartKey
from gpumemwidget.model.devices import HOST, DeviceState, DeviceUse, ProcessUse, Reading
from tests.breakdowns.readings import (
    GIB,
    MIB,
    accounts,
    make_account,
    make_host_state,
    make_owned,
    make_process,
    make_segment,
    make_state,
    segments,
    states,
)

#: The order of the parts, from what is allocated to what is free.
ORDER: tuple[PartKey, ...] = (
    *("allocated", "pending", "releasable", "fragmented", "pools", "cached", "outside"),
    *("children", "others", "unlisted", "driver", "free"),
)


def build(state: DeviceState, *args: object, **options: object) -> Breakdown:
    breakdown = build_breakdown(state, *args, **options)
    assert breakdown is not None
    assert sum(part.n_bytes for part in breakdown.parts) == breakdown.total_bytes
    return breakdown


def list_parts(breakdown: Breakdown) -> list[tuple[PartKey, int]]:
    return [(part.key, part.n_bytes) for part in breakdown.parts]


def merge_parts(breakdown: Breakdown) -> list[tuple[tuple[PartKey, ...], int]]:
    return [(part.merged, part.n_bytes) for part in breakdown.parts if part.key == "rest"]


class TestAnything:
    """Whatever is read, at whatever moments."""

    @given(st.data())
    def test_the_parts_are_all_of_it(self, data: st.DataObject) -> None:
        """They sum to the total at each level, none is negative or empty, each stands once."""
        state = data.draw(states())

        breakdown = build_breakdown(state, data.draw(accounts(state)))

        total = state.info.total_bytes
        if state.use is not None and state.use.total_bytes is not None:
            total = state.use.total_bytes
        if not total:
            assert breakdown is None
            return
        assert breakdown is not None
        assert breakdown.total_bytes == total
        assert sum(part.n_bytes for part in breakdown.parts) == total
        keys = [key for part in breakdown.parts for key in part.merged or (part.key,)]
        assert len(keys) == len(set(keys))
        firsts = [ORDER.index((part.merged or (part.key,))[0]) for part in breakdown.parts]
        assert firsts == sorted(firsts)
        check_parts(breakdown.parts)

    @given(st.data())
    def test_what_is_told_is_what_was_read(self, data: st.DataObject) -> None:
        """A part of its own is either a figure that was read, or all that remains of the whole."""
        state = data.draw(states())

        breakdown = build_breakdown(state)

        if breakdown is None:
            return
        parts = {part.key: part.n_bytes for part in breakdown.parts}
        reading, use = state.reading, state.use
        if "allocated" in parts and reading is not None and reading.allocated_bytes is not None:
            assert parts["allocated"] == reading.allocated_bytes
        if "free" in parts and use is not None and use.free_bytes is not None:
            remains = not any(part.merged for part in breakdown.parts)
            assert parts["free"] == use.free_bytes or remains


def check_parts(parts: tuple[BreakdownPart, ...]) -> None:
    for part in parts:
        assert part.n_bytes > 0
        assert (part.key == "rest") == (len(part.merged) > 1)
        if part.parts:
            assert sum(each.n_bytes for each in part.parts) == part.n_bytes
            check_parts(part.parts)


class TestGpu:
    """A GPU of which all is known, and of which something is not."""

    def test_each_byte_has_its_part(self) -> None:
        """In the order from what tensors hold to what is free."""
        breakdown = build(make_state())

        assert list_parts(breakdown) == [
            ("allocated", 13 * GIB),
            ("releasable", GIB),
            ("fragmented", 3 * GIB // 2),
            ("pools", GIB // 2),
            ("outside", 500 * MIB),
            ("children", 2 * GIB),
            ("others", 11 * GIB),
            ("unlisted", 9 * MIB),
            ("driver", 480 * MIB),
            ("free", 51 * GIB - 989 * MIB),
        ]
        assert [part.n_bytes for part in breakdown.parts[6].parts] == [10 * GIB, GIB]
        assert (breakdown.total_bytes, breakdown.allocated_bytes, breakdown.reserved_bytes) == (
            80 * GIB,
            13 * GIB,
            16 * GIB,
        )
        assert breakdown.used_bytes == 29 * GIB + 509 * MIB
        assert breakdown.largest_free_block_bytes == GIB
        assert breakdown.doubts == ()

    def test_a_device_that_was_not_touched_has_what_the_driver_tells(self) -> None:
        """This process has nothing there, and PyTorch has no figures of it."""
        breakdown = build(
            make_state(
                reading=None,
                segments=(),
                processes=(make_process(20, "other", 10 * GIB, None),),
                use=DeviceUse("cuda:0", 11 * GIB, 68 * GIB, 80 * GIB, driver_bytes=GIB),
            )
        )

        assert list_parts(breakdown) == [
            ("others", 10 * GIB),
            ("unlisted", GIB),
            ("driver", GIB),
            ("free", 68 * GIB),
        ]
        assert (breakdown.allocated_bytes, breakdown.reserved_bytes) == (None, None)

    def test_what_can_not_be_is_one_part(self) -> None:
        """More than there is: then nothing of it is believed."""
        reading = Reading("cuda:0", 90 * GIB, 90 * GIB)

        breakdown = build(make_state(reading=reading, segments=(), is_at_one_moment=False))

        assert [part.key for part in breakdown.parts] == ["rest"]


_BESIDE: tuple[PartKey, ...] = ("outside", "children", "others", "unlisted")
_UNALLOCATED: tuple[PartKey, ...] = ("pending", "releasable", "fragmented", "pools")
_STRANGER = make_process(4121, "other", 29 * GIB, None)


@pytest.mark.parametrize(
    ("changes", "merged", "n_bytes", "doubt"),
    [
        pytest.param(
            {"processes": None},
            _BESIDE,
            13 * GIB + 509 * MIB,
            BreakdownDoubt.NOT_LISTED,
            id="no list",
        ),
        pytest.param(
            {"processes": (_STRANGER,)},
            _BESIDE,
            13 * GIB + 509 * MIB,
            BreakdownDoubt.NOT_LISTED,
            id="a container, where one of the pids is this process's",
        ),
        pytest.param(
            {
                "processes": (
                    make_process(10, "own", 16 * GIB + 500 * MIB),
                    make_process(20, "other", None),
                )
            },
            ("others", "unlisted"),
            13 * GIB + 9 * MIB,
            BreakdownDoubt.NOT_LISTED,
            id="a process of unknown size",
        ),
        pytest.param(
            {"processes": (make_process(10, "own", None), make_process(20, "other", 10 * GIB))},
            ("outside", "unlisted"),
            3 * GIB + 509 * MIB,
            BreakdownDoubt.NOT_LISTED,
            id="this process's size unknown",
        ),
        pytest.param(
            {"use": replace(make_state().use, used_bytes=29 * GIB + 989 * MIB, driver_bytes=None)},
            ("unlisted", "driver"),
            489 * MIB,
            None,
            id="a driver before 510",
        ),
        pytest.param(
            {"use": None, "processes": None},
            (*_BESIDE, "free"),
            64 * GIB - 480 * MIB,
            BreakdownDoubt.NO_DRIVER,
            id="no driver: PyTorch's total lacks what the driver keeps",
        ),
        pytest.param(
            {
                "use": DeviceUse("cuda:0", GIB, 79 * GIB, 80 * GIB, driver_bytes=0),
                "is_at_one_moment": False,
            },
            (*_BESIDE, "driver", "free"),
            64 * GIB,
            BreakdownDoubt.FIGURES_DIFFER,
            id="PyTorch's figures of one moment, the driver's of another",
        ),
        pytest.param(
            {"segments": ()},
            _UNALLOCATED,
            3 * GIB,
            BreakdownDoubt.SEGMENTS_UNKNOWN,
            id="cudaMallocAsync, which has no segments",
        ),
    ],
)
def test_what_can_not_be_told_apart_is_one_part(
    changes: dict[str, object],
    merged: tuple[PartKey, ...],
    n_bytes: int,
    doubt: BreakdownDoubt | None,
) -> None:
    """Exactly what remains beside the figures that are known, and the reason."""
    breakdown = build(make_state(**changes))

    assert merge_parts(breakdown) == [(merged, n_bytes)]
    assert breakdown.doubts == (() if doubt is None else (doubt,))


class TestKinds:
    """What is allocated, by kind."""

    def test_kinds_are_as_requested_where_that_is_known(self) -> None:
        """What they were rounded up by is a part of its own; so is what nothing is known of."""
        account = make_account(
            make_owned(8 * GIB, "parameter", rounding=100),
            make_owned(2 * GIB, "gradient", rounding=20),
            make_owned(GIB, "tensor", "nowhere", rounding=3),
            make_owned(GIB, "unknown", "nowhere"),
            make_owned(GIB, "cuBLAS workspace", "nowhere"),
        )

        allocated = build(make_state(), account).parts[0]

        assert [(part.key, part.kind, part.n_bytes) for part in allocated.parts] == [
            ("kind", "parameter", 8 * GIB - 100),
            ("kind", "gradient", 2 * GIB - 20),
            ("kind", "tensor", GIB - 3),
            ("kind", "cuBLAS workspace", GIB),
            ("unnamed", None, GIB),
            ("rounding", None, 123),
        ]

    def test_an_account_of_another_moment_is_not_used(self) -> None:
        """What it adds up to is not what is allocated."""
        account = make_account(make_owned(12 * GIB), allocated_bytes=12 * GIB)

        breakdown = build(make_state(), account)

        assert breakdown.parts[0].parts == ()
        assert breakdown.doubts == (BreakdownDoubt.OWNERS_DIFFER,)

    def test_an_incomplete_account_says_so(self) -> None:
        """Some of what is of no known kind there may be of one."""
        account = make_account(make_owned(13 * GIB, "unknown", "nowhere"))

        breakdown = build(make_state(), account, is_complete=False)

        assert [part.key for part in breakdown.parts[0].parts] == ["unnamed"]
        assert breakdown.doubts == (BreakdownDoubt.OWNERS_INCOMPLETE,)


class TestHost:
    """The process's own memory, in the machine's or its control group's."""

    def test_each_byte_has_its_part(self) -> None:
        """Pinned memory stands beside it: malloc does not count it."""
        breakdown = build(make_host_state())

        assert list_parts(breakdown) == [
            ("allocated", 5 * GIB),
            ("cached", GIB),
            ("others", 18 * GIB),
            ("free", 40 * GIB),
        ]
        assert breakdown.pinned_bytes == 2 * GIB
        assert breakdown.doubts == ()

    def test_what_is_not_resident_takes_no_memory(self) -> None:
        """Malloc may have handed out more than was ever written to."""
        breakdown = build(make_host_state(reading=Reading(HOST, 30 * GIB, 6 * GIB)))

        assert merge_parts(breakdown) == [(("allocated", "cached"), 6 * GIB)]
        assert breakdown.doubts == (BreakdownDoubt.FIGURES_DIFFER,)

    @pytest.mark.parametrize(
        "processes", [None, (ProcessUse(11, "python worker", "child", 2 * GIB),)]
    )
    def test_children_share_their_pages(self, processes: tuple[ProcessUse, ...] | None) -> None:
        """What is resident in them is no part of the whole: some of it is counted already."""
        breakdown = build(make_host_state(processes=processes))

        assert merge_parts(breakdown) == [(("children", "others"), 18 * GIB)]


class TestAsleep:
    """Reserved bytes without memory behind them, as in vLLM's sleep mode."""

    def test_the_parts_are_what_has_memory(self) -> None:
        """By the driver's figure of this process: what sleeps is no part of the device."""
        own = make_process(10, "own", 4 * GIB)
        used = 4 * GIB + 9 * MIB
        use = DeviceUse("cuda:0", used, 80 * GIB - used, 80 * GIB, driver_bytes=0)

        breakdown = build(make_state(processes=(own,), use=use))

        assert breakdown.asleep_bytes == 12 * GIB
        assert list_parts(breakdown)[:2] == [("rest", 4 * GIB), ("unlisted", 9 * MIB)]

    def test_hidden_processes_may_sleep(self) -> None:
        """In a container: everybody together has less than this process has reserved."""
        use = DeviceUse("cuda:0", 6 * GIB, 74 * GIB, 80 * GIB, driver_bytes=0)

        breakdown = build(make_state(processes=None, use=use))

        assert breakdown.asleep_bytes == 10 * GIB
        assert list_parts(breakdown) == [("rest", 6 * GIB), ("free", 74 * GIB)]

    def test_figures_of_different_moments_prove_nothing(self) -> None:
        """Memory may have been taken between the two readings."""
        own = make_process(10, "own", 4 * GIB)

        breakdown = build(make_state(processes=(own,), is_at_one_moment=False))

        assert breakdown.asleep_bytes == 0
        assert BreakdownDoubt.FIGURES_DIFFER in breakdown.doubts


# -- What becomes of what is reserved and unallocated ----------------------------------------------

#: Blocks as ``make_segment`` takes them, each segment with its pool and the size of its pages.
_FREE = ((("i", 20 * MIB),), {})
_HELD = ((("a", 1), ("i", 8 * MIB), ("a", 1), ("i", 3 * MIB)), {})
_IN_POOL = ((("a", MIB), ("i", MIB)), {"pool_id": (1, 0)})
_IN_GROWING_POOL = ((("i", 5 * MIB),), {"pool_id": (0, 1), "page_bytes": 20 * MIB})
_GROWN = (("a", 5 * MIB), ("i", 40 * MIB), ("a", 5 * MIB), ("i", 10 * MIB))
_OVER_A_PAGE = (("a", 20 * MIB), ("i", 12 * MIB), ("p", 8 * MIB), ("a", MIB))


@pytest.mark.parametrize(
    ("made", "sums_mib"),
    [
        # One block in use holds back all of a segment that does not grow.
        ([_FREE, _HELD], [0, 20, 11, 0, 20]),
        # ``empty_cache`` waits for what is pending, which holds nothing back.
        ([((("p", MIB), ("i", 19 * MIB)), {})], [1, 19, 0, 0, 19]),
        # Whatever is unallocated in a pool is apart, in whichever state its segment is.
        ([_IN_POOL, _IN_GROWING_POOL], [0, 0, 0, 6, 0]),
        # Of a segment that grows whole pages are given back, counted from its start.
        ([(_GROWN, {"page_bytes": 20 * MIB})], [0, 20, 30, 0, 40]),
        ([(_GROWN, {"page_bytes": 2 * MIB})], [0, 48, 2, 0, 40]),
        # What is pending between free blocks joins them; its own bytes stay its own.
        ([(_OVER_A_PAGE, {"page_bytes": 20 * MIB})], [8, 12, 0, 0, 12]),
    ],
)
def test_what_is_unallocated_is_divided_by_what_becomes_of_it(
    made: list[tuple[tuple[tuple[str, int], ...], dict[str, Any]]], sums_mib: list[int]
) -> None:
    """What waits, what ``empty_cache`` gives back and what it can't, and what pools keep."""
    found = divide_unallocated(make_segment(*blocks, **options) for blocks, options in made)

    sums = [found.pending_bytes, found.releasable_bytes, found.fragmented_bytes, found.pools_bytes]
    assert [*sums, found.largest_free_block_bytes] == [n_mib * MIB for n_mib in sums_mib]


@given(segments())
def test_each_byte_is_in_one_sum(found: tuple[()]) -> None:
    """Whatever the segments are."""
    sums = divide_unallocated(found)

    assert min(sums.releasable_bytes, sums.fragmented_bytes) >= 0
    assert sums.reserved_bytes == (
        sums.allocated_bytes
        + sums.pending_bytes
        + sums.releasable_bytes
        + sums.fragmented_bytes
        + sums.pools_bytes
    )
