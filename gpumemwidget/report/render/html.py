"""The blocks of a report as static HTML: no script, nothing from elsewhere, its styles with it.

A notebook that is not trusted strips the style sheet and each SVG; ``markup`` writes the styles
without which a report can't be read on the elements themselves.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

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
    Step,
    Steps,
    Table,
)
from gpumemwidget.report.render.markup import (
    UNTRUSTED_NOTE,
    Html,
    escape,
    h,
    indent,
    join_html,
    render_share,
)
from gpumemwidget.report.render.palette import list_properties

#: CSS class of a report with a frame.
CARD_CLASS = "gmw-card"
#: CSS class of a card that is no error: a leak.
WARNING_CLASS = "gmw-warning"


_TONES = {"muted": "gmw-m", "bad": "gmw-bad", "warn": "gmw-warn"}


def render_html(blocks: Sequence[Block], classes: Sequence[str] = ()) -> str:
    """Return the blocks as one ``<div>`` with the style sheets of just those kinds that it has."""
    every = list(_iter_blocks(blocks))
    css = "".join(map(read_sheet, _list_sheets(every, classes)))
    untrusted = UNTRUSTED_NOTE if any(isinstance(b, Picture) and b.is_svg for b in every) else None
    # MathJax would read a user's "$x$" as a formula; its versions pass over these two classes.
    root = ".".join(("div.gmw.mathjax_ignore.tex2jax_ignore", *classes))
    return h(root, h("style", Html(css)), *map(_render_block, blocks), untrusted)


@functools.cache
def read_sheet(name: str) -> str:
    """Return a style sheet of ``styles/`` on one line, with the colours of the palette put in."""
    css = (Path(__file__).parent / "styles" / f"{name}.css").read_text(encoding="utf-8")
    css = re.sub(r"/\*.*?\*/", "", css, flags=re.DOTALL)
    colors = list_properties()
    css = re.sub(r"var\((--gmw-[\w-]+)\)", lambda match: colors[match[1]], css)
    css = re.sub(r"\s+", " ", css).strip()
    return re.sub(r" ?([{};,]) ?|(?<=:) ", lambda match: match[1] or "", css)


def _list_sheets(blocks: Iterable[Block], classes: Sequence[str]) -> list[str]:
    kinds = {type(block) for block in blocks}
    if kinds == {Line}:
        return ["line"]
    wanted = {
        "base": True,
        "table": bool(kinds & {Table, Options}),
        "panel": any(isinstance(block, Table) and _is_wide(block) for block in blocks),
        "steps": bool(kinds & {Steps, Fold}),
        "listing": any(isinstance(block, Table) and block.opens for block in blocks),
        **{block.sheet: True for block in blocks if isinstance(block, Picture)},
        "card": CARD_CLASS in classes,
    }
    return [name for name, is_wanted in wanted.items() if is_wanted]


def _iter_blocks(blocks: Iterable[Block]) -> Iterator[Block]:
    for block in blocks:
        yield block
        if isinstance(block, Fold):
            yield from _iter_blocks(block.blocks)


def _render_block(block: Block) -> Html:  # noqa: PLR0911 - one for each kind
    match block:
        case Picture():
            return block.to_html()
        case Table():
            return _render_table(block)
        case Note():
            mark = f"{block.mark} " if block.mark else None
            return h(f"p.gmw-n.{_TONES.get(block.tone, '')}", mark, block.text)
        case Heading():
            return h("p", join_html(map(_render_run, block.runs), " · "))
        case Line():
            pieces = join_html((h("span", piece) for piece in block.pieces), " ")
            return h("div.gmw-l", pieces)
        case Steps():
            return h("ol", *map(_render_step, block.steps))
        case Options():
            return _render_options(block)
        case Fold():
            summary = h("summary", join_html(map(_render_run, block.runs), " · "))
            return h("details.gmw-fo", summary, *map(_render_block, block.blocks))


def _render_run(run: Run) -> Html:
    match run.tone:
        case "plain":
            return join_html([run.text])
        case "strong":
            return h("strong", run.text)
        case "code":
            return h("code", run.text, dir="auto")
        case tone:
            return h(f"span.{_TONES[tone]}", run.text)


def _render_step(step: Step) -> Html:
    name = h("strong", step.name)
    if step.tone == "code":
        name = h("code.gmw-k", step.name, dir="auto")
    details = [
        h("li", detail if isinstance(detail, str) else join_html(map(_render_run, detail)))
        for detail in step.details
    ]
    summary = f": {step.summary}" if step.summary else None
    below = h("ul", *details) if details else None
    return h(f"li.{_TONES.get(step.tone, '')}", name, summary, below)


def _render_options(options: Options) -> Html:
    rows = []
    for option in options.options:
        command = None
        if option.command:
            command = h("div.gmw-cd", h("code", option.command, dir="auto"))
        rows.append(h("tr", h("td.gmw-r", option.amount), h("td.gmw-f", option.text, command)))
    table = h("table.gmw-t.gmw-out", h("caption", options.caption), h("tbody", *rows))
    return h("div.gmw-w", table)


# -- Tables ----------------------------------------------------------------------------------------


def _render_table(table: Table) -> Html:
    columns = table.columns[table.n_shared if table.shared_above else 0 :]
    heads = [
        h(f"th{_list_classes(columns[index:], Cell(''))}", column.title, scope="col")
        for index, column in enumerate(columns)
    ]
    bodies = [h("tbody", *_iter_rows(table, group, columns)) for group in table.groups]
    # A table of numbers alone may wrap between a number and its unit, so that it fits; one with a
    # column that is cut takes the whole width.
    width = {None: ".gmw-q", "cut": ".gmw-u", "wrap": ""}[columns[-1].last]
    if _is_wide(table):
        width = ".gmw-wr"
    if table.opens:
        width = ".gmw-li"
    return h(
        "div.gmw-w",
        h(
            f"table.gmw-t{width}{'.gmw-st' * _stacks(table)}",
            h(f"caption{'.gmw-h' * (not table.caption_is_seen)}", table.caption),
            h("thead", h("tr", *heads)),
            *bodies,
        ),
    )


def _is_wide(table: Table) -> bool:
    """Return whether a row stands in several lines where a page is as narrow as a side panel."""
    is_plain = not (table.n_shared or _stacks(table))
    return is_plain and table.columns[-1].last == "wrap" and len(table.columns) > 4


def _stacks(table: Table) -> bool:
    """Return whether a row's last cell stands below the others where there is little room."""
    return table.stacks and not table.n_shared and len(table.columns) <= 4


def _iter_rows(
    table: Table, group: tuple[tuple[Cell, ...], ...], columns: tuple[Column, ...]
) -> Iterator[Html]:
    first, *others = group
    if table.shared_above:
        label = " ".join(cell.text for cell in first[: table.n_shared])
        yield h("tr", h("th.gmw-d", label, scope="rowgroup", colspan=len(columns)))
        yield _render_row(table, first[table.n_shared :], columns)
    else:
        yield _render_row(table, first, columns, table.n_shared, len(group))
        columns = columns[table.n_shared :]
    for row in others:
        yield _render_row(table, row, columns, row_class=".gmw-call" * table.opens)


def _render_row(
    table: Table,
    row: tuple[Cell, ...],
    columns: tuple[Column, ...],
    n_shared: int = 0,
    n_rows: int = 1,
    *,
    row_class: str = "",
) -> Html:
    cells = []
    for index, (cell, column) in enumerate(zip(row, columns, strict=False)):
        spans_group = index < n_shared or (n_shared > 0 and column.last is not None)
        is_shared = n_rows > 1 and spans_group
        is_head = column.kind in ("name", "source")
        scope = ("rowgroup" if is_shared else "row") if is_head else None
        can_open = table.opens and n_rows > 1
        may_be_cut = column.last == "cut" and _is_code(column, cell)
        cells.append(
            h(
                f"{'th' if is_head else 'td'}{_list_classes(columns[index:], cell)}",
                *_list_content(table, column, cell, can_open=can_open),
                scope=scope,
                rowspan=n_rows if is_shared else None,
                title=cell.text.strip() if may_be_cut else None,
            )
        )
    if table.opens and row[1].tone == "strong":
        row_class = ".gmw-sum"
    return h(f"tr{row_class}", *cells)


def _is_code(column: Column, cell: Cell) -> bool:
    if column.kind == "source":
        return cell.tone == "code"
    return column.kind == "code" and cell.text != "" and cell.tone == "plain"


def _list_content(
    table: Table, column: Column, cell: Cell, *, can_open: bool
) -> list[Html | str | None]:
    text: Html | str = cell.text
    if _is_code(column, cell):
        is_line = column.kind == "source" and not cell.level
        if column.fold is not None:
            # A name breaks behind a dot rather than within a word.
            text = Html("<wbr>".join(map(escape, re.split(r"(?<=[._/])", cell.text))))
        text = h(f"code{'.gmw-cs' * is_line}", text, dir="auto")
        if is_line and can_open:
            text = h("details", h("summary", text))
    elif cell.tone == "strong":
        text = h("strong", text)
    if cell.detail:
        text = join_html([text, " ", h("span.gmw-m", cell.detail)])
    if cell.swatch and column.kind != "index":
        text = join_html([h(f"i.gmw-sq.{cell.swatch}"), text])
    if cell.level:
        text = indent(join_html([text]), cell.level)
    mark = f"{cell.mark}\N{NO-BREAK SPACE}" if cell.mark else None
    if cell.share is None:
        return [mark, text]
    if table.opens:
        return [render_share(cell.share, "gmw-ly"), text]
    return [mark, text, render_share(cell.share, "gmw-y")]


def _list_classes(columns: Sequence[Column], cell: Cell) -> str:
    """Return the classes of a cell in the first of these columns; the others follow it."""
    column, following = columns[0], columns[1:2]
    classes = []
    if column.kind == "number":
        is_before_text = any(other.kind != "number" for other in following)
        classes += ["gmw-r", "gmw-rt"] if is_before_text else ["gmw-r"]
    if column.last == "wrap":
        classes.append("gmw-f")
    if column.fold is not None:
        is_long = 2 * cell.level + len(cell.text) > column.fold
        classes += ["gmw-o", "gmw-z"] if is_long else ["gmw-o"]
    if column.last == "cut":
        classes.append("gmw-c")
    if column.kind == "index":
        classes += ["gmw-ix", cell.swatch] if cell.swatch else ["gmw-ix"]
    if column.kind == "source":
        is_line = cell.tone == "code" and not cell.level
        classes += ["gmw-src"] if is_line else ["gmw-src", "gmw-wd"]
    if cell.tone in _TONES:
        classes.append(_TONES[cell.tone])
    return "".join(f".{name}" for name in classes)
