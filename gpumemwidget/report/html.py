"""A document as static HTML: no script, nothing from elsewhere, its small style sheet with it.

Where a page strips styles and SVG (a notebook that is not trusted, GitHub), the tables, headings
and notes that remain still say everything. Everything that is shown passes through ``escape_html``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from gpumemwidget.report.bridgebar import render_bridge
from gpumemwidget.report.bridgetheme import BRIDGE_CSS, SEGMENTS_CSS
from gpumemwidget.report.card import render_bar, render_options
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
    Run,
    SegmentCharts,
    Sparklines,
    Steps,
    Table,
    Timelines,
    UseBar,
)
from gpumemwidget.report.escape import escape_html
from gpumemwidget.report.listing import render_listing
from gpumemwidget.report.segmentchart import render_segments
from gpumemwidget.report.svg import render_sparkline
from gpumemwidget.report.theme import (
    BASE_CSS,
    CARD_CSS,
    LINE_CSS,
    ROOT_CLASS,
    SHARE_CSS,
    SPARKLINE_CSS,
    STEPS_CSS,
    TABLE_CSS,
)
from gpumemwidget.report.timeline import render_timeline
from gpumemwidget.report.tracetheme import FOLD_CSS, LISTING_CSS, TIMELINE_CSS

__all__ = ["render_html", "render_html_line"]

# MathJax would read a user's "$x$" as a formula; both its versions pass over these classes.
_ROOT_CLASSES = f"{ROOT_CLASS} mathjax_ignore tex2jax_ignore"

_OPTION = re.compile(r"(?<= )--[a-z]+")

_TONE_CLASSES = {"muted": "gmw-m", "bad": "gmw-bad", "warn": "gmw-warn"}


def render_html(document: Document) -> str:
    """The document as one ``<div>`` that carries the styles of just the blocks that it has."""
    blocks = list(_list_blocks(document.blocks))
    kinds = {type(block) for block in blocks}
    css = BASE_CSS
    css += TABLE_CSS if kinds & {Table, Options, Listing} else ""
    css += SHARE_CSS if Listing in kinds or any(map(_has_shares, blocks)) else ""
    css += SPARKLINE_CSS if Sparklines in kinds else ""
    css += STEPS_CSS if Steps in kinds else ""
    css += TIMELINE_CSS if Timelines in kinds else ""
    css += LISTING_CSS if Listing in kinds else ""
    css += BRIDGE_CSS if Bridges in kinds else ""
    css += SEGMENTS_CSS if SegmentCharts in kinds else ""
    css += FOLD_CSS if Fold in kinds else ""
    css += CARD_CSS if document.classes else ""
    body = "".join(_render_block(block) for block in document.blocks)
    classes = " ".join((_ROOT_CLASSES, *map(escape_html, document.classes)))
    return f'<div class="{classes}"><style>{css}</style>{body}</div>'


def render_html_line(pieces: Sequence[str]) -> str:
    """One quiet line; it breaks only between the pieces."""
    spans = " ".join(f"<span>{escape_html(piece)}</span>" for piece in pieces)
    return f'<div class="gmw-l {_ROOT_CLASSES}"><style>{LINE_CSS}</style>{spans}</div>'


def _render_block(block: Block) -> str:
    return _RENDERERS[type(block)](block)


def _render_heading(heading: Heading) -> str:
    return f"<p>{' · '.join(_render_run(run) for run in heading.runs)}</p>"


def _render_note(note: Note) -> str:
    tone = _TONE_CLASSES.get(note.tone, "")
    mark = f"{escape_html(note.mark)} " if note.mark else ""
    return f'<p class="gmw-n {tone}">{mark}{escape_html(note.text)}</p>'


def _render_sparklines(block: Sparklines) -> str:
    charts = "".join(render_sparkline(chart) for chart in block.charts)
    return f'<div class="gmw-s">{charts}</div>'


def _render_timelines(block: Timelines) -> str:
    return "".join(map(render_timeline, block.charts))


def _render_bridges(block: Bridges) -> str:
    return render_bridge(block.chart)


def _render_segments(block: SegmentCharts) -> str:
    return render_segments(block.chart)


def _render_fold(fold: Fold) -> str:
    summary = " · ".join(map(_render_run, fold.runs))
    body = "".join(map(_render_block, fold.blocks))
    return f'<details class="gmw-fo"><summary>{summary}</summary>{body}</details>'


def _list_blocks(blocks: Iterable[Block]) -> Iterator[Block]:
    """The blocks with those that are folded in them."""
    for block in blocks:
        yield block
        if isinstance(block, Fold):
            yield from _list_blocks(block.blocks)


def _has_shares(block: Block) -> bool:
    return isinstance(block, Table) and any(
        cell.share is not None for group in block.groups for row in group for cell in row
    )


def _render_run(run: Run) -> str:
    text = escape_html(run.text)
    if run.tone == "strong":
        return f"<strong>{text}</strong>"
    if run.tone == "code":
        return f'<code dir="auto">{text}</code>'
    if run.tone in _TONE_CLASSES:
        return f'<span class="{_TONE_CLASSES[run.tone]}">{text}</span>'
    return text


def _render_steps(steps: Steps) -> str:
    items = []
    for step in steps.steps:
        summary = f": {escape_html(step.summary)}" if step.summary else ""
        details = "".join(f"<li>{_render_detail(detail)}</li>" for detail in step.details)
        inner = f"<strong>{escape_html(step.name)}</strong>{summary}"
        if step.tone == "code":
            inner = f'<code dir="auto" class="gmw-k">{escape_html(step.name)}</code>{summary}'
        inner += f"<ul>{details}</ul>" if details else ""
        tone = _TONE_CLASSES.get(step.tone)
        items.append(f'<li class="{tone}">{inner}</li>' if tone else f"<li>{inner}</li>")
    return f"<ol>{''.join(items)}</ol>"


def _render_detail(detail: str | tuple[Run, ...]) -> str:
    if isinstance(detail, str):
        return escape_html(detail)
    return "".join(_render_run(run) for run in detail)


def _render_table(table: Table) -> str:
    n_above = table.n_shared if table.shared_above else 0
    columns = table.columns[n_above:]
    head = "".join(
        f'<th scope="col"{_class_of(column, Cell(""))}>{escape_html(column.title)}</th>'
        for column in columns
    )
    bodies = "".join(
        f"<tbody>{_render_group(table, group, columns)}</tbody>" for group in table.groups
    )
    if table.stacks:
        # A line may end after each hyphen, and would divide an option.
        bodies = _OPTION.sub(r'<span class="gmw-nb">\g<0></span>', bodies)
    hidden = "" if table.caption_is_seen else ' class="gmw-h"'
    # A table of numbers alone may break them from their units to stay in sight; one with a column
    # to cut takes the whole width.
    classes = {None: "gmw-t gmw-q", "cut": "gmw-t gmw-u", "wrap": "gmw-t"}[columns[-1].last]
    classes += " gmw-st" if table.stacks else ""
    caption = f"<caption{hidden}>{escape_html(table.caption)}</caption>"
    return (
        f'<div class="gmw-w"><table class="{classes}">{caption}'
        f"<thead><tr>{head}</tr></thead>{bodies}</table></div>"
    )


def _render_group(
    table: Table, group: tuple[tuple[Cell, ...], ...], columns: tuple[Column, ...]
) -> str:
    if table.shared_above:
        shared, first = group[0][: table.n_shared], group[0][table.n_shared :]
        label = " ".join(escape_html(cell.text) for cell in shared)
        if first and first[0].spans_rest:
            label += f' <span class="gmw-m">{escape_html(first[0].text)}</span>'
        above = f'<tr><th scope="rowgroup" colspan="{len(columns)}" class="gmw-d">{label}</th></tr>'
        rows = () if first and first[0].spans_rest else (first, *group[1:])
        return above + "".join(f"<tr>{_render_cells(row, columns)}</tr>" for row in rows)
    rows_html = []
    for index, row in enumerate(group):
        if index:
            rows_html.append(f"<tr>{_render_cells(row, columns[table.n_shared :])}</tr>")
        else:
            cells = _render_cells(
                row,
                columns,
                n_rows=len(group),
                n_shared=table.n_shared,
                last_is_shared=table.last_is_shared,
            )
            rows_html.append(f"<tr>{cells}</tr>")
    return "".join(rows_html)


def _render_cells(
    row: tuple[Cell, ...],
    columns: tuple[Column, ...],
    *,
    n_rows: int = 1,
    n_shared: int = 0,
    last_is_shared: bool = True,
) -> str:
    parts = []
    for index, (cell, column) in enumerate(zip(row, columns, strict=False)):
        attributes = _class_of(column, cell)
        is_shared_last = last_is_shared and column.last is not None
        is_shared = n_rows > 1 and (index < n_shared or is_shared_last)
        if is_shared:
            attributes += f' rowspan="{n_rows}"'
        if cell.spans_rest:
            attributes += f' colspan="{len(columns) - index}"'
        text = escape_html(cell.text)
        if column.kind == "code" and text and cell.tone == "plain":
            attributes += f' title="{text}"' if column.last == "cut" else ""
            text = f'<code dir="auto">{text}</code>'
        if cell.tone == "strong":
            text = f"<strong>{text}</strong>"
        if cell.swatch:
            text = f'<i class="{cell.swatch}"></i>{text}'
        if cell.level:
            text = '<div class="gmw-j">' * cell.level + text + "</div>" * cell.level
        if cell.share is not None:
            text += _render_bar(cell.share)
        if cell.detail:
            text += f' <span class="gmw-m">({escape_html(cell.detail)})</span>'
        if cell.mark:
            text = f"{escape_html(cell.mark)}&nbsp;{text}"
        if column.kind == "name":
            scope = "rowgroup" if is_shared else "row"
            parts.append(f'<th scope="{scope}"{attributes}>{text}</th>')
        else:
            parts.append(f"<td{attributes}>{text}</td>")
    return "".join(parts)


def _render_bar(share: float) -> str:
    """A bar that says no more than the number beside it; where SVG is stripped the number stays."""
    return (
        '<svg class="gmw-y" viewBox="0 0 100 1" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect width="{100 * share:.3g}" height="1"/></svg>'
    )


def _class_of(column: Column, cell: Cell) -> str:
    classes = []
    if column.kind == "number" and not cell.spans_rest:
        classes.append("gmw-r")
    if column.last == "wrap":
        classes.append("gmw-f")
    if column.fold is not None:
        is_long = 2 * cell.level + len(cell.text) > column.fold
        classes.append("gmw-o gmw-z" if is_long else "gmw-o")
    if column.last == "cut":
        classes.append("gmw-c")
    if cell.tone in _TONE_CLASSES:
        classes.append(_TONE_CLASSES[cell.tone])
    return f' class="{" ".join(classes)}"' if classes else ""


#: How each kind of block is drawn.
_RENDERERS: dict[type[Block], Callable[[Any], str]] = {
    Bridges: _render_bridges,
    Fold: _render_fold,
    Heading: _render_heading,
    Listing: render_listing,
    Note: _render_note,
    Options: render_options,
    SegmentCharts: _render_segments,
    Sparklines: _render_sparklines,
    Steps: _render_steps,
    Table: _render_table,
    Timelines: _render_timelines,
    UseBar: render_bar,
}
