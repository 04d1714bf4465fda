"""What the live chart sends to the page, on simulated GPUs."""

from __future__ import annotations

import dataclasses
import gc
import sys
from typing import Any, NoReturn

import pytest

from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.errors import BackendError
from gpumemwidget.model.devices import Sample
from gpumemwidget.recording.monitor import Monitor
from gpumemwidget.testing import RecordingPlayer, ReplayBackend, Step, play_script
from gpumemwidget.widgets.frontend import read_plotly
from gpumemwidget.widgets.live_chart import LiveChart
from tests.clock import ManualClock
from tests.jupyter.rows import unpack_rows, unpack_update

_MIB = 1024**2
_STEPS = [
    Step(1, "touch", 0),
    Step(1, "allocate", 0, "weights", 100 * _MIB),
    Step(2, "allocate", 0, "batch", 20 * _MIB),
    Step(3, "touch", 1),
    Step(3, "allocate", 1, "more", 50 * _MIB),
    Step(4, "free", 0, "batch"),
]


class _Session:
    """A monitor on a script, and a chart whose messages are kept."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = ManualClock(now_s=10.0)
        self.backend = ReplayBackend(RecordingPlayer(play_script(_STEPS)))
        self.failures: list[str] = []
        self.monitor = Monitor(
            Hardware([self.backend]), clock=self.clock, on_failure=self.failures.append
        )
        # The thread would sample by the machine's time; the tests say themselves when.
        monkeypatch.setattr(self.monitor, "want_samples", lambda _who: None)
        self.backend.player.advance()
        self.chart = LiveChart(self.monitor, execution_count=7)
        self.sent: list[dict[str, Any]] = []
        self.chart.send = lambda message, buffers: self.sent.append(message | {"buffers": buffers})

    def start(self) -> None:
        self.monitor.start_cell(execution_count=7, cell_id=None, source="train()")

    def sample(self) -> Sample:
        """The script goes on by an event in a tenth of a second, and the sampler sees it."""
        self.backend.player.advance()
        return self.sample_again(0.1)

    def sample_again(self, after_s: float) -> Sample:
        self.clock.advance(after_s)
        sample = Sample(self.clock.now(), self.monitor.hardware.read())
        self.monitor.history.append(sample)
        self.monitor.sampled.call([sample])
        return sample


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Any:
    session = _Session(monkeypatch)
    yield session
    session.chart.close()
    session.monitor.close()
    assert session.failures == []


def test_the_dashboards_messages_are_sent(session: _Session) -> None:
    """The cell's start, then its samples as rows; numbered without a gap from the state on."""
    number = session.chart.get_state(["snapshot"])["snapshot"]["seq"]
    session.start()

    session.sample()

    started, devices, rows = session.sent
    assert (started["kind"], started["seq"], started["cell"]["start_s"]) == (
        "started",
        number + 1,
        10,
    )
    assert (devices["kind"], devices["seq"]) == ("devices", number + 2)
    assert (rows["kind"], rows["devices"], rows["peaks_are"]) == ("rows", ("cuda:0",), ["exact"])
    assert unpack_update(rows["buffers"][0], 1) == (
        number + 3,
        10.0,
        [(10.1, [(120 * _MIB, 120 * _MIB, 120 * _MIB, 120 * _MIB)])],
    )


def test_a_page_that_joins_late_gets_what_was_drawn(session: _Session) -> None:
    """The running cell, and every sample since its start; of the time before there is none."""
    session.sample_again(1.0)
    session.clock.advance(1.0)
    session.start()
    session.sample()
    session.sample()

    snapshot = session.chart.get_state(["snapshot"])["snapshot"]

    assert snapshot["running"]["start_s"] == 12.0
    assert snapshot["columns"] == ("cuda:0", "cuda:1")
    assert snapshot["peaks_are"] == ["exact", "exact"]
    times = [time_s for time_s, _ in unpack_rows(snapshot["data"], 2)]
    assert times == pytest.approx([12.0, 12.1, 12.2])


def test_a_page_that_joins_late_gets_the_extremes(session: _Session) -> None:
    """Of thousands of samples some hundreds, with the one highest and the one lowest of each."""
    session.start()
    reading = session.monitor.hardware.read()[0]
    for number in range(3000):
        session.clock.advance(0.1)
        extreme = {1234: 90 * _MIB, 2345: -90 * _MIB}.get(number, 0)
        device = dataclasses.replace(
            reading,
            allocated_bytes=100 * _MIB + extreme,
            reserved_bytes=200 * _MIB + max(0, extreme),
        )
        session.monitor.history.append(Sample(session.clock.now(), (device,)))

    rows = unpack_rows(session.chart.get_state(["snapshot"])["snapshot"]["data"], 1)

    assert len(rows) < 1500
    allocated, reserved, *_ = zip(*(device for _, (device,) in rows), strict=True)
    assert {10 * _MIB, 100 * _MIB, 190 * _MIB} <= set(allocated)
    assert max(reserved) == 290 * _MIB


def test_the_state_is_sent_again_for_a_page_that_was_not_ready(
    session: _Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Soon after the start, and seldom later: no page can ask for it while the cell runs."""
    sent_s: list[float] = []

    def send_state(key: str) -> None:
        if key == "snapshot":
            sent_s.append(session.clock.now() - 10)

    monkeypatch.setattr(session.chart, "send_state", send_state)
    session.start()

    for _ in range(1000):
        session.sample_again(0.5)

    assert sent_s[:4] == [0.5, 1.0, 2.0, 4.0]
    assert len(sent_s) == 10


def test_a_page_that_missed_a_message_gets_the_state(session: _Session) -> None:
    """From the moment on that it knows."""
    session.start()
    session.sample()
    session.sample()
    session.sent.clear()

    session.chart._handle_custom_msg({"kind": "snapshot", "since_s": 10.15}, [])

    (snapshot,) = session.sent
    assert snapshot["kind"] == "snapshot"
    times = [time_s for time_s, _ in unpack_rows(snapshot["buffers"][0], 2)]
    assert times == pytest.approx([10.2])


def test_the_picture_comes_when_the_cell_has_run_for_a_moment(session: _Session) -> None:
    """plotly.js is sent once, and never for a short cell."""
    session.start()
    session.sample_again(0.9)
    assert session.chart.plotly == b""

    session.sample_again(0.1)

    assert session.chart.plotly == read_plotly()


def test_copies_cost_a_bounded_share_of_a_long_cell(session: _Session) -> None:
    """Each five seconds at first, each tenth of its time later."""
    copied: list[float] = []
    session.chart.on_copy = lambda _bundle: copied.append(session.clock.now() - 10)
    session.start()
    for _ in range(400):
        session.sample_again(1.0)

    assert copied[:4] == [5, 10, 15, 20]
    assert len(copied) < 40
    assert copied[-1] - copied[-2] > 30


def test_a_closed_chart_says_nothing_and_leaves_no_script(session: _Session) -> None:
    """A late sample is dropped; what a front end saves of it is next to nothing."""
    session.start()
    session.sample_again(2.0)
    session.chart.close()
    session.sent.clear()

    session.sample()

    assert session.sent == []
    state = session.chart.get_state(["script", "css", "plotly"])
    assert state == {"script": "", "css": "", "plotly": b""}


def test_a_chart_that_could_not_be_made_goes_silently(
    session: _Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A widget is closed when it is collected, where an exception would be printed."""
    printed: list[object] = []

    def fail() -> NoReturn:
        raise BackendError("the driver is gone")

    with monkeypatch.context() as patch:
        patch.setattr(sys, "unraisablehook", printed.append)
        patch.setattr(session.monitor.hardware, "read", fail)
        with pytest.raises(BackendError):
            LiveChart(session.monitor, execution_count=8)
        gc.collect()

    assert printed == []
