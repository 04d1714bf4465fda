"""Call functions at events, and run actions when no cell is running."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from gpumemwidget.recording.forks import survive_fork

_T = TypeVar("_T")


class Callbacks(Generic[_T]):
    """Functions to call when one kind of event happens, in the order in which they were added.

    Args:
        on_error: called with the name and the exception of a function that raised; the functions
            after it are still called.
    """

    def __init__(self, on_error: Callable[[str, Exception], None]) -> None:
        self._on_error = on_error
        self._functions: tuple[Callable[[_T], object], ...] = ()

    def add(self, function: Callable[[_T], object]) -> Callable[[], None]:
        """Call ``function`` at each event from now on.

        Returns:
            A function that ends this; calling it again changes nothing.
        """
        self._functions = (*self._functions, function)

        def remove() -> None:
            self._functions = tuple(known for known in self._functions if known is not function)

        return remove

    def call(self, value: _T) -> None:
        """Call all functions with ``value``."""
        for function in self._functions:
            try:
                function(value)
            except Exception as exc:  # noqa: BLE001 - reported; the other functions are called
                name = getattr(function, "__qualname__", repr(function))
                self._on_error(name.removesuffix(".<locals>.<lambda>"), exc)

    def clear(self) -> None:
        """Call none of the functions any more."""
        self._functions = ()


class IdleQueue:
    """Actions that run one at a time and in order, each only when no cell is running.

    On ipykernel 7 a button's click may run on a thread of its own beside the running cell, so "is a
    cell running?" and the start of an action are one step.

    A cell's start never waits: if an action is still under way on another thread when a cell
    starts, the two run side by side, and the actions after it wait for the cell's end.

    Args:
        on_error: called with the exception of an action; the actions after it still run.
    """

    def __init__(self, on_error: Callable[[Exception], None]) -> None:
        self._on_error = on_error
        self._actions: deque[Callable[[], None]] = deque()
        self._cell_runs = False
        self._acting = False
        self._lock = threading.RLock()
        survive_fork(self)

    def start_cell(self) -> None:
        """Let actions wait from now on."""
        with self._lock:
            self._cell_runs = True

    def end_cell(self) -> None:
        """Run the actions that waited, on this thread, unless another thread runs them already."""
        with self._lock:
            self._cell_runs = False
        self._run_waiting()

    def add(self, action: Callable[[], None]) -> None:
        """Run ``action`` at once on this thread if nothing runs, else when its turn comes."""
        with self._lock:
            self._actions.append(action)
        self._run_waiting()

    def clear(self) -> None:
        """Forget the actions that wait."""
        with self._lock:
            self._actions.clear()

    def reset_after_fork(self) -> None:
        """Forget everything in a forked child, where no cell ends any more."""
        self._lock = threading.RLock()
        self._actions = deque()
        self._cell_runs = self._acting = False

    def _run_waiting(self) -> None:
        with self._lock:
            # A thread that is acting goes on with the actions that were added.
            if self._acting or self._cell_runs or not self._actions:
                return
            self._acting = True
        try:
            while (action := self._take_next()) is not None:
                try:
                    action()
                except Exception as exc:  # noqa: BLE001 - one action's failure is not the next one's
                    self._on_error(exc)
        except BaseException:
            with self._lock:
                self._acting = False
            raise

    def _take_next(self) -> Callable[[], None] | None:
        """Return the next action; ``None``, and end acting in the same step, if none may run."""
        with self._lock:
            if self._cell_runs or not self._actions:
                self._acting = False
                return None
            return self._actions.popleft()
