"""One measured figure beside its target, and the table that they make.

The groups run in processes of their own, so that no group's imports, threads or heap reach into
another's figures; a row is what comes back from there, as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

__all__ = ["Row", "emit", "format_bytes", "format_seconds", "format_table", "judge", "parse_rows"]


@dataclass(frozen=True, slots=True)
class Row:
    """One figure."""

    #: What was measured, in a few words.
    what: str
    #: The figure as it is shown, with its unit.
    measured: str
    #: The figure itself, to compare with ``limit``; ``None`` where it could not be measured.
    value: float | None = None
    #: The most that ``value`` may be; ``None`` where there is no target.
    limit: float | None = None
    #: The target as it is shown; empty where there is none.
    target: str = ""
    #: What a table of its own kind of rows shows in the place of the figure, by the column's name.
    columns: dict[str, str] = field(default_factory=dict)
    #: All that was measured, as JSON has it; for ``--json`` alone.
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def is_met(self) -> bool | None:
        """Whether the target is reached; ``None`` without a target or a figure."""
        if self.value is None or self.limit is None:
            return None
        return self.value <= self.limit


def judge(
    what: str, value: float, limit: float, show: Callable[[float], str], more: str = ""
) -> Row:
    """Return a figure beside its target, both as ``show`` writes them; ``more`` follows it."""
    return Row(what, f"{show(value)}{more}", value, limit, f"≤ {show(limit)}")


def format_seconds(value_s: float) -> str:
    """Return ``1.73 s``, ``336 ms``."""
    return f"{value_s:.3g} s" if value_s >= 1 else f"{value_s * 1e3:.3g} ms"


def format_bytes(n_bytes: float) -> str:
    """Return ``0.72 kB``, ``50 MB``, in powers of ten."""
    return f"{n_bytes / 1e6:.4g} MB" if n_bytes >= 1e5 else f"{n_bytes / 1e3:.3g} kB"


def format_table(rows: Sequence[Row]) -> str:
    """The rows as Markdown: a table for all with a figure, one for each kind with columns."""
    verdicts = {True: "yes", False: "**no**", None: ""}
    tables = []
    for names, group in groupby(rows, key=lambda row: tuple(row.columns)):
        lines = [
            [row.what, row.measured, row.target, verdicts[row.is_met]]
            if not names
            else [row.what, *row.columns.values()]
            for row in group
        ]
        head = ["what", *(names or ("measured", "target", "met"))]
        lines[:0] = [head, []]
        tables.append("\n".join(_format_line(line) or "|---" * len(head) + "|" for line in lines))
    return "\n\n".join(tables)


def _format_line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |" if cells else ""


def emit(measure: Callable[[bool], Sequence[Row]]) -> None:
    """Run one group's measurement and print its rows as the last line of the output."""
    rows = measure("--quick" in sys.argv[1:])
    print()
    print(json.dumps([asdict(row) for row in rows]))


def parse_rows(output: str) -> list[Row]:
    """The rows that :func:`emit` printed."""
    return [Row(**fields) for fields in json.loads(output.splitlines()[-1])]
