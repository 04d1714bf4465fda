"""What the live chart sends to the page, on simulated GPUs."""

from __future__ import annotations

import gc
import json
import re
import sys
from typing import Any, NoReturn

import pytest

from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.backends.replay import ReplayBackend
from gpumemwidget.backends.script import Step
from gpumemwidget.errors import BackendError
from gpumemwidget.jupyter.live import LiveChart
from gpumemwidget.measure.monitor import Monitor
from gpumemwidget.records import Sample
from tests.clock import ManualClock

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

    def __init__(self, **options: Any) -> None:
        self.clock = ManualClock(now_s=10.0)
        self.backend = ReplayBackend.from_script(_STEPS)
        self.failures: list[str] = []
        self.monitor = Monitor(
            Hardware([self.backend]), clock=self.clock, on_failure=self.failures.append
        )
        self.backend.playback.advance()
        self.chart = LiveChart(self.monitor, execution_count=7, **options)
        self.sent: list[dict[str, Any]] = []
        self.chart.send = lambda message, _buffers: self.sent.append(message)
        self.monitor.add_listener(self.chart)

    def start(self) -> None:
        self.monitor.start_cell(execution_count=7, cell_id=None, source="train()")

    def sample(self) -> None:
        """The script goes on by an event in a tenth of a second, and the sampler sees it."""
        self.backend.playback.advance()
        self.clock.advance(0.1)
        sample = Sample(self.clock.now(), self.monitor.hardware.read())
        self.monitor.history.append(sample)
        self.chart.on_samples([sample])


@pytest.fixture
def session(request: pytest.FixtureRequest) -> Any:
    session = _Session(**getattr(request, "param", {}))
    yield session
    session.chart.close()
    session.monitor.close()
    assert session.failures == []


def test_each_sample_is_one_small_message(session: _Session) -> None:
    """The first one also tells what stood at the start."""
    session.start()

    session.sample()

    (message,) = session.sent
    assert message == {
        "before": [[100 * _MIB, 100 * _MIB]],
        "point": [0.1, [120 * _MIB, 120 * _MIB, 120 * _MIB, 120 * _MIB, ""]],
    }
    assert len(json.dumps(message)) < 200


def test_what_was_before_the_cell_is_no_point_of_it(session: _Session) -> None:
    """The end of the cell before comes with the first tick."""
    before = Sample(session.clock.now(), session.monitor.hardware.read())
    session.clock.advance(1.0)
    session.start()
    start = Sample(session.clock.now(), session.monitor.hardware.read())

    session.chart.on_samples([before, start])

    assert [message["point"][0] for message in session.sent] == [0.0]


def test_a_device_that_is_first_touched_in_the_cell_joins(session: _Session) -> None:
    """It began at 0; the page gets the report's outline anew before the point that has it."""
    session.start()
    session.sample()
    session.sent.clear()

    session.sample()

    outline, point = session.sent
    assert [device["name"] for device in outline["report"]["devices"]] == ["cuda:0", "cuda:1"]
    assert [device["before"] for device in outline["report"]["devices"]] == [
        [100 * _MIB, 100 * _MIB],
        [0, 0],
    ]
    assert [each[0] for each in point["point"][1:]] == [120 * _MIB, 50 * _MIB]


@pytest.mark.parametrize("session", [{"device": "cuda:0"}], indirect=True)
def test_a_chart_of_one_device_tells_of_no_other(session: _Session) -> None:
    session.start()
    session.sample()
    session.sample()

    assert [len(message["point"]) for message in session.sent] == [2, 2]
    assert not any("report" in message for message in session.sent)


def test_the_outline_has_what_the_page_looks_for(session: _Session) -> None:
    """live.js finds its places by these: five numbers a counter, a figure with both lines."""
    session.start()
    session.sample()
    session.sample()

    html = session.chart.report["html"]
    rows = [row for row in re.findall(r"<tr>.*?</tr>", html) if "<td" in row]
    assert [row.count("<td") for row in rows] == [5, 5, 5, 5]
    assert re.findall(r"<th[^>]*>(\w[^<]*)</th>", html)[:3] == ["memory", "before", "after"]
    figures = re.findall(r"<figure.*?</figure>", html)
    assert len(figures) == 2
    for figure in figures:
        for part in ('path class="gmw-a"', 'path class="gmw-v"', 'path class="gmw-p"'):
            assert figure.count(part) == 1
        assert figure.count('<i class="gmw-p"></i>peak ') == 1
        assert len(re.findall(r"</svg><span>[^<]*</span> <span>[^<]*</span>", figure)) == 1
        assert 'class="gmw-x"' in figure


def test_a_page_that_joins_late_gets_what_was_drawn(session: _Session) -> None:
    session.start()
    session.sample()
    session.sample()
    session.sample()

    state = session.chart.get_state(["points"])

    points = state["points"]
    assert [point[0] for point in points] == [0.2, 0.3]
    assert points[-1][1][:2] == [100 * _MIB, 120 * _MIB]


def test_a_closed_chart_says_nothing_and_leaves_no_script(session: _Session) -> None:
    """A late sample is dropped; what a front end saves of it is next to nothing."""
    session.start()
    session.chart.close()

    session.sample()

    assert session.sent == []
    assert session.chart.get_state(["_esm", "report"]) == {
        "_esm": "export default {}",
        "report": {},
    }


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
