"""The files that a trace's frames are of: the traced cell, earlier cells, the user's files.

A frame has a file name and a line. Of a cell the name is the one that it was compiled under, and
``linecache`` knows its text, as it does for tracebacks.
"""

from __future__ import annotations

import linecache
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from stat import S_ISREG
from typing import Literal

from gpumemwidget.libraries import is_library
from gpumemwidget.records import Frame

__all__ = ["Source", "Sources", "align_typed", "read_source"]

_INDENT = re.compile(r"[ \t]*")
_DEFINITION = re.compile(r"(?:async\s+def|def|class)\s+([^\W\d]\w*)")
#: What ``%%time`` compiles its body as.
_TIMED = ("<timed exec>", "<timed eval>")
#: Longer files are not read: what is theirs then has no text.
_MOST_LINES = 50_000
_MOST_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Source:
    """A cell or a file of the user's."""

    #: ``In[7]``, ``train.py``.
    name: str
    filename: str
    kind: Literal["cell", "earlier cell", "file"]
    #: ``""`` where it is not known.
    text: str

    @property
    def lines(self) -> list[str]:
        """The lines, the first at 0, without their ends."""
        return self.text.splitlines()


class Sources:
    """Which source a frame belongs to.

    Args:
        traced: the traced cell. Its lines are numbered as those of the compiled code are.
        cells: the numbers of cells by the names of their compiled files.
        also: other names that parts of the traced cell's code are compiled under, and how many of
            the cell's lines stand above each part, where its text does not tell; its own name
            where that begins further down.
        read: the lines of a file with their ends, ``[]`` where they are not known.
    """

    def __init__(
        self,
        traced: Source,
        *,
        cells: Mapping[str, int] | None = None,
        also: Mapping[str, int] | None = None,
        read: Callable[[str], list[str]] | None = None,
    ) -> None:
        self.traced = traced
        self._cells = dict(cells or {})
        self._offsets = {traced.filename: 0, **(also or {})}
        self._read = read_source if read is None else read
        self._found: dict[str, Source | None] = {}
        self._lines: dict[str, list[str]] = {}

    def find(self, filename: str) -> Source | None:
        """The source of a file; ``None`` for a library's."""
        if filename not in self._found and filename not in self._offsets:
            offset = self._find_part(filename)
            if offset is None:
                self._found[filename] = self._make(filename)
            else:
                self._offsets[filename] = offset
        return self.traced if filename in self._offsets else self._found[filename]

    def find_line(self, frame: Frame) -> int | None:
        """The line of the traced cell that a frame is at; ``None`` where it is not the cell's."""
        if frame.filename not in self._found:
            self.find(frame.filename)
        offset = self._offsets.get(frame.filename)
        return None if offset is None else frame.line + offset

    def read_lines(self, filename: str) -> list[str]:
        """The lines of any file, a library's too; ``[]`` where they can't be had."""
        if filename in self._offsets:
            return self.traced.lines
        if filename not in self._lines:
            lines = self._read(filename) if filename else []
            self._lines[filename] = lines if len(lines) <= _MOST_LINES else []
        return self._lines[filename]

    def qualify(self, frame: Frame) -> str:
        """A frame's function with the classes and functions around it: ``Net.forward``.

        The text says which they are, as far as it still is what ran; else the name stands alone.
        """
        line = self.find_line(frame)
        lines = self.read_lines(frame.filename)
        number = frame.line if line is None else line
        if not frame.function.isidentifier() or not 0 < number <= len(lines):
            return frame.function
        names: list[str] = []
        limit = _indent(lines[number - 1])
        if _DEFINITION.match(lines[number - 1].strip()):
            # A function of one line is around itself.
            limit += 1
        for text in reversed(lines[:number]):
            stripped = text.strip()
            # What closes a bracket may stand at any column.
            if not stripped or stripped[0] in ")]}#" or _indent(text) >= limit:
                continue
            found = _DEFINITION.match(stripped)
            if found:
                names.append(found[1])
            limit = _indent(text)
            if not limit:
                break
        if frame.function not in names:
            return frame.function
        return ".".join(reversed(names[names.index(frame.function) :]))

    def _find_part(self, filename: str) -> int | None:
        """How many of the traced cell's lines stand above a part that is compiled by itself.

        That is what is below ``%%time`` or ``%%capture``.
        """
        lines = self.traced.lines
        n_heads = _count_heads(lines)
        if filename in _TIMED and n_heads:
            return n_heads
        number = self._cells.get(filename)
        if not n_heads or (f"In[{number}]" != self.traced.name and number is not None):
            return None
        if number is None and is_library(filename):
            return None
        part = "".join(self.read_lines(filename)).strip("\n").splitlines()
        while lines and not lines[-1].strip():
            lines.pop()
        offset = len(lines) - len(part)
        if not part or offset < n_heads or any(map(str.strip, lines[n_heads:offset])):
            return None
        is_same = all(
            line == typed or typed.lstrip().startswith(("%", "!"))
            for line, typed in zip(part, lines[offset:], strict=True)
        )
        return offset if is_same else None

    def _make(self, filename: str) -> Source | None:
        number = self._cells.get(filename)
        if number is None and (not filename or is_library(filename)):
            return None
        name = PurePath(filename).name if number is None else f"In[{number}]"
        text = "".join(self.read_lines(filename))
        if number is None and not text and filename.startswith("<"):
            return None  # Something that was put together and never stood anywhere.
        return Source(name, filename, "file" if number is None else "earlier cell", text)


def read_source(filename: str) -> list[str]:
    """The lines of a file with their ends, as tracebacks have them; ``[]`` where there are none.

    A trace that was read from a file may name any other: a device is not read, which may never end.
    """
    try:
        if filename not in linecache.cache and os.path.exists(filename):  # noqa: PTH110 - as it is
            stat = os.stat(filename)  # noqa: PTH116 - as above
            if not S_ISREG(stat.st_mode) or stat.st_size > _MOST_BYTES:
                return []
        return linecache.getlines(filename)
    except (OSError, ValueError, MemoryError):  # A name with a zero or half a character in it.
        return []


def align_typed(typed: str, compiled: str) -> str:
    """A cell as it was typed, with the line numbers of what was compiled.

    IPython takes blank lines above a cell away and rewrites magics, mostly line for line. Where it
    is not line for line, the compiled text is the one whose numbers are right. (What is below
    another cell magic is compiled by itself, and found by its text.)

    Args:
        typed: as the person typed it, with the line of ``%%memtrace``.
        compiled: as ``linecache`` has it.
    """
    lines = typed.splitlines()
    while lines and not lines[0].strip():
        del lines[0]
    while lines and not lines[-1].strip():
        lines.pop()
    others = compiled.rstrip().splitlines()
    is_kept = len(lines) == len(others) or _count_heads(lines) > _count_heads(lines[:1])
    return "\n".join(lines) if is_kept else compiled


def _count_heads(lines: Sequence[str]) -> int:
    """The lines up to the last of the cell magics that a cell begins with."""
    n_heads = 0
    for number, line in enumerate(lines, 1):
        if line.lstrip().startswith("%%"):
            n_heads = number
        elif line.strip():
            break
    return n_heads


def _indent(text: str) -> int:
    found = _INDENT.match(text)
    return len(found[0].expandtabs()) if found else 0
