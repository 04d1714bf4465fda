"""Load the extension into a shell, follow the shell's cells, and take all of it away again.

IPython calls ``pre_run_cell`` and ``post_run_cell`` for more than cells: for the body of
``%%capture``, for code that calls ``run_cell``, for runs that the front end keeps out of the
history, on ipykernel 7 also from a subshell's thread; and for an empty cell, and for the one that
holds ``%load_ext``, only the second of the two. Every run is kept on a stack here, by the
``ExecutionInfo`` that both events carry, so that each end finds its own beginning.

A failure in here is shown once and never reaches the cell.
"""

from __future__ import annotations

import asyncio
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from types import FrameType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, cast

from IPython import version_info as ipython_version
from IPython.core.interactiveshell import InteractiveShell

from gpumemwidget.backends.hardware import Hardware, detect_hardware, take_hardware
from gpumemwidget.backends.hooks import find_torch
from gpumemwidget.jupyter.magics import MemMagics, list_magics
from gpumemwidget.jupyter.outputs import LeakCards, MemtraceLine, OomCards, Outputs
from gpumemwidget.model.cells import Status
from gpumemwidget.model.devices import HOST, DeviceState
from gpumemwidget.model.traces import TraceRequest
from gpumemwidget.ownership.shell import LAST_EXCEPTION, ShellReference
from gpumemwidget.progress import Progress, listen
from gpumemwidget.report.render.wording import join_words
from gpumemwidget.session.interrupts import (
    InterruptHold,
    RaiseInterrupt,
    run_to_end,
    run_uninterrupted,
    send_later,
)
from gpumemwidget.session.session import Session
from gpumemwidget.units import format_bytes

if TYPE_CHECKING:
    from IPython.core.interactiveshell import ExecutionInfo, ExecutionResult

    from gpumemwidget.ownership.shell import Shell

#: Extensions by the shell that has loaded them.
_extensions: dict[InteractiveShell, Extension] = {}


def load(shell: InteractiveShell) -> None:
    """Record the shell's cells from now on; what is loaded already stays as it is."""
    if shell not in _extensions:
        # So that a Ctrl-C leaves nothing half loaded.
        run_uninterrupted(_load, shell)


def _load(shell: InteractiveShell) -> None:
    hardware = take_hardware("traces") or detect_hardware()
    opened: Extension | Hardware = hardware
    try:
        opened = extension = Extension(shell, hardware)
        extension.open()
    except BaseException:
        opened.close()
        raise
    _extensions[shell] = extension
    with extension.session.reporting("looking up the devices"):
        print(extension.describe())


def unload(shell: InteractiveShell) -> None:
    """Take away everything that ``load`` added; nothing if there is nothing."""
    hold = InterruptHold()
    try:
        with hold:
            extension = _extensions.pop(shell, None)
            if extension is not None:
                with extension.session.reporting("looking up the peaks"):
                    for sentence in extension.describe_loss():
                        print(sentence)
                extension.close()
    finally:
        if hold.is_due:
            # It may end a %reload_ext here, which says nothing itself.
            print("gpumemwidget is not loaded.")
            send_later()


class Extension:
    """A session in one shell, with the hooks that feed it and the magics that ask it."""

    def __init__(self, shell: InteractiveShell, hardware: Hardware) -> None:
        # A protocol's attribute can be set; the namespace of a running shell is only read here.
        self._references = IPythonShell(shell)
        references = cast("Shell", self._references)
        self.session = Session(references, hardware, on_failure=_show_failure)
        self.outputs = Outputs(shell, self.session)
        self._shell = shell
        self._magics = MemMagics(shell, self.session)
        self._cards = OomCards(self.session)
        self._leaks = LeakCards(self.session)
        self.events = CellEvents(shell, self.session, self.outputs, self._cards, self._leaks)
        self._transformer = MemtraceLine(self._magics.read_request, self._take_request)
        #: Magics of the same names that were there before.
        self._displaced: list[tuple[str, str, object]] = []

    def open(self) -> None:
        """Take part in the shell."""
        self._references.open()
        tables = self._shell.magics_manager.magics
        for kind, name in list_magics(self._magics):
            if name in tables[kind]:
                self._displaced.append((kind, name, tables[kind][name]))
        self._shell.register_magics(self._magics)
        self._shell.input_transformers_cleanup.append(self._transformer)
        self._cards.open()
        self._leaks.open()
        self.session.open()
        self.events.register()
        if hasattr(self._shell, "kernel"):
            from gpumemwidget.widgets.lab import LabLink  # noqa: PLC0415 - a terminal has no pages

            with self.session.reporting("speaking to JupyterLab"):
                self.session.attach(LabLink).open(self._open_dashboard)

    def close(self) -> None:
        """Leave nothing behind. May be called twice."""
        # A part that fails must not keep the others.
        reporting = self.session.reporting
        with reporting("leaving the shell's events"):
            self.events.unregister()
        with reporting("no longer noticing OOMs"):
            self._cards.close()
        with reporting("taking away the input transformer"):
            if self._transformer in self._shell.input_transformers_cleanup:
                self._shell.input_transformers_cleanup.remove(self._transformer)
        with reporting("taking away the magics"):
            self._remove_magics()
        self._references.close()
        with reporting("closing a cell's output"):
            self.outputs.close(None)
        self.session.close()

    def describe(self) -> str:
        """Return one line: which devices were found, and how to go on."""
        states = self.session.stat()
        kinds = Counter(map(_describe_kind, states))
        groups = [words if n == 1 else f"{n} × {words}" for words, n in kinds.items()]
        found = join_words(groups)
        if states and all(state.info.device == HOST for state in states):
            found = f"{found}; no GPU was found{'' if find_torch() else ' yet'}"
        show = "%memdash opens the dashboard"
        if not hasattr(self._shell, "kernel"):
            show = "%memstat shows the memory now"
        return f"gpumemwidget records every cell: {found}. {show}, %memhelp lists all commands."

    def describe_loss(self) -> list[str]:
        """Return which limits that were set here go with the extension, and which stay."""
        sentences = []
        for limit in self.session.hardware.read_limits():
            device = limit.device
            if limit.is_waiting:
                sentences.append(f"the limit that waited for {device} is forgotten.")
            elif limit.limit_bytes is not None and device in self.session.limited:
                sentences.append(
                    f"{device} keeps its limit of {format_bytes(limit.limit_bytes)}, until "
                    "torch.cuda.set_per_process_memory_fraction(1.0, "
                    f"{device.partition(':')[2]})."
                )
        return [f"gpumemwidget: {sentence}" for sentence in sentences]

    def _open_dashboard(self) -> str:
        """Return the model's id of the dashboard, which a page is about to show."""
        from gpumemwidget.widgets.dashboard import Dashboard  # noqa: PLC0415 - brings ipywidgets

        dashboard = self.session.attach(Dashboard)
        dashboard.expect_view()
        return str(dashboard.model_id)

    def _take_request(self, request: TraceRequest | None) -> None:
        """Note the request above a cell that is about to run, or trace the cell that runs."""
        if threading.current_thread() is not threading.main_thread():
            return  # A subshell's cells are not recorded.
        if not self.events.is_running:
            self.outputs.next_request = request
        elif request is not None:
            with self.session.reporting("preparing a cell's output"):
                self.outputs.trace(request)

    def _remove_magics(self) -> None:
        # IPython has no call for this.
        manager = self._shell.magics_manager
        for kind, name in list_magics(self._magics):
            magic = manager.magics[kind].get(name)
            if getattr(magic, "__self__", None) is self._magics:
                del manager.magics[kind][name]
        registered = type(self._magics).__name__
        if manager.registry.get(registered) is self._magics:
            del manager.registry[registered]
        # Magics objects enter themselves here.
        configurables: list[Any] = self._shell.configurables
        if self._magics in configurables:
            configurables.remove(self._magics)
        for kind, name, magic in self._displaced:
            manager.magics[kind].setdefault(name, magic)
        self._displaced.clear()


def _show_failure(message: str) -> None:
    print(f"gpumemwidget: {message}", file=sys.stderr)


def _describe_kind(report: DeviceState) -> str:
    """Return what several devices may share: ``NVIDIA H200 (139.81 GiB, from first use on)``."""
    info = report.info
    total = "" if info.total_bytes is None else format_bytes(info.total_bytes)
    words = ", ".join(filter(None, (total, "" if report.reading else "from first use on")))
    return f"{'host memory' if info.device == HOST else info.name}{f' ({words})' if words else ''}"


# -- What IPython holds of the user's --------------------------------------------------------------


_UNDERSCORES = ("_", "__", "___")
#: How paths into IPython's copy of its own names begin.
_HIDDEN = "user_ns_hidden: "
#: The name of ``Out[5]`` in the namespace: ``_5``.
_OUT_NAME = re.compile(r"_(?P<number>\d+)")
#: IPython's own names: the inputs, the histories. (Its functions are "hidden" as well.)
_OWN_NAME = re.compile(r"_i\d+|_i{1,3}|_ih|_oh|_dh|In|Out|_exit_code|_sh|__\w+__")


class IPythonShell:
    """The running IPython as a ``Shell``, for walks and releases.

    A displayed value lives on in up to nine places and an exception in up to eight; memory is freed
    only when the last of them lets go. All of them are known here, so that a walk can account for
    each and a release can drop exactly those that it announced.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell: Any = shell
        #: The numbers of cells by the names of their compiled files, where IPython 7 has none.
        self._noted: dict[str, int] = {}

    def open(self) -> None:
        """Note the files of cells that run from now on, where IPython does not."""
        if not hasattr(self._shell.compile, "_filename_map"):
            self._shell.compile.cache = self._cache

    def close(self) -> None:
        """Stop noting the files of cells. May be called twice."""
        if vars(self._shell.compile).get("cache") == self._cache:
            del self._shell.compile.cache

    def _cache(self, transformed_code: str, number: int = 0, raw_code: str | None = None) -> str:
        compiler = self._shell.compile
        name: str = type(compiler).cache(compiler, transformed_code, number, raw_code=raw_code)
        self._noted[name] = number
        return name

    @property
    def user_ns(self) -> MutableMapping[str, object]:
        """Return the notebook's namespace itself, not a copy."""
        namespace: MutableMapping[str, object] = self._shell.user_ns
        return namespace

    @property
    def names_hint(self) -> str:
        """The magic that lists the names, for an error."""
        return "%who lists what there is"

    def list_user_names(self) -> list[str]:
        """Return the names that the user bound, in the order of their making.

        A name that begins with an underscore is the user's too, and so is ``_`` once they have
        bound it themselves (``for _ in loader``).
        """
        hidden = dict(self._shell.user_ns_hidden)
        # Names that belong to rows alone, though ``globals()`` takes any text.
        row_name = re.compile(rf"Out\[.*\]|{LAST_EXCEPTION}", re.DOTALL)
        return [
            name
            for name, value in dict(self.user_ns).items()
            if type(name) is str
            and not (name in hidden and hidden[name] is value)
            and not _OWN_NAME.fullmatch(name)
            and not _OUT_NAME.fullmatch(name)
            and not row_name.fullmatch(name)
            and not (name in _UNDERSCORES and self._is_own_underscore(name, value))
            and not issubclass(type(value), ModuleType)
        ]

    def read_cell_numbers(self) -> dict[str, int]:
        """Return the numbers of the cells that ran, by the names of their compiled files."""
        return dict(getattr(self._shell.compile, "_filename_map", self._noted))

    def list_own_objects(self) -> list[object]:
        """Return the shell with its parts, which reach everything and own nothing."""
        shell = self._shell
        own: list[object] = [
            self,
            shell,
            shell.user_ns,
            shell.user_ns_hidden,
            shell.user_module,
            shell.user_ns.get("In"),
            shell.user_ns.get("_oh"),
            shell.user_ns.get("Out"),
            shell.displayhook,
            vars(shell.displayhook),
            shell.last_execution_result,
            sys,
        ]
        own.extend(shell.configurables)
        for name in ("InteractiveTB", "SyntaxTB", "events", "display_pub", "kernel", "parent"):
            own.append(getattr(shell, name, None))
        return [part for part in own if part is not None]

    def list_references(self) -> list[ShellReference]:
        """Return every reference to a displayed value or an exception, each once."""
        return [*self._list_out_references(), *self._list_exception_references()]

    # -- displayed values --------------------------------------------------------------------------

    def _is_own_underscore(self, name: str, value: object) -> bool:
        """Return whether ``_`` still is the last displayed value, and was not bound by the user."""
        hook = self._shell.displayhook
        return value is getattr(hook, name, None) or value is self._shell.user_ns_hidden.get(name)

    def _list_out_references(self) -> Iterator[ShellReference]:
        shell = self._shell
        outputs = shell.user_ns.get("_oh", {})
        row_of: dict[int, str] = {}
        for number, value in dict(outputs).items():
            row = row_of[id(value)] = f"Out[{number}]"
            yield ShellReference(row, "out", row, value, partial(outputs.pop, number, None))
        for prefix, namespace in (("", shell.user_ns), (_HIDDEN, shell.user_ns_hidden)):
            for name, value in dict(namespace).items():
                match = _OUT_NAME.fullmatch(name) if type(name) is str else None
                if match:
                    row = row_of[id(value)] = f"Out[{match['number']}]"
                    drop = partial(namespace.pop, name, None)
                    yield ShellReference(row, "out", prefix + name, value, drop)
        # The unnumbered ones belong to the row of the same value; `%reset out` leaves them alone.
        # All three get the same value when dropped, or IPython takes `_` for the user's own.
        hook = vars(shell.displayhook)
        for name in _UNDERSCORES:
            for prefix, namespace in (
                ("", shell.user_ns),
                (_HIDDEN, shell.user_ns_hidden),
                ("displayhook.", hook),
            ):
                value = namespace.get(name)
                if prefix == "" and not self._is_own_underscore(name, value):
                    continue
                if value is not None and not (type(value) is str and value == ""):
                    row = row_of.setdefault(id(value), name)
                    drop = partial(namespace.__setitem__, name, "")
                    yield ShellReference(row, "out", prefix + name, value, drop)
        last = shell.last_execution_result
        if last is not None and last.result is not None:
            row = row_of.get(id(last.result), "_")
            drop = partial(setattr, last, "result", None)
            yield ShellReference(row, "out", "last_execution_result.result", last.result, drop)

    # -- exceptions --------------------------------------------------------------------------------

    def _list_exception_references(self) -> Iterator[ShellReference]:
        shell = self._shell
        names = ("last_value", "last_exc", "last_traceback")
        holders: list[tuple[str, object, str]] = [("sys", sys, name) for name in names]
        for handler in ("InteractiveTB", "SyntaxTB"):
            # `pdb` is made by the first %debug and keeps the frames that it looked at.
            for name in ("tb", "last_syntax_error", "pdb"):
                holders.append((handler, getattr(shell, handler, None), name))
        for name in ("error_in_exec", "error_before_exec"):
            holders.append(("last_execution_result", shell.last_execution_result, name))
        for owner_name, owner, name in holders:
            value = getattr(owner, name, None)
            is_exception = isinstance(value, TracebackType | BaseException)
            if is_exception or (name == "pdb" and value is not None):
                drop = partial(_forget_exception, owner, name)
                path = f"{owner_name}.{name}"
                yield ShellReference(LAST_EXCEPTION, "exception", path, value, drop)


def _forget_exception(owner: object, name: str) -> None:
    if owner is not sys:
        setattr(owner, name, None)
        return
    vars(sys).pop(name, None)
    # The class alone holds no frames, but must not speak of an exception that is gone.
    vars(sys).pop("last_type", None)


# -- The shell's cells -----------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Run:
    """One call of ``run_cell`` that has not returned."""

    info: Any  #: an ``ExecutionInfo``; its fields have no types that fit all versions of IPython
    is_cell: bool  #: true for a cell that a person ran, which is recorded
    #: Status of the runs within this one: ``%%capture`` hides the error of its body.
    inner_status: Status = "ok"


class CellEvents:
    """Follows the shell's cells through two of its events."""

    def __init__(
        self,
        shell: InteractiveShell,
        session: Session,
        outputs: Outputs,
        ooms: OomCards,
        leaks: LeakCards,
    ) -> None:
        self._shell = shell
        self._monitor = session.monitor
        self._outputs = outputs
        self._ooms = ooms
        self._leaks = leaks
        self._reporting = session.reporting
        self._thread = threading.main_thread().ident
        self._runs: list[_Run] = []
        #: Holds a Ctrl-C back while a run begins or ends.
        self._hold = InterruptHold()
        #: In the shell's list while a cell begins that was interrupted before its first line.
        self._raise_interrupt = RaiseInterrupt()

    @property
    def is_running(self) -> bool:
        """True if the calling thread is the one that runs cells, and is running one."""
        return get_ident() == self._thread and bool(self._runs)

    def register(self) -> None:
        """Take part in the shell's events; a cell that is running now counts from here on."""
        self._shell.events.register("pre_run_cell", self._pre_run_cell)
        self._shell.events.register("post_run_cell", self._post_run_cell)
        if get_ident() == self._thread:
            self._runs = [_Run(info, is_cell=False) for info in _list_running(self._shell)]
            if self._runs and self._runs[0].info.store_history:
                self._runs[0].is_cell = True
                self._start(self._runs[0].info, partial=True)

    def unregister(self) -> None:
        """Leave the shell's events. May be called twice."""
        events = self._shell.events
        for event, callback in (
            ("pre_run_cell", self._pre_run_cell),
            ("post_run_cell", self._post_run_cell),
        ):
            if callback in events.callbacks[event]:
                events.unregister(event, callback)
        self._runs.clear()
        self._let_cells_run()

    # -- The events --------------------------------------------------------------------------------

    def _pre_run_cell(self, info: Any) -> None:
        """Note that a run begins; ``info`` is its ``ExecutionInfo``."""
        if self._follow(lambda: self._begin(info)):
            self._shell.ast_transformers.append(self._raise_interrupt)

    def _post_run_cell(self, result: ExecutionResult | None) -> None:
        """Note that a run has ended, or an empty cell was run; ``None``: IPython knows no more."""
        error: BaseException | None = None
        try:
            if self._follow(lambda: run_to_end(self._end, result)):
                error = KeyboardInterrupt()
        except Exception as exc:  # noqa: BLE001 - a timeout of the user's, the cell's end being done
            error = exc.with_traceback(None)
        if error is None:
            return
        if result is not None and result.success:
            # Cells that wait behind are not run then, as with a Ctrl-C a moment before.
            result.error_in_exec = error
        elif isinstance(error, KeyboardInterrupt):
            return  # The cell has ended already.
        self._shell.showtraceback((type(error), error, None))

    def _follow(self, action: Callable[[], None]) -> bool:
        """Do what an event is for, on the thread of the cells; return whether a Ctrl-C came.

        One that comes before it is held back keeps the action from beginning, and not from being
        done: a cell that is not seen to end would count as running.
        """
        is_cut = has_begun = False
        while not has_begun:
            try:
                if get_ident() != self._thread:
                    return False
                with InterruptHold() as self._hold:
                    has_begun = True
                    self._hold.is_due |= is_cut
                    with self._reporting("following the cells"):
                        action()
            except KeyboardInterrupt:
                is_cut = True
        return is_cut or self._hold.is_due

    def _begin(self, info: Any) -> None:
        if self._runs and info.store_history and len(_list_running(self._shell)) <= 1:
            # The end of what is on the stack never came, for this one runs alone.
            self._abandon()
        run = _Run(info, is_cell=not self._runs and info.store_history)
        self._runs.append(run)
        if run.is_cell:
            with self._reporting("preparing a cell's output"):
                self._outputs.open(info.raw_cell)
            self._start(info, partial=False)

    def _let_cells_run(self) -> None:
        transformers = self._shell.ast_transformers
        if self._raise_interrupt in transformers:
            transformers.remove(self._raise_interrupt)

    def _end(self, result: ExecutionResult | None) -> None:
        # Long work from here on (a report, a release that has waited) says how far it has got, and
        # is broken off there by a Ctrl-C. That one is handed on after the work.
        with suppress(KeyboardInterrupt), listen(self._break_off):
            self._end_run(result)

    @property
    def _is_interrupted(self) -> bool:
        return self._hold.is_noted or self._hold.is_due

    def _break_off(self, _progress: Progress) -> None:
        if self._is_interrupted:
            raise KeyboardInterrupt

    def _end_run(self, result: ExecutionResult | None) -> None:
        self._let_cells_run()
        run = self._find_run(result)
        status = _read_status(result)
        if status == "ok" and self._is_interrupted:
            status = "interrupted"
        if run is None:
            return
        while self._runs.pop() is not run:
            pass  # Drop runs that began within this one and never ended.
        if status == "ok":
            status = run.inner_status
        if run.is_cell:
            self._finish(result, status)
        elif self._runs and status != "ok":
            self._runs[-1].inner_status = status
            with self._reporting("noticing OOMs"):
                self._ooms.end_inner(result)

    def _find_run(self, result: ExecutionResult | None) -> _Run | None:
        """Return the run that has ended; ``None`` for a run that never began (an empty cell)."""
        if not self._runs:
            return None
        if result is None or result.info is None:
            return self._runs[-1]
        for run in reversed(self._runs):
            if run.info is result.info:
                return run
        # If the run itself was broken off, IPython makes a new info for its result.
        innermost = self._runs[-1]
        is_same = innermost.info.raw_cell == result.info.raw_cell
        return innermost if is_same and result.error_in_exec is not None else None

    # -- Measuring ---------------------------------------------------------------------------------

    def _start(self, info: Any, *, partial: bool) -> None:
        self._ooms.start()
        with self._reporting("recording a cell's start"):
            # IPython counts the cell at its start from 9.8 on, and at its end before.
            self._monitor.start_cell(
                execution_count=self._shell.execution_count - int(ipython_version[:2] >= (9, 8)),
                cell_id=getattr(info, "cell_id", None),
                source=info.raw_cell,
                partial=partial,
            )

    def _finish(self, result: ExecutionResult | None, status: Status) -> None:
        record = None
        with self._reporting("recording a cell's end"):
            count = None if result is None else result.execution_count
            record = self._monitor.end_cell(status=status, execution_count=count)
        try:
            with self._reporting("showing the card of an OOM"):
                self._ooms.end(record, result)
        finally:  # A Ctrl-C that stops the card must not leave the cell's trace open.
            # A syntax error, or a magic that IPython refuses: no line ran.
            has_run = result is None or result.error_before_exec is None
            with self._reporting("showing a cell's report"):
                self._outputs.close(record, has_run=has_run)
            with self._reporting("reporting what grows"):
                self._leaks.end()

    def _abandon(self) -> None:
        was_measured = self._runs[0].is_cell
        self._runs.clear()
        if was_measured:
            with self._reporting("giving up a cell without an end"):
                self._monitor.discard_cell()
            with self._reporting("giving up a cell's output"):
                self._outputs.close(None)


def _read_status(result: ExecutionResult | None) -> Status:
    """Return how a run ended, by its result."""
    if result is None:
        return "interrupted"
    # IPython keeps an interrupt before the first line apart from one in a line, and ipykernel ends
    # a cell that awaits by cancelling its task.
    for error in (result.error_before_exec, result.error_in_exec):
        if isinstance(error, (KeyboardInterrupt, asyncio.CancelledError)):
            return "interrupted"
    return "ok" if result.success else "error"


def _list_running(shell: InteractiveShell) -> list[ExecutionInfo]:
    """Return the runs that the calling code is part of, outermost first, from the Python stack.

    IPython has no list of what is running; its coroutine's frame holds the ``info`` that the run's
    end will bring. Only used when the extension is loaded, and for runs within runs.
    """
    infos = []
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - public by its documentation, in spite of its name
    while frame is not None:
        if frame.f_code.co_name == "run_cell_async" and frame.f_locals.get("self") is shell:
            info = frame.f_locals.get("info")
            if info is not None:
                infos.append(info)
        frame = frame.f_back
    infos.reverse()
    return infos
