"""Be called at each turn of the loops in the cells' own code, from Python 3.12 on.

``sys.monitoring`` tells of each jump back to a loop's beginning, in the code objects that are asked
for alone: https://docs.python.org/3/library/sys.monitoring.html. Code of libraries is told of once,
when it first starts, and never again. Earlier Pythons could only tell by tracing all code, which
slows it: there optimizers and ``gpumemwidget.watch`` tell of steps.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from types import CodeType
from typing import Any

from gpumemwidget.backends.tool_numbers import find_monitoring, take_tool_number
from gpumemwidget.errors import is_our_error, keep_from_cell
from gpumemwidget.tracing.sources import is_library

#: A loop is left alone once so many turns in a row were shorter on average: a step that uses a
#: device takes longer.
_MIN_TURN_S, _N_TRIED = 0.0002, 64
#: Number of code objects from which those that are gone are forgotten.
_MAX_CODES = 1000


class LoopEvents:
    """Tells of each turn of the loops in the cells' code.

    Args:
        is_cell: tells whether a file is a cell's.
        on_turn: called with the file and the line at which the loop begins, on the thread that
            made this; it must not raise.
        clock: returns a time in seconds.
    """

    def __init__(
        self,
        is_cell: Callable[[str], bool],
        on_turn: Callable[[tuple[str, int]], None],
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._is_cell = is_cell
        self._on_turn = on_turn
        self._clock = clock
        self._thread_id = threading.get_ident()
        self._monitoring: Any = None
        self._tool = 0
        #: By its id, for two cells with the same text have code that is equal.
        self._codes: dict[int, weakref.ref[CodeType]] = {}
        #: For each jump back, by its code's id, its offset in it and the thread's id: the loop's
        #: place, since when its turns are counted, and their number.
        self._turns: dict[tuple[int, int, int], tuple[tuple[str, int], float, int]] = {}

    def open(self) -> None:
        """Begin, where Python can tell and has a number for one more tool."""
        tool = take_tool_number("gpumemwidget loops")
        if tool is None:
            return
        monitoring = find_monitoring()
        self._monitoring, self._tool = monitoring, tool
        events = monitoring.events
        for event, see in ((events.PY_START, self._see_start), (events.JUMP, self._see_jump)):
            guarded = keep_from_cell(see, _survive, instead=monitoring.DISABLE)
            monitoring.register_callback(tool, event, guarded)
        monitoring.set_events(tool, events.PY_START)

    def close(self) -> None:
        """Take everything away. May be called twice."""
        monitoring, self._monitoring = self._monitoring, None
        if monitoring is None:
            return
        monitoring.set_events(self._tool, 0)
        for code in filter(None, (known() for known in self._codes.copy().values())):
            monitoring.set_local_events(self._tool, code, 0)
        for event in (monitoring.events.PY_START, monitoring.events.JUMP):
            monitoring.register_callback(self._tool, event, None)
        monitoring.free_tool_id(self._tool)
        self._codes.clear()
        self._turns.clear()

    def start_cell(self) -> None:
        """Count anew: a cell begins."""
        self._turns.clear()
        if len(self._codes) > _MAX_CODES:
            # Other threads may add to it meanwhile.
            for key, code in self._codes.copy().items():
                if code() is None:
                    self._codes.pop(key, None)

    def _see_start(self, code: CodeType, _offset: int) -> Any:
        name = code.co_filename
        monitoring = self._monitoring
        if monitoring is None:
            return None
        if not is_library(name) and self._is_cell(name):
            self._codes[id(code)] = weakref.ref(code)
            monitoring.set_local_events(self._tool, code, monitoring.events.JUMP)
        return monitoring.DISABLE

    def _see_jump(self, code: CodeType, offset: int, target: int) -> Any:
        monitoring = self._monitoring
        if monitoring is None:
            return None
        if target > offset:
            return monitoring.DISABLE
        thread_id = threading.get_ident()
        key = id(code), offset, thread_id
        now_s = self._clock()
        place, begin_s, n_turns = self._turns.get(key) or (_find_place(code, target), now_s, 0)
        if n_turns == _N_TRIED:
            if now_s - begin_s < _N_TRIED * _MIN_TURN_S:
                return monitoring.DISABLE
            begin_s, n_turns = now_s, 0
        self._turns[key] = place, begin_s, n_turns + 1
        if thread_id == self._thread_id:
            self._on_turn(place)
        return None


def _survive(exc: BaseException) -> bool:
    return isinstance(exc, Exception) and is_our_error(exc)


def _find_place(code: CodeType, offset: int) -> tuple[str, int]:
    for start, end, line in code.co_lines():
        if start <= offset < end and line is not None:
            return code.co_filename, line
    return code.co_filename, code.co_firstlineno
