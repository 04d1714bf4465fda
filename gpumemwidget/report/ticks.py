"""The marks of a scale in bytes: at round binary amounts; a library's own would be decimal."""

from __future__ import annotations

from gpumemwidget.units import format_bytes

__all__ = ["choose_ticks", "format_tick"]

#: At most so many.
_N_TICKS = 5


def choose_ticks(top: int, low: int = 0) -> list[int]:
    """Multiples of the smallest power of two that needs few of them; the ends where none fits."""
    step = 1
    while (top - low) // step >= _N_TICKS:
        step *= 2
    ticks = list(range(-(-low // step) * step, top + 1, step))
    return ticks if len(ticks) > 1 else [low, top]


def format_tick(n_bytes: int) -> str:
    """``2 GiB``, ``1.50 GiB``."""
    return format_bytes(n_bytes).replace(".00", "")
