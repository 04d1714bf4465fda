"""The dashboard: a live plot, the cells, the variables with their release, whole devices.

It is an anywidget that draws with plotly.js in the browser. The kernel sends each sample as a small
binary message; a page that joins late, or is loaded anew, gets all that it needs with the widget's
state, which is put together when somebody asks for it.
"""

from __future__ import annotations

import contextlib
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import anywidget
import traitlets
from IPython.core.display_functions import DisplayHandle, display
from IPython.core.getipython import get_ipython

from gpumemwidget.jupyter.devicepanel import DevicePanel
from gpumemwidget.jupyter.feed import OPENING, Feed
from gpumemwidget.jupyter.frontend import read_css, read_esm, read_plotly
from gpumemwidget.jupyter.messages import Message, describe_failure
from gpumemwidget.jupyter.variables import VariablesPanel
from gpumemwidget.jupyter.wire import Wire
from gpumemwidget.measure.monitor import Monitor
from gpumemwidget.owners.base import Shell
from gpumemwidget.records import CellRecord, Sample
from gpumemwidget.report.report import Report, report_ledger, report_stat

__all__ = ["Dashboard", "Session"]

#: How many outputs that show the dashboard are remembered, to be made static when it closes.
_MOST_OUTPUTS = 20
#: IPython publishes no types for these.
_display: Any = display
_new_handle: Any = DisplayHandle
#: How many cells the static side of the dashboard shows.
_N_STATIC_CELLS = 10


class Session(Protocol):
    """What the dashboard needs of the extension."""

    monitor: Monitor
    shell: Shell


def _snapshot_to_json(_value: object, widget: Dashboard) -> Message | None:
    return widget.take_snapshot()


class Dashboard(anywidget.AnyWidget):
    """The session's dashboard. It may be shown any number of times; all views are live.

    Args:
        session: the monitor that it draws and the shell whose names it lists.
    """

    _esm = traitlets.Unicode().tag(sync=True)
    _css = traitlets.Unicode().tag(sync=True)
    #: plotly.js, compressed: ``static/unpack.js`` makes it a module.
    plotly = traitlets.Bytes().tag(sync=True)
    #: Which kernel's dashboard a page's views belong to.
    dashboard_id = traitlets.Unicode().tag(sync=True)
    #: The state for a page that joins; made anew each time that it is asked for.
    snapshot = traitlets.Any().tag(sync=True, to_json=_snapshot_to_json)
    #: Whether messages from the page are heard while a cell runs.
    hears_in_mid_cell = traitlets.Bool(False).tag(sync=True)

    def __init__(self, session: Session) -> None:
        self._is_closed = False
        self._outputs: deque[Any] = deque(maxlen=_MOST_OUTPUTS)
        self._monitor = session.monitor
        self._feed = Feed(session.monitor, Wire(self).send, on_hearing=self._note_hearing)
        self._variables = VariablesPanel(
            session.monitor, session.shell, self._send_all, guard=self._guard_call
        )
        self._device = DevicePanel(
            session.monitor,
            session.shell,
            self._send_all,
            guard=self._guard_call,
            seen=self._feed.list_devices_seen,
        )
        self._watcher = _Watcher(self.note_change, self._device.tell_live)
        session.monitor.add_listener(self._watcher)
        super().__init__(dashboard_id=uuid.uuid4().hex)
        self.on_msg(self._handle_message)

    @traitlets.default("_esm")
    def _default_esm(self) -> str:
        return read_esm()

    @traitlets.default("_css")
    def _default_css(self) -> str:
        return read_css()

    @traitlets.default("plotly")
    def _default_plotly(self) -> bytes:
        return read_plotly()

    def take_snapshot(self) -> Message | None:
        """The state that goes with the widget: enough to draw at once.

        ``None`` where it can't be had: a page asks for the states of all widgets at once, and the
        user's own must not go down with ours.
        """
        try:
            return self._feed.take_snapshot(OPENING)
        except Exception as exc:  # noqa: BLE001 - shown once; the page draws what comes later
            failure = describe_failure(exc)
            self._monitor.report_failure(f"The dashboard's state could not be read: {failure}")
            return None

    # -- Showing it --------------------------------------------------------------------------------

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """The live view, and beside it what a saved notebook shows without a kernel."""
        bundle = super()._repr_mimebundle_(**kwargs)
        if bundle is None:
            return None
        data, metadata = bundle
        static = self._report_static()
        return {**data, "text/html": static.html, "text/plain": static.text}, metadata

    def _ipython_display_(self) -> None:
        """Show one more view; its output is remembered, so that it can become static."""
        if self._is_closed:
            _display(self._report_static())
            return
        bundle = self._repr_mimebundle_()
        if bundle is None:
            return
        self._feed.expect_view()
        handle = _new_handle()
        handle.display(bundle[0], metadata=bundle[1], raw=True)
        if hasattr(get_ipython(), "kernel"):
            # A terminal would print the update as another output.
            self._outputs.append(handle)

    def _report_static(self) -> Report:
        hardware = self._monitor.hardware
        ledger = self._monitor.ledger
        now = report_stat(hardware.read_devices())
        cells = report_ledger(ledger.records, dropped=ledger.dropped, last=_N_STATIC_CELLS)
        title = "Memory dashboard, as it was. %memdash shows the live one."
        html = f'<div><p style="margin:0 0 8px;opacity:.75">{title}</p>{now.html}{cells.html}</div>'
        return Report(text=f"{title}\n\n{now.text}\n\n{cells.text}", html=html)

    def close(self) -> None:
        """Stop, and leave the static side in the outputs. May be called twice."""
        if not self._is_closed:
            self._is_closed = True
            self._feed.close()
            self._monitor.remove_listener(self._watcher)
            try:
                self._make_static()
            finally:
                super().close()
        else:
            super().close()

    def _make_static(self) -> None:
        outputs = list(self._outputs)
        self._outputs.clear()
        if not outputs:
            return
        static = self._report_static()
        for handle in outputs:
            handle.update({"text/html": static.html, "text/plain": static.text}, raw=True)

    # -- Messages ----------------------------------------------------------------------------------

    def _handle_message(self, _widget: object, content: Message, _buffers: object) -> None:
        with self._guard():
            self._answer(content)

    def _answer(self, content: Message) -> None:
        kind = content.get("kind")
        if kind == "view":
            self._hear_view(content)
        elif kind == "gone":
            self._feed.lose(content["view"], page_left=content["page_left"])
        elif kind == "snapshot":
            self._feed.send_snapshot(content.get("since_s"))
        elif kind == "variables":
            self._variables.list_soon()
        elif kind == "seen":
            self._variables.note_seen(request=content["id"])
        elif kind == "account":
            self._variables.account_soon()
        elif kind == "parts":
            self._variables.send_parts(
                key=content["key"], node=content["node"], start=content["start"]
            )
        elif kind == "find":
            self._variables.send_found(key=content["key"], text=content["text"])
        elif kind == "sum":
            self._variables.sum_soon(request=content["id"], names=content["names"])
        elif kind == "release":
            self._variables.release_soon(
                request=content["id"], names=content["names"], keep=content["keep"]
            )

    def _hear_view(self, content: Message) -> None:
        self._feed.hear(
            content["view"],
            visible=content["visible"],
            variables=content["variables"],
            device=content.get("device"),
        )
        if content.get("snapshot"):
            self._feed.send_snapshot(content.get("since_s"))
            self._variables.send_unseen()
        if content.get("list"):
            self._variables.list_soon()
        if content.get("look"):
            self._device.look_soon()

    def _send_all(self, message: Message) -> None:
        self.send(message)

    def _note_hearing(self) -> None:
        self.hears_in_mid_cell = True

    def note_change(self) -> None:
        """What the user holds may have changed: the views that show it are told."""
        self._variables.note_change()
        if self._feed.shows_variables:
            self._variables.list_after_cell()
        self._device.note_change()

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        """Show a failure in the views: what a widget's callback raises is seen nowhere else."""
        try:
            yield
        except (Exception, KeyboardInterrupt) as exc:  # noqa: BLE001 - shown
            self._send_all({"kind": "trouble", "message": describe_failure(exc)})

    def _guard_call(self, action: Callable[[], None]) -> None:
        with self._guard():
            action()


class _Watcher:
    """Tells that a cell has ended, and that time goes by."""

    def __init__(self, on_end: Callable[[], None], on_tick: Callable[[], None]) -> None:
        self._on_end = on_end
        self._on_tick = on_tick

    def on_cell_started(self, cell: object) -> None:
        """Nothing: the feed tells the views."""

    def on_cell_ended(self, record: CellRecord) -> None:  # noqa: ARG002
        """Refresh what a cell may have changed."""
        self._on_end()

    def on_samples(self, samples: Sequence[Sample]) -> None:  # noqa: ARG002
        """The feed sends them; what is live beside them goes with their clock."""
        self._on_tick()
