"""What becomes of what is reserved and unallocated: held against what ``empty_cache`` gives."""

from __future__ import annotations

from hypothesis import given

from gpumemwidget.device_parts import divide_unallocated
from tests.breakdowns.readings import MIB, make_segment, segments


def test_a_segment_without_a_block_in_use_is_given_back() -> None:
    """One block in use holds back all of a segment that does not grow."""
    found = divide_unallocated(
        [
            make_segment(("i", 20 * MIB)),
            make_segment(("a", 1), ("i", 8 * MIB), ("a", 1), ("i", 3 * MIB)),
        ]
    )

    assert (found.releasable_bytes, found.fragmented_bytes) == (20 * MIB, 11 * MIB)
    assert found.largest_free_block_bytes == 20 * MIB


def test_what_is_pending_holds_nothing_back() -> None:
    """``empty_cache`` waits for it; it is a part of its own until then."""
    found = divide_unallocated([make_segment(("p", MIB), ("i", 19 * MIB))])

    assert (found.pending_bytes, found.releasable_bytes) == (MIB, 19 * MIB)


def test_pools_are_apart() -> None:
    """Whatever is unallocated in one, in whichever state its segment is."""
    found = divide_unallocated(
        [
            make_segment(("a", MIB), ("i", MIB), pool_id=(1, 0)),
            make_segment(("i", 5 * MIB), pool_id=(0, 1), page_bytes=20 * MIB),
        ]
    )

    assert (found.pools_bytes, found.releasable_bytes, found.fragmented_bytes) == (6 * MIB, 0, 0)
    assert found.largest_free_block_bytes == 0


def test_of_a_segment_that_grows_whole_pages_are_given_back() -> None:
    """They are counted from its start: 20 MiB each, 2 MiB where requests are small."""
    blocks = (("a", 5 * MIB), ("i", 40 * MIB), ("a", 5 * MIB), ("i", 10 * MIB))

    large = divide_unallocated([make_segment(*blocks, page_bytes=20 * MIB)])
    small = divide_unallocated([make_segment(*blocks, page_bytes=2 * MIB)])

    assert (large.releasable_bytes, large.fragmented_bytes) == (20 * MIB, 30 * MIB)
    assert (small.releasable_bytes, small.fragmented_bytes) == (38 * MIB + 10 * MIB, 2 * MIB)


def test_a_page_may_lie_over_blocks_that_are_one_as_soon_as_both_are_free() -> None:
    """What is pending between free blocks joins them; its own bytes stay its own."""
    segment = make_segment(
        ("a", 20 * MIB), ("i", 12 * MIB), ("p", 8 * MIB), ("a", MIB), page_bytes=20 * MIB
    )

    found = divide_unallocated([segment])

    assert (found.pending_bytes, found.releasable_bytes, found.fragmented_bytes) == (
        8 * MIB,
        12 * MIB,
        0,
    )


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
