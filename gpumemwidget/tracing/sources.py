"""Find the source of a frame: the traced cell, an earlier cell, a file of the user's, a library.

A frame has a file name and a line. A cell's file name is the one that it was compiled under;
``linecache`` has its text, as for tracebacks.
"""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import PurePath
from stat import S_ISREG
from types import CodeType, FrameType
from typing import Literal, TypeAlias

from gpumemwidget.model.devices import Frame

#: Files of the standard library and of installed packages, here and on the machine of a recording,
#: and files that torch.compile wrote.
_LIBRARIES = re.compile(
    r"[/\\](site|dist)-packages[/\\]|^<frozen |[/\\]lib[/\\]python3\.\d+[/\\]"
    r"|[/\\]torchinductor_|^<eval_with_key>|^"
    + "|^".join(re.escape(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))
)
#: An installed file's path from where its package lies.
_INSTALLED = re.compile(
    r".*[/\\](?:(?:site|dist)-packages|lib[/\\]python3\.\d+)[/\\](.+)\.py", re.DOTALL
)
_DEFINITION = re.compile(r"(?:async\s+def|def|class)\s+([^\W\d]\w*)")


@dataclass(frozen=True, slots=True)
class Source:
    """A cell or a file of the user's.

    Attributes:
        name: ``In [7]``, ``train.py``.
        filename: the name that its code is compiled under.
        kind: the traced cell, an earlier cell, or a file.
        text: ``""`` if it is not known.
    """

    name: str
    filename: str
    kind: Literal["cell", "earlier cell", "file"]
    text: str

    @property
    def lines(self) -> list[str]:
        """Lines without their ends; line 1 is at index 0."""
        return self.text.splitlines()

    def list_shown(self, numbers: Iterable[int]) -> list[tuple[int, str]]:
        """Return the lines to show with their numbers: all of a cell, else some and those around.

        Args:
            numbers: lines that are shown in any case, though the text may not have them.
        """
        lines = self.lines
        shown = set(numbers)
        if self.kind == "cell":
            shown.update(range(1, len(lines) + 1))
        else:
            # Three lines above and below.
            around = {number + step for number in shown for step in range(-3, 4)}
            shown.update(number for number in around if 0 < number <= len(lines))
        return [(n, lines[n - 1] if 0 < n <= len(lines) else "") for n in sorted(shown)]


class Sources:
    """Finds which source a frame belongs to.

    Args:
        traced: the traced cell, with lines numbered as those of the compiled code.
        cells: numbers of cells by the names of their compiled files.
        also: other file names of parts of the traced cell, each with the number of the cell's lines
            above the part; the cell's own name, if its code begins further down.
        read: returns the lines of a file with their ends, ``[]`` if they are not known.
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
        self._read = read_source if read is None else read
        self._found: dict[str, Source | None] = {}
        #: For each file with a part of the traced cell, the number of the cell's lines above it.
        self._offsets = {traced.filename: 0, **(also or {})}
        self._lines: dict[str, list[str]] = {}

    def find(self, filename: str) -> Source | None:
        """Return the source of a file; ``None`` for a library's."""
        if filename in self._offsets:
            return self.traced
        if filename not in self._found:
            self._found[filename] = self._make(filename)
        return self._found[filename]

    def find_line(self, frame: Frame) -> int | None:
        """Return the line of the traced cell that a frame is at; ``None`` in another source."""
        if self.find(frame.filename) is not self.traced:
            return None
        return frame.line + self._offsets[frame.filename]

    def read_lines(self, filename: str) -> list[str]:
        """Return the lines of any file, a library's too; ``[]`` if they can't be read."""
        if filename in self._offsets:
            return self.traced.lines
        if filename not in self._lines:
            self._lines[filename] = self._read(filename) if filename else []
        return self._lines[filename]

    def qualify(self, frame: Frame) -> str:
        """Return a frame's function with the classes and functions around it: ``Net.forward``.

        They are read from the text, as far as it still is what ran; else it is the name alone.
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
            # A closing bracket may be at any column.
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

    def _make(self, filename: str) -> Source | None:
        number = self._cells.get(filename)
        if number is None and (not filename or is_library(filename)):
            return None
        name = PurePath(filename).name if number is None else f"In [{number}]"
        text = "".join(self.read_lines(filename))
        if number is None and not text and filename.startswith("<"):
            return None  # Code that was generated and has no source.
        return Source(name, filename, "file" if number is None else "earlier cell", text)


def read_source(filename: str) -> list[str]:
    """Return the lines of a file with their ends, as tracebacks do; ``[]`` if there are none.

    A trace from a file may name anything: only a regular file of up to 16 MiB is read, as a device
    may never end.
    """
    try:
        if filename not in linecache.cache and os.path.exists(filename):  # noqa: PTH110 - as it is
            stat = os.stat(filename)  # noqa: PTH116 - a string as it is
            if not S_ISREG(stat.st_mode) or stat.st_size > 16 << 20:
                return []
        return linecache.getlines(filename)
    except (OSError, ValueError, MemoryError):  # A name with a zero or half a character in it.
        return []


def name_module(filename: str) -> str | None:
    """Return the module of an installed file: ``torch.nn.functional``; ``None`` for others."""
    match = _INSTALLED.fullmatch(filename)
    if match is None:
        return None
    return re.sub(r"[/\\]", ".", match[1]).removesuffix(".__init__")


@lru_cache(maxsize=4096)
def is_library(filename: str) -> bool:
    """Return whether a file belongs to an installed package or to Python itself.

    Args:
        filename: the name in a code object.
    """
    return _LIBRARIES.search(filename) is not None


def format_allocation(frames: Sequence[Frame], cells: Mapping[str, int]) -> str | None:
    """Return the innermost line outside of libraries, else the innermost; ``None`` without any.

    Args:
        frames: innermost first.
        cells: numbers of cells by the names of their compiled files.

    Returns:
        ``In [7], line 3``; of a file ``train.py, line 12``.
    """
    if not frames:
        return None
    own = (frame for frame in frames if frame.filename in cells or not is_library(frame.filename))
    frame = next(own, frames[0])
    number = cells.get(frame.filename)
    name = PurePath(frame.filename).name if number is None else f"In [{number}]"
    return f"{name}, line {frame.line}"


def _indent(text: str) -> int:
    return len(text.expandtabs()) - len(text.expandtabs().lstrip(" "))


# -- A traced cell and a traced block --------------------------------------------------------------

#: File names of the bodies of ``%%time`` and ``%time``.
_TIMED = ("<timed exec>", "<timed eval>")
#: Returns whether a frame that begins is that of the code to follow.
IsEntry: TypeAlias = Callable[[FrameType], bool]


def make_is_entry(run_code: CodeType, typed: str) -> IsEntry:
    """Return a function that returns whether a cell's code begins at a frame.

    Args:
        run_code: of IPython's method that runs what it has compiled.
        typed: the cell. Where it is another magic's, that magic may compile its body once more.
    """
    is_magic = _find_magic(typed) is not None
    n_seen = 0

    def is_entry(frame: FrameType) -> bool:
        nonlocal n_seen
        caller = frame.f_back
        if caller is not None and caller.f_code is run_code:
            name = frame.f_code.co_filename
            if name == run_code.co_filename or is_library(name):
                return False  # IPython's own: a property of the shell's.
            n_seen += 1
            return is_magic or n_seen == 1
        return is_magic and frame.f_code.co_filename in _TIMED

    return is_entry


def find_cell_sources(
    typed: str, number: int | None, numbers: Mapping[str, int], files: Sequence[str] = ()
) -> Sources:
    """Return the sources of a cell that IPython has run.

    Args:
        typed: the cell as it was typed.
        number: its number, as IPython compiled it.
        numbers: the numbers of all cells by the names of their files.
        files: those whose code was seen to run, the cell's own first.
    """
    magic = _find_magic(typed)
    lines = typed.splitlines()
    own = [name for name, cell_number in numbers.items() if cell_number == number]
    if magic is not None and number is not None:
        # IPython counts a body that the magic has it run as the next cell, which is still to come.
        coming = [name for name, cell_number in numbers.items() if cell_number == number + 1]
        own += [name for name in coming if _is_body(linecache.getlines(name), lines[magic:])]
    own = [*dict.fromkeys([*files, *own])]
    compiled = {name: "".join(linecache.getlines(name)) for name in own}
    name = "the cell" if number is None else f"In [{number}]"
    others = {file: n for file, n in numbers.items() if file not in compiled}
    if number is not None:
        # Code that the cell lets IPython run is counted as the next cell, which is still to come.
        others = {file: min(n, number) for file, n in others.items()}
    if not own:
        return Sources(Source(name, "", "cell", typed), cells=others)
    if magic is None:
        first = files[0] if files else max(own, key=lambda file: len(compiled[file]))
        text = align_typed(typed, compiled[first])
        return Sources(Source(name, first, "cell", text), cells=others)
    calls = [file for file in own if "run_cell_magic(" in compiled[file]]
    # The body runs alone where ``%%memtrace`` is within it.
    first = [*calls, *(file for file in files if file not in _TIMED), *own][0]
    also = {
        file: len(lines) - len(text.splitlines()) if text else magic
        for file, text in compiled.items()
        if file != first
    }
    also.update((file, magic) for file in _TIMED)
    if calls:
        also[first] = magic - 1  # The call is at the line of the other magic.
    return Sources(Source(name, first, "cell", typed), cells=others, also=also)


def find_block_sources(filename: str, numbers: Mapping[str, int]) -> Sources:
    """Return the sources of a ``with`` block: the file or the cell that it is in."""
    number = numbers.get(filename)
    text = "".join(linecache.getlines(filename))
    others = {file: n for file, n in numbers.items() if file != filename}
    if number is None:
        return Sources(Source(PurePath(filename).name, filename, "file", text), cells=others)
    return Sources(Source(f"In [{number}]", filename, "cell", text), cells=others)


def _is_body(compiled: Sequence[str], typed: Sequence[str]) -> bool:
    """Return whether a text is what is below a magic: without blank lines above, magics run."""
    n_above = len(typed) - len(compiled)
    return n_above >= 0 and all(
        text.rstrip("\n") == line or "get_ipython()" in text
        for text, line in zip(compiled, typed[n_above:], strict=True)
    )


def _find_magic(typed: str) -> int | None:
    """Return the number of lines up to a cell magic that isn't ours; ``None`` if there is none."""
    for place, line in enumerate(typed.splitlines()):
        text = line.strip()
        if text and not text.startswith("%%memtrace"):
            return place + 1 if text.startswith("%%") else None
    return None


def align_typed(typed: str, compiled: str) -> str:
    """Return a cell's text as it was typed, with the line numbers of the compiled code.

    IPython removes blank lines above a cell and rewrites magics, mostly line for line. Otherwise
    only the compiled text has the right numbers, and is returned.

    Args:
        typed: the text as the user typed it, with the line of ``%%memtrace``.
        compiled: the text that ``linecache`` has.
    """
    lines = typed.splitlines()
    while lines and not lines[0].strip():
        del lines[0]
    while lines and not lines[-1].strip():
        lines.pop()
    n_compiled = len(compiled.rstrip().splitlines())
    return "\n".join(lines) if len(lines) == n_compiled else compiled
