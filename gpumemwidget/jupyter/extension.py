"""Load the extension into a shell, and take all of it away again."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any, cast

from gpumemwidget.backends.hardware import Hardware, detect_hardware, take_hardware
from gpumemwidget.backends.hooks import find_torch
from gpumemwidget.jupyter.cards import LeakCards, OomCards
from gpumemwidget.jupyter.cell_events import CellEvents
from gpumemwidget.jupyter.magics import MemMagics, list_magics
from gpumemwidget.jupyter.memtrace import MemtraceLine, Outputs
from gpumemwidget.jupyter.references import IPythonShell
from gpumemwidget.model.devices import HOST, DeviceState
from gpumemwidget.model.traces import TraceRequest
from gpumemwidget.report.render.wording import join_words
from gpumemwidget.session.interrupts import InterruptHold, run_uninterrupted, send_later
from gpumemwidget.session.session import Session
from gpumemwidget.units import format_bytes

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

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
