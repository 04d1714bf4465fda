"""What becomes of what is reserved and unallocated: held against what ``empty_cache`` gives."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from gpumemwidget.device_parts import divide_unallocated
from tests.breakdowns.readings import MIB, make_segment, segments

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
