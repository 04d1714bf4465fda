"""Show a chart in the output of a ``%%memtrace`` cell while the cell runs.

The view has the table of the report that follows, and the dashboard's own chart. A ``Feed`` sends
the messages that the dashboard gets too; a page that joins late gets the samples since the start.

This module brings ipywidgets and anywidget; it is imported when the first chart is shown.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import anywidget
import traitlets

from gpumemwidget.model.cells import CellDevice, CellRecord, Span
from gpumemwidget.model.devices import Reading, Sample
from gpumemwidget.recording.monitor import Monitor, RunningCell
from gpumemwidget.recording.thinning import thin_samples
from gpumemwidget.report.cell import report_unfinished
from gpumemwidget.report.render.html import read_sheet
from gpumemwidget.widgets.feed import OPENING, Feed
from gpumemwidget.widgets.frontend import read_css, read_esm, read_plotly
from gpumemwidget.widgets.messages import CHART_REQUESTS, Message, check_request, describe_failure
from gpumemwidget.widgets.static_copies import wrap_copy

__all__ = ["LiveChart"]

#: Runs the script that a trait holds. The widget's own script stays the same to the end: anywidget
#: writes a line to the browser's console for each change of it.
_LOADER = """\
export default () => {
  let chart = null;
  return {
    async initialize(given) {
      const blob = new Blob([given.model.get("script")], { type: "text/javascript" });
      const url = URL.createObjectURL(blob);
      try {
        chart = (await import(url)).default();
      } finally {
        URL.revokeObjectURL(url);
      }
      chart.initialize(given);
    },
    render: (given) => chart.render(given),
  };
};
"""
#: Seconds after the start at which plotly.js is sent: a shorter cell has the table alone.
_PICTURE_AFTER_S = 1.0
#: Seconds between two copies of the chart, for a page whose kernel has died. Of a long cell they
#: are made less often, so that all of them together cost a bounded share of its time.
_COPY_EVERY_S = 5.0
_COPY_EVERY_SHARE = 0.1
#: Seconds after the start at which the state is sent first; then it is sent at twice the time.
#: Messages to a widget whose script is being loaded are lost, and a busy kernel can't be asked for
#: them; its state is kept.
_STATE_AFTER_S = 0.25
#: Maximum number of samples that a copy is drawn from.
_MOST_COPIED = 1000


def _snapshot_to_json(_value: object, widget: LiveChart) -> Message | None:
    return widget.take_snapshot()


class LiveChart(anywidget.AnyWidget):
    """The live chart of a traced cell.

    Args:
        monitor: who samples the memory.
        execution_count: of the cell.
        device: the one to show; ``None`` for all.
    """

    _esm = _LOADER

    #: The module that draws the chart, and its style sheet.
    script = traitlets.Unicode().tag(sync=True)
    css = traitlets.Unicode().tag(sync=True)
    #: The widget of the module.
    widget = traitlets.Unicode("trace").tag(sync=True)
    #: plotly.js, compressed, once the cell has run for a moment.
    plotly = traitlets.Bytes().tag(sync=True)
    execution_count = traitlets.Int(None, allow_none=True).tag(sync=True)
    device = traitlets.Unicode(None, allow_none=True).tag(sync=True)
    #: The class of the static copy below the chart, which a live view hides.
    copy_class = traitlets.Unicode().tag(sync=True)
    #: The state for a page that joins; made anew each time that it is asked for.
    snapshot = traitlets.Any().tag(sync=True, to_json=_snapshot_to_json)

    _is_closed = True

    def __init__(
        self, monitor: Monitor, *, execution_count: int | None, device: str | None = None
    ) -> None:
        self._monitor = monitor
        self._start_s = monitor.clock.now()
        self._before: tuple[Reading, ...] = monitor.hardware.read()
        #: Called with each new static copy, on the sampler's thread.
        self.on_copy: Callable[[dict[str, str]], None] | None = None
        self._copied_s = self._start_s
        self._state_due_s = 0.0
        self._feed = Feed(monitor, self._tell_views)
        # Before a page knows the first message's number: what comes after that has no gap.
        self._feed.expect_view()
        self._listening = ExitStack()
        self._listening.callback(self._feed.close)
        self._listening.callback(monitor.cell_started.add(self._begin))
        self._listening.callback(monitor.sampled.add(self._follow))
        self._is_closed = False
        super().__init__(
            script=read_esm(),
            css=read_sheet("base") + read_sheet("table") + read_css(),
            execution_count=execution_count,
            device=device,
            copy_class=f"gmw-copy-{uuid.uuid4().hex}",
        )
        self.on_msg(self._handle_message)

    def take_snapshot(self) -> Message | None:
        """Return the state for a page that joins: the cell, with samples since its start.

        ``None`` where it can't be had: a page asks for the states of all widgets at once, and the
        user's own must not go down with ours.
        """
        try:
            return self._feed.take_snapshot(OPENING, since_s=self._start_s)
        except Exception as exc:  # noqa: BLE001 - shown once; the page draws what comes later
            failure = describe_failure(exc)
            self._monitor.report_failure(f"The live chart's state could not be read: {failure}")
            return None

    def close(self) -> None:
        """End the chart on every page. May be called twice."""
        # A widget that goes is closed once more, also one whose making failed.
        if self._is_closed:
            return
        self._is_closed = True
        self._listening.close()
        # nbclient saves the state of closed widgets too: leave it nothing to save.
        self.script = ""
        self.css = ""
        self.plotly = b""
        # ipywidgets makes a model for the layout beside each widget and leaves it open.
        layout = self.layout
        super().close()
        layout.close()

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """Return the chart's widget, with an empty text where widgets can't be shown."""
        bundle = super()._repr_mimebundle_(**kwargs)
        if bundle is None:
            return None
        data, metadata = bundle
        return {**data, "text/plain": ""}, metadata

    def describe_copy(self, sample: Sample | None = None) -> dict[str, str]:
        """Return what a page shows in the chart's place when the kernel is gone, by its type.

        Args:
            sample: the last one; ``None`` before there is any.
        """
        now = self._before if sample is None else sample.readings
        before = {reading.device: reading for reading in self._before}
        record = CellRecord(
            execution_count=self.execution_count,
            cell_id=None,
            first_line="",
            started_at=0.0,
            start_s=self._start_s,
            duration_s=0.0 if sample is None else max(0.0, sample.time_s - self._start_s),
            status="interrupted",
            devices=tuple(
                _compare(before.get(reading.device, reading), reading)
                for reading in now
                if self.device in (None, reading.device)
            ),
        )
        samples = thin_samples(self._monitor.history.samples(since_s=self._start_s), _MOST_COPIED)
        copied = report_unfinished(record, samples)
        html = wrap_copy(copied.html, copy_class=self.copy_class, view_class="gmw-live")
        return {"text/html": html, "text/plain": copied.text}

    # -- What the monitor says ---------------------------------------------------------------------

    def _begin(self, cell: RunningCell) -> None:
        self._start_s = self._copied_s = cell.start_s
        self._state_due_s = _STATE_AFTER_S
        self._before = cell.before or self._before

    def _follow(self, samples: Sequence[Sample]) -> None:
        """Send the state and the picture's script, and renew the copy, on the sampler's thread."""
        now_s = samples[-1].time_s
        elapsed_s = now_s - self._start_s
        if elapsed_s >= self._state_due_s:
            self._state_due_s = 2 * elapsed_s
            self.send_state("snapshot")
        if elapsed_s >= _PICTURE_AFTER_S and not self.plotly:
            self.plotly = read_plotly()
        is_due = now_s - self._copied_s >= max(_COPY_EVERY_S, _COPY_EVERY_SHARE * elapsed_s)
        if self.on_copy is not None and is_due:
            self._copied_s = now_s
            self.on_copy(self.describe_copy(samples[-1]))

    # -- Messages ----------------------------------------------------------------------------------

    def _tell_views(self, message: Message, buffers: Sequence[bytes]) -> None:
        self.send(message, list(buffers))

    def _handle_message(self, _widget: object, content: object, _buffers: object) -> None:
        """Send the state anew to a page that has missed a message."""
        request = check_request(content, CHART_REQUESTS)
        self._feed.send_snapshot(request.get("since_s") or self._start_s)


def _compare(before: Reading, now: Reading) -> CellDevice:
    """Return the change of a device between two readings."""
    return CellDevice(
        device=now.device,
        allocated=Span(before.allocated_bytes, now.allocated_bytes, now.allocated_peak_bytes),
        reserved=Span(before.reserved_bytes, now.reserved_bytes, now.reserved_peak_bytes),
        peak_is=now.peak_is,
        num_alloc_retries=0,
        num_ooms=0,
    )
