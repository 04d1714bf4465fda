"""Two results beside each other: one sentence, and a table for each figure that has changed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from gpumemwidget.model.comparisons import ComparedRow, ComparedTotal
from gpumemwidget.model.devices import HOST
from gpumemwidget.report.render.blocks import (
    FEW,
    Block,
    Cell,
    Column,
    Heading,
    Note,
    Run,
    Table,
    bound_items,
    bytes_cell,
    drop_blank_columns,
    number_columns,
)
from gpumemwidget.report.render.markup import clean
from gpumemwidget.report.render.output import Report
from gpumemwidget.report.render.text import SHORT_WIDTH, cut_middle
from gpumemwidget.report.render.wording import name_device
from gpumemwidget.units import format_bytes, format_change

_SAME = "No change, or on the host less than 1 MiB"
#: Text that is no markup of Markdown, and the characters that may be some.
_PLAIN = re.compile(r"(?:[^\W_]|[ .,()'/-]|:(?=\d))*")
_SPECIAL = re.compile(r"[^\w .,()'/=+-]|_")


def report_comparison(a_name: str, b_name: str, totals: Sequence[ComparedTotal]) -> Report:
    """Report what has changed from one side to the other, the largest change first."""
    blocks: list[Block] = [Heading((Run(describe_comparison(a_name, b_name, totals), "strong"),))]
    blocks.extend(_list_tables(a_name, b_name, totals))
    blocks += [Note(note) for note in _list_notes(a_name, b_name, totals, str)]
    return Report(blocks)


def _list_tables(a_name: str, b_name: str, totals: Sequence[ComparedTotal]) -> Iterator[Table]:
    """Yield a table for each figure that has changed, with its sum."""
    columns = (
        Column("what", "words"),
        *number_columns(a_name, b_name, "change"),
        Column("where", "code", last="wrap", is_optional=True),
    )
    blank = [Cell("")] * 4
    for total in filter(_is_shown, totals):
        listed = list(map(_list_cells, total.rows))
        rows = bound_items(listed, lambda words: (Cell(words), *blank))
        sums = bytes_cell(total.a_bytes), bytes_cell(total.b_bytes)
        change = Cell(format_change(total.change_bytes), tone="strong")
        rows += ((Cell("in all", tone="strong"), *sums, change, Cell("")),)
        groups = [(cells,) for cells in rows]
        # The rows are bounded already, and the sum is always shown.
        yield drop_blank_columns(Table(_name_total(total), columns, groups, most=len(groups)))


def _list_notes(
    a_name: str, b_name: str, totals: Sequence[ComparedTotal], quote: Callable[[str], str]
) -> list[str]:
    """Return sentences on the figures that have no table."""
    groups: dict[str, list[str]] = {}
    for total in totals:
        name, n_bytes = quote(_name_total(total)), total.a_bytes
        words = f"Known of {quote(a_name)} alone"
        if n_bytes is None:
            n_bytes, words = total.b_bytes, f"Known of {quote(b_name)} alone"
        if total.change_bytes is not None:
            words = _SAME
        elif n_bytes is None:
            words = "Not known of either"
        else:
            name += f" ({format_bytes(n_bytes)})"
        if not _is_shown(total):
            groups.setdefault(words, []).append(name)
    if not any(map(_is_shown, totals)):
        groups.pop(_SAME, None)
    return [f"{words}: {'; '.join(names)}." for words, names in groups.items()]


def _is_shown(total: ComparedTotal) -> bool:
    """Return whether a figure has changed by more than the host's always does."""
    largest_bytes = max((abs(row.change_bytes) for row in total.rows), default=0)
    # The host's memory always changes a little.
    return largest_bytes >= (1024**2 if total.device == HOST else 1)


def _name_total(total: ComparedTotal) -> str:
    return f"{total.measure} on {name_device(total.device)}"


def describe_comparison(
    a_name: str,
    b_name: str,
    totals: Sequence[ComparedTotal],
    *,
    quote: Callable[[str], str] = str,
) -> str:
    """Return the largest change in one sentence; ``quote`` marks what the user has named."""
    largest = next(filter(_is_shown, totals), None)
    if largest is None:
        names = f"{quote(a_name)} and {quote(b_name)}"
        if any(total.rows for total in totals):
            return f"{names} differ by less than 1 MiB, on the host alone"
        if any(total.change_bytes is None for total in totals):
            return f"What {names} both have is the same, to the byte"
        return f"{names} are the same, to the byte"
    named = [_describe_row(row, quote) for row in largest.rows[:FEW]]
    if len(largest.rows) > FEW:
        named.append(f"{len(largest.rows) - FEW} more")
    amount = format_change(largest.change_bytes)
    return f"{amount} {quote(_name_total(largest))}: {'; '.join(named)}"


def tabulate_comparison(a_name: str, b_name: str, totals: Sequence[ComparedTotal]) -> str:
    """Return the comparison as Markdown, for a comment on a change."""
    lines = [f"**{describe_comparison(a_name, b_name, totals, quote=_quote)}**"]
    for table in _list_tables(a_name, b_name, totals):
        lines += ["", _quote(table.caption), ""]
        lines += [f"| {' | '.join(_quote(column.title) for column in table.columns)} |"]
        lines += ["|---|---:|---:|---:|" + "---|" * (len(table.columns) > 4)]
        for (cells,) in table.groups:
            words = [_quote(cells[0].text), *(cell.text for cell in cells[1:4])]
            lines.append(f"| {' | '.join([*words, *(_quote(cell.text) for cell in cells[4:])])} |")
    for note in _list_notes(a_name, b_name, totals, _quote):
        lines += ["", note]
    return "\n".join(lines)


def _quote(text: str) -> str:
    """Return text for a line or a cell of Markdown, as code if it could be taken for markup."""
    text = clean(" ".join(text.split()))
    if _PLAIN.fullmatch(text):
        return text
    if not {"|", "`"} & set(text):
        return f"`{text}`"
    # A cell of a table ends at a "|", also within backticks.
    return f"<code>{_SPECIAL.sub(lambda match: f'&#{ord(match[0])};', text)}</code>"


def _list_cells(row: ComparedRow) -> tuple[Cell, ...]:
    words = format_change(row.change_bytes)
    if row.a_bytes is None or row.b_bytes is None:
        words += " (new)" if row.a_bytes is None else " (gone)"
    sides = (Cell("") if n is None else bytes_cell(n) for n in (row.a_bytes, row.b_bytes))
    return (Cell(row.what), *sides, Cell(words), Cell(row.where))


def _describe_row(row: ComparedRow, quote: Callable[[str], str]) -> str:
    place = f" ({quote(cut_middle(row.where, SHORT_WIDTH))})" if row.where else ""
    words = f"{quote(row.what)}{place} {format_change(row.change_bytes)}"
    if row.a_bytes is None:
        return f"{words}, new"
    return f"{words}, gone" if row.b_bytes is None else words
