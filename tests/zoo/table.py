"""The table of the zoo in ``docs/zoo.md``, written and read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.zoo.measure import (
    HAS_ACCELERATE,
    Outcome,
    is_named,
    measure_accelerate,
    measure_del,
)
from tests.zoo.pattern import Pattern

__all__ = [
    "Row",
    "format_table",
    "measure_row",
    "read_gpu_rows",
    "read_table",
    "write_rows",
    "write_table",
]

_PAGE = Path(__file__).parents[2] / "docs" / "zoo.md"
_START = "<!-- zoo: python -m tests.zoo --docs -->\n"
_END = "<!-- end of zoo -->"
#: What only a GPU shows, as ``python -m tests.zoo --device cuda --json FILE`` measured it there.
_ON_GPU = Path(__file__).with_name("on_gpu.json")
_MOST_OWNERS = 2
_SUMMARY_HEAD = (
    "| measured on | patterns | freed entirely | holder named | freed entirely by `del`, "
    "`gc.collect()`, `empty_cache()` | freed entirely by accelerate's `release_memory` |"
)
_HEAD = "| what keeps memory | freed | named | by `del` | by accelerate |"


@dataclass(frozen=True, slots=True)
class Row:
    """What became of a pattern; each figure in percent of what it keeps."""

    id: str
    ours: int
    #: Who was named, of those that must be, as the pattern has them.
    owners: tuple[str, ...]
    is_explained: bool
    deletion: int
    #: ``None`` where accelerate is not installed.
    accelerate: int | None


def measure_row(pattern: Pattern, ours: Outcome, *, device: str) -> Row:
    """Measure the others beside what we came to."""
    named = [owner for owner in pattern.owners if is_named(owner, ours.paths)]
    keeps, freed = pattern.keeps_on(device), ours.freed_bytes
    if pattern.is_counted_by_allocator:
        keeps, freed = ours.allocator_freed_bytes + ours.left_bytes, ours.allocator_freed_bytes
    accelerate = None
    if HAS_ACCELERATE:
        accelerate = _percent(measure_accelerate(pattern, device=device), keeps)
    return Row(
        id=pattern.id,
        ours=_percent(freed, keeps),
        owners=tuple(named),
        is_explained=len(named) == len(pattern.owners),
        deletion=_percent(measure_del(pattern, device=device), keeps),
        accelerate=accelerate,
    )


def format_table(patterns: Sequence[Pattern], rows: Mapping[str, Row]) -> str:
    """The table and what it comes to, as Markdown.

    Args:
        patterns: in the order of the table.
        rows: by the pattern's id. Where there is none, or no figure of accelerate's in it, that of
            the page is kept: not every machine can run everything. What was never run is left out.
    """
    kept = _read_rows()
    known = [each for each in patterns if each.id in rows or _format_title(each) in kept]
    cells = [_format_row(each, rows.get(each.id), kept.get(_format_title(each))) for each in known]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    here = [row for row, each in zip(cells, known, strict=True) if each.runs_on != "cuda"]
    on_host = (
        len(here),
        sum(row[1] == "all" for row in here),
        sum(bool(row[2]) for row in here),
        sum(row[3] == "all" for row in here),
        sum(row[4] == "all" for row in here),
    )
    summary = [_SUMMARY_HEAD, "|---|---|---|---|---|---|", _format_sums("the host", on_host)]
    gpu, on_gpu = _read_on_gpu()
    if on_gpu:
        summary.append(_format_sums(gpu, _sum_rows(on_gpu)))
    opening = ["## Each pattern", "", _HEAD, "|---|---|---|---|---|"]
    return "\n".join([*summary, "", *opening, *lines])


def read_table() -> str:
    """The table as ``format_table`` gave it, from the page."""
    _, _, rest = _PAGE.read_text(encoding="utf-8").partition(_START)
    return rest.partition(_END)[0].strip("\n")


def _read_rows() -> dict[str, tuple[str, ...]]:
    """The rows of the page: the cells of each by its first cell."""
    lines = [line for line in read_table().splitlines() if line.startswith("| [")]
    rows = [tuple(line.removeprefix("| ").removesuffix(" |").split(" | ")) for line in lines]
    return {row[0]: row for row in rows}


def write_table(table: str) -> None:
    """Replace the table between the two marks of the page."""
    text = _PAGE.read_text(encoding="utf-8")
    before, start, rest = text.partition(_START)
    _, end, after = rest.partition(_END)
    _PAGE.write_text("".join((before, start, f"\n{table}\n\n", end, after)), encoding="utf-8")


def read_gpu_rows(patterns: Sequence[Pattern]) -> dict[str, Row]:
    """Of these patterns, those that only a GPU shows, as they were measured on one."""
    only_there = {pattern.id for pattern in patterns if pattern.runs_on == "cuda"}
    return {row.id: row for row in _read_on_gpu()[1] if row.id in only_there}


def _read_on_gpu() -> tuple[str, list[Row]]:
    """The GPU's name, and all that was measured on it."""
    if not _ON_GPU.exists():
        return "", []
    content = json.loads(_ON_GPU.read_text(encoding="utf-8"))
    rows = [Row(**{**row, "owners": tuple(row["owners"])}) for row in content["rows"]]
    return content["machine"]["GPU"], rows


def _sum_rows(rows: Sequence[Row]) -> tuple[int, ...]:
    """How many there are, and in how many all was done."""
    return (
        len(rows),
        sum(row.ours == 100 for row in rows),
        sum(row.is_explained for row in rows),
        sum(row.deletion == 100 for row in rows),
        sum(row.accelerate == 100 for row in rows),
    )


def _format_sums(where: str, sums: Sequence[int]) -> str:
    return f"| {where} | {' | '.join(map(str, sums))} |"


def write_rows(file: Path, machine: Mapping[str, str], rows: Sequence[Row]) -> None:
    """Write rows, as ``on_gpu.json`` has them."""
    content = {"machine": dict(machine), "rows": [asdict(row) for row in rows]}
    file.write_text(f"{json.dumps(content, indent=2, ensure_ascii=False)}\n", encoding="utf-8")


def _percent(n_bytes: int, of_bytes: int) -> int:
    """Rounded down: nothing short of all of it is 100."""
    return max(n_bytes, 0) * 100 // of_bytes


def _format_title(pattern: Pattern) -> str:
    return f"[{pattern.title}]({pattern.link})"


def _format_row(pattern: Pattern, row: Row | None, kept: tuple[str, ...] | None) -> tuple[str, ...]:
    if row is None:
        assert kept is not None
        return kept
    owners = [owner.replace("*", "…") for owner in row.owners[:_MOST_OWNERS]]
    shown = ", ".join(f"`{owner}`" for owner in owners)
    accelerate = "?" if kept is None else kept[4]
    if row.accelerate is not None:
        accelerate = _format_percent(row.accelerate)
    return (
        _format_title(pattern),
        _format_percent(row.ours),
        shown if row.is_explained else "",
        _format_percent(row.deletion),
        accelerate,
    )


def _format_percent(percent: int) -> str:
    return {0: "none", 100: "all"}.get(percent, f"{percent}%")
