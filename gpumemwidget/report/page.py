"""One page that shows what happened: reports one below the other, in a file that needs nothing.

A page has no script and fetches nothing. What is the user's own can be replaced in the records
before they are reported, so that the page gives nothing away.
"""

from __future__ import annotations

import functools
import html
import re
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from types import NoneType
from typing import Any, TypeVar, cast

from gpumemwidget.report.render.output import Report

# -- The page --------------------------------------------------------------------------------------


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
        # What is beyond 3 MB is left out from the end, and named.
        if n_bytes > 3_000_000:
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


# -- Placeholders for what is the user's -----------------------------------------------------------


def _list_words(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Fields, by name or by class and name, whose text is never the user's.
_PUBLIC = _list_words(
    """device kind key merged status peak_is unit root dtype role gives_is relation state library
    tensor measure phase by_device own_bytes silent_libraries unread_libraries ChildProcess.devices
    DeviceBreakdowns.maps DeviceInfo.name Breakdown.name
    GpuShare.name LibraryUse.name LibraryArray.what HardwareNote.what HardwareNote.device
    OomCard.notes"""
)
#: Fields with paths and names, which keep their shape: reports join, compare and cut them.
_PATHS = _list_words(
    """steps rows row path owner container module modules names shared_with holders functions
    function Variable.name"""
)
#: Fields with the cell or file, and perhaps the line, where something is.
_PLACES = _list_words("place allocated_at cell source SourceUnit.name SegmentMap.lines")
#: Our own words in paths, and in texts that are one word.
_OWN_WORDS = _list_words(
    """Out line last exception its cause context variable variables s graph cache key closure
    default top level saved by rubbish gc collect frees it no none name names Python own objects and
    libraries unknown other cuBLAS workspace in the private pool of your on allocated reserved held
    where object perhaps a gradient bucket buckets DistributedDataParallel parameter optimizer state
    buffer tensor for backward CUDA CUDA-graph compile thread running something that can t see
    whatever lent to torch NumPy CuPy JAX file ipywidgets cuda host"""
)
#: A quoted key; a line of a function; a piece of a name, or a number.
_PIECE = re.compile(
    r'(?P<quoted>"(?:[^"\\]|\\.)*"?)'
    r"|(?P<own>^Out\[\d{1,6}\]|(?<=\) )line \d{1,6}\b|\b(?:cuda|xpu):\d\d?\b)"
    r"|(?P<number>[0-9]+)|(?P<word>[^0-9\s.\[\](),:;'\"…]+)",
    re.DOTALL,
)
#: Beginnings of predicted remedies' names; only a path may follow one.
_REMEDY = re.compile(
    r"checkpointing of |(bfloat16 autocast|expandable segments|no_grad"
    r"|half the batch, gradients accumulated over two)\Z"
)
_PLACE = re.compile(r"(In ?\[[\d ]{0,6}\])?(.*?)(, line \d+)?", re.DOTALL)

_T = TypeVar("_T")


class Redaction:
    """Replaces the user's texts with placeholders: ``hidden 3``, or ``name_c[2]`` for a path.

    Whatever a record's text is, it is replaced unless its field is listed above as one of our own
    words. Figures stay, and the same text has the same placeholder wherever it stands.

    Args:
        is_off: whether records are returned as they are.
    """

    def __init__(self, *, is_off: bool = False) -> None:
        self._is_off = is_off
        self._texts: dict[str, str] = {}
        self._words: dict[str, str] = {}
        self._numbers: dict[str, str] = {}

    def redact(self, value: _T, field: str = "") -> _T:
        """Return a record, or records in containers, with placeholders.

        Args:
            value: the records.
            field: the field that texts outside of any record are treated as.
        """
        found: Any = value
        if self._is_off:
            return value
        if isinstance(value, str):
            found = self._replace(value, field)
        elif isinstance(value, Mapping):
            found = {self.redact(k, field): self.redact(v, field) for k, v in value.items()}
        elif isinstance(value, (tuple, list, deque)):
            found = type(value)([self.redact(item, field) for item in value])
        elif is_dataclass(value) and not isinstance(value, type):
            changes = {
                name: self.redact(getattr(value, name), known)
                for name, known in _list_fields(type(value))
            }
            found = replace(value, **changes) if changes else value
        elif not isinstance(value, (int, float, bytes, array, Enum, NoneType)):
            raise TypeError(f"{type(value).__name__} may have texts of the user's")
        return cast("_T", found)

    def _replace(self, text: str, field: str) -> str:
        if field in _PUBLIC or not text.strip() or text in _OWN_WORDS:
            return text
        if field == "PredictedRemedy.command":
            return ""  # It is code; the name says what to do.
        if field == "PredictedRemedy.name" and (begin := _REMEDY.match(text)):
            return begin[0] + _PIECE.sub(self._replace_piece, text[begin.end() :])
        if field in _PATHS:
            return _PIECE.sub(self._replace_piece, text)
        if field in _PLACES and (match := _PLACE.fullmatch(text)):
            cell, file, line = match.groups("")
            return cell + (self._hide(file) if file else "") + line
        return self._hide(text)

    def _hide(self, text: str) -> str:
        return self._texts.setdefault(text.strip(), f"hidden {len(self._texts) + 1}")

    def _replace_piece(self, match: re.Match[str]) -> str:
        text = match[0]
        if match["own"] or text in _OWN_WORDS:
            return text
        if match["quoted"]:
            # Keys that differ in numbers alone stay alike.
            parts = re.split("([0-9]+)", text[1:-1])
            return f'"{"".join(map(self._replace_part, parts))}"'
        return self._replace_part(text)

    def _replace_part(self, text: str) -> str:
        if not text:
            return text
        if text.isascii() and text.isdigit():
            return self._numbers.setdefault(text, str(len(self._numbers)))
        if text not in self._words:
            number, letters = len(self._words), ""
            while number >= 0:
                number, letter = divmod(number, 26)
                letters, number = chr(ord("a") + letter) + letters, number - 1
            # A text that can't be typed as a name stays one.
            self._words[text] = f"name{'_' if f'x{text}'.isidentifier() else '-'}{letters}"
        return self._words[text]


@functools.cache
def _list_fields(cls: type) -> tuple[tuple[str, str], ...]:
    """Return the fields that may have text, each with the name by which it is treated."""
    listed = []
    for field in fields(cls):
        full = f"{cls.__name__}.{field.name}"
        if not re.fullmatch(r"(int|float|bool|bytes|array)\b.*", str(field.type)):
            is_listed = full in _PUBLIC | _PATHS | _PLACES or cls.__name__ == "PredictedRemedy"
            listed.append((field.name, full if is_listed else field.name))
    return tuple(listed)
