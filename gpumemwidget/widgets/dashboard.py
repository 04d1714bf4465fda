"""Show the dashboard: a live plot, the cells, the variables with their release, whole devices.

The dashboard is an anywidget that draws with plotly.js in the browser. The kernel sends each sample
as a small binary message. A page that joins late, or is loaded anew, gets the readings and the
cells with the widget's state, which is put together when somebody asks for it.

nbclient saves the state that a widget is made with in the notebook. So plotly.js is not part of the
state, and the readings and cells are not while the widget is made: they follow as messages, which
anywidget keeps until its module is loaded. A page that joins asks for plotly.js.

What a saved notebook shows when the kernel is gone is a static copy. JupyterLab prefers a widget to
any HTML in the same output, and draws "Error displaying widget" where the widget's kernel is gone.
So the copy is an output of its own, directly below the widget's. While the widget lives, its view
hides the copy with a style sheet; where there is no view, the copy's own style sheet hides the
output above it. A notebook that is not trusted draws no widget and keeps no style sheet: there the
widget's output shows its text, which is empty, and the copy is shown as it is.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable
from hashlib import sha256
from pathlib import PureWindowsPath
from string import Template
from typing import Any

import anywidget
import traitlets
from IPython.core.getipython import get_ipython
from IPython.display import DisplayHandle, display

from gpumemwidget.remote.reader.recordings import Processes
from gpumemwidget.report.cell import report_ledger
from gpumemwidget.report.devices import report_stat
from gpumemwidget.report.render.blocks import Note
from gpumemwidget.report.render.output import Report
from gpumemwidget.session.leak_watch import LeakWatch
from gpumemwidget.session.session import Session
from gpumemwidget.widgets.feed import Feed
from gpumemwidget.widgets.lab import SIDE_MIME, LabLink
from gpumemwidget.widgets.page import (
    CELL_PAUSE_S,
    Message,
    Outgoing,
    Page,
    encode,
    read_css,
    read_esm,
    read_plotly,
)
from gpumemwidget.widgets.panels import DevicePanel, DeviceUseHistory, VariablesPanel
from gpumemwidget.widgets.processes_panel import ProcessesPanel
from gpumemwidget.widgets.progress_line import NOTHING

#: IPython publishes no types for these.
_display: Any = display
_new_handle: Any = DisplayHandle
#: JupyterLab, Notebook 7 and nbconvert give an output the class ``jp-OutputArea-child``, and what
#: it draws ``jp-OutputArea-output``; that of a widget which can't be drawn has ``jupyter-widgets``.
#: While JupyterLab still loads the widget, the copy waits a moment, so that nothing flickers.
_COPY_STYLE = Template(
    ".jp-OutputArea-child:has(+ .jp-OutputArea-child .$copy):not(:has($view)){display:none}"
    ".jp-OutputArea-child:has(> .jp-OutputArea-output:not(.jp-RenderedText,.jupyter-widgets))"
    " + .jp-OutputArea-child .$copy{animation:gmw-wait 2s}"
    "@keyframes gmw-wait{from,99%{height:0;opacity:0;overflow:hidden}}"
    # All copies are the same: a notebook shows the first.
    ".jp-Cell:has(.$copy) ~ .jp-Cell .$copy{display:none}"
)


def _identify_notebook() -> str:
    """Return the hash of this kernel's notebook's path and its file name, or ``""``.

    Some front ends save a widget's state with the notebook: a hash hides the folders' names.
    """
    shell = get_ipython()
    # VS Code's path is the user's file; the session that it opens on a server has another name.
    given = shell.user_ns.get("__vsc_ipynb_file__") if shell is not None else None
    # Jupyter's server names its notebook to a kernel so.
    path = given if isinstance(given, str) else os.environ.get("JPY_SESSION_NAME", "")
    if not path:
        return ""
    # The server may run on Windows, and the kernel elsewhere.
    digest = sha256(path.encode(errors="replace")).hexdigest()
    return f"{digest[:12]}/{PureWindowsPath(path).name}"


def _snapshot_to_json(_value: object, widget: Dashboard) -> Message | None:
    snapshot = widget.take_snapshot()
    return snapshot and {**snapshot, "data": encode(snapshot["data"])}


class Dashboard(anywidget.AnyWidget):
    """The session's dashboard, which may be shown any number of times; all views are live."""

    _esm = traitlets.Unicode().tag(sync=True)
    _css = traitlets.Unicode().tag(sync=True)
    #: ``True`` if the page has to ask for the messages that wait.
    polls = traitlets.Bool(default_value=False).tag(sync=True)
    #: Id by which a page knows the views of this dashboard.
    dashboard_id = traitlets.Unicode().tag(sync=True)
    #: By which a page keeps a person's choices and names files; empty where it is unknown.
    notebook = traitlets.Unicode().tag(sync=True)
    #: What a page that joins has to know; made anew each time that it is asked for.
    snapshot = traitlets.Any().tag(sync=True, to_json=_snapshot_to_json)

    def __init__(self, session: Session) -> None:
        self._is_made = self._is_closed = False
        # However often the dashboard is shown, all of its outputs are updated as one.
        self._live_output = _new_handle()
        self._side_output = _new_handle()
        self._copy_output = _new_handle()
        self._has_outputs = False
        self._copies_soon = False
        self._session = session
        self._monitor = session.monitor
        self._report_failure = session.report_failure
        self._growth = session.attach(LeakWatch)
        self._outgoing = Outgoing(self, session.monitor)
        self._page = Page(session, self._outgoing.send)
        self._feed = Feed(session.monitor, self._page.send, self._growth.list_leaks_by_cell)
        self._variables = VariablesPanel(self._page)
        self._device = DevicePanel(self._page, list_seen=self._feed.list_devices_seen)
        self._use = DeviceUseHistory(
            session.monitor, self._page.send, is_seen=lambda: self._feed.is_seen
        )
        self._watched = session.attach(Processes)
        self._processes = ProcessesPanel(self._page, is_seen=lambda: self._feed.shows_processes)
        #: Ends the callbacks from the session.
        self._listening = contextlib.ExitStack()
        for stop in (
            session.monitor.cell_ended.add(lambda _: self.note_change()),
            session.released.add(lambda _: self.note_change()),
            self._growth.found.add(self._feed.send_leak),
            session.monitor.sampled.add(lambda _: self._send_use()),
            self._watched.changed.add(lambda _: self._note_watching()),
            self._watched.gathered.add(lambda _: self._page.guard(self._processes.update)),
        ):
            self._listening.callback(stop)
        #: The answer to each kind of request from a page.
        self._answers: dict[str, Callable[[Message], None]] = {
            "view": self._hear_view,
            "gone": lambda request: self._feed.lose(request["view"]),
            "snapshot": lambda request: self._feed.send_snapshot(request["since_s"]),
            "variables": lambda _: self._variables.list_soon(),
            "account": lambda _: self._variables.account_soon(),
            "parts": self._variables.send_parts,
            "find": self._variables.send_found,
            "sum": self._variables.sum_soon,
            "why": self._variables.explain_soon,
            "release": self._variables.release_soon,
            "process": self._processes.report_soon,
            "poll": lambda _: self._outgoing.send_kept(),
            "plotly": lambda _: self._send_plotly(),
        }
        super().__init__(
            _esm=read_esm(),
            _css=read_css(),
            polls=self._outgoing.is_polled,
            dashboard_id=uuid.uuid4().hex,
            notebook=_identify_notebook(),
        )
        self._is_made = True
        self.on_msg(self._handle_message)
        self._send_plotly()
        self._page.guard(self._send_snapshot)

    def take_snapshot(self) -> Message | None:
        """Return the state that goes with the widget: enough to draw at once.

        ``None`` while the widget is made, and if it can't be read: a page asks for the states of
        all widgets at once, and the user's own must not fail with ours.
        """
        if not self._is_made:
            return None
        try:
            return {
                **self._feed.take_snapshot(),
                "use": self._use.describe(),
                "watches": self._is_watching,
            }
        except Exception as exc:  # noqa: BLE001 - shown once; the page draws what comes later
            self._report_failure("reading the dashboard's state", exc)
            return None

    # -- Showing it --------------------------------------------------------------------------------

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """Return the live view alone: the static copy is an output of its own."""
        bundle = super()._repr_mimebundle_(**kwargs)
        if bundle is None:
            return None
        data, metadata = bundle
        return {**data, "text/plain": ""}, metadata

    def _ipython_display_(self) -> None:
        self.show()

    def expect_view(self) -> None:
        """Sample for a view that is about to be shown elsewhere than in an output."""
        self._feed.expect_view()

    def show(self, *, is_beside: bool = False) -> None:
        """Show one more view, and below it the static copy for a page without a kernel.

        Args:
            is_beside: pages with JupyterLab's panel open it, and show where the dashboard is in the
                place of the view.
        """
        bundle = None
        if not self._is_closed and hasattr(get_ipython(), "kernel"):
            bundle = self._repr_mimebundle_()
        if bundle is None:
            _display(self._report_static())
            return
        self._feed.expect_view()
        data, metadata = bundle
        output = self._live_output
        if is_beside:
            self._session.attach(LabLink).show()
            data = {SIDE_MIME: {"dashboard_id": self.dashboard_id}, **data}
            output = self._side_output
        output.display(data, metadata=metadata, raw=True)
        self._copy_output.display(self._describe_copy(), raw=True)
        self._has_outputs = True

    def _describe_copy(self) -> dict[str, str]:
        static = self._report_static()
        copy_class = f"gmw-copy-{self.dashboard_id}"
        # The view, or the note that it is beside the notebook, makes the copy needless.
        style = _COPY_STYLE.substitute(copy=copy_class, view=".gmd,.gml-note")
        html = f'<div class="{copy_class}"><style>{style}</style>{static.html}</div>'
        return {"text/html": html, "text/plain": static.text}

    def _report_static(self) -> Report:
        now = report_stat(self._monitor.hardware.read_devices())
        ledger = self._monitor.ledger
        cells = report_ledger(
            ledger.records,
            dropped=ledger.dropped,
            n_shown=10,
            leaks=self._growth.list_leaks_by_cell(),
        )
        taken = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self._monitor.clock.wall()))
        title = f"Snapshot of the dashboard, {taken}. Run %memdash for the live view."
        return Report((Note(title), *now.blocks, *cells.blocks))

    def _update_copies_soon(self) -> None:
        """Bring the static copies up to date when the cells have paused, if a page has any."""
        if self._has_outputs and self._feed.has_views and not self._copies_soon:
            self._copies_soon = True
            self._page.run_when_idle(self._update_copies, CELL_PAUSE_S)

    def _update_copies(self) -> None:
        self._copies_soon = False
        if not self._is_closed:
            self._copy_output.update(self._describe_copy(), raw=True)

    def close(self) -> None:
        """Stop, and leave the static copy in the outputs. May be called twice."""
        try:
            if not self._is_closed:
                self._is_closed = True
                self._feed.close()
                self._listening.close()
                self._leave_copies()
        finally:
            super().close()

    def _leave_copies(self) -> None:
        """Show the copy alone in every output of the dashboard."""
        if not self._has_outputs:
            return
        self._has_outputs = False
        static = self._report_static()
        self._copy_output.update({"text/html": static.html, "text/plain": static.text}, raw=True)
        for output in (self._live_output, self._side_output):
            output.update(NOTHING, raw=True)

    # -- Messages ----------------------------------------------------------------------------------

    def _handle_message(self, _widget: object, content: Any, _buffers: object) -> None:
        with self._outgoing.answering():
            self._page.guard(lambda: self._answers[content["kind"]](content))

    def _hear_view(self, request: Message) -> None:
        self._feed.hear(
            request["view"],
            visible=request["visible"],
            variables=request["variables"],
            device=request["device"],
            processes=request.get("processes", False),
        )
        if request["snapshot"]:
            self._send_snapshot(request["since_s"])
        if request["list"]:
            self._variables.list_soon()
        if request["look"]:
            self._device.look_soon()
        if self._feed.shows_processes:
            self._processes.look_soon()

    def _send_plotly(self) -> None:
        self._page.send({"kind": "plotly"}, [read_plotly()])

    def _send_snapshot(self, since_s: float | None = None) -> None:
        self._feed.send_snapshot(since_s)
        self._page.send({"kind": "uses", **self._use.describe()})
        self._page.send({"kind": "watching", "watches": self._is_watching})

    def _send_use(self) -> None:
        if self._use.send():
            self._device.send_children()

    # -- Processes that are watched ----------------------------------------------------------------

    @property
    def _is_watching(self) -> bool:
        return bool(self._watched.sources)

    def _note_watching(self) -> None:
        """Show the Processes tab where something is watched, and hide it where nothing is."""
        self._page.send({"kind": "watching", "watches": self._is_watching})

    def note_change(self) -> None:
        """Refresh what shows the user's objects, after a cell or a release."""
        self._variables.note_change()
        if self._feed.shows_variables:
            self._variables.list_soon(CELL_PAUSE_S)
        self._device.note_change()
        self._update_copies_soon()
