"""What ``%load_ext gpumemwidget`` adds to a shell, and what takes all of it away again."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Collection, Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast

from gpumemwidget.backends.hardware import Hardware, detect_hardware
from gpumemwidget.devices import Limit
from gpumemwidget.errors import NotLoadedError
from gpumemwidget.jupyter.cells import CellEvents
from gpumemwidget.jupyter.limits import LimitMagics
from gpumemwidget.jupyter.magics import MemMagics
from gpumemwidget.jupyter.memtrace import MemtraceLine, MemtraceOptions
from gpumemwidget.jupyter.oom import OomCards
from gpumemwidget.jupyter.parsing import list_magics
from gpumemwidget.jupyter.references import IPythonShell
from gpumemwidget.jupyter.trace import Outputs
from gpumemwidget.jupyter.tracing import take_plain_hardware
from gpumemwidget.measure.limitwatch import LimitWatch
from gpumemwidget.measure.monitor import Monitor
from gpumemwidget.records import HOST, DeviceReport
from gpumemwidget.units import format_bytes

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from gpumemwidget.jupyter.dashboard import Dashboard
    from gpumemwidget.jupyter.oombuttons import CardButtons
    from gpumemwidget.owners.base import Shell

__all__ = ["Extension", "current_extension", "find_extension", "load", "unload"]

#: The shells that have it, in the order of their loading.
_extensions: dict[InteractiveShell, Extension] = {}


def load(shell: InteractiveShell) -> Extension:
    """Record the shell's cells from now on; what is loaded already stays as it is."""
    extension = _extensions.get(shell)
    if extension is None:
        extension = Extension(shell, take_plain_hardware() or detect_hardware())
        extension.open()
        _extensions[shell] = extension
        extension.introduce()
    return extension


def unload(shell: InteractiveShell) -> None:
    """Take away everything that ``load`` added; nothing where there is nothing."""
    extension = _extensions.pop(shell, None)
    if extension is not None:
        extension.say_farewell()
        extension.close()
        module = sys.modules.get("gpumemwidget.owners.whereabouts")
        if module is not None:
            # Weak references keep the headers of storages.
            module.whereabouts.forget_all()


def current_extension() -> Extension:
    """The extension of the running shell.

    Raises:
        NotLoadedError: it is not loaded.
    """
    extension = find_extension()
    if extension is None:
        raise NotLoadedError("gpumemwidget is not loaded: run %load_ext gpumemwidget first")
    return extension


def find_extension() -> Extension | None:
    """The extension of the running shell; ``None`` where it is not loaded."""
    # Whoever has loaded it has IPython imported.
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell in _extensions:
        return _extensions[shell]
    # A shell that is not the process's registered one, as in an embedded session.
    return next(reversed(_extensions.values())) if _extensions else None


class Extension:
    """Everything of ours in one shell.

    Args:
        shell: the ``InteractiveShell``.
        hardware: what is measured.

    Attributes:
        ipython: the shell itself.
        shell: the same as ``owners`` sees it.
        monitor: records the cells.
        last_failure: the whole traceback of the last failure of ours, for a bug report.
        sites: whether the lines of blocks on GPUs are kept between traces, in words.
        card_buttons: the buttons on the cards of OOMs, once there are any.
    """

    def __init__(self, shell: InteractiveShell, hardware: Hardware) -> None:
        self.ipython = shell
        # A protocol's attribute can be set; the namespace of a running shell is only read here.
        self.shell = cast("Shell", IPythonShell(shell))
        self.monitor = Monitor(hardware, on_failure=self.show_failure)
        self.last_failure: str | None = None
        self.sites = "the line of each block is not kept"
        self._dashboard: Dashboard | None = None
        self.card_buttons: CardButtons | None = None
        self._magics = MemMagics(shell, self)
        self._all_magics: tuple[MemMagics | LimitMagics, ...] = (
            self._magics,
            LimitMagics(shell, self),
        )
        #: The devices whose limits were set here.
        self.limited: set[str] = set()
        self.limit_watch = LimitWatch(self.monitor)
        self.outputs = Outputs(self, self._magics.read_options)
        self._ooms = OomCards(self)
        self._events = CellEvents(
            shell, self.monitor, self.outputs, self._ooms, self.report_failure
        )
        self._transformer = MemtraceLine(shell, self._magics.read_options, self._trace_running)
        #: Magics of the same names that were there before us.
        self._displaced: list[tuple[str, str, object]] = []

    def open(self) -> None:
        """Take part in the shell."""
        tables = self.ipython.magics_manager.magics
        for magics in self._all_magics:
            for kind, name in list_magics(magics):
                if name in tables[kind]:
                    self._displaced.append((kind, name, tables[kind][name]))
            self.ipython.register_magics(magics)
        self.ipython.input_transformers_cleanup.append(self._transformer)
        self._ooms.open()
        self._events.register()

    def close(self) -> None:
        """Leave nothing behind. May be called twice."""
        # Each by itself: what one of them fails at must not keep the others.
        self._attempt("leaving the shell's events", self._events.unregister)
        self._attempt("no longer noticing OOMs", self._ooms.close)
        self._attempt("taking away the input transformer", self._remove_transformer)
        self._attempt("taking away the magics", self._remove_magics)
        self._attempt(
            "closing a cell's output", lambda: self.outputs.close(None, showed_result=False)
        )
        self._attempt("closing the dashboard", self._close_dashboard)
        self._attempt("taking the buttons out of cards", self._close_card_buttons)
        self._attempt("closing the monitor", self.monitor.close)

    def open_dashboard(self, *, interval_s: float | None = None) -> Dashboard:
        """The dashboard, made at the first call.

        Args:
            interval_s: seconds between samples from now on; ``None`` leaves them as they are.
        """
        from gpumemwidget.jupyter.dashboard import Dashboard  # noqa: PLC0415 - brings ipywidgets

        if interval_s is not None:
            self.monitor.interval_s = interval_s
        if self._dashboard is None:
            self._dashboard = Dashboard(self)
        return self._dashboard

    def keep_sites(self, *, is_on: bool) -> str:
        """Keep the line of each block on a GPU from now on, or no longer; what was done."""
        self.sites = self.monitor.hardware.set_sites(is_on=is_on)
        return self.sites

    def note_change(self) -> None:
        """Something was released beside the cells: what shows the variables is old."""
        if self._dashboard is not None:
            self._dashboard.note_change()

    # -- What a person is told ---------------------------------------------------------------------

    def introduce(self) -> None:
        """Say what was found; what can't be read now is no reason not to record."""
        self._attempt("looking up the devices", lambda: print(self.describe()))

    def say_farewell(self) -> None:
        """Say what goes with us."""

        def say() -> None:
            for sentence in self.describe_loss():
                print(sentence)

        self._attempt("looking up the peaks", say)

    def describe(self) -> str:
        """One line: which devices were found, and how to go on."""
        reports = self.monitor.hardware.read_devices()
        groups = [
            _describe_devices(words, [report.info.device for report in group])
            for words, group in groupby(reports, key=_describe_kind)
        ]
        return (
            f"gpumemwidget records every cell from here on: {', '.join(groups)}. "
            "%memdash opens the dashboard."
        )

    def describe_loss(self) -> list[str]:
        """What goes with us, and which limits of those that were set here stay."""
        limits = [
            f"gpumemwidget: {sentence}"
            for limit in self.monitor.hardware.read_limits()
            for sentence in _describe_stay(limit, self.limited)
        ]
        return limits + [
            f"gpumemwidget: {_name_peak(device)} forgets the {format_bytes(peak_bytes)} of before, "
            "and runs from the last cell's start."
            for device, peak_bytes in self.monitor.hardware.list_lost_peaks()
        ]

    def show_failure(self, message: str) -> None:
        """Say what failed of ours, in one line."""
        print(f"gpumemwidget: {message}", file=sys.stderr)

    def report_failure(self, what: str, exc: Exception) -> None:
        """Tell of a failure of ours in one line, and keep its traceback."""
        self.last_failure = "".join(traceback.format_exception(exc))
        cause = f"{type(exc).__name__}: {exc}".splitlines()[0]
        self.monitor.report_failure(
            f"{what} failed ({cause}); your cell is not affected, and recording goes on. "
            "For a bug report: print(gpumemwidget.last_failure())"
        )

    # -- Parts -------------------------------------------------------------------------------------

    def _trace_running(self, options: MemtraceOptions) -> None:
        """A ``%%memtrace`` line was taken out, of a whole cell or of what a cell magic runs."""
        # A whole cell is transformed before it begins; its own start looks at its first line.
        if self._events.is_running:
            try:
                self.outputs.trace(options)
            except Exception as exc:  # noqa: BLE001 - a failure of ours is never the cell's
                self.report_failure("preparing a cell's output", exc)

    def _remove_transformer(self) -> None:
        transformers = self.ipython.input_transformers_cleanup
        if self._transformer in transformers:
            transformers.remove(self._transformer)

    def _remove_magics(self) -> None:
        # IPython has no call for this.
        manager = self.ipython.magics_manager
        # Where each Magics object enters itself.
        configurables: list[Any] = self.ipython.configurables
        for magics in self._all_magics:
            for kind, name in list_magics(magics):
                magic = manager.magics[kind].get(name)
                if getattr(magic, "__self__", None) is magics:
                    del manager.magics[kind][name]
            registered = type(magics).__name__
            if manager.registry.get(registered) is magics:
                del manager.registry[registered]
            if magics in configurables:
                configurables.remove(magics)
        for kind, name, magic in self._displaced:
            manager.magics[kind].setdefault(name, magic)
        self._displaced.clear()

    def _close_dashboard(self) -> None:
        dashboard, self._dashboard = self._dashboard, None
        if dashboard is not None:
            dashboard.close()

    def _close_card_buttons(self) -> None:
        buttons, self.card_buttons = self.card_buttons, None
        if buttons is not None:
            buttons.close()

    def _attempt(self, what: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as exc:  # noqa: BLE001 - the other parts still have to go
            self.report_failure(what, exc)


def _describe_stay(limit: Limit, ours: Collection[str]) -> Iterator[str]:
    """What becomes of a limit."""
    if limit.is_waiting:
        yield f"the limit that waited for {limit.device} is forgotten."
    elif limit.limit_bytes is not None and limit.device in ours:
        index = limit.device.partition(":")[2]
        yield (
            f"{limit.device} keeps its limit of {format_bytes(limit.limit_bytes)}, until "
            f"torch.cuda.set_per_process_memory_fraction(1.0, {index})."
        )


def _name_peak(device: str) -> str:
    """Where the user reads the peak that we wiped out."""
    if device == HOST:
        return "this process's own peak (resource.getrusage)"
    return f"torch's own peak of {device}"


def _describe_kind(report: DeviceReport) -> str:
    """What several devices may have in common: ``NVIDIA H200 (139.81 GiB)``."""
    info = report.info
    total = f" ({format_bytes(info.total_bytes)})" if info.total_bytes is not None else ""
    untouched = "" if report.reading is not None else " once you use it"
    return f"{'host memory' if info.device == HOST else info.name}{total}{untouched}"


def _describe_devices(words: str, devices: list[str]) -> str:
    """``cuda:0 NVIDIA H200 (139.81 GiB)``, ``8 × NVIDIA H200 (139.81 GiB)``, ``host memory``."""
    if devices == [HOST]:
        return words
    return f"{devices[0]} {words}" if len(devices) == 1 else f"{len(devices)} × {words}"
