"""What a budget's interrupt has met: a cell's own code, its loop, or what must not be broken off.

Read from the Python stack, since nobody else tells.
"""

from __future__ import annotations

import asyncio
import logging
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from types import CoroutineType, FrameType, FunctionType
from typing import Any, Literal

from IPython.core.displayhook import DisplayHook
from IPython.core.interactiveshell import InteractiveShell

__all__ = ["asks_loop", "find_what_runs", "runs_cell"]

_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_RUN_CODE = InteractiveShell.run_code.__code__
_RUN_CELL = InteractiveShell.run_cell_async.__code__
#: Within it an interrupt leaves a message of ipykernel's half made, and later cells that await are
#: then answered as failed.
_SHOW_VALUE = DisplayHook.__call__.__code__
#: Whose functions run as callbacks of weak references and of forks: an exception in one is lost, as
#: it is in a finalizer.
_LOSING_FILES = frozenset(
    function.__code__.co_filename
    for function in (logging.getLogger, weakref.finalize.__call__, weakref.WeakSet.add)
)


def asks_loop(handler: Callable[..., Any]) -> bool:
    """Whether it is ipykernel's for a cell that awaits: it cancels the cell's task, in the loop."""
    if type(handler) is not FunctionType:
        return False
    return str(handler.__globals__.get("__name__")).startswith("ipykernel.")


def find_what_runs(
    frame: FrameType, user_globals: dict[str, Any]
) -> Literal["cell", "loop", "other"]:
    """What the innermost frame is a part of: the cell's code, no cell at all, or something else.

    Args:
        frame: the innermost one.
        user_globals: of the user's code.
    """
    each: FrameType | None = frame
    while each is not None:
        code, outer = each.f_code, each.f_back
        if code is _RUN_CELL or code is _SHOW_VALUE or code.co_filename.startswith(_PACKAGE):
            return "other"
        if code.co_name == "__del__" or code.co_filename in _LOSING_FILES:
            return "other"
        if outer is not None and outer.f_code is _RUN_CODE and each.f_globals is user_globals:
            return "cell"
        each = outer
    return "loop"


def runs_cell(task: asyncio.Task[Any]) -> bool:
    """Whether a task is a cell's, and still at it."""
    coroutine: Any = task.get_coro()
    while type(coroutine) is CoroutineType:
        if coroutine.cr_code is _RUN_CELL:
            return not task.done()
        coroutine = coroutine.cr_await
    return False
