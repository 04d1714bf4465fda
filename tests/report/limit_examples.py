"""Limits to draw: every state that one can be in."""

from __future__ import annotations

from gpumemwidget.model.devices import Limit, Reading

__all__ = ["make_limits", "make_peaks", "make_tight_limits"]

MIB = 1024**2
GIB = 1024 * MIB
#: What an H100 has to PyTorch.
TOTAL = 85_017_493_504


def make_limits() -> list[Limit]:
    """With room, without a limit, waiting for their devices, and set before these are in use."""
    return [
        Limit("cuda:10", None, None, None),
        Limit("cuda:0", 12 * GIB, TOTAL, 10 * GIB + 5 * MIB),
        Limit("cuda:1", None, TOTAL, 3 * GIB),
        Limit("cuda:2", None, None, None, is_waiting=True, share=0.8),
        Limit("cuda:3", 12 * GIB, None, None, is_waiting=True),
        Limit("cuda:4", 12 * GIB, TOTAL, None),
        Limit("cuda:5", 12 * GIB, TOTAL, 12 * GIB),
    ]


def make_tight_limits() -> list[Limit]:
    """Under what is reserved: with a cache that is enough, that is not, empty, and unknown."""
    return [
        Limit(
            "cuda:0",
            8 * GIB,
            TOTAL,
            10 * GIB,
            releasable_bytes=4 * GIB,
            largest_free_block_bytes=3 * GIB,
        ),
        Limit(
            "cuda:1",
            8 * GIB,
            TOTAL,
            10 * GIB,
            releasable_bytes=512 * MIB,
            largest_free_block_bytes=GIB,
        ),
        Limit(
            "cuda:2",
            8 * GIB,
            TOTAL,
            10 * GIB,
            releasable_bytes=0,
            largest_free_block_bytes=0,
        ),
        Limit("cuda:3", 8 * GIB, TOTAL, 10 * GIB),
    ]


def make_peaks() -> list[Reading]:
    """What the user's own calls told: exact, cut short, and unknown."""
    return [
        Reading("cuda:0", 5, 6, 3 * GIB, 4 * GIB, "exact"),
        Reading("cuda:1", 5, 6, 2 * GIB, 3 * GIB, "at least"),
        Reading("cuda:2", None, None),
    ]
