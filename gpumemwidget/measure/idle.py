"""What acts on the user's memory waits until no cell is running.

On ipykernel 7 a button's click may run on a thread of its own beside the running cell, so the
question "is a cell running?" and the start of an action must be one step.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from gpumemwidget.measure.forks import survive_fork

__all__ = ["IdleQueue"]


class IdleQueue:
    """Actions that run one at a time and in order, each only when no cell is running.

    A cell's start never waits: if an action is still under way on another thread when a cell
    starts, the two run side by side (as two cells' threads would), ``is_acting`` says so, and the
    actions behind it wait for the cell's end.

    Args:
        on_error: told of each action that raised; the ones behind it still run.
    """

    def __init__(self, on_error: Callable[[Exception], None]) -> None:
        self._on_error = on_error
        self._actions: deque[Callable[[], None]] = deque()
        self._cell_runs = False
        self._acting = False
        self._lock = threading.RLock()
        survive_fork(self)

    @property
    def is_acting(self) -> bool:
        """Whether an action is under way, on whatever thread."""
        return self._acting

    @property
    def n_waiting(self) -> int:
        """How many actions wait for their turn."""
        return len(self._actions)

    def start_cell(self) -> None:
        """From here on actions wait."""
        with self._lock:
            self._cell_runs = True

    def end_cell(self) -> None:
        """Run what has waited, on this thread, unless another thread is at it already."""
        with self._lock:
            self._cell_runs = False
        self._run_waiting()

    def add(self, action: Callable[[], None]) -> None:
        """Run ``action`` at once on this thread if nothing runs, else when its turn comes."""
        with self._lock:
            self._actions.append(action)
        self._run_waiting()

    def clear(self) -> None:
        """Forget what waits."""
        with self._lock:
            self._actions.clear()

    def reset_after_fork(self) -> None:
        """In a child no cell ends any more: what waits there would wait for ever."""
        self._lock = threading.RLock()
        self._actions = deque()
        self._cell_runs = self._acting = False

    def _run_waiting(self) -> None:
        with self._lock:
            # Whoever acts goes on with what was added.
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
        """The next action, or none and the end of acting, in one step."""
        with self._lock:
            if self._cell_runs or not self._actions:
                self._acting = False
                return None
            return self._actions.popleft()
