"""Replace what is the user's in records, so that a report of them gives nothing away.

Whatever a record's text is, it is replaced unless its field is listed here as one of our own words.
Figures stay, and the same text has the same placeholder wherever it stands.
"""

from __future__ import annotations

import functools
import re
from array import array
from collections import deque
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from types import NoneType
from typing import Any, TypeVar, cast


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
