"""Stacks as a person would tell them.

Between a user's line and the allocation lie the frames of libraries: of them stay the forward of
each module, the function that was called and the one that called into the library's own code.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import TypeAlias

from gpumemwidget.libraries import is_library
from gpumemwidget.measure.sources import Sources
from gpumemwidget.measure.stacks import count_module_calls, is_module_call
from gpumemwidget.records import Frame

__all__ = ["Step", "fold_frames", "name_step"]

#: A call that stays, and the module's path where it is a module's forward (``""``: not known).
Step: TypeAlias = "tuple[Frame, str | None]"

#: What only passes calls on.
_PLUMBING = re.compile(
    r"[/\\](torch[/\\](nn[/\\]modules[/\\]module|_dynamo[/\\].*|_compile|_ops|overrides|_classes"
    r"|utils[/\\](_contextlib|_device)|autograd[/\\](function|graph)|optim[/\\]optimizer"
    r"|_functorch[/\\].*|_higher_order_ops[/\\].*)|contextlib|functools)\.py$"
)
_PACKAGE = re.compile(r".*[/\\](?:(?:site|dist)-packages|lib[/\\]python3\.\d+)[/\\](.*)\.py$")
#: Where people know a class from, instead of where it is written.
_EXPORTED = re.compile(r"^(?:(torch\.nn)\.modules|(torch\.optim)|(torch))\.\w+(?=\.[A-Z])")


def fold_frames(frames: Sequence[Frame], modules: Sequence[str]) -> tuple[Step, ...]:
    """The calls that a person would name, outermost first.

    Args:
        frames: innermost first.
        modules: the modules of the calls that the frames pass through, outermost first; there may
            be others before them.
    """
    n_calls = count_module_calls(frames)
    names = iter(modules[len(modules) - n_calls :] if n_calls else ())
    steps: list[Step] = []
    inside: list[Step] = []
    module: str | None = None
    for frame in reversed(frames):
        if is_module_call(frame):
            steps += _shorten(inside)
            inside = []
            module = next(names, "")
        elif not is_library(frame.filename):
            steps += _shorten(inside)
            inside = []
            steps.append((frame, module))
            module = None
        elif not _is_plumbing(frame.filename):
            inside.append((frame, module))
            module = None
    return (*steps, *_shorten(inside))


def name_step(step: Step, sources: Sources) -> str:
    """``step``, ``Net.forward``; a library's function as ``torch.nn.functional.linear``."""
    frame, module = step
    name = sources.qualify(frame)
    found = _PACKAGE.match(frame.filename) if is_library(frame.filename) else None
    # People know modules by their classes.
    if found is None or (module is not None and "." in name):
        return name
    package = re.sub(r"[/\\]", ".", found[1]).removesuffix(".__init__")
    return _EXPORTED.sub(lambda match: match[match.lastindex or 0], f"{package}.{name}")


@lru_cache(maxsize=4096)
def _is_plumbing(filename: str) -> bool:
    return _PLUMBING.search(filename) is not None


def _shorten(inside: Sequence[Step]) -> list[Step]:
    """Of the calls within a library the first one that it offers, and the last one."""
    if not inside:
        return []
    offered = [each for each in inside if not each[0].function.startswith(("_", "<"))]
    first = inside[0] if inside[0][1] is not None or not offered else offered[0]
    last = offered[-1] if offered else first
    return [first] if last is first else [first, last]
