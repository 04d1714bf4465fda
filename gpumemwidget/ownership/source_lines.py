"""Name the source line that allocated memory, and the library function that the line called.

A recorded stack begins in PyTorch and ends in IPython; in between are the user's own lines.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from gpumemwidget.model.segments import Frame
from gpumemwidget.tracing.sources import is_library


def format_frame(frame: Frame, cells: Mapping[str, int]) -> str:
    """``In[7], line 3``; of a file ``train.py, line 12``.

    Args:
        frame: where it was.
        cells: the numbers of cells by the names of their compiled files.
    """
    number = cells.get(frame.filename)
    name = PurePath(frame.filename).name if number is None else f"In[{number}]"
    return f"{name}, line {frame.line}"


def format_allocation(frames: Sequence[Frame], cells: Mapping[str, int]) -> str | None:
    """Return the innermost line outside of libraries, else the innermost; ``None`` without any."""
    for frame in frames:
        if frame.filename in cells or not is_library(frame.filename):
            return format_frame(frame, cells)
    return format_frame(frames[0], cells) if frames else None


#: A file's path from where its package lies.
_PACKAGE_PATH = re.compile(
    r".*[/\\](?:(?:site|dist)-packages|lib[/\\]python3\.\d+)[/\\](.+)\.py", re.DOTALL
)

#: The magic that compiles the lines below its own, and the names it compiles them under.
_TIME, _TIMED = re.compile(r"\s*%%time\b"), re.compile(r"<timed (exec|eval)>")

#: The magics that a cell begins with.
_HEAD = re.compile(r"\s*(%%|$)")


@dataclass(frozen=True, slots=True)
class Place:
    """A line of the user's, and what it called."""

    #: ``In[7], line 3``; ``None`` where no line of the user's is in the stack.
    place: str | None
    text: str
    #: ``torch.nn.modules.linear.Linear.forward``.
    function: str | None


def find_place(
    frames: Sequence[Frame],
    cells: Mapping[str, int],
    *,
    source: str = "",
    number: int | None = None,
) -> Place:
    """Return the innermost line of the user's in a stack, and the public function that it called.

    Args:
        frames: innermost first.
        cells: the numbers of cells by the names of their compiled files.
        source: the cell that ran, as typed.
        number: its number.
    """
    typed = source.rstrip().splitlines()
    first = None
    for at, frame in enumerate(frames):
        if frame.filename not in cells and is_library(frame.filename):
            continue
        text = linecache.getline(frame.filename, frame.line)
        line = _find_typed(frame, cells, typed, number)
        if line is not None:
            place, text = f"In[{number}], line {line}", typed[line - 1]
        else:
            place = format_frame(frame, cells)
        function = first.function if first else _find_function(frames[:at])
        found = Place(place, text.strip(), function)
        if text.strip() or not frame.filename.startswith("<"):
            return found
        # The source of ``exec`` and ``%time`` stands nowhere: better name the caller.
        first = first or found
    return first or Place(place=None, text="", function=_find_function(frames))


def _find_typed(
    frame: Frame, cells: Mapping[str, int], typed: Sequence[str], number: int | None
) -> int | None:
    """Return the line of the cell as typed, for code that a magic has compiled by itself.

    IPython counts what is below ``%%capture`` as a cell of the next number.
    """
    if number is None or not typed:
        return None
    if cells.get(frame.filename) == number:
        # IPython has replaced magics by calls that no person typed.
        n_compiled = len("".join(linecache.getlines(frame.filename)).rstrip().splitlines())
        if n_compiled == 1 and typed[0].startswith("%%"):
            return 1  # One call, which was given all that stands below.
        return frame.line if n_compiled == len(typed) and frame.line <= n_compiled else None
    n_heads = next((at for at, line in enumerate(typed) if not _HEAD.match(line)), len(typed))
    if not n_heads:
        return None
    if _TIMED.fullmatch(frame.filename):
        is_head = any(map(_TIME.match, typed[:n_heads]))
        return n_heads + frame.line if is_head and n_heads + frame.line <= len(typed) else None
    part = "".join(linecache.getlines(frame.filename)).rstrip().splitlines()
    offset = len(typed) - len(part)
    is_part = (
        part
        and offset >= n_heads
        and all(
            # Magics in the cell have been replaced by calls.
            line == own.rstrip() or own.lstrip().startswith(("%", "!"))
            for line, own in zip(part, typed[offset:], strict=True)
        )
    )
    return offset + frame.line if is_part and frame.line <= len(part) else None


def _find_function(frames: Sequence[Frame]) -> str | None:
    for frame in frames:
        if all(_is_public(part) for part in frame.function.split(".")):
            return f"{_name_module(frame.filename)}.{frame.function}"
    return None


def _is_public(name: str) -> bool:
    # ``wrapper.<locals>.inner`` is a decorator's, and says nothing of what was called.
    return not name.startswith(("_", "<")) or (name.startswith("__") and name.endswith("__"))


def _name_module(filename: str) -> str:
    match = _PACKAGE_PATH.fullmatch(filename)
    if match is None:
        return PurePath(filename).stem
    return re.sub(r"[/\\]", ".", match[1]).removesuffix(".__init__")
