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
    Listing,
    ListingRow,
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
    h,
    indent,
    join_html,
    render_share,
)
from gpumemwidget.report.render.palette import list_properties
from gpumemwidget.report.wording.words import cut_words

#: Class of a report with a frame.
CARD_CLASS = "gmw-card"

# MathJax would read a user's "$x$" as a formula; both its versions pass over the last two classes.
_ROOT = "div.gmw.mathjax_ignore.tex2jax_ignore"

_STYLES = Path(__file__).parent / "styles"
_OPTION = re.compile(r"((?<= )--[a-z]+)")
_TONES = {"muted": "gmw-m", "bad": "gmw-bad", "warn": "gmw-warn"}
#: Maximum number of characters of a source line.
_MAX_SOURCE_WIDTH = 180
#: Number of characters from which on a source line is repeated as its own tooltip.
_LONG_SOURCE_WIDTH = 48
_TAB_SIZE = 4


def render_html(blocks: Sequence[Block], classes: Sequence[str] = ()) -> str:
    """Return the blocks as one ``<div>`` with the style sheets of just those kinds that it has."""
    every = list(_iter_blocks(blocks))
    css = "".join(map(read_sheet, _list_sheets(every, classes)))
    untrusted = UNTRUSTED_NOTE if any(isinstance(b, Picture) and b.is_svg for b in every) else None
    root = ".".join((_ROOT, *classes))
    return h(root, h("style", Html(css)), *map(_render_block, blocks), untrusted)


@functools.cache
def read_sheet(name: str) -> str:
    """Return a style sheet of ``styles/`` on one line, with the colours of the palette put in."""
    css = (_STYLES / f"{name}.css").read_text(encoding="utf-8")
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
        "table": bool(kinds & {Table, Options, Listing}),
        "steps": bool(kinds & {Steps, Fold}),
        "listing": Listing in kinds,
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
        case Listing():
            return _render_listing(block)
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
        h(f"th{_list_classes(column, Cell(''))}", column.title, scope="col") for column in columns
    ]
    bodies = [h("tbody", *_iter_rows(table, group, columns)) for group in table.groups]
    # A table of numbers alone may break them from their units to stay in sight; one with a column
    # to cut takes the whole width.
    width = {None: ".gmw-q", "cut": ".gmw-u", "wrap": ""}[columns[-1].last]
    return h(
        "div.gmw-w",
        h(
            f"table.gmw-t{width}{'.gmw-st' * table.stacks}",
            h(f"caption{'.gmw-h' * (not table.caption_is_seen)}", table.caption),
            h("thead", h("tr", *heads)),
            *bodies,
        ),
    )


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
        yield _render_row(table, row, columns)


def _render_row(
    table: Table,
    row: tuple[Cell, ...],
    columns: tuple[Column, ...],
    n_shared: int = 0,
    n_rows: int = 1,
) -> Html:
    cells = []
    for index, (cell, column) in enumerate(zip(row, columns, strict=False)):
        stands_for_all = index < n_shared or (n_shared > 0 and column.last is not None)
        is_shared = n_rows > 1 and stands_for_all
        is_code = column.kind == "code" and cell.text != "" and cell.tone == "plain"
        is_name = column.kind == "name"
        scope = ("rowgroup" if is_shared else "row") if is_name else None
        cells.append(
            h(
                f"{'th' if is_name else 'td'}{_list_classes(column, cell)}",
                *_list_content(table, column, cell, is_code=is_code),
                scope=scope,
                rowspan=n_rows if is_shared else None,
                title=cell.text if is_code and column.last == "cut" else None,
            )
        )
    return h("tr", *cells)


def _list_content(
    table: Table, column: Column, cell: Cell, *, is_code: bool
) -> list[Html | str | None]:
    text: Html | str = cell.text
    if is_code:
        text = h("code", text, dir="auto")
    elif cell.tone == "strong":
        text = h("strong", text)
    elif table.stacks and column.last == "wrap":
        # A line may end after each hyphen, and would divide an option of a magic.
        pieces = enumerate(_OPTION.split(text))
        text = join_html(h("span.gmw-nb", piece) if odd % 2 else piece for odd, piece in pieces)
    if cell.swatch:
        text = join_html([h(f"i.gmw-sq.{cell.swatch}"), text])
    if cell.level:
        text = indent(join_html([text]), cell.level)
    return [
        f"{cell.mark}\N{NO-BREAK SPACE}" if cell.mark else None,
        text,
        render_share(cell.share, "gmw-y") if cell.share is not None else None,
    ]


def _list_classes(column: Column, cell: Cell) -> str:
    """Return the classes of a cell, each behind a dot."""
    classes = []
    if column.kind == "number":
        classes.append("gmw-r")
    if column.last == "wrap":
        classes.append("gmw-f")
    if column.fold is not None:
        is_long = 2 * cell.level + len(cell.text) > column.fold
        classes += ["gmw-o", "gmw-z"] if is_long else ["gmw-o"]
    if column.last == "cut":
        classes.append("gmw-c")
    if cell.tone in _TONES:
        classes.append(_TONES[cell.tone])
    return "".join(f".{each}" for each in classes)


# -- Source beside its amounts ---------------------------------------------------------------------


def _render_listing(listing: Listing) -> Html:
    """Return a table in which a line is opened to its calls by a click.

    The calls are rows of the same table, so that their amounts stand in its columns; a style shows
    them while the line is open. Where styles are stripped they are always shown.
    """
    heads = [h("th.gmw-r", title, scope="col") for title in listing.columns]
    bodies: list[Html] = []
    rows: list[Html] = []
    for row in listing.rows:
        drawn = h(f"tr{'.gmw-sum' * (row.kind == 'sum')}", *_list_listing_cells(row))
        if row.calls:
            bodies += [h("tbody", *rows)] if rows else []
            calls = [h("tr.gmw-call", *_list_listing_cells(call)) for call in row.calls]
            bodies.append(h("tbody", drawn, *calls))
            rows = []
        else:
            rows.append(drawn)
    bodies += [h("tbody", *rows)] if rows else []
    head = h("tr", h("th.gmw-ix", scope="col"), h("th.gmw-src", "line", scope="col"), *heads)
    caption = h("caption.gmw-h", listing.caption)
    return h("div.gmw-w", h("table.gmw-t.gmw-li", caption, h("thead", head), *bodies))


def _list_listing_cells(row: ListingRow) -> list[Html]:
    band = f".gmw-k{row.band}" if row.band else ""
    number = h(f"td.gmw-ix{band}", row.number)
    return [number, _render_source(row), *map(_render_amount, row.amounts)]


def _render_source(row: ListingRow) -> Html:
    if row.kind == "line":
        shown = cut_words(row.text.rstrip().expandtabs(_TAB_SIZE), _MAX_SOURCE_WIDTH)
        code = h("code.gmw-cs", shown, dir="auto")
        if row.calls:
            code = h("details", h("summary", code))
        title = shown.strip() if len(shown) > _LONG_SOURCE_WIDTH else None
        return h("th.gmw-src", code, scope="row", title=title)
    text: Html | str = row.text
    if row.kind == "call":
        text = h("code", text)
    elif row.kind == "words":
        text = h("span.gmw-m", text)
    if row.detail:
        text = join_html([text, " ", h("span.gmw-m", row.detail)])
    if row.level:
        text = indent(join_html([text]), row.level)
    return h("th.gmw-src.gmw-wd", text, scope="row")


def _render_amount(cell: Cell) -> Html:
    bar = render_share(cell.share, "gmw-ly") if cell.share is not None else None
    return h(f"td.gmw-r{'.gmw-m' * (cell.tone == 'muted')}", bar, cell.text)
