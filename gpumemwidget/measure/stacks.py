"""What a recorded stack says of who was running: the cell's line, a thread, autograd.

The stacks of autograd's own threads begin with what autograd called (a hook, a custom function, the
recomputation of a checkpoint), or there is none at all. Those of Python's threads and of the main
program begin where Python begins them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from gpumemwidget.measure.sources import Sources
from gpumemwidget.records import Frame

__all__ = ["Stack", "count_module_calls", "find_backward", "is_module_call", "read_stack"]

_BACKWARDS = {
    "_engine_run_backward": ("torch/autograd/graph.py",),
    "backward": ("torch/autograd/__init__.py", "torch/_tensor.py"),
    "grad": ("torch/autograd/__init__.py",),
}
_MODULE_CALLS = {"_call_impl": ("torch/nn/modules/module.py",)}
#: The outermost functions of the main program, by whatever it was started.
_MAIN = frozenset(("<module>", "_run_module_as_main"))
_THREAD = "_bootstrap"


@dataclass(frozen=True, slots=True, eq=False)
class Stack:
    """A stack and what it says."""

    #: Innermost first.
    frames: tuple[Frame, ...]
    #: ``cell``: the traced cell's code, on the thread that runs it. ``autograd``: one of autograd's
    #: threads. ``other``: any other thread, or the main program outside of the cell.
    kind: Literal["cell", "autograd", "other"]
    #: The cell's innermost line; ``None`` where there is none of the cell's.
    line: int | None
    #: How many frames are of what that line called, and of what the cell called at all.
    n_below: int
    n_inside: int
    n_module_calls: int


def read_stack(frames: tuple[Frame, ...], sources: Sources) -> Stack:
    """What a stack says.

    Args:
        frames: innermost first.
        sources: which frames are the cell's.
    """
    places = [place for place, each in enumerate(frames) if sources.find_line(each) is not None]
    outermost = frames[-1].function if frames else ""
    kind: Literal["cell", "autograd", "other"] = "autograd"
    if outermost == _THREAD or (outermost in _MAIN and not places):
        kind = "other"
    elif places:
        kind = "cell"
    return Stack(
        frames=frames,
        kind=kind,
        line=sources.find_line(frames[places[0]]) if places else None,
        n_below=places[0] if places else len(frames),
        # The main program outside of the cell is not the cell's doing; threads may be.
        n_inside=places[-1] if places else 0 if outermost in _MAIN else len(frames),
        n_module_calls=count_module_calls(frames),
    )


def find_backward(stack: Stack) -> int | None:
    """The place of the innermost frame that runs a backward for the cell."""
    for place, each in enumerate(stack.frames[: stack.n_inside]):
        if each.function in _BACKWARDS and _is_of(each, _BACKWARDS):
            return place
    return None


def count_module_calls(frames: Sequence[Frame]) -> int:
    """How many calls of modules a stack passes through."""
    return len([each for each in frames if is_module_call(each)])


def is_module_call(frame: Frame) -> bool:
    """Whether what is above a frame is a module's ``forward``, or what was hooked to it."""
    return frame.function in _MODULE_CALLS and _is_of(frame, _MODULE_CALLS)


def _is_of(frame: Frame, files: Mapping[str, tuple[str, ...]]) -> bool:
    """Whether a function is one of these files'."""
    return frame.filename.replace("\\", "/").endswith(files[frame.function])
