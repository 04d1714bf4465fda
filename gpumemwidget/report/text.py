"""A document as plain text, for a terminal and wherever HTML is not shown.

80 columns, no boxes. Our own characters are such that every Windows console can print them, so
``≥`` is written ``>=``; the user's text may hold any letter, but nothing that acts on a terminal.
"""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any

from gpumemwidget.report.document import (
    Block,
    Bridges,
    Cell,
    Column,
    Document,
    Fold,
    Heading,
    Listing,
    Note,
    Options,
    Part,
    SegmentCharts,
    Steps,
    Table,
    UseBar,
)
from gpumemwidget.report.escape import clean
from gpumemwidget.report.listing import list_text_rows
from gpumemwidget.report.segmenttext import write_segments
from gpumemwidget.units import format_bytes

__all__ = ["WIDTH", "cut", "cut_middle", "measure", "render_text", "render_text_line"]

#: Columns that a report keeps to where its numbers allow it.
WIDTH = 80

#: Source needs more.
LISTING_WIDTH = 100

_GAP = "  "

#: A last column is never squeezed below this.
_NARROWEST_LAST = 12

_ELLIPSIS = "…"


def render_text(document: Document) -> str:
    """The document as lines; a blank line stands before each block but the first.

    Notes that follow each other stand together.
    """
    parts: list[str] = []
    was_note = False
    for block in document.blocks:
        render = _RENDERERS.get(type(block))
        if render is None:
            continue
        is_note = isinstance(block, Note)
        if parts:
            parts.append("\n" if is_note and was_note else "\n\n")
        parts.append(render(block))
        was_note = is_note
    # A space that does not break has done its work.
    return "".join(parts).replace("\xa0", " ")


def render_text_line(pieces: Sequence[str]) -> str:
    """Pieces on one line."""
    return _GAP.join(clean(piece) for piece in pieces)


def measure(text: str) -> int:
    """How many columns of a terminal a text takes: wide letters take two, joined marks none."""
    if text.isascii():
        return len(text)
    return sum(_measure_character(character) for character in text)


def _measure_character(character: str) -> int:
    if unicodedata.combining(character) or character in "\u200c\u200d\ufe0f":
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def cut(text: str, width: int) -> str:
    """The text, ended with an ellipsis where it would take more than ``width`` columns."""
    if measure(text) <= width:
        return text
    used = 0
    for index, character in enumerate(text):
        used += _measure_character(character)
        if used > width - 1:
            return text[:index].rstrip() + _ELLIPSIS
    return text


def cut_middle(text: str, width: int) -> str:
    """The text with an ellipsis for its middle where it is too wide: a path's end tells most."""
    if measure(text) <= width:
        return text
    start = cut(text, width // 3)
    room = width - measure(start)
    for index in range(max(len(text) - room, 0), len(text)):
        if measure(text[index:]) <= room:
            return start + text[index:]
    return start


def _render_heading(heading: Heading) -> str:
    line = " · ".join(clean(run.text) for run in heading.runs)
    return line if measure(line) <= WIDTH else _fill(line, indent="  ")


def _render_note(note: Note) -> str:
    return _fill(_join_mark(note.mark, clean(note.text)), indent="")


def _render_steps(steps: Steps) -> str:
    lines: list[str] = []
    for number, step in enumerate(steps.steps, 1):
        summary = f": {clean(step.summary)}" if step.summary else ""
        lines.append(_fill(f"{number}. {clean(step.name)}{summary}", indent="   "))
        for detail in step.details:
            pieces = [detail] if isinstance(detail, str) else [run.text for run in detail]
            lines.append(_fill(f"   {''.join(map(clean, pieces))}", indent="     "))
    return "\n".join(lines)


def _render_bar(bar: UseBar) -> str:
    """The parts as a table."""

    def list_rows(parts: Sequence[Part], level: int) -> list[tuple[Cell, ...]]:
        rows: list[tuple[Cell, ...]] = []
        for part in parts:
            amount, detail = Cell(format_bytes(part.n_bytes)), Cell(part.detail)
            rows.append((Cell(part.label, level=level), amount, detail))
            rows.extend(list_rows(part.parts, level + 1))
        return rows

    rows = list_rows(bar.parts, 1)
    if bar.mark_bytes is not None:
        rows.append((Cell(bar.mark_label, level=1), Cell(format_bytes(bar.mark_bytes)), Cell("")))
    title = (Cell(clean(bar.title)), Cell(format_bytes(bar.total_bytes)), Cell(""))
    columns = (Column("", "words"), Column(""), Column("", "words", last="wrap"))
    table = Table(caption="", columns=columns, groups=((title, *rows),), last_is_shared=False)
    return _render_table(table).lstrip("\n")


def _render_bridges(block: Bridges) -> str:
    """What others tell of the device: the parts themselves are a table of their own."""
    rows = tuple(
        (Cell(ruler.label, level=1), Cell(format_bytes(ruler.n_bytes)), Cell(ruler.teller))
        for ruler in block.chart.rulers
    )
    columns = (Column("", "words"), Column(""), Column("", "words", last="wrap"))
    table = Table(caption="", columns=columns, groups=(rows,), last_is_shared=False)
    return f"{block.chart.caption}{_render_table(table)}"


def _render_segments(block: SegmentCharts) -> str:
    *rows, keys = write_segments(block.chart)
    return "\n".join((*rows, _fill(keys, indent="")))


def _render_options(options: Options) -> str:
    width = max(measure(clean(option.amount)) for option in options.options)
    lines = [clean(options.caption)]
    hanging = " " * (2 + width) + _GAP
    for option in options.options:
        amount = clean(option.amount)
        start = "  " + " " * (width - measure(amount)) + amount + _GAP
        lines.append(_fill(start + clean(option.text), indent=hanging))
        if option.command:
            lines.append(_fill(hanging + clean(option.command), indent=hanging + "  "))
    return "\n".join(lines)


def _render_listing(listing: Listing) -> str:
    """The numbers first and the source last, which takes what room there is."""
    titles = ("", listing.columns, "line", "")
    rows = list(list_text_rows(listing))
    number_width = max((len(number) for number, *_ in rows), default=0)
    widths = [
        max(len(title), *(len(amounts[i]) for _, amounts, *_ in rows if amounts), 1)
        for i, title in enumerate(listing.columns)
    ]
    lines = []
    for number, amounts, text, detail in (titles, *rows):
        shown = amounts or ("",) * len(widths)
        fields = [amount.rjust(width) for amount, width in zip(shown, widths, strict=True)]
        fields.append(number.rjust(number_width))
        start = _GAP.join(fields) + _GAP
        room = LISTING_WIDTH - len(start)
        lines.append((start + _join_detail(text, detail, room)).rstrip())
    return "\n".join(lines)


def _join_detail(text: str, detail: str, room: int) -> str:
    """Where a call was made says more than the end of a long name, if it is short."""
    if detail and measure(detail) <= room // 3:
        return cut(text, room - measure(detail) - len(_GAP)) + _GAP + detail
    return cut(f"{text}{_GAP}{detail}".rstrip(), room)


def _render_fold(fold: Fold) -> str:
    title = " · ".join(clean(run.text) for run in fold.runs)
    return f"{title}\n{render_text(Document(fold.blocks))}"


def _fill(text: str, *, indent: str) -> str:
    return textwrap.fill(
        text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _join_mark(mark: str, text: str) -> str:
    return f"{mark.replace('≥', '>=')} {text}" if mark else text


def _render_table(table: Table) -> str:
    rows = [_expand(table, group, index) for group in table.groups for index in range(len(group))]
    n_fixed = sum(column.last is None for column in table.columns)
    widths = [
        max(
            [measure(column.title)]
            + [measure(_show(row[index], column)) for row in rows if not _is_spanned(row, index)]
        )
        for index, column in enumerate(table.columns[:n_fixed])
    ]
    last_width = max(WIDTH - sum(widths) - len(_GAP) * n_fixed, _NARROWEST_LAST)
    header = tuple(Cell(column.title) for column in table.columns)
    lines = [clean(table.caption)] if table.caption_is_seen else []
    if table.stacks:
        lines.extend(_render_row(header[:n_fixed], table.columns, widths, last_width))
        for row in rows:
            lines.extend(_render_row(row[:n_fixed], table.columns, widths, last_width))
            indent = "  " * (row[0].level + 2)
            if len(row) > n_fixed and row[n_fixed].text:
                lines.append(_fill(indent + clean(row[n_fixed].text), indent=indent))
        return "\n".join(lines)
    for row in (header, *rows):
        lines.extend(_render_row(row, table.columns, widths, last_width))
    return "\n".join(lines)


def _expand(table: Table, group: tuple[tuple[Cell, ...], ...], index: int) -> tuple[Cell, ...]:
    """A row in full length: what it shares with the row above is left blank."""
    blanks = (Cell(""),) * (table.n_shared if index else 0)
    return blanks + group[index]


def _is_spanned(row: tuple[Cell, ...], index: int) -> bool:
    return index >= len(row) or row[index].spans_rest


def _show(cell: Cell, column: Column) -> str:
    indent = "  " * cell.level
    shown = indent + _join_mark(cell.mark, clean(cell.text))
    if column.fold is None or measure(shown) <= column.fold:
        return shown
    # However deep in a tree, something of the text has to be seen.
    indent = indent[: column.fold // 2]
    return indent + cut_middle(clean(cell.text), column.fold - len(indent))


def _render_row(
    row: tuple[Cell, ...], columns: tuple[Column, ...], widths: list[int], last_width: int
) -> list[str]:
    fields: list[str] = []
    rest: list[str] = []
    for cell, column, width in zip(row, columns, (*widths, last_width), strict=False):
        shown = _show(cell, column)
        if cell.spans_rest:
            fields.append(shown)
        elif column.last == "cut":
            fields.append(cut(shown, width))
        elif column.last == "wrap":
            first, *rest = textwrap.wrap(shown, width, break_on_hyphens=False) or [""]
            fields.append(first)
        else:
            blank = " " * (width - measure(shown))
            fields.append(blank + shown if column.kind == "number" else shown + blank)
    hanging = " " * (sum(widths) + len(_GAP) * len(widths))
    return [_GAP.join(fields).rstrip(), *(hanging + line for line in rest)]


#: How each kind of block is written; those that are not here only HTML can show.
_RENDERERS: dict[type[Block], Callable[[Any], str]] = {
    Bridges: _render_bridges,
    Fold: _render_fold,
    Heading: _render_heading,
    Listing: _render_listing,
    Note: _render_note,
    Options: _render_options,
    SegmentCharts: _render_segments,
    Steps: _render_steps,
    Table: _render_table,
    UseBar: _render_bar,
}
