"""Name the user's line that asked for memory, and the library function that the line called.

A recorded stack begins in PyTorch and ends in IPython; in between are the user's own lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import PurePath

from gpumemwidget.model.segments import Frame
from gpumemwidget.tracing.sources import Sources, is_library, name_module


@dataclass(frozen=True, slots=True)
class FailingLine:
    """A line of the user's, and what it called."""

    #: ``In[7], line 3``; ``None`` where no line of the user's is in the stack.
    place: str | None
    text: str
    #: ``torch.nn.modules.linear.Linear.forward``; ``None`` where the line calls C at once.
    function: str | None


def find_failing_line(frames: Sequence[Frame], sources: Sources) -> FailingLine:
    """Return the innermost line of the user's in a stack, and the public function that it called.

    Args:
        frames: innermost first.
        sources: the cell that ran, earlier cells, and files.
    """
    called = takewhile(lambda frame: is_library(frame.filename), frames)
    function = _find_function(called)
    for frame in frames:
        source = sources.find(frame.filename)
        if source is None:
            continue
        number = sources.find_line(frame) or frame.line
        text = source.lines[number - 1].strip() if 0 < number <= len(source.lines) else ""
        return FailingLine(f"{source.name}, line {number}", text, function)
    return FailingLine(None, "", function)


def _find_function(frames: Iterable[Frame]) -> str | None:
    """Return the innermost function that has a public name."""
    for frame in frames:
        if all(_is_public(part) for part in frame.function.split(".")):
            module = name_module(frame.filename) or PurePath(frame.filename).stem
            return f"{module}.{frame.function}"
    return None


def _is_public(name: str) -> bool:
    # ``wrapper.<locals>.inner`` is a decorator's, and says nothing of what was called.
    return not name.startswith(("_", "<")) or (name.startswith("__") and name.endswith("__"))
