"""The files that a traced cell's code runs under, as IPython compiles it."""

from __future__ import annotations

import linecache
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from types import CodeType, FrameType
from typing import TYPE_CHECKING

from gpumemwidget.libraries import is_library
from gpumemwidget.measure.sources import Source, Sources, align_typed

if TYPE_CHECKING:
    from gpumemwidget.measure.linehooks import IsEntry

__all__ = ["find_block_sources", "find_cell_sources", "make_is_entry"]

#: The body of ``%%time``, and of ``%time``.
_TIMED = ("<timed exec>", "<timed eval>")
_OURS = "%%memtrace"


def make_is_entry(run_code: CodeType, typed: str) -> IsEntry:
    """Tells the frames at which a cell's code begins from all others.

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
            if is_library(frame.f_code.co_filename):
                return False  # IPython's own: a property of the shell's.
            n_seen += 1
            return is_magic or n_seen == 1
        return is_magic and frame.f_code.co_filename in _TIMED

    return is_entry


def find_cell_sources(
    typed: str, number: int | None, numbers: Mapping[str, int], files: Sequence[str] = ()
) -> Sources:
    """The sources of a cell that IPython has run.

    Args:
        typed: the cell as it was typed.
        number: its number, as IPython compiled it.
        numbers: the numbers of all cells by the names of their files.
        files: those whose code was seen to run, the cell's own first.
    """
    own = [name for name, each in numbers.items() if each == number]
    own = [*dict.fromkeys([*files, *own])]
    compiled = {name: "".join(linecache.getlines(name)) for name in own}
    lines = typed.splitlines()
    magic = _find_magic(typed)
    name = "the cell" if number is None else f"In[{number}]"
    others = {each: n for each, n in numbers.items() if each not in compiled}
    if number is not None:
        # What the cell has IPython run is counted as the next cell, and that has not been yet.
        others = {each: min(n, number) for each, n in others.items()}
    if not own:
        return Sources(Source(name, "", "cell", typed), cells=others)
    if magic is None:
        first = files[0] if files else max(own, key=lambda each: len(compiled[each]))
        text = align_typed(typed, compiled[first])
        return Sources(Source(name, first, "cell", text), cells=others)
    calls = [each for each in own if "run_cell_magic(" in compiled[each]]
    # The body runs alone where ``%%memtrace`` stands within it.
    first = [*calls, *(each for each in files if each not in _TIMED), *own][0]
    also = {
        each: len(lines) - len(text.splitlines()) if text else magic
        for each, text in compiled.items()
        if each != first
    }
    also.update((each, magic) for each in _TIMED)
    if calls:
        also[first] = magic - 1  # The call stands where the other magic does.
    return Sources(Source(name, first, "cell", typed), cells=others, also=also)


def find_block_sources(filename: str, numbers: Mapping[str, int]) -> Sources:
    """The sources of a ``with`` block: those of the file, or of the cell, that it stands in."""
    number = numbers.get(filename)
    text = "".join(linecache.getlines(filename))
    others = {each: n for each, n in numbers.items() if each != filename}
    if number is None:
        return Sources(Source(PurePath(filename).name, filename, "file", text), cells=others)
    return Sources(Source(f"In[{number}]", filename, "cell", text), cells=others)


def _find_magic(typed: str) -> int | None:
    """How many lines of a cell end with that of a cell magic which isn't ours; ``None``: none."""
    for place, line in enumerate(typed.splitlines()):
        text = line.strip()
        if text and not text.startswith(_OURS):
            return place + 1 if text.startswith("%%") else None
    return None
