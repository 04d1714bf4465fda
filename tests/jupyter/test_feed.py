"""What the dashboard's views are sent, and when nothing is."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest

from gpumemwidget.backends.cuda.backend import CudaBackend
from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.model.devices import Reading, Sample
from gpumemwidget.model.leaks import Leak
from gpumemwidget.recording.monitor import Monitor
from gpumemwidget.testing import SimulatedGpus, simulate_torch
from gpumemwidget.widgets.feed import _MAX_ROWS_BYTES, Feed, pack_rows
from tests.clock import ManualClock
from tests.jupyter.machine import has_run_meanwhile
from tests.jupyter.page import unpack_rows
from tests.report.examples import make_leak

_MIB = 1024**2


class _Session:
    """A monitor of two GPUs, of which one is in use, and a feed whose messages are kept."""

    def __init__(self) -> None:
        self.clock = ManualClock(now_s=10.0, wall_s=5000.0)
        self.gpus = SimulatedGpus(2)
        self.gpus.allocate(100 * _MIB)
        self.failures: list[str] = []
        self.monitor = Monitor(
            Hardware([CudaBackend(simulate_torch(self.gpus))]),
            clock=self.clock,
            on_failure=lambda what, exc: self.failures.append(f"{what}: {exc}"),
        )
        self.sent: list[dict[str, Any]] = []
        self.leaks: dict[float, list[Leak]] = {}
        self.feed = Feed(self.monitor, self._keep, lambda: self.leaks)

    def see(self, view: str = "a", *, visible: bool = True, variables: bool = False) -> None:
        self.feed.hear(view, visible=visible, variables=variables)

    def sample(self, seconds: float = 0.1) -> None:
        """Time passes and the sampler takes a sample."""
        self.clock.advance(seconds)
        sample = Sample(self.clock.now(), self.monitor.hardware.read())
        self.monitor.history.append(sample)
        self.feed.send_samples([sample])

    def run_cell(self) -> None:
        self.monitor.start_cell(execution_count=3, cell_id="c", source="train()")
        self.clock.advance(2.0)
        self.monitor.end_cell(status="ok")

    def take_sent(self) -> list[dict[str, Any]]:
        sent, self.sent = self.sent, []
        return sent

    def _keep(self, message: dict[str, Any], buffers: Sequence[bytes] = ()) -> None:
        self.sent.append({**message, "buffers": buffers})


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Session]:
    session = _Session()
    # The thread would sample by the machine's time; the tests say themselves when.
    monkeypatch.setattr(session.monitor, "want_samples", lambda _who: None)
    yield session
    session.feed.close()
    session.monitor.close()
    assert session.failures == []


def _list_kinds(messages: list[dict[str, Any]]) -> list[str]:
    return [message["kind"] for message in messages]


def test_sample_is_one_row_in_a_binary_message(session: _Session) -> None:
    """Time, allocated, reserved and peak; the first one is preceded by what the devices are."""
    session.see()

    session.sample(0.5)
    session.sample(0.5)

    devices, first, second = session.take_sent()
    assert devices["devices"][0]["device"] == "cuda:0"
    assert first["devices"] == ("cuda:0",)
    assert first["seq"] == devices["seq"] + 1
    assert (first["running_s"], first["wall_offset_s"]) == (None, 4990.0)
    assert unpack_rows(first["buffers"][0], 1) == [(10.5, [(100 * _MIB,) * 4])]
    assert second["seq"] == first["seq"] + 1


def test_new_device_is_told_before_its_first_row(session: _Session) -> None:
    """A GPU that is touched later adds columns."""
    session.see()
    session.sample()
    session.take_sent()

    session.gpus.allocate(50 * _MIB, 1)
    session.sample()

    devices, rows = session.take_sent()
    assert [each["device"] for each in devices["devices"]] == ["cuda:0", "cuda:1"]
    assert rows["devices"] == ("cuda:0", "cuda:1")
    assert len(unpack_rows(rows["buffers"][0], 2)[0][1]) == 2


def test_cell_is_told_at_both_ends(session: _Session) -> None:
    """The running cell at its start, its record at its end."""
    session.see()

    session.run_cell()

    started, ended = session.take_sent()
    assert started["cell"] == {
        "execution_count": 3,
        "first_line": "train()",
        "start_s": 10.0,
        "before": {"cuda:0": [100 * _MIB, 100 * _MIB]},
        "own": False,
        "leaks": [],
    }
    assert ended["record"]["status"] == "ok"
    assert ended["record"]["duration_s"] == 2.0
    assert ended["record"]["devices"] == [
        {
            "device": "cuda:0",
            "change": 0,
            "peak": 100 * _MIB,
            "rise": 0,
            "outside": 0,
            "peak_of": "allocated",
            "peak_is": "exact",
            "crossed": None,
        }
    ]


def test_leak_is_told_while_its_cell_runs_and_stays_with_it(session: _Session) -> None:
    """In words; with the running cell for a view that joins, and with the record."""
    session.see()
    cell = session.monitor.start_cell(execution_count=3, cell_id="c", source="train()")
    session.take_sent()
    leak = make_leak(unit="step", since=12, cell_start_s=cell.start_s)

    session.leaks[cell.start_s] = [leak]
    session.feed.send_leak(leak)
    joined = session.feed.take_snapshot()["running"]
    session.monitor.end_cell(status="ok")

    told, ended = session.take_sent()
    assert told["kind"] == "leak"
    assert told["start_s"] == cell.start_s
    assert told["leak"]["mark"] == "+37.00 MiB a step"
    assert told["leak"]["note"] == "cuda:0 grows 37.00 MiB a step since step 12, from line 7"
    assert told["leak"]["sentence"].startswith("cuda:0 grows 37.00 MiB a step since step 12, for ")
    assert joined["leaks"] == ended["record"]["leaks"] == [told["leak"]]
    assert session.feed.take_snapshot()["cells"][0]["leaks"] == [told["leak"]]


@pytest.mark.parametrize(
    "leave",
    [
        lambda session: session.see(visible=False),
        lambda session: session.feed.lose("a"),
        lambda session: session.feed.close(),
    ],
    ids=["hidden", "closed", "unloaded"],
)
def test_nothing_is_sent_when_nobody_looks(
    session: _Session, leave: Callable[[_Session], None]
) -> None:
    """Neither rows nor cells, and the monitor is told that no samples are wanted."""
    session.see()
    assert session.feed.is_seen
    session.take_sent()

    leave(session)
    session.sample()
    session.run_cell()

    assert session.take_sent() == []
    assert not session.feed.is_seen


def test_snapshot_has_all_that_a_new_page_needs(session: _Session) -> None:
    """Devices, cells, the running cell, the clock and the rows, under the last message's number."""
    session.see()
    session.sample()
    session.run_cell()
    session.monitor.start_cell(execution_count=4, cell_id="d", source="more()")

    snapshot = session.feed.take_snapshot()

    assert snapshot["seq"] == session.take_sent()[-1]["seq"]
    assert snapshot["wall_offset_s"] == 4990.0
    assert [cell["first_line"] for cell in snapshot["cells"]] == ["train()"]
    assert snapshot["running"]["first_line"] == "more()"
    assert snapshot["columns"] == ("cuda:0",)
    times = [time for time, _ in unpack_rows(snapshot["data"], 1)]
    assert times == pytest.approx([10.1, 10.1, 12.1, 12.1])


def test_snapshot_since_a_moment_is_what_came_after(session: _Session) -> None:
    """A view that comes back asks only for what it missed."""
    for _ in range(5):
        session.sample(0.5)

    session.feed.send_snapshot(since_s=11.5)

    (message,) = session.take_sent()
    assert message["kind"] == "snapshot"
    assert message["since_s"] == 11.5
    times = [time for time, _ in unpack_rows(message["buffers"][0], 1)]
    assert times == [11.5, 12.0, 12.5]


def test_snapshot_of_a_long_session_is_bounded(session: _Session) -> None:
    """With the newest sample in it."""
    for _ in range(5000):
        session.clock.advance(0.1)
        session.monitor.history.append(Sample(session.clock.now(), session.monitor.hardware.read()))

    data = session.feed.take_snapshot()["data"]

    assert 0.7 * _MAX_ROWS_BYTES < len(data) <= _MAX_ROWS_BYTES
    assert unpack_rows(data, 1)[-1][0] == session.clock.now()


def test_silent_view_is_lost_when_it_could_be_heard(session: _Session) -> None:
    """A notebook that was closed says nothing; its view counts for a while after a cell's end."""
    session.see()
    session.monitor.start_cell(execution_count=1, cell_id="c", source="train()")
    session.sample(3600.0)
    assert session.feed.is_seen
    session.monitor.end_cell(status="ok")
    session.sample(24.0)
    assert session.feed.is_seen

    session.sample(2.0)

    assert not session.feed.is_seen


def test_expected_view_is_sampled_for_until_it_comes(session: _Session) -> None:
    """On a busy kernel the first word of a view may come an hour after it was shown."""
    session.monitor.start_cell(execution_count=1, cell_id="c", source="%memdash")
    session.feed.expect_view()
    session.monitor.end_cell(status="ok")
    session.monitor.start_cell(execution_count=2, cell_id="d", source="train()")
    session.sample(3600.0)
    assert session.feed.is_seen

    session.monitor.end_cell(status="ok")
    session.see("a")
    session.feed.lose("a")

    assert not session.feed.is_seen


def test_expected_view_that_never_comes_is_given_up(session: _Session) -> None:
    """A notebook that is executed without a front end is not sampled for ever."""
    session.feed.expect_view()

    session.sample(26.0)

    assert not session.feed.is_seen


def test_page_left_in_mid_cell_may_come_back(session: _Session) -> None:
    """Sampling goes on to the cell's end, when a reloaded page can speak; then it is given up."""
    session.see()
    session.monitor.start_cell(execution_count=1, cell_id="c", source="train()")

    session.feed.lose("a")
    session.sample(600.0)

    assert session.feed.is_seen
    session.monitor.end_cell(status="ok")
    session.sample(26.0)
    assert not session.feed.is_seen


def test_limit_that_a_cell_set_is_told(session: _Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the first update after the cell, and not with each."""
    session.see()
    session.sample()
    session.sample()
    assert "devices" not in _list_kinds(session.take_sent()[1:])
    (info,) = session.monitor.hardware.list_devices()
    limited = dataclasses.replace(info, limit_bytes=200 * _MIB)
    monkeypatch.setattr(session.monitor.hardware, "list_devices", lambda: (limited,))

    session.run_cell()
    session.sample()

    devices, rows = session.take_sent()[-2:]
    assert devices["devices"][0]["limit_bytes"] == 200 * _MIB
    assert rows["kind"] == "rows"


@pytest.mark.parametrize("ask", ["take_snapshot", "send_snapshot", "send_samples"])
def test_a_cell_runs_while_a_driver_is_asked(
    session: _Session, monkeypatch: pytest.MonkeyPatch, ask: str
) -> None:
    """A driver may hang: no cell waits for what a view is told of the devices."""
    session.see()
    sample = Sample(10.0, session.monitor.hardware.read())
    session.monitor.history.append(sample)
    work = partial(getattr(session.feed, ask), *[[sample]] * ("samples" in ask))

    assert has_run_meanwhile(monkeypatch, session.monitor.hardware, work, session.run_cell)
    assert _list_kinds(session.take_sent())[:2] == ["started", "ended"]


# -- Rows ------------------------------------------------------------------------------------------


def test_row_holds_a_sample_exactly() -> None:
    """Bytes up to the petabytes are whole numbers in a float64; what was not read is NaN."""
    huge = 2**52 + 1
    readings = (Reading("cuda:0", huge, huge + 1, huge + 2, huge + 3), Reading("cuda:1", None, 5))

    data = pack_rows([Sample(1.5, readings)], ["cuda:0", "cuda:1", "cuda:2"])

    ((time_s, (first, second, missing)),) = unpack_rows(data, 3)
    assert (time_s, first) == (1.5, (huge, huge + 1, huge + 2, huge + 3))
    assert [math.isnan(figure) for figure in second] == [True, False, True, True]
    assert second[1] == 5
    assert all(map(math.isnan, missing))
