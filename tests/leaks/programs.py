"""Programs of notebooks, with and without a leak: their cells in the order a user runs them.

Each is a section of a page in ``notebooks/``: its name, the report, documentation or tutorial it is
modelled on, a list of facts, and its cells, which are parted by lines of ``# %%``. The cells find
the global ``DEVICE`` ("cpu" or "cuda") in their namespace, so that each program runs on the host
and on a GPU. They need nothing but torch, numpy and the standard library.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

__all__ = ["CLEAN", "LEAKS", "Leak", "Program", "order_cells"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """Cells that a user runs one after the other."""

    #: What the program is called in tests: ``replay_buffer_deque``.
    name: str
    #: The text of each cell that is run, in order; a cell that is run again is repeated.
    runs: tuple[str, ...]
    #: True if some of the runs end with an exception.
    raises: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Leak(Program):
    """A program whose last cell keeps more and more memory of the device."""

    #: Whether it shows over repeated runs of the last cell, or from step to step of a loop in it.
    found_by: Literal["runs", "steps"]
    #: The stripped text of each line that may be reported: the innermost that allocates what is
    #: kept, perhaps in an earlier cell, and that of the last cell which calls it. A line that calls
    #: the whole loop says nothing, and is not among them.
    lines: tuple[str, ...]
    #: A text that the name of the holder contains, while the cell runs and after it.
    holder: str
    #: Why it is not reported; ``""`` if it is.
    unseen: str = ""

    @property
    def grown(self) -> str:
        """The cell that leaks: the last one."""
        return self.runs[-1]


def order_cells(text: str, order: str) -> tuple[str, ...]:
    """Return the cells of a notebook in the order in which they are run.

    Args:
        text: the cells, parted by lines of ``# %%``.
        order: their numbers, from 1: ``"1 2 2 2"`` runs the second cell three times.
    """
    cells = [cell.strip() for cell in text.split("# %%")]
    numbers = [int(number) for number in order.split()]
    if set(numbers) != set(range(1, len(cells) + 1)):
        raise ValueError(f"{len(cells)} cells, but the order is {order!r}")
    return tuple(cells[number - 1] for number in numbers)


_ProgramT = TypeVar("_ProgramT", bound=Program)
_SECTION = re.compile(
    r"^## (?P<name>\w+)\n\n[^\n]+\n\n(?P<facts>(?:- [^\n]+\n)+)\n```python\n(?P<cells>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


def _read(folder: str, kind: type[_ProgramT]) -> tuple[_ProgramT, ...]:
    programs = []
    for path in sorted((Path(__file__).parent / "notebooks" / folder).glob("*.md")):
        page = path.read_text(encoding="utf-8")
        sections = _SECTION.findall(page)
        for name, facts, cells in sections:
            values: dict[str, Any] = {"name": name}
            for fact in facts.splitlines():
                key, _, value = fact.removeprefix("- ").partition(": ")
                value = value.strip("`")
                if key == "line":
                    values["lines"] = (*values.get("lines", ()), value)
                else:
                    values[key.replace(" ", "_")] = value or True
            values["runs"] = order_cells(cells, values["runs"])
            programs.append(kind(**values))
        if page.count("\n## ") != len(sections):
            raise ValueError(f"{path}: a section can't be read")
    return tuple(programs)


CLEAN = _read("clean", Program)
LEAKS = _read("leaks", Leak)
