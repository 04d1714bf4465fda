"""Find the files that a traced cell's code runs under, as IPython compiles it."""

from __future__ import annotations

import linecache
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from types import CodeType, FrameType
from typing import TYPE_CHECKING

from gpumemwidget.tracing.sources import Source, Sources, align_typed, is_library

if TYPE_CHECKING:
    from gpumemwidget.tracing.line_watch import IsEntry


#: File names of the bodies of ``%%time`` and ``%time``.
_TIMED = ("<timed exec>", "<timed eval>")
_OURS = "%%memtrace"


def make_is_entry(run_code: CodeType, typed: str) -> IsEntry:
    """Return a function that tells whether a cell's code begins at a frame.

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
    name = "the cell" if number is None else f"In[{number}]"
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
    # The body runs alone where ``%%memtrace`` stands within it.
    first = [*calls, *(file for file in files if file not in _TIMED), *own][0]
    also = {
        file: len(lines) - len(text.splitlines()) if text else magic
        for file, text in compiled.items()
        if file != first
    }
    also.update((file, magic) for file in _TIMED)
    if calls:
        also[first] = magic - 1  # The call stands where the other magic does.
    return Sources(Source(name, first, "cell", typed), cells=others, also=also)


def find_block_sources(filename: str, numbers: Mapping[str, int]) -> Sources:
    """Return the sources of a ``with`` block: the file or the cell that it stands in."""
    number = numbers.get(filename)
    text = "".join(linecache.getlines(filename))
    others = {file: n for file, n in numbers.items() if file != filename}
    if number is None:
        return Sources(Source(PurePath(filename).name, filename, "file", text), cells=others)
    return Sources(Source(f"In[{number}]", filename, "cell", text), cells=others)


def _is_body(compiled: Sequence[str], typed: Sequence[str]) -> bool:
    """Return whether a text is what stands below a magic: without blank lines above, magics run."""
    n_above = len(typed) - len(compiled)
    return n_above >= 0 and all(
        text.rstrip("\n") == line or "get_ipython()" in text
        for text, line in zip(compiled, typed[n_above:], strict=True)
    )


def _find_magic(typed: str) -> int | None:
    """Return the number of lines up to a cell magic that isn't ours; ``None`` if there is none."""
    for place, line in enumerate(typed.splitlines()):
        text = line.strip()
        if text and not text.startswith(_OURS):
            return place + 1 if text.startswith("%%") else None
    return None
