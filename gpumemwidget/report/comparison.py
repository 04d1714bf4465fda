"""Two results beside each other: one sentence, and a table for each figure that has changed."""

from __future__ import annotations

from collections.abc import Sequence

from gpumemwidget.model.comparisons import ComparedRow, ComparedTotal
from gpumemwidget.model.devices import HOST
from gpumemwidget.report.render.blocks import (
    Block,
    Cell,
    Column,
    Heading,
    Note,
    Run,
    Table,
    bytes_cell,
)
from gpumemwidget.report.render.output import Report
from gpumemwidget.report.render.text import SHORT_WIDTH, cut_middle
from gpumemwidget.units import format_bytes, format_change

#: Number of rows that the first sentence names, and maximum number that a table shows.
_FEW, _MOST = 3, 30
#: Change on the host, in bytes, up to which it says nothing.
_HOST_SLACK_BYTES = 1024**2


def report_comparison(a_name: str, b_name: str, totals: Sequence[ComparedTotal]) -> Report:
    """Report what has changed from one side to the other, the largest change first."""
    changed = [total for total in totals if _is_shown(total)]
    columns = (
        Column("what", "words"),
        Column(a_name),
        Column(b_name),
        Column("change"),
        Column("where", "code", last="wrap"),
    )
    blocks: list[Block] = [Heading((Run(describe_comparison(a_name, b_name, totals), "strong"),))]
    for total in changed:
        groups = [(_list_cells(row),) for row in total.rows]
        caption = f"{total.device}: {total.measure}"
        if total.a_bytes is not None and total.b_bytes is not None:
            sums = bytes_cell(total.a_bytes), bytes_cell(total.b_bytes)
            change = Cell(format_change(total.change_bytes), tone="strong")
            groups.append(((Cell("in all", tone="strong"), *sums, change, Cell("")),))
        blocks.append(Table(caption, columns, tuple(groups), most=_MOST))
        if total.a_bytes is None and total.b_bytes is None:
            blocks.append(Note("Peaks of different moments: they have no sum."))
    others = [f"{total.device} ({total.measure})" for total in totals if not _is_shown(total)]
    if changed and others:
        blocks.append(Note(f"No change, or on the host less than 1 MiB: {', '.join(others)}."))
    return Report(tuple(blocks))


def _is_shown(total: ComparedTotal) -> bool:
    """Return whether a figure has changed by more than the host's always does."""
    largest_bytes = max((abs(row.change_bytes) for row in total.rows), default=0)
    return largest_bytes >= (_HOST_SLACK_BYTES if total.device == HOST else 1)


def describe_comparison(a_name: str, b_name: str, totals: Sequence[ComparedTotal]) -> str:
    """Return the largest change in one sentence."""
    largest = next((total for total in totals if total.rows), None)
    if largest is None:
        return f"{a_name} and {b_name} are the same, to the byte"
    named = "; ".join(map(_describe_row, largest.rows[:_FEW]))
    n_more = len(largest.rows) - _FEW
    more = f"; {n_more} more" if n_more > 0 else ""
    if largest.a_bytes is None or largest.b_bytes is None:
        return f"{largest.measure}: {named}{more}"
    amount = format_change(largest.change_bytes)
    return f"{amount} {largest.measure} on {largest.device}: {named}{more}"


def tabulate_comparison(a_name: str, b_name: str, totals: Sequence[ComparedTotal]) -> str:
    """Return the comparison as Markdown, for a comment on a change."""
    lines = [f"**{describe_comparison(a_name, b_name, totals)}**"]
    for total in totals:
        if not total.rows:
            continue
        lines += ["", f"{total.device}: {total.measure}", ""]
        lines += [f"| what | {a_name} | {b_name} | change | where |", "|---|---:|---:|---:|---|"]
        for row in total.rows:
            cells = [cell.text.replace("|", "\\|").replace("\n", " ") for cell in _list_cells(row)]
            lines.append(f"| {' | '.join(cells)} |")
        if total.a_bytes is not None and total.b_bytes is not None:
            sums = f"{format_bytes(total.a_bytes)} | {format_bytes(total.b_bytes)}"
            lines.append(f"| in all | {sums} | {format_change(total.change_bytes)} | |")
    return "\n".join(lines)


def _list_cells(row: ComparedRow) -> tuple[Cell, ...]:
    words = format_change(row.change_bytes)
    if row.a_bytes is None or row.b_bytes is None:
        words += " (new)" if row.a_bytes is None else " (gone)"
    sides = (Cell("") if n is None else bytes_cell(n) for n in (row.a_bytes, row.b_bytes))
    return (Cell(row.what), *sides, Cell(words), Cell(row.where))


def _describe_row(row: ComparedRow) -> str:
    place = f" ({cut_middle(row.where, SHORT_WIDTH)})" if row.where else ""
    words = f"{row.what}{place} {format_change(row.change_bytes)}"
    if row.a_bytes is None:
        return f"{words}, new"
    return f"{words}, gone" if row.b_bytes is None else words
