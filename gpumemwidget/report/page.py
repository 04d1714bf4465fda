"""One page that shows what happened: reports one below the other, in a file that needs nothing.

A page has no script and fetches nothing.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

from gpumemwidget.report.render.output import Report

#: Maximum size of a page, in bytes: what is beyond it is left out from the end, and named.
_MAX_BYTES = 3_000_000
_STYLE = (
    ":root{color-scheme:light dark}body{font:14px/1.5 system-ui,sans-serif;margin:24px auto;"
    "max-width:1100px;padding:0 16px}h1{font-size:1.4em}h2{border-top:1px solid #8884;"
    "font-size:1.15em;margin-top:1.6em;padding-top:.8em}@media print{:root{color-scheme:light}"
    "body{margin:0;max-width:none}details::details-content{content-visibility:visible}}"
)


def render_story(
    title: str,
    sections: Sequence[tuple[str, Report]],
    *,
    is_redacted: bool = False,
) -> str:
    """Return a whole HTML page.

    Args:
        title: its heading.
        sections: the headings and reports, in their order.
        is_redacted: whether names, paths and lines of code in the reports are placeholders.
    """
    note = "Names, paths and lines of code are placeholders."
    if not is_redacted:
        note = "Names of variables, paths and lines of code are in this page; --redact hides them."
    parts, left_out, n_bytes = [], [], 0
    for heading, report in sections:
        part = f"<section><h2>{html.escape(heading)}</h2>{report.html}</section>\n"
        n_bytes += len(part.encode("utf-8", "replace"))
        if n_bytes > _MAX_BYTES:
            left_out.append(heading)
        else:
            parts.append(part)
    if left_out:
        note += f" Left out, as the page would be too large: {', '.join(left_out)}."
    head = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>\n<body>"
    )
    begin = f"<h1>{html.escape(title)}</h1><p>{html.escape(note)}</p>"
    return f"{head}{begin}\n{''.join(parts)}</body></html>\n"
