"""One page that tells what happened: reports one below the other, in a file that needs nothing.

A page has no script and fetches nothing. It can be redacted: names, paths and lines of code are
placeholders then, the same one wherever the same text stands. A word stays only if this package,
Python or PyTorch's public names have it, so that nothing has to be known of what is secret.
"""

from __future__ import annotations

import builtins
import functools
import html
import keyword
import re
import sys
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

from gpumemwidget.report.render.output import Report

#: Maximum size of a page, in bytes: what is beyond it is left out from the end, and named.
_MAX_BYTES = 3_000_000
_STYLE = (
    "body{font:14px/1.5 system-ui,sans-serif;margin:24px auto;max-width:1100px;padding:0 16px;"
    "color-scheme:light dark}h1{font-size:1.4em}h2{border-top:1px solid #8884;font-size:1.15em;"
    "margin-top:1.6em;padding-top:.8em}@media print{body{margin:0;max-width:none}"
    "details{display:block}}"
)
_WORD = re.compile(r"[^\W\d]\w*")
_PATH = re.compile(r"(?:~?/|[A-Za-z]:\\)[^\s\"'<>,;()]+|[\w.-]+\.(?:py|ipynb|jsonl|pickle)\b")
#: Elements whose whole text may be code; ``title`` is that of a shape.
_CODE = {"code", "title"}
#: Elements without an end.
_VOID = {"br", "col", "hr", "img", "input", "meta", "wbr"}


def render_story(
    title: str,
    sections: Sequence[tuple[str, Report]],
    *,
    known: str = "",
    is_redacted: bool = False,
) -> str:
    """Return a whole HTML page.

    Args:
        title: its heading.
        sections: the headings and reports, in their order.
        known: words that stay in a redacted page, such as names of devices and versions.
        is_redacted: whether names, paths and lines of code become placeholders.
    """
    note = "Names, paths and lines of code are placeholders."
    if not is_redacted:
        note = "Names of variables, paths and lines of code are in this page; --redact hides them."
    parts, left_out, n_bytes = [], [], 0
    redaction = _Redaction(known)
    for heading, report in sections:
        part = f"<section><h2>{html.escape(heading)}</h2>{report.html}</section>\n"
        if is_redacted:
            part = redaction.redact(part)
        n_bytes += len(part.encode())
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


class _Redaction(HTMLParser):
    """Replaces what may be secret in HTML, with the same placeholder wherever it stands."""

    def __init__(self, known: str) -> None:
        super().__init__(convert_charrefs=True)
        self._kept = _list_own_words() | {"code", *_WORD.findall(known)}
        self._names: dict[str, str] = {}
        self._codes: dict[str, str] = {}
        self._out: list[str] = []
        self._code: list[str] | None = None
        self._is_style = False

    def redact(self, text: str) -> str:
        """Return HTML with placeholders."""
        self._out = []
        self.feed(text)
        self.close()
        self.reset()
        return "".join(self._out)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Write an element's start, with the words of its attributes replaced."""
        written = ""
        for name, value in attrs:
            # A title has the whole of what is cut beside it.
            if name != "title":
                text = self._replace(value or "") if name == "aria-label" else value or ""
                written += f' {name}="{html.escape(text)}"'
        self._write(f"<{tag}{written}>")
        if tag in _CODE:
            self._code = []
        self._is_style = tag == "style"

    def handle_endtag(self, tag: str) -> None:
        """Write an element's end; that of code as the placeholder of all its text."""
        if tag in _CODE and self._code is not None:
            text, self._code = "".join(self._code), None
            self._out.append(html.escape(self._replace_code(text)))
        self._is_style = False
        if tag not in _VOID:
            self._write(f"</{tag}>")

    def handle_data(self, data: str) -> None:
        """Write text, with the words that may be secret replaced."""
        if self._code is not None:
            self._code.append(data)
        else:
            self._out.append(data if self._is_style else html.escape(self._replace(data)))

    def _write(self, markup: str) -> None:
        """Write markup, but for what is within code, which is one placeholder."""
        if self._code is None:
            self._out.append(markup)

    def _replace(self, text: str) -> str:
        # A path is one placeholder, which no word of it is left of.
        text = _PATH.sub(lambda match: self._replace_code(match[0]), text)
        return _WORD.sub(lambda match: self._name(match[0]), text)

    def _name(self, word: str) -> str:
        if word in self._kept:
            return word
        return self._names.setdefault(word, f"n{len(self._names) + 1}")

    def _replace_code(self, text: str) -> str:
        """Return a placeholder for a line, a path or a command; of ours the magic stays."""
        if not _WORD.search(text):
            return text
        if text.startswith("%mem"):
            command, _, rest = text.partition(" ")
            return f"{command} {self._replace_code(rest)}" if rest else command
        return self._codes.setdefault(text.strip(), f"code {len(self._codes) + 1}")


@functools.cache
def _list_own_words() -> frozenset[str]:
    """Return the words of this package, of Python and of PyTorch's public names."""
    words = {*keyword.kwlist, *dir(builtins)}
    package = Path(__file__).parents[1]
    for folder in ("report", "model"):
        for path in (package / folder).rglob("*.py"):
            words.update(_WORD.findall(path.read_text(encoding="utf-8")))
    for name in ("torch", "torch.nn", "torch.optim", "torch.cuda"):
        words.update(dir(sys.modules.get(name, object)))
    return frozenset(words)
