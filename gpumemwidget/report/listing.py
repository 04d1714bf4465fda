"""Source with amounts beside its lines, drawn as text and as HTML.

In HTML a line with calls below it is opened by a click: the calls are rows of the same table, so
that their amounts stand in its columns, and a style shows them while the line is open. Where styles
are stripped they stand there in any case.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpumemwidget.report.document import Cell, Listing, ListingRow
from gpumemwidget.report.escape import clean, escape_html
from gpumemwidget.report.words import cut_words

__all__ = ["clean_source", "list_text_rows", "render_listing"]

#: Characters of a line that the HTML carries; of calls' names.
_MOST_TEXT = 180
_TAB = 4


def clean_source(text: str) -> str:
    """A line of source with its indentation, and nothing in it that acts on what shows it."""
    return clean(text.rstrip().expandtabs(_TAB))


# -- As text ---------------------------------------------------------------------------------------


def list_text_rows(listing: Listing) -> Iterator[tuple[str, tuple[str, ...], str, str]]:
    """For each row its number, its amounts, its text and its detail; calls below their lines."""
    for row in listing.rows:
        yield _show(row)
        for call in row.calls:
            yield _show(call)


def _show(row: ListingRow) -> tuple[str, tuple[str, ...], str, str]:
    number = "" if row.number is None else str(row.number)
    amounts = tuple(cell.text for cell in row.amounts)
    if row.kind == "line":
        text = clean_source(row.text)
    elif row.level:
        text = "  " * row.level + "> " + clean(row.text)
    else:
        text = clean(row.text)
    return number, amounts, text, clean(row.detail)


# -- As HTML ---------------------------------------------------------------------------------------


def render_listing(listing: Listing) -> str:
    """A table; each line with calls is a part of it that can be opened."""
    head = "".join(
        f'<th scope="col" class="gmw-r">{escape_html(title)}</th>' for title in listing.columns
    )
    bodies: list[str] = []
    is_open = False
    for row in listing.rows:
        if row.calls:
            calls = "".join(f'<tr class="gmw-call">{_render_row(call)}</tr>' for call in row.calls)
            bodies.append(f"{'</tbody>' if is_open else ''}<tbody><tr>{_render_row(row)}</tr>")
            bodies.append(f"{calls}</tbody>")
            is_open = False
            continue
        start = "" if is_open else "<tbody>"
        class_ = ' class="gmw-sum"' if row.kind == "sum" else ""
        bodies.append(f"{start}<tr{class_}>{_render_row(row)}</tr>")
        is_open = True
    end = "</tbody>" if is_open else ""
    return (
        f'<div class="gmw-w"><table class="gmw-t gmw-li">'
        f'<caption class="gmw-h">{escape_html(listing.caption)}</caption>'
        f'<thead><tr><th scope="col" class="gmw-ix"></th><th scope="col" class="gmw-src">line</th>'
        f"{head}</tr></thead>{''.join(bodies)}{end}</table></div>"
    )


def _render_row(row: ListingRow) -> str:
    band = f" gmw-k{row.band}" if row.band else ""
    number = "" if row.number is None else row.number
    cells = "".join(map(_render_amount, row.amounts))
    return f'<td class="gmw-ix{band}">{number}</td>{_render_source(row)}{cells}'


def _render_source(row: ListingRow) -> str:
    if row.kind != "line":
        text = escape_html(row.text)
        inner = (
            f"<code>{text}</code>" if row.kind == "call" else f'<span class="gmw-m">{text}</span>'
        )
        if row.kind == "sum":
            inner = text
        if row.detail:
            inner += f' <span class="gmw-m">{escape_html(row.detail)}</span>'
        if row.level:
            inner = '<div class="gmw-j">' * row.level + inner + "</div>" * row.level
        return f'<th scope="row" class="gmw-src gmw-wd">{inner}</th>'
    shown = cut_words(row.text.rstrip().expandtabs(_TAB), _MOST_TEXT)
    text = escape_html(shown)
    code = f'<code dir="auto">{text}</code>'
    title = f' title="{text.strip()}"' if len(shown) > 48 else ""
    if row.calls:
        code = f"<details><summary>{code}</summary></details>"
    return f'<th scope="row" class="gmw-src"{title}>{code}</th>'


def _render_amount(cell: Cell) -> str:
    class_ = "gmw-r gmw-m" if cell.tone == "muted" else "gmw-r"
    bar = ""
    if cell.share is not None:
        bar = (
            '<svg class="gmw-y" viewBox="0 0 100 1" preserveAspectRatio="none" aria-hidden="true">'
            f'<rect width="{100 * cell.share:.3g}" height="1"/></svg>'
        )
    return f'<td class="{class_}">{bar}{escape_html(cell.text)}</td>'
