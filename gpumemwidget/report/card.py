"""What stands on the card of an OOM and nowhere else, as HTML: the bar, the ways out.

The bar is an SVG of the size of the charts, stretched to the room it has. The amounts stand below
it and not within: a notebook that is not trusted loses its SVG, but would keep the text in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpumemwidget.report.document import Options, Part, UseBar
from gpumemwidget.report.escape import escape_html
from gpumemwidget.report.theme import LOOKS, SPARKLINE_HEIGHT, SPARKLINE_WIDTH
from gpumemwidget.units import format_bytes

__all__ = ["render_bar", "render_options"]


def render_bar(bar: UseBar) -> str:
    """The bar; below it its parts, those that are made of others on lines of their own."""
    drawn = []
    x = 0.0
    for part in _list_leaves(bar.parts):
        width = _scale(part.n_bytes, bar)
        drawn.append(
            f'<rect class="{_class_of(part)}" x="{x:.5g}" width="{width:.3g}" '
            f'height="{SPARKLINE_HEIGHT}"/>'
        )
        x += width
    label = f"{bar.title} {format_bytes(bar.total_bytes)}: " + ", ".join(
        f"{part.label} {format_bytes(part.n_bytes)}" for part in _list_leaves(bar.parts)
    )
    mark = ""
    if bar.mark_bytes is not None:
        drawn.append(f'<path d="M{_scale(bar.mark_bytes, bar):.5g} 0V{SPARKLINE_HEIGHT}"/>')
        mark = f' <span><i class="gmw-lm"></i>{_describe(bar.mark_label, bar.mark_bytes)}</span>'
    groups = [part for part in bar.parts if part.parts]
    others = [part for part in bar.parts if not part.parts]
    lines = [
        f"<p>{_describe(group.label, group.n_bytes, is_whole=True)}: {_list_keys(group.parts)}</p>"
        for group in groups
    ]
    if others or mark:
        lines.append(f"<p>{_list_keys(others)}{mark}</p>")
    return (
        f'<p class="gmw-eh"><strong>{escape_html(bar.title)}</strong> '
        f"<span>{format_bytes(bar.total_bytes)}</span></p>"
        f'<figure class="gmw-e"><svg role="img" aria-label="{escape_html(label)}" '
        f'viewBox="0 0 {SPARKLINE_WIDTH} {SPARKLINE_HEIGHT}" preserveAspectRatio="none">'
        f'{"".join(drawn)}</svg></figure><div class="gmw-el">{"".join(lines)}</div>'
    )


def _list_leaves(parts: Sequence[Part]) -> Iterator[Part]:
    for part in parts:
        if part.parts:
            yield from _list_leaves(part.parts)
        else:
            yield part


def _scale(n_bytes: int, bar: UseBar) -> float:
    return SPARKLINE_WIDTH * n_bytes / bar.total_bytes


def _class_of(part: Part) -> str:
    return f"gmw-l{LOOKS[part.look]}"


def _list_keys(parts: Sequence[Part]) -> str:
    return " ".join(
        f'<span><i class="{_class_of(part)}"></i>'
        f"{_describe(part.label, part.n_bytes, detail=part.detail)}</span>"
        for part in parts
    )


def _describe(label: str, n_bytes: int, *, detail: str = "", is_whole: bool = False) -> str:
    amount = f"<strong>{format_bytes(n_bytes)}</strong>" if is_whole else format_bytes(n_bytes)
    more = f' <span class="gmw-m">({escape_html(detail)})</span>' if detail else ""
    return f"{escape_html(label)} {amount}{more}"


def render_options(options: Options) -> str:
    """A row for each: what it gives, what it is, and below that what to type."""
    rows = "".join(
        f'<tr><td class="gmw-r">{escape_html(option.amount)}</td>'
        f'<td class="gmw-f">{escape_html(option.text)}'
        f"{_render_command(option.command)}</td></tr>"
        for option in options.options
    )
    return (
        f'<div class="gmw-w"><table class="gmw-t gmw-out"><caption>'
        f"{escape_html(options.caption)}</caption><tbody>{rows}</tbody></table></div>"
    )


def _render_command(command: str) -> str:
    return (
        f'<div class="gmw-cd"><code dir="auto">{escape_html(command)}</code></div>'
        if command
        else ""
    )
