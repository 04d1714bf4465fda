"""The marks of a scale in bytes: at round binary amounts; a library's own would be decimal."""

from __future__ import annotations

from gpumemwidget.units import format_bytes

__all__ = ["choose_ticks", "format_tick"]

#: At most so many.
_N_TICKS = 5


def choose_ticks(top: int) -> list[int]:
    """0 and multiples of the smallest power of two that needs few of them."""
    step = 1
    while top // step >= _N_TICKS:
        step *= 2
    return list(range(0, top + 1, step))


def format_tick(n_bytes: int) -> str:
    """``2 GiB``, ``1.50 GiB``."""
    return format_bytes(n_bytes).replace(".00", "")
