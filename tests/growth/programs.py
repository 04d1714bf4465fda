"""Describe a program of a notebook: its cells in the order in which a user runs them.

The cells find the global ``DEVICE`` ("cpu" or "cuda") in their namespace, so that each program runs
on the host and on a GPU. They need nothing but torch, numpy and the standard library.
"""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import dedent
from typing import Literal

__all__ = ["Leak", "Program", "order_cells"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """Cells that a user runs one after the other."""

    #: What the program is called in tests: ``replay_buffer_deque``.
    name: str
    #: The report, the page of a documentation or the tutorial that it is modelled on.
    source: str
    #: The text of each cell that is run, in order; a cell that is run again stands there again.
    runs: tuple[str, ...]
    #: True if some of the runs end with an exception.
    raises: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Leak(Program):
    """A program whose last cell keeps more and more memory of the device."""

    #: Whether it shows over repeated runs of the last cell, or from step to step of a loop in it.
    found_by: Literal["runs", "steps"]
    #: The stripped text of the line that allocates what is kept, or of each that may be told: the
    #: innermost, which may stand in an earlier cell, and that of the last cell which calls it. One
    #: that calls the whole loop says nothing, and is not among them.
    line: str | tuple[str, ...]
    #: A text that the name of the holder contains, while the cell runs and after it.
    holder: str

    @property
    def grown(self) -> str:
        """The cell that leaks: the last one."""
        return self.runs[-1]

    @property
    def lines(self) -> tuple[str, ...]:
        """The lines that are right."""
        return (self.line,) if isinstance(self.line, str) else self.line


def order_cells(text: str, order: str) -> tuple[str, ...]:
    """Return the cells of a notebook in the order in which they are run.

    Args:
        text: the cells, parted by lines of ``# %%``.
        order: their numbers, from 1: ``"1 2 2 2"`` runs the second cell three times.
    """
    cells = [cell.strip() for cell in dedent(text).split("# %%")]
    numbers = [int(number) for number in order.split()]
    if set(numbers) != set(range(1, len(cells) + 1)):
        raise ValueError(f"{len(cells)} cells, but the order is {order!r}")
    return tuple(cells[number - 1] for number in numbers)
