"""Be called at each turn of the slow loops in the cells' own code, from Python 3.12 on.

``sys.monitoring`` reports each jump back to a loop's beginning, in the code objects that are asked
for alone: https://docs.python.org/3/library/sys.monitoring.html. All other code runs as fast as
ever. Earlier Pythons could only report jumps by tracing all code, which slows it: there optimizers
and ``gpumemwidget.watch`` mark the steps.
"""

from __future__ import annotations

import dis
import functools
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

from gpumemwidget.backends.hooks import find_monitoring, take_tool_number
from gpumemwidget.errors import is_our_error, keep_from_cell

#: A loop is left alone once so many turns in a row took less on average, in seconds: being called
#: takes some 3 µs with cold caches.
_MIN_TURN_S, _N_TRIED = 0.001, 16
#: Number of times in a row that turns must have been slow. One turn may be so by chance.
_N_SLOW = 2
#: Instructions that end a loop's turn. Python 3.12 and later have no others.
_JUMPS_BACK = [dis.opmap[name] for name in dis.opmap if name.startswith("JUMP_BACKWARD")]


class LoopEvents:
    """Calls back at each turn of the slow loops in the cells' code.

    Args:
        on_turn: is called with what identifies the loop in the running cell, once the loop is known
            to be slow; it must not raise. The loop is left alone if it returns ``False``.
        clock: returns a time in seconds.
    """

    def __init__(
        self,
        on_turn: Callable[[tuple[int, int]], bool],
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._on_turn = on_turn
        self._clock = clock
        self._monitoring: Any = None
        self._tool = 0
        #: By its id, for two cells with the same text have code that is equal.
        self._codes: dict[int, weakref.ref[CodeType]] = {}
        #: For each jump back, by its code's id and its offset in it: since when turns are counted,
        #: their number, and how often so many have been slow.
        self._turns: dict[tuple[int, int], tuple[float, int, int]] = {}

    def open(self, run_code: CodeType) -> None:
        """Begin, where Python reports jumps and has a number for one more tool.

        Args:
            run_code: the code of ``InteractiveShell.run_code``, which runs the cells' code: its
                variable ``code_obj``.
        """
        tool = take_tool_number("gpumemwidget loops")
        if tool is None:
            return
        monitoring = find_monitoring()
        self._monitoring, self._tool = monitoring, tool
        events = monitoring.events
        for event, see in ((events.PY_START, self._see_start), (events.JUMP, self._see_jump)):
            guarded = keep_from_cell(see, _survive, instead=monitoring.DISABLE)
            monitoring.register_callback(tool, event, guarded)
        self._codes[id(run_code)] = weakref.ref(run_code)
        monitoring.set_local_events(tool, run_code, events.PY_START)

    def close(self) -> None:
        """Take everything away. May be called twice."""
        monitoring, self._monitoring = self._monitoring, None
        if monitoring is None:
            return
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

    def _see_start(self, _run_code: CodeType, _offset: int) -> None:
        monitoring = self._monitoring
        if monitoring is None:
            return
        # The frame behind those of this method and of its guard.
        frame = sys._getframe(2)  # noqa: SLF001 - public by its documentation
        for code in list_codes(frame.f_locals["code_obj"]):
            instructions = code.co_code[::2]
            if any(jump in instructions for jump in _JUMPS_BACK):
                # No code of ours runs when it goes: a signal's handler could lose its error there.
                forget = functools.partial(self._codes.pop, id(code))
                self._codes[id(code)] = weakref.ref(code, forget)
                monitoring.set_local_events(self._tool, code, monitoring.events.JUMP)

    def _see_jump(self, code: CodeType, offset: int, target: int) -> Any:
        monitoring = self._monitoring
        if monitoring is None:
            return None
        if target > offset:
            return monitoring.DISABLE
        key = id(code), offset
        now_s = self._clock()
        begin_s, n_turns, n_slow = self._turns.get(key, (now_s, -1, 0))
        n_turns += 1
        if n_turns and now_s - begin_s >= _N_TRIED * _MIN_TURN_S:
            begin_s, n_turns, n_slow = now_s, 0, n_slow + 1
        elif n_turns == _N_TRIED:
            return monitoring.DISABLE
        self._turns[key] = begin_s, n_turns, n_slow
        return None if n_slow < _N_SLOW or self._on_turn(key) else monitoring.DISABLE


def list_codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and those of the functions and classes that it defines."""
    yield code
    for constant in code.co_consts:
        if type(constant) is CodeType:
            yield from list_codes(constant)


def _survive(exc: BaseException) -> bool:
    return isinstance(exc, Exception) and is_our_error(exc)
