"""Where in the user's code memory was asked for, and which function of a library asked for it."""

from __future__ import annotations

import linecache
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from gpumemwidget.libraries import is_library
from gpumemwidget.owners.lines import format_frame
from gpumemwidget.records import Frame

__all__ = ["Place", "find_place"]

#: A file's path from where its package lies.
_PACKAGE_PATH = re.compile(
    r".*[/\\](?:(?:site|dist)-packages|lib[/\\]python3\.\d+)[/\\](.+)\.py", re.DOTALL
)
#: What ``%%time`` compiles: the lines below its own.
_TIMED = re.compile(r"<timed (exec|eval)>")


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
    """The innermost line of the user's in a stack, and the innermost public function below it.

    Args:
        frames: innermost first.
        cells: the numbers of cells by the names of their compiled files.
        source: the cell that ran, as typed.
        number: its number.
    """
    for place, frame in enumerate(frames):
        if frame.filename in cells or not is_library(frame.filename):
            where = format_frame(frame, cells)
            text = linecache.getline(frame.filename, frame.line)
            lines = source.splitlines()
            is_timed = _TIMED.fullmatch(frame.filename) and source.startswith("%%time")
            if is_timed and number is not None and frame.line < len(lines):
                where, text = f"In[{number}], line {frame.line + 1}", lines[frame.line]
            return Place(where, text.strip(), _find_function(frames[:place]))
    return Place(place=None, text="", function=_find_function(frames))


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
