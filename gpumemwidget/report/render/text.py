"""The blocks of a report as plain text, for a terminal and wherever HTML is not shown.

80 columns, no boxes. Our own characters are such that every Windows console can print them, so
``≥`` is written ``>=``; the user's text may hold any letter, but nothing that acts on a terminal.
"""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Iterable
from dataclasses import replace

from gpumemwidget.report.render.blocks import (
    Block,
    Cell,
    Column,
    Fold,
    Heading,
    Line,
    Note,
    Options,
    Picture,
    Run,
    Steps,
    Table,
)
from gpumemwidget.report.render.markup import clean

#: Number of columns that a report keeps to where its numbers allow it.
_WIDTH = 80
_GAP = "  "
#: Maximum numbers of columns of a path or a line of code: among other words, and alone.
SHORT_WIDTH, LONG_WIDTH = 72, 200


def render_text(blocks: Iterable[Block]) -> str:
    """Return the blocks as lines, with a blank line between two blocks, though not two notes."""
    parts: list[str] = []
    was_note = False
    for block in blocks:
        text = _render_block(block)
        if not text:
            continue
        is_note = isinstance(block, Note)
        if parts:
            parts.append("\n" if is_note and was_note else "\n\n")
        parts.append(text)
        was_note = is_note
    # A space that does not break has done its work.
    return "".join(parts).replace("\xa0", " ")


def _render_block(block: Block) -> str:  # noqa: PLR0911 - one for each kind
    match block:
        case Picture():
            return block.to_text()
        case Table():
            return render_table(block)
        case Note():
            return fill_text(_join_mark(block.mark, clean(block.text)))
        case Heading():
            return fill_text(_join_runs(block.runs, " · "), indent="  ")
        case Line():
            return _GAP.join(map(clean, block.pieces))
        case Steps():
            return _render_steps(block)
        case Options():
            return _render_options(block)
        case Fold():
            return f"{_join_runs(block.runs, ' · ')}\n{render_text(block.blocks)}"


def _join_runs(runs: tuple[Run, ...], separator: str = "") -> str:
    return separator.join(clean(run.text) for run in runs)


def _join_mark(mark: str, text: str) -> str:
    return f"{mark.replace('≥', '>=')} {text}" if mark else text


def fill_text(text: str, *, indent: str = "", start: str = "") -> str:
    """Return a text in lines of 80 columns."""
    if _measure(start + text) <= _WIDTH:
        return start + text
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=start,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _render_steps(steps: Steps) -> str:
    lines: list[str] = []
    for number, step in enumerate(steps.steps, 1):
        summary = f": {clean(step.summary)}" if step.summary else ""
        lines.append(fill_text(f"{number}. {clean(step.name)}{summary}", indent="   "))
        for detail in step.details:
            text = clean(detail) if isinstance(detail, str) else _join_runs(detail)
            lines.append(fill_text(f"   {text}", indent="     "))
    return "\n".join(lines)


def _render_options(options: Options) -> str:
    width = max(_measure(clean(option.amount)) for option in options.options)
    lines = [clean(options.caption)]
    hanging = " " * (2 + width) + _GAP
    for option in options.options:
        amount = clean(option.amount)
        start = "  " + " " * (width - _measure(amount)) + amount + _GAP
        lines.append(fill_text(start + clean(option.text), indent=hanging))
        if option.command:
            lines.append(fill_text(hanging + clean(option.command), indent=hanging + "  "))
    return "\n".join(lines)


# -- Widths ----------------------------------------------------------------------------------------


def _measure(text: str) -> int:
    """Return the columns of a terminal that a text takes: wide letters two, joined marks none."""
    if text.isascii():
        return len(text)
    return sum(map(_measure_character, text))


def _measure_character(character: str) -> int:
    if unicodedata.combining(character) or character in "\u200c\u200d\ufe0f":
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def cut(text: str, width: int) -> str:
    """Return the text, ended with an ellipsis if it takes more than ``width`` columns."""
    if _measure(text) <= width:
        return text
    used = 0
    for index, character in enumerate(text):
        used += _measure_character(character)
        if used > width - 1:
            return text[:index].rstrip() + "…"
    return text


def cut_middle(text: str, width: int) -> str:
    """Return the text, with an ellipsis for its middle if it takes more than ``width`` columns.

    The end of a path says more than its middle.
    """
    if _measure(text) <= width:
        return text
    start = cut(text, width // 3)
    room = width - _measure(start)
    for index in range(max(len(text) - room, 0), len(text)):
        if _measure(text[index:]) <= room:
            return start + text[index:]
    return start


# -- Tables ----------------------------------------------------------------------------------------


def render_table(table: Table) -> str:
    """Return a table as lines; columns without a title have no header."""
    if table.opens:
        table = _put_source_last(table)
    columns = table.columns
    # Cells that a row shares with the row above it are left blank.
    blanks = (Cell(""),) * table.n_shared
    rows = [blanks * bool(index) + row for group in table.groups for index, row in enumerate(group)]
    n_fixed = sum(column.last is None for column in columns)
    widths = [
        max(
            [_measure(column.title)]
            + [_measure(_show(row[index], column)) for row in rows if index < len(row)]
        )
        for index, column in enumerate(columns[:n_fixed])
    ]
    # Source needs more columns.
    width = 100 if table.opens else _WIDTH
    # However wide the others are, the last column keeps room for words.
    last_width = max(width - sum(widths) - len(_GAP) * n_fixed, 12)
    header = tuple(Cell(column.title) for column in columns)
    lines = [clean(table.caption)] if table.caption_is_seen else []
    for row in ([header] if any(column.title for column in columns) else []) + rows:
        if not table.stacks:
            lines.extend(_render_row(row, columns, widths, last_width))
            continue
        lines.extend(_render_row(row[:n_fixed], columns, widths, last_width))
        if row is not header and len(row) > n_fixed and row[n_fixed].text:
            indent = "  " * (row[0].level + 2)
            lines.append(fill_text(indent + clean(row[n_fixed].text), indent=indent))
    return "\n".join(lines)


def _put_source_last(table: Table) -> Table:
    n_amounts = len(table.columns) - 2
    blank = (Cell(""),) * n_amounts
    index, source, *amounts = table.columns
    groups = tuple(
        tuple((*(*row[2:], *blank)[:n_amounts], *row[:2]) for row in group)
        for group in table.groups
    )
    columns = (*amounts, index, replace(source, last="cut"))
    return replace(table, columns=columns, groups=groups)


def _show(cell: Cell, column: Column) -> str:
    indent = "  " * cell.level
    if cell.level and column.kind == "source":
        indent += "> "
    shown = indent + _join_mark(cell.mark, clean(cell.text))
    if column.fold is None or _measure(shown) <= column.fold:
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
        if column.last == "cut":
            fields.append(_join_detail(shown, clean(cell.detail), width))
        elif column.last == "wrap":
            first, *rest = textwrap.wrap(shown, width, break_on_hyphens=False) or [""]
            fields.append(first)
        else:
            blank = " " * (width - _measure(shown))
            fields.append(blank + shown if column.kind in ("number", "index") else shown + blank)
    hanging = " " * (sum(widths) + len(_GAP) * len(widths))
    return [_GAP.join(fields).rstrip(), *(hanging + line for line in rest)]


def _join_detail(text: str, detail: str, room: int) -> str:
    """Put a short detail behind a text that is cut for it; else cut both together."""
    if detail and _measure(detail) <= room // 3:
        return cut(text, room - _measure(detail) - len(_GAP)) + _GAP + detail
    return cut(f"{text}{_GAP}{detail}".rstrip(), room)
