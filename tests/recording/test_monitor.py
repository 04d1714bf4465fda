"""The session's monitor: cells, samples, listeners, waiting actions, failures."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from queue import SimpleQueue
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumemwidget.backends.cuda.backend import CudaBackend
from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.model.cells import CellRecord, Span
from gpumemwidget.model.devices import Sample
from gpumemwidget.recording import history
from gpumemwidget.recording.monitor import Callbacks, Monitor, RunningCell
from gpumemwidget.testing import SimulatedGpus, simulate_torch
from tests.clock import ManualClock
from tests.recording.scripted import ScriptedHardware, gpu, host

PATIENCE_S = 20.0
MIB = 1024**2


class Session:
    """A monitor on scripted hardware and a clock that stands still."""

    def __init__(self) -> None:
        self.clock = ManualClock(now_s=1000.0, wall_s=1_800_000_000.0)
        self.hardware = ScriptedHardware(gpu(10), host(20))
        self.failures: list[str] = []
        self.monitor = Monitor(self.hardware, clock=self.clock, on_failure=self._note_failure)

    def start(self, source: str = "x = 1", *, partial: bool = False) -> RunningCell:
        return self.monitor.start_cell(
            execution_count=1, cell_id="a", source=source, partial=partial
        )

    def _note_failure(self, what: str, exc: Exception) -> None:
        self.failures.append(f"{what}: {exc!r}")

    def end(self) -> CellRecord:
        record = self.monitor.end_cell(status="ok")
        assert record is not None
        return record


class Diary:
    """Callbacks that write down what they are told, and can wait for samples."""

    def __init__(self, on_event: Callable[[str], None] | None = None) -> None:
        self.events: list[tuple[str, object]] = []
        self.threads: set[str] = set()
        self._on_event = on_event
        self._more = threading.Condition()

    @property
    def samples(self) -> list[Sample]:
        return [what for event, what in self.events if isinstance(what, Sample)]

    def on_cell_started(self, cell: RunningCell) -> None:
        self._note("started", cell)

    def on_cell_ended(self, record: CellRecord) -> None:
        self._note("ended", record)

    def on_samples(self, samples: Sequence[Sample]) -> None:
        self.threads.add(threading.current_thread().name)
        for sample in samples:
            self._note("sample", sample)

    def listen(self, monitor: Monitor) -> Callable[[], None]:
        """Add all three callbacks; return a function that removes them."""
        removers = ExitStack()
        removers.callback(monitor.cell_started.add(self.on_cell_started))
        removers.callback(monitor.cell_ended.add(self.on_cell_ended))
        removers.callback(monitor.sampled.add(self.on_samples))
        return removers.close

    def wait_for_samples(self, count: int) -> bool:
        with self._more:
            return self._more.wait_for(lambda: len(self.samples) >= count, PATIENCE_S)

    def _note(self, event: str, what: object) -> None:
        with self._more:
            self.events.append((event, what))
            self._more.notify_all()
        if self._on_event is not None:
            self._on_event(event)


@pytest.fixture
def session() -> Iterator[Session]:
    session = Session()
    yield session
    session.monitor.close()
    assert not session.monitor.is_sampling


class TestCell:
    """From start to record."""

    def test_becomes_a_record(self, session: Session) -> None:
        """With both times, the duration, and what stood at both ends."""
        cell = session.start("%%memtrace\nmodel = load()")
        running = session.monitor.running
        session.clock.advance(2.5)
        session.hardware.readings = (gpu(30, peak=70), host(20))

        record = session.monitor.end_cell(status="error", execution_count=9)

        assert record is not None
        assert running is cell
        assert session.monitor.running is None
        assert session.monitor.ledger.records == (record,)
        assert (record.execution_count, record.cell_id, record.status) == (9, "a", "error")
        assert record.first_line == "model = load()"
        assert (record.started_at, record.start_s) == (1_800_000_000.0, 1000.0)
        assert record.duration_s == 2.5
        assert record.devices[0].allocated == Span(10, 30, 70)

    def test_the_time_of_reading_is_not_the_cells(self, session: Session) -> None:
        """A cell lasts from the end of the first reading to the beginning of the second."""
        session.hardware.on_ask = lambda _: session.clock.advance(100.0)

        session.start()
        session.clock.advance(1.5)
        record = session.end()

        assert (record.start_s, record.duration_s) == (1100.0, 1.5)

    def test_both_ends_are_samples_of_the_cell(self, session: Session) -> None:
        """The plot of a cell begins and ends with what its record says, however short it is."""
        session.monitor.read_now()
        session.clock.advance(0.1)
        session.start()
        session.clock.advance(0.1)
        session.hardware.readings = (gpu(30), host(20))
        record = session.end()
        session.clock.advance(0.1)
        session.monitor.read_now()

        samples = session.monitor.samples_of(record)

        assert samples == [
            Sample(1000.1, (gpu(10), host(20))),
            Sample(1000.2, (gpu(30), host(20))),
        ]
        assert len(session.monitor.history) == 4

    def test_an_end_without_a_start_is_none(self, session: Session) -> None:
        """As after %load_ext: no record, and the hardware is not asked."""
        assert session.monitor.end_cell(status="ok") is None
        assert session.hardware.asked == []

    def test_a_discarded_cell_leaves_no_record(self, session: Session) -> None:
        """Nobody is told of it, what waits for its end runs; a second time does nothing."""
        diary, done = Diary(), list[str]()
        diary.listen(session.monitor)
        session.start()
        session.monitor.when_idle(lambda: done.append("action"))

        session.monitor.discard_cell()
        session.monitor.discard_cell()

        assert session.monitor.running is None
        assert done == ["action"]
        assert len(session.monitor.ledger) == 0
        assert [event for event, _ in diary.events] == ["started"]

    def test_an_interrupt_while_reading_costs_no_record(self, session: Session) -> None:
        """Ctrl-C gets through, but the cell is in the ledger and the next one can start."""
        session.start()
        session.hardware.failure = KeyboardInterrupt()

        with pytest.raises(KeyboardInterrupt):
            session.monitor.end_cell(status="ok")

        (record,) = session.monitor.ledger
        assert record.devices[0].allocated == Span(10, None, None)
        assert session.monitor.running is None

    def test_an_interrupt_in_a_listener_holds_nothing_back(self, session: Session) -> None:
        """What waits for the cell's end still runs."""

        def interrupt(event: str) -> None:
            if event == "ended":
                raise KeyboardInterrupt

        done: list[str] = []
        Diary(interrupt).listen(session.monitor)
        session.start()
        session.monitor.when_idle(lambda: done.append("action"))

        with pytest.raises(KeyboardInterrupt):
            session.end()

        assert done == ["action"]
        assert len(session.monitor.ledger) == 1


class TestFailure:
    """Hardware and listeners fail; the user's cell does not."""

    @pytest.mark.parametrize("end", ["start", "end"])
    def test_a_failing_end_still_gives_a_record(self, end: str, session: Session) -> None:
        """That end is unknown."""
        gone = OSError("gone")
        session.hardware.failure = gone if end == "start" else None
        session.start()
        session.hardware.failure = gone if end == "end" else None

        record = session.end()

        known = Span(None, 10, None) if end == "start" else Span(10, None, None)
        assert record.devices[0].allocated == known
        assert session.failures == [f"Reading the memory at a cell's {end}: OSError('gone')"]

    def test_a_failing_listener_is_told_and_hides_nothing(self, session: Session) -> None:
        """Those behind it are told, cell after cell."""

        def fail(event: str) -> None:
            raise ZeroDivisionError(event)

        broken, diary = Diary(fail), Diary()
        broken.listen(session.monitor)
        diary.listen(session.monitor)

        for _ in range(2):
            session.start()
            session.end()

        assert [event for event, _ in diary.events] == ["started", "ended"] * 2
        assert (
            session.failures
            == [
                "Diary.on_cell_started: ZeroDivisionError('started')",
                "Diary.on_cell_ended: ZeroDivisionError('ended')",
            ]
            * 2
        )


class TestListeners:
    """Who is told what, and when."""

    def test_are_told_of_both_ends(self, session: Session) -> None:
        """With the cell while it runs, with the record when it is in the ledger."""
        seen: list[tuple[str, RunningCell | None, int]] = []
        monitor = session.monitor
        diary = Diary(lambda event: seen.append((event, monitor.running, len(monitor.ledger))))
        diary.listen(monitor)

        cell = session.start()
        record = session.end()

        assert diary.events == [("started", cell), ("ended", record)]
        assert seen == [("started", cell, 0), ("ended", None, 1)]

    def test_are_told_nothing_once_removed(self, session: Session) -> None:
        """Removing twice changes nothing, and leaves the others."""
        diary, other = Diary(), Diary()
        remove = session.monitor.cell_started.add(diary.on_cell_started)
        session.monitor.cell_started.add(other.on_cell_started)

        remove()
        remove()
        session.start()
        session.end()

        assert diary.events == []
        assert len(other.events) == 1


class TestWhenIdle:
    """Actions that must not touch a running cell's memory."""

    def test_in_a_cell_it_is_after_the_record_and_the_listeners(self, session: Session) -> None:
        """What an action frees belongs to no cell. One may add another, which waits its turn."""
        order: list[str] = []
        monitor = session.monitor
        Diary(order.append).listen(monitor)

        def act() -> None:
            monitor.when_idle(lambda: order.append("added"))
            order.append(f"action, {len(monitor.ledger)} recorded")

        session.start()
        monitor.when_idle(act)
        monitor.when_idle(lambda: order.append("second"))
        order.append("cell")
        session.end()

        expected = ["started", "cell", "ended", "action, 1 recorded", "second", "added"]
        assert order == expected

    def test_one_that_fails_is_reported(self, session: Session) -> None:
        """And the next still runs."""
        done: list[str] = []
        session.start()
        session.monitor.when_idle(lambda: {}["model"])
        session.monitor.when_idle(lambda: done.append("action"))

        session.end()

        assert done == ["action"]
        assert session.failures == ["An action after the cell's end: KeyError('model')"]

    def test_an_interrupt_gets_through_and_loses_none(self, session: Session) -> None:
        """Ctrl-C in an action is the user's; those behind it run with the next one."""
        done: list[str] = []

        def interrupt() -> None:
            raise KeyboardInterrupt

        session.start()
        session.monitor.when_idle(interrupt)
        session.monitor.when_idle(lambda: done.append("behind"))
        with pytest.raises(KeyboardInterrupt):
            session.end()
        session.monitor.when_idle(lambda: done.append("later"))

        assert done == ["behind", "later"]

    def test_nothing_waits_once_closed(self, session: Session) -> None:
        """Unloaded in mid-cell: what was clicked is forgotten."""
        done: list[str] = []
        session.start()
        session.monitor.when_idle(lambda: done.append("action"))

        session.monitor.close()
        session.end()

        assert done == []


class TestSampling:
    """The thread runs for those who want samples, and no longer."""

    @pytest.fixture
    def live(self) -> Iterator[tuple[Monitor, ScriptedHardware, Diary]]:
        """A monitor on the real clock, a millisecond a sample."""
        hardware = ScriptedHardware(gpu(10), host(20))
        monitor = Monitor(hardware, on_failure=pytest.fail, interval_s=0.001)
        diary = Diary()
        diary.listen(monitor)
        # In a cell the interval stays as it is.
        monitor.start_cell(execution_count=1, cell_id=None, source="")
        yield monitor, hardware, diary
        monitor.close()
        assert not monitor.is_sampling

    def test_samples_go_to_the_history_and_to_the_listeners(
        self, live: tuple[Monitor, ScriptedHardware, Diary]
    ) -> None:
        """On the sampler's own thread, in order, each once; the cell's end among them."""
        monitor, hardware, diary = live
        monitor.want_samples(diary)
        assert diary.wait_for_samples(3)
        hardware.readings = (gpu(77), host(20))
        record = monitor.end_cell(status="ok")
        end_sample = monitor.samples_of(record)[-1]

        assert diary.wait_for_samples(len(diary.samples) + 2)
        monitor.unwant_samples(diary)
        monitor.close()

        assert end_sample.readings[0].allocated_bytes == 77
        assert end_sample in diary.samples
        assert diary.threads == {"gpumemwidget-sampler"}
        times = [sample.time_s for sample in diary.samples]
        assert times == sorted(times)
        assert diary.samples == monitor.history.samples()[-len(diary.samples) :]

    def test_stops_when_the_last_one_does_not_want_it_any_more(
        self, live: tuple[Monitor, ScriptedHardware, Diary]
    ) -> None:
        """Not before; wanting twice is wanting once; it starts again."""
        monitor, _, diary = live
        first, second = Diary(), Diary()

        monitor.want_samples(first)
        monitor.want_samples(first)
        monitor.want_samples(second)
        monitor.unwant_samples(first)
        with_one = monitor.is_sampling
        monitor.unwant_samples(second)
        monitor.unwant_samples(second)
        with_none = monitor.is_sampling
        n_before = len(diary.samples)
        monitor.want_samples(monitor)

        assert (with_one, with_none) == (True, False)
        assert diary.wait_for_samples(n_before + 2)
        monitor.unwant_samples(monitor)
        assert not monitor.is_sampling

    def test_stops_when_whoever_wanted_it_is_gone(
        self, live: tuple[Monitor, ScriptedHardware, Diary]
    ) -> None:
        """A view that was dropped without a word costs nothing for long."""
        monitor, _, diary = live
        view = Diary()
        monitor.want_samples(view)
        assert diary.wait_for_samples(1)
        (thread,) = [t for t in threading.enumerate() if t.name == "gpumemwidget-sampler"]

        del view
        gc.collect()
        thread.join(PATIENCE_S)

        assert not thread.is_alive()
        assert not monitor.is_sampling

    def test_a_sample_has_no_place_within_a_cells_end(
        self, live: tuple[Monitor, ScriptedHardware, Diary]
    ) -> None:
        """A sample that was read while the end is being read gets neither before nor behind it."""
        monitor, hardware, diary = live
        monitor.want_samples(diary)
        assert diary.wait_for_samples(1)

        def let_a_sample_come(method: str) -> None:
            if method == "read_exact":
                n_seen = hardware.asked.count("read")
                while hardware.asked.count("read") == n_seen:
                    pass

        hardware.on_ask = let_a_sample_come

        record = monitor.end_cell(status="ok")

        last = monitor.samples_of(record)[-1]
        assert last.time_s == pytest.approx(record.start_s + record.duration_s, abs=1e-9)
        assert last.readings == hardware.readings

    def test_failing_reads_are_told(self) -> None:
        """As a sentence of the session's, and not on the thread alone."""
        hardware = ScriptedHardware()
        hardware.failure = OSError("gone")
        failures: SimpleQueue[str] = SimpleQueue()
        monitor = Monitor(hardware, on_failure=lambda what, exc: failures.put(f"{what}: {exc}"))

        monitor.want_samples(self)
        told = failures.get(timeout=PATIENCE_S)
        monitor.close()

        assert told == "Sampling the memory: gone"


class TestClose:
    """After an unload."""

    def test_leaves_nothing_behind(self, session: Session) -> None:
        """The thread is gone when it returns; twice is fine; wanting starts nothing any more."""
        diary = Diary()
        diary.listen(session.monitor)
        session.monitor.want_samples(diary)
        assert diary.wait_for_samples(1)
        n_events = len(diary.events)

        session.monitor.close()
        session.monitor.close()
        threads = [thread.name for thread in threading.enumerate()]
        session.monitor.want_samples(diary)
        session.start()
        record = session.end()

        assert "gpumemwidget-sampler" not in threads
        assert not session.monitor.is_sampling
        assert session.hardware.asked.count("close") == 2
        assert len(diary.events) == n_events
        assert record.status == "ok"

    def test_goes_on_if_the_hardware_does_not(self, session: Session) -> None:
        """The failure is told, and the rest is taken away."""
        session.hardware.close = None  # type: ignore[assignment]

        session.monitor.close()

        assert session.failures == [
            """Closing the hardware: TypeError("'NoneType' object is not callable")"""
        ]


ACTIONS = st.lists(
    st.sampled_from(["allocate", "allocate more", "free", "empty cache", "user resets", "sample"]),
    max_size=12,
)


class TestEndToEnd:
    """Over the real backends, with simulated allocators behind them."""

    @given(cells=st.lists(ACTIONS, min_size=1, max_size=6))
    def test_records_are_the_allocators_own_figures(self, cells: list[list[str]]) -> None:
        """Before, after and peak of each cell, exactly; "at least" if the user reset in it."""
        allocator = SimulatedGpus()
        torch: Any = simulate_torch(allocator)
        hardware = Hardware([CudaBackend(torch)])
        monitor = Monitor(hardware, on_failure=pytest.fail)
        blocks: list[int] = []
        expected: list[tuple[Span, int | None]] = []

        def current() -> int:
            if not allocator.list_touched():
                return 0
            return allocator.stats()["allocated_bytes"]["all"]["current"]

        for actions in cells:
            monitor.start_cell(execution_count=None, cell_id=None, source="")
            before = peak = current()
            for action in actions:
                if action.startswith("allocate"):
                    blocks.append(allocator.allocate(5 * MIB if "more" in action else 3 * 512))
                elif action == "free" and blocks:
                    allocator.free(blocks.pop())
                elif action == "empty cache":
                    hardware.empty_cache()
                elif action == "user resets":
                    torch._C._cuda_resetPeakMemoryStats(0)
                elif action == "sample":
                    monitor.read_now()
                peak = max(peak, current())
            monitor.end_cell(status="ok")
            expected.append((Span(before, current(), peak), len(allocator.list_touched())))

        recorded = [
            (record.devices[0].allocated if record.devices else Span(0, 0, 0), len(record.devices))
            for record in monitor.ledger
        ]
        exact = [
            not record.devices or record.devices[0].peak_is == "exact" for record in monitor.ledger
        ]
        monitor.close()
        for actions, (span, n_devices), (true, n_true), is_exact in zip(
            cells, recorded, expected, exact, strict=True
        ):
            assert is_exact or "user resets" in actions
            assert n_devices == n_true
            assert (span.before_bytes, span.after_bytes) == (true.before_bytes, true.after_bytes)
            assert span.peak_bytes is not None
            assert true.peak_bytes is not None
            assert span.peak_bytes <= true.peak_bytes
            assert not is_exact or span.peak_bytes == true.peak_bytes


def test_listeners_that_threads_add_at_once_are_all_called() -> None:
    """Subshells and pages may add theirs while a cell opens the dashboard."""
    events: Callbacks[None] = Callbacks(lambda what, exc: pytest.fail(f"{what}: {exc}"))
    called: list[tuple[int, int]] = []
    begin = threading.Barrier(8)

    def add(thread: int) -> None:
        begin.wait()
        for number in range(500):
            key = thread, number
            remove = events.add(lambda _, key=key: called.append(key))  # type: ignore[misc]
            if number % 2:
                remove()

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=add, args=(number,)) for number in range(8)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    finally:
        sys.setswitchinterval(interval_s)
    events.call(None)

    assert sorted(called) == [
        (thread, number) for thread in range(8) for number in range(0, 500, 2)
    ]


def test_a_cell_runs_while_the_history_is_thinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """And its two samples stay, behind the thinned ones."""
    monitor = Monitor(ScriptedHardware(gpu(1), host(2)), on_failure=pytest.fail)
    monitor.history.capacity = 10
    is_thinning, may_end = threading.Event(), threading.Event()
    thin = history.thin_samples

    def thin_slowly(samples: Sequence[Sample], most: int) -> Sequence[Sample]:
        is_thinning.set()
        assert may_end.wait(60)
        return thin(samples, most)

    for _ in range(10):
        monitor.read_now()
    monkeypatch.setattr(history, "thin_samples", thin_slowly)
    reading = threading.Thread(target=monitor.read_now)
    reading.start()
    assert is_thinning.wait(60)

    def run_cell() -> None:
        monitor.start_cell(execution_count=1, cell_id=None, source="1")
        monitor.end_cell(status="ok")

    cell = threading.Thread(target=run_cell)
    cell.start()

    cell.join(30)
    has_run = not cell.is_alive()
    may_end.set()
    reading.join()
    cell.join()

    [record] = monitor.ledger.records
    assert has_run
    assert len(monitor.samples_of(record)) == 2
    assert len(monitor.history) <= 10
    monitor.close()


def test_a_history_that_no_sampler_thins_is_thinned_at_the_ends_of_cells() -> None:
    """Nobody need look at the dashboard: the history of 10,000 cells is bounded all the same."""
    monitor = Monitor(ScriptedHardware(gpu(1), host(2)), on_failure=pytest.fail)
    monitor.history.capacity = 100

    for number in range(200):
        monitor.start_cell(execution_count=number, cell_id=None, source="1")
        monitor.end_cell(status="ok")

    assert len(monitor.history) <= 125
    assert len(monitor.samples_of(monitor.ledger[-1])) == 2
    monitor.close()


class TestWhatTheDriverLists:
    """What is outside PyTorch: the driver is asked where something may have changed."""

    @pytest.mark.parametrize(
        ("pause_s", "acts", "before_bytes"), [(0.05, False, 30), (0.2, False, 70), (0.05, True, 70)]
    )
    def test_a_cell_that_follows_at_once_begins_with_the_last_ones_end(
        self, pause_s: float, acts: bool, before_bytes: int
    ) -> None:
        """After a while, or what a button has done meanwhile, the driver is asked again."""
        session = Session()
        session.hardware.own_bytes = 40
        session.start()
        session.clock.advance(1)
        session.end()

        session.hardware.own_bytes = 80
        if acts:
            session.monitor.when_idle(lambda: None)
        session.clock.advance(pause_s)
        session.start()
        session.clock.advance(1)
        record = session.end()

        assert record.devices[0].outside == Span(before_bytes, 70, 70)

    @pytest.mark.parametrize(
        ("lasts_s", "takes", "has_others", "after_bytes"),
        [
            (0.001, False, False, 30),
            (0.003, False, False, 70),
            (0.001, True, False, 65),
            (0.001, False, True, 70),
        ],
    )
    def test_only_an_instant_that_changes_nothing_is_not_asked_after(
        self, lasts_s: float, takes: bool, has_others: bool, after_bytes: int
    ) -> None:
        """What PyTorch has taken, or another library that is imported, makes a difference."""
        session = Session()
        session.hardware.own_bytes = 40
        session.hardware.has_others = has_others

        session.start()
        session.hardware.own_bytes = 80
        if takes:
            session.hardware.readings = (gpu(15), host(20))
        session.clock.advance(lasts_s)
        record = session.end()

        assert record.devices[0].outside == Span(30, after_bytes, after_bytes)

    def test_an_answer_that_failed_is_none_for_the_next_cell(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It is asked again at once: nothing that was there before is the next one's."""
        session = Session()
        session.hardware.own_bytes = 40
        session.start()
        with monkeypatch.context() as patch:
            patch.setattr(session.hardware, "read_own_uses", lambda: 1 / 0)
            session.clock.advance(1)
            session.end()

        session.start()
        session.clock.advance(1)
        record = session.end()

        assert record.devices[0].outside == Span(30, 30, 30)
        assert len(session.failures) == 1

    def test_what_happens_in_the_cell_itself_is_not_the_last_ones(self) -> None:
        """A cell that never ended leaves nothing that is good for the next one."""
        session = Session()
        session.hardware.own_bytes = 40
        session.start()
        session.end()
        session.start()
        session.monitor.discard_cell()

        session.hardware.own_bytes = 80
        session.start()
        record = session.end()

        assert record.devices[0].outside == Span(70, 70, 70)
