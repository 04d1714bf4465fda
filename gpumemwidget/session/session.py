"""Answer everything that a user can ask a loaded extension for.

Magics, buttons and the Python functions are thin callers of a ``Session``: they parse, call and
display.
"""

from __future__ import annotations

import difflib
import logging
import os
import threading
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from gpumemwidget.backends.hardware import Hardware, detect_hardware
from gpumemwidget.errors import (
    BadInputError,
    BusyError,
    FileError,
    Notes,
    NotLoadedError,
    RecordingError,
    UnknownNameError,
    describe_exception,
    is_from_signal_handler,
    name_type,
)
from gpumemwidget.model.cells import CellRecord
from gpumemwidget.model.devices import Budget
from gpumemwidget.model.ooms import OomCard
from gpumemwidget.model.traces import CellTrace
from gpumemwidget.recording.limits import (
    change_budgets,
    parse_limit,
    read_limits,
    reset_peaks,
    set_limits,
)
from gpumemwidget.recording.monitor import Callbacks, Monitor
from gpumemwidget.units import format_duration

if TYPE_CHECKING:
    from gpumemwidget.model.devices import DeviceState, Limit
    from gpumemwidget.model.ownership import Explanation, MemoryAccount, Variable
    from gpumemwidget.model.releases import (
        ReleasePlan,
        ReleaseReport,
        ReleaseRequest,
        ReleaseSum,
        RestorePlan,
        RestoreReport,
    )
    from gpumemwidget.ownership.shell import Shell
    from gpumemwidget.session.whole_devices import DeviceBreakdowns


_log = logging.getLogger("gpumemwidget")

#: Maximum number of traces, and of cards, that are kept, the last ones.
_MAX_KEPT = 8

_T = TypeVar("_T")


class Session:
    """A loaded extension: its state, and a method for each thing that a user can ask for.

    Attributes:
        pid: the process that it was made in: a forked child finds its parent's.
        shell: the running IPython, as far as the memory of the user's names is concerned.
        monitor: records the cells and samples the memory.
        released: called after each release and restore, with ``None``.
        trace_begins: called before a trace reads lines, with ``None``: one reads them at a time.
        last_failure: the traceback of the last failure of ours, for a bug report.
        limited: devices whose limit was set through this session.
        shows_line: whether every cell gets a summary line, from the next cell on.

    Args:
        shell: the running IPython.
        hardware: what is measured.
        on_failure: shows one sentence to the user; it gets each failure once.
    """

    def __init__(
        self, shell: Shell, hardware: Hardware, *, on_failure: Callable[[str], None]
    ) -> None:
        self.pid = os.getpid()
        self.shell = shell
        self.monitor = Monitor(hardware, on_failure=self.report_failure)
        self.released: Callbacks[None] = Callbacks(self.report_failure)
        self.trace_begins: Callbacks[None] = Callbacks(self.report_failure)
        self.last_failure: str | None = None
        self._on_failure = on_failure
        self._failures: Notes[str] = Notes()
        self.limited: set[str] = set()
        self.shows_line = False
        #: The last traces of cells, by the cell's ``start_s``, and cards of cells that ran out.
        self._traces: dict[float, CellTrace] = {}
        self.oom_cards: deque[OomCard] = deque(maxlen=_MAX_KEPT)
        self._attached: dict[object, Any] = {}
        #: For each class the lock under which its object is made: threads may ask for one at once.
        self._makes: dict[object, threading.RLock] = {}
        self._has_released = False

    @property
    def hardware(self) -> Hardware:
        """Return the machine's memory, which the session measures."""
        return self.monitor.hardware

    def keep_trace(self, trace: CellTrace) -> None:
        """Keep a cell's trace for ``%memdiff`` and ``%memsave``."""
        self._traces[trace.record.start_s] = trace
        while len(self._traces) > _MAX_KEPT:
            del self._traces[next(iter(self._traces))]

    def list_traces(self) -> tuple[CellTrace, ...]:
        """Return the last traces of cells."""
        return tuple(self._traces.values())

    def find_trace(self, record: CellRecord) -> CellTrace | None:
        """Return the trace of a recorded cell; ``None`` where it has none, or no longer."""
        return self._traces.get(record.start_s)

    # -- What is there -----------------------------------------------------------------------------

    def stat(self) -> tuple[DeviceState, ...]:
        """Return the memory of every device now."""
        return self.hardware.read_devices()

    def breakdown(
        self, device: str | None = None, *, with_maps: bool = True, budget_s: float = 10.0
    ) -> DeviceBreakdowns:
        """Return whole devices in parts; see ``gpumemwidget.breakdown`` and ``take_breakdowns``."""
        from gpumemwidget.session.whole_devices import take_breakdowns  # noqa: PLC0415 - when used

        return take_breakdowns(
            self.hardware,
            device,
            shell=self.shell,
            budgets=self.monitor.budgets,
            with_maps=with_maps,
            budget_s=budget_s,
        )

    def owners(self) -> MemoryAccount:
        """Return who owns what is allocated on each device."""
        from gpumemwidget.ownership.account import take_memory_account  # noqa: PLC0415 - when used

        return take_memory_account(self.shell, self.hardware)

    def why(self, expression: str | None = None, *, unnamed: bool = False) -> Explanation:
        """Return what holds some memory, path by path; see ``gpumemwidget.why``."""
        from gpumemwidget.ownership.why import explain, explain_unnamed  # noqa: PLC0415 - when used

        # By its exact type: no code of the user's object runs.
        if expression is not None and type(expression) is not str:
            raise BadInputError(
                f"an expression can't be of type {name_type(expression)}: give it as text, "
                "why('model') and not why(model)"
            )
        if unnamed == bool(expression):
            raise BadInputError(
                "give either a variable or a part of one, such as model.layers[0].weight, or "
                "--unnamed for what no variable leads to"
            )
        if not expression:
            return explain_unnamed(self.shell, self.hardware)
        return explain(self.shell, expression)

    def variables(self) -> tuple[Variable, ...]:
        """Return what each variable, ``Out`` and the last exception hold, biggest first."""
        from gpumemwidget.ownership.account import list_variables  # noqa: PLC0415 - when used

        return list_variables(self.shell)

    def sum_frees(self, names: Sequence[str], *, keep: bool = False, budget_s: float) -> ReleaseSum:
        """Return what is freed if exactly these rows of ``variables`` are released together.

        With ``keep`` copies stay on the CPU, and what is on the host already is not freed.
        """
        from gpumemwidget.ownership.account import sum_frees  # noqa: PLC0415 - when used

        return sum_frees(self.shell, names, keep=keep, budget_s=budget_s)

    # -- What is released --------------------------------------------------------------------------

    def plan_release(self, request: ReleaseRequest) -> ReleasePlan:
        """Return what ``release`` would do; nothing is changed."""
        from gpumemwidget.releasing.plan import plan_release  # noqa: PLC0415 - when used

        self._refuse_parts(request)
        return plan_release(self.shell, self.hardware, request)

    def release(self, request: ReleaseRequest) -> ReleaseReport:
        """Release what is asked for; see ``gpumemwidget.release``."""
        from gpumemwidget.releasing.release import execute_release  # noqa: PLC0415 - when used

        self._refuse_beside_cell()
        self._refuse_parts(request)
        self._has_released = True
        try:
            return execute_release(self.shell, self.hardware, request)
        finally:
            self.released.call(None)

    def plan_restore(self, names: Sequence[str]) -> RestorePlan:
        """Return what ``restore`` would do; nothing is changed."""
        from gpumemwidget.releasing.release import plan_restore  # noqa: PLC0415 - when used

        return plan_restore(self.shell, names)

    def restore(self, names: Sequence[str]) -> RestoreReport:
        """Bring back what a release moved to the CPU; see ``gpumemwidget.restore``."""
        from gpumemwidget.releasing.release import execute_restore  # noqa: PLC0415 - when used

        self._refuse_beside_cell()
        try:
            return execute_restore(self.shell, self.hardware, names)
        finally:
            self.released.call(None)

    def _refuse_parts(self, request: ReleaseRequest) -> None:
        """Refuse a part of a variable with the command that frees it."""
        from gpumemwidget.releasing.plan import find_part  # noqa: PLC0415 - when used
        from gpumemwidget.report.release import word_part_refusal  # noqa: PLC0415 - when used

        part = find_part(self.shell, request.names)
        if part is not None:
            raise BadInputError(word_part_refusal(self.why(part)))

    def _refuse_beside_cell(self) -> None:
        """Refuse to change the user's objects on another thread than the running cell's."""
        is_own_thread = threading.current_thread() is threading.main_thread()
        if self.monitor.running is not None and not is_own_thread:
            raise BusyError("a cell is running: release from the cell itself, or after its end")

    # -- What is set -------------------------------------------------------------------------------

    def limit(self, value: object = None, *, device: str | None = None) -> tuple[Limit, ...]:
        """Limit what PyTorch may reserve on a GPU; see ``gpumemwidget.limit``."""
        if value is None:
            return read_limits(self.hardware, device)
        limits = set_limits(self.hardware, parse_limit(value), device)
        self.limited.update(limit.device for limit in limits)
        return limits

    def reset_peaks(self, device: str | None = None) -> tuple[str, ...]:
        """Reset PyTorch's peaks; see ``gpumemwidget.reset_peaks``."""
        return reset_peaks(self.hardware, device)

    def budget(
        self, amount: int | str | None = None, *, device: str | None = None
    ) -> tuple[Budget, ...]:
        """Set what each cell may allocate; see ``gpumemwidget.budget``."""
        monitor = self.monitor
        budgets = change_budgets(monitor.budgets, self.hardware, amount, device=device)
        monitor.budgets = budgets
        if device is None or amount is not None:
            return budgets.list()
        n_bytes = budgets.find(device)
        return () if n_bytes is None else (Budget(device, n_bytes),)

    # -- Its own life ------------------------------------------------------------------------------

    def open(self) -> None:
        """Let ``find_session`` find this session."""
        _sessions.append(self)

    def attach(self, kind: Callable[[Session], _T]) -> _T:
        """Return the session's one object of a class, made at the first call.

        ``Session.close`` calls its ``close()``.
        """
        if kind not in self._attached:
            with self._makes.setdefault(kind, threading.RLock()):
                if kind not in self._attached:
                    self._attached[kind] = kind(self)
        found: _T = self._attached[kind]
        return found

    def report_failure(self, what: str, exc: Exception) -> None:
        """Report a failure of ours in one line, once for each type, and keep its traceback."""
        self.last_failure = "".join(traceback.format_exception(exc))
        # The message may differ each time, as with an address in it.
        if not self._failures.add(f"{what}: {type(exc).__name__}"):
            return
        message = (
            f"{what} failed ({describe_exception(exc)}); your cell is not affected, and recording "
            "goes on."
        )
        # A file that is gone, or of a newer version, is no bug.
        if not isinstance(exc, (FileError, RecordingError)):
            message += " For a bug report: print(gpumemwidget.last_failure())"
        try:
            self._on_failure(message)
        except Exception:  # noqa: BLE001 - the log is all that is left
            _log.exception("could not show: %s", message)

    def reporting(self, what: str) -> _Reporting:
        """Report what fails in the ``with`` block, and go on behind it."""
        return _Reporting(self, what)

    def close(self) -> None:
        """End all that is attached, and recording. May be called twice."""
        if self in _sessions:
            _sessions.remove(self)
        attached, self._attached = self._attached, {}
        for part in attached.values():
            with self.reporting(f"closing the {type(part).__name__}"):
                part.close()
        with self.reporting("closing the monitor"):
            self.monitor.close()
        if self._has_released:
            from gpumemwidget.releasing.storages import original_devices  # noqa: PLC0415 - when used

            # Weak references keep the headers of storages.
            original_devices.forget_all()


class _Reporting:
    """Reports what fails in a ``with`` block.

    ``@contextmanager`` would take three times as long, and each cell enters several.
    """

    __slots__ = ("_session", "_what")

    def __init__(self, session: Session, what: str) -> None:
        self._session = session
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, exc: BaseException | None, __: object) -> bool:
        if not isinstance(exc, Exception):
            return False  # Nothing failed, or a Ctrl-C goes on.
        if is_from_signal_handler(exc):
            return False  # A timeout of the user's, that landed here.
        self._session.report_failure(self._what, exc)
        return True


# -- Finding it ------------------------------------------------------------------------------------

#: Sessions of the shells that have loaded the extension, in the order of loading.
_sessions: list[Session] = []


def current_session() -> Session:
    """Return the session that was loaded last.

    Raises:
        NotLoadedError: the extension is not loaded.
    """
    session = find_session()
    if session is None:
        raise NotLoadedError("gpumemwidget is not loaded: run %load_ext gpumemwidget first")
    return session


def find_session() -> Session | None:
    """Return the session that was loaded last; ``None`` if the extension is not loaded."""
    return _sessions[-1] if _sessions else None


# -- Without a session -----------------------------------------------------------------------------


@contextmanager
def borrow_plain_hardware() -> Iterator[Hardware]:
    """Yield the machine's memory for one question without the extension."""
    hardware = detect_hardware()
    try:
        yield hardware
    finally:
        hardware.close()


# -- Names that a person asks for ------------------------------------------------------------------


def check_rows(account: MemoryAccount, names: Sequence[str], bound: Collection[str]) -> None:
    """Refuse names that are no rows of the account; ``bound`` are all of the user's variables.

    Raises:
        BadInputError: it is a variable and holds nothing.
        UnknownNameError: there is no such name; close ones are named.
    """
    from gpumemwidget.report.account import list_rows  # noqa: PLC0415 - when used

    rows = [variable.name for variable in account.variables]
    rows += [row.name for part in account.devices for row, _ in list_rows(part.owned)]
    rows += [array.name for array in account.library_arrays]
    for name in names:
        if name in rows:
            continue
        if name in bound:
            if account.is_complete:
                raise BadInputError(f"{name!r} holds no tensor memory: %memvars lists what does")
            raise BadInputError(
                f"no tensor memory was found in {name!r}: there were too many objects to look at "
                f"in {format_duration(account.duration_s)}"
            )
        close = difflib.get_close_matches(name, dict.fromkeys([*rows, *bound]), n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else "%memvars lists what there is"
        raise UnknownNameError(f"{name!r} is neither a variable nor a row of the account: {hint}")
