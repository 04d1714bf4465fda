"""Read recorded Python stacks: which line of the cell ran, on whose thread, through which calls.

A stack of one of autograd's own threads begins with what autograd called (a hook, a custom
function, the recomputation of a checkpoint), or is empty. Stacks of Python's threads and of the
main program begin with Python's own outermost function.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

from gpumemwidget.model.devices import Frame
from gpumemwidget.tracing.sources import Sources, is_library, name_module

#: The function by which PyTorch calls a module's forward.
_MODULE_CALL = ("_call_impl", "torch/nn/modules/module.py")
#: Outermost functions of a main program, however it was started.
_MAIN = frozenset(("<module>", "_run_module_as_main"))
#: Outermost function of a thread of Python's.
THREAD = "_bootstrap"
#: Files that only pass calls on.
_PLUMBING = re.compile(
    r"[/\\](torch[/\\](nn[/\\]modules[/\\]module|_dynamo[/\\].*|_compile|_ops|overrides|_classes"
    r"|utils[/\\](_contextlib|_device)|autograd[/\\](function|graph)|optim[/\\]optimizer"
    r"|_functorch[/\\].*|_higher_order_ops[/\\].*)|contextlib|functools)\.py$"
)
#: The package that users import a class from, in place of the module that defines it.
_EXPORTED = re.compile(r"^(?:(torch\.nn)\.modules|(torch\.optim)|(torch))\.\w+(?=\.[A-Z])")

#: A call to show, and the module's path if it is a module's forward (``""``: not known).
Step: TypeAlias = "tuple[Frame, str | None]"


@dataclass(frozen=True, slots=True, eq=False)
class Stack:
    """A recorded stack.

    Attributes:
        frames: innermost first.
        kind: ``cell``: the traced cell's code, on the thread that runs it. ``autograd``: one of
            autograd's threads. ``other``: another thread, or the main program outside of the cell.
        line: the innermost line of the cell; ``None`` if no frame is the cell's.
        n_inside: number of frames up to the cell's outermost one, the innermost first.
        n_module_calls: number of calls of modules.
    """

    frames: tuple[Frame, ...]
    kind: Literal["cell", "autograd", "other"]
    line: int | None
    n_inside: int
    n_module_calls: int


def read_stack(frames: tuple[Frame, ...], sources: Sources) -> Stack:
    """Classify a stack, whose innermost frame comes first."""
    places = [place for place, frame in enumerate(frames) if sources.find_line(frame) is not None]
    outermost = frames[-1].function if frames else ""
    kind: Literal["cell", "autograd", "other"] = "autograd"
    if outermost == THREAD or (outermost in _MAIN and not places):
        kind = "other"
    elif places:
        kind = "cell"
    return Stack(
        frames=frames,
        kind=kind,
        line=sources.find_line(frames[places[0]]) if places else None,
        # The main program outside of the cell is not the cell's doing; threads may be.
        n_inside=places[-1] + 1 if places else 0 if outermost in _MAIN else len(frames),
        n_module_calls=_count_module_calls(frames),
    )


def fold_frames(frames: Sequence[Frame], modules: Sequence[str]) -> tuple[Step, ...]:
    """Return the calls that a person would name, outermost first.

    Of a library's frames there remain: the forward of each module, the function that was called,
    and the last one that the library offers to its users.

    Args:
        frames: innermost first.
        modules: the modules of the calls that the frames pass through, outermost first; there may
            be others before them.
    """
    n_calls = _count_module_calls(frames)
    names = iter(modules[len(modules) - n_calls :] if n_calls else ())
    steps: list[Step] = []
    library_steps: list[Step] = []
    module: str | None = None
    for frame in reversed(frames):
        if _is_module_call(frame):
            steps += _shorten(library_steps)
            library_steps = []
            module = next(names, "")
        elif not is_library(frame.filename):
            steps += _shorten(library_steps)
            library_steps = []
            steps.append((frame, module))
            module = None
        elif not _is_plumbing(frame.filename):
            library_steps.append((frame, module))
            module = None
    return (*steps, *_shorten(library_steps))


def name_step(step: Step, sources: Sources) -> str:
    """Return ``step``, ``Net.forward``, or ``torch.nn.functional.linear`` for a library's."""
    frame, module = step
    name = sources.qualify(frame)
    package = name_module(frame.filename) if is_library(frame.filename) else None
    # Users know a module by its class.
    if package is None or (module is not None and "." in name):
        return name
    return _EXPORTED.sub(lambda match: match[match.lastindex or 0], f"{package}.{name}")


def _shorten(steps: Sequence[Step]) -> list[Step]:
    """Return the first and the last of a library's calls that it offers to its users."""
    if not steps:
        return []
    offered = [step for step in steps if not step[0].function.startswith(("_", "<"))]
    first = steps[0] if steps[0][1] is not None or not offered else offered[0]
    last = offered[-1] if offered else first
    return [first] if last is first else [first, last]


def _count_module_calls(frames: Sequence[Frame]) -> int:
    return len([frame for frame in frames if _is_module_call(frame)])


def _is_module_call(frame: Frame) -> bool:
    function, file = _MODULE_CALL
    return frame.function == function and frame.filename.replace("\\", "/").endswith(file)


@lru_cache(maxsize=4096)
def _is_plumbing(filename: str) -> bool:
    return _PLUMBING.search(filename) is not None
