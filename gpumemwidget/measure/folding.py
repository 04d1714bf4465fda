"""Stacks as a person would tell them.

Between a user's line and the allocation lie the frames of libraries: of them stay the forward of
each module, the function that was called and the one that called into the library's own code.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeAlias

from gpumemwidget.libraries import is_library
from gpumemwidget.measure.sources import Sources
from gpumemwidget.measure.stacks import count_module_calls
from gpumemwidget.records import Frame

__all__ = ["Step", "fold_frames", "name_function"]

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
_EXPORTED = re.compile(r"^(torch\.nn)\.modules\.\w+(?=\.[A-Z])|^(torch\.optim)\.\w+(?=\.[A-Z])")


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
        if count_module_calls((frame,)):
            steps += _shorten(inside)
            inside = []
            module = next(names, "")
        elif not is_library(frame.filename):
            steps += _shorten(inside)
            inside = []
            steps.append((frame, module))
            module = None
        elif not _PLUMBING.search(frame.filename):
            inside.append((frame, module))
            module = None
    return (*steps, *_shorten(inside))


def name_function(frame: Frame, sources: Sources) -> str:
    """``Net.forward``; a library's ``torch.nn.functional.linear``."""
    name = sources.qualify(frame)
    found = _PACKAGE.match(frame.filename) if is_library(frame.filename) else None
    if found is None:
        return name
    module = re.sub(r"[/\\]", ".", found[1]).removesuffix(".__init__")
    name = f"{module}.{name}".replace("torch._tensor.", "torch.Tensor.").replace(
        "Tensor.Tensor.", "Tensor."
    )
    return _EXPORTED.sub(lambda match: match[1] or match[2], name)


def _shorten(inside: Sequence[Step]) -> list[Step]:
    """Of the calls within a library the first one that it offers, and the last one."""
    if not inside:
        return []
    offered = [each for each in inside if not each[0].function.startswith(("_", "<"))]
    first = inside[0] if inside[0][1] is not None or not offered else offered[0]
    last = offered[-1] if offered else first
    return [first] if last is first else [first, last]
