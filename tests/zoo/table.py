"""The table of the zoo in ``docs/zoo.md``, written and read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.zoo.measure import Outcome, is_named, measure_del
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
    "`gc.collect()`, `empty_cache()` |"
)
_HEAD = "| what keeps memory | freed | named | by `del` |"


@dataclass(frozen=True, slots=True)
class Row:
    """What became of a pattern; each figure in percent of what it keeps."""

    id: str
    ours: int
    #: Who was named, of those that must be, as the pattern has them.
    owners: tuple[str, ...]
    is_explained: bool
    deletion: int


def measure_row(pattern: Pattern, ours: Outcome, *, device: str) -> Row:
    """Measure ``del`` beside what we came to."""
    named = [owner for owner in pattern.owners if is_named(owner, ours.paths)]
    keeps, freed = pattern.keeps_on(device), ours.freed_bytes
    if pattern.is_counted_by_allocator:
        keeps, freed = ours.allocator_freed_bytes + ours.left_bytes, ours.allocator_freed_bytes
    return Row(
        id=pattern.id,
        ours=_percent(freed, keeps),
        owners=tuple(named),
        is_explained=len(named) == len(pattern.owners),
        deletion=_percent(measure_del(pattern, device=device), keeps),
    )


def format_table(patterns: Sequence[Pattern], rows: Mapping[str, Row]) -> str:
    """The table and what it comes to, as Markdown.

    Args:
        patterns: in the order of the table.
        rows: by the pattern's id; a pattern without one is left out.
    """
    known = [each for each in patterns if each.id in rows]
    on_host = [rows[each.id] for each in known if each.runs_on != "cuda"]
    gpu, on_gpu = _read_on_gpu()
    summary = [_SUMMARY_HEAD, "|---|---|---|---|---|"]
    summary += [_format_sums("the host", on_host), _format_sums(gpu, on_gpu)]
    opening = ["## Each pattern", "", _HEAD, "|---|---|---|---|"]
    return "\n".join(
        [*summary, "", *opening, *(_format_row(each, rows[each.id]) for each in known)]
    )


def read_table() -> str:
    """The table as ``format_table`` gave it, from the page."""
    _, _, rest = _PAGE.read_text(encoding="utf-8").partition(_START)
    return rest.partition(_END)[0].strip("\n")


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
    content = json.loads(_ON_GPU.read_text(encoding="utf-8"))
    rows = [Row(**{**row, "owners": tuple(row["owners"])}) for row in content["rows"]]
    return content["machine"]["GPU"], rows


def _format_sums(where: str, rows: Sequence[Row]) -> str:
    """How many there are, and in how many all was done."""
    freed, named = sum(row.ours == 100 for row in rows), sum(row.is_explained for row in rows)
    deleted = sum(row.deletion == 100 for row in rows)
    return f"| {where} | {len(rows)} | {freed} | {named} | {deleted} |"


def write_rows(file: Path, machine: Mapping[str, str], rows: Sequence[Row]) -> None:
    """Write rows, as ``on_gpu.json`` has them."""
    content = {"machine": dict(machine), "rows": [asdict(row) for row in rows]}
    file.write_text(f"{json.dumps(content, indent=2, ensure_ascii=False)}\n", encoding="utf-8")


def _percent(n_bytes: int, of_bytes: int) -> int:
    """Rounded down: nothing short of all of it is 100."""
    return max(n_bytes, 0) * 100 // of_bytes


def _format_row(pattern: Pattern, row: Row) -> str:
    owners = [f"`{owner.replace('*', '…')}`" for owner in row.owners[:_MOST_OWNERS]]
    shown = ", ".join(owners) if row.is_explained else ""
    freed, deleted = _format_percent(row.ours), _format_percent(row.deletion)
    return f"| [{pattern.title}]({pattern.link}) | {freed} | {shown} | {deleted} |"


def _format_percent(percent: int) -> str:
    return {0: "none", 100: "all"}.get(percent, f"{percent}%")
