"""The sampler's rhythm, by a clock that the test moves, and its thread, by events."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator

import pytest

from gpumemwidget.model.devices import Reading, Sample
from gpumemwidget.recording.sampler import Clock, Sampler
from tests.clock import ManualClock
from tests.recording.scripted import ScriptedHardware, host

PATIENCE_S = 20.0


class Ticker:
    """A sampler whose ticks the test makes, with all that came of them."""

    def __init__(self) -> None:
        self.clock = ManualClock(now_s=1000.0)
        self.hardware = ScriptedHardware(host(1))
        self.samples: list[Sample] = []
        self.errors: list[Exception] = []
        self.sampler = Sampler(
            self.hardware.read,
            clock=self.clock,
            on_sample=self.samples.append,
            on_error=self.errors.append,
            interval_s=0.125,
        )

    def tick(self) -> float:
        """Let the next sample fall due and take it; how long it is to the one after."""
        self.clock.advance(self.sampler.due_s - self.clock.now())
        self.sampler._tick(None)
        return self.sampler.due_s - self.clock.now()


class TestRhythm:
    """When the next sample falls due."""

    def test_is_quick_in_a_cell_and_slow_between(self) -> None:
        """The first sample is due at once."""
        ticker = Ticker()

        before = ticker.tick()
        ticker.sampler.start_cell()
        in_cell = [ticker.tick(), ticker.tick()]
        ticker.sampler.end_cell()
        after = ticker.tick()

        assert (before, in_cell, after) == (1.0, [0.125, 0.125], 1.0)
        assert [sample.time_s for sample in ticker.samples] == [1000.0, 1001.0, 1001.125, 1001.25]

    def test_late_ticks_are_dropped(self) -> None:
        """After a stall of 30 intervals there is one sample, and the next an interval later."""
        ticker = Ticker()
        ticker.sampler.start_cell()
        ticker.tick()

        ticker.clock.advance(30 * 0.125)
        ticker.sampler._tick(None)

        assert len(ticker.samples) == 2
        assert ticker.sampler.due_s == ticker.clock.now() + 0.125

    def test_a_slow_read_is_followed_by_a_whole_interval(self) -> None:
        """Hardware that takes longer than the interval is not asked again at once."""
        ticker = Ticker()
        ticker.sampler.start_cell()
        ticker.hardware.on_ask = lambda _: ticker.clock.advance(0.5)

        wait = ticker.tick()

        assert wait == 0.125
        assert [sample.time_s for sample in ticker.samples] == [1000.0]

    def test_a_failure_is_told_and_sampling_goes_on(self) -> None:
        ticker = Ticker()
        ticker.hardware.failure = OSError("the driver is gone")
        ticker.tick()
        ticker.hardware.failure = None

        ticker.tick()

        assert [str(error) for error in ticker.errors] == ["the driver is gone"]
        assert len(ticker.samples) == 1


@pytest.fixture
def start_sampler() -> Iterator[Callable[..., Sampler]]:
    """Makes samplers on the real clock, a millisecond apart, and stops them."""
    samplers: list[Sampler] = []

    def start(on_sample: Callable[[Sample], None], **options: object) -> Sampler:
        arguments = {
            "read": lambda: (host(1),),
            "on_error": lambda _: None,
            "interval_s": 0.001,
            "idle_interval_s": 0.001,
            **options,
        }
        sampler = Sampler(clock=Clock(), on_sample=on_sample, **arguments)
        samplers.append(sampler)
        sampler.start()
        return sampler

    yield start

    for sampler in samplers:
        sampler.stop()
        assert sampler.join(PATIENCE_S)


class Arrivals:
    """Counts samples, and waits for so and so many."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self._more = threading.Condition()

    def __call__(self, sample: Sample) -> None:
        with self._more:
            self.samples.append(sample)
            self._more.notify_all()

    def wait_for(self, count: int) -> bool:
        with self._more:
            return self._more.wait_for(lambda: len(self.samples) >= count, PATIENCE_S)


class TestThread:
    """The thread that lets them fall due."""

    def test_a_cell_wakes_it_at_once(self, start_sampler: Callable[..., Sampler]) -> None:
        """It does not sleep through a cell's first seconds: here it would for an hour."""
        arrivals = Arrivals()
        sampler = start_sampler(arrivals, idle_interval_s=3600.0)
        assert arrivals.wait_for(1)

        sampler.start_cell()

        assert arrivals.wait_for(3)

    def test_runs_in_the_context_of_its_start(self, start_sampler: Callable[..., Sampler]) -> None:
        """There ipykernel keeps which cell the thread's messages belong to."""
        cell = contextvars.ContextVar("cell", default="none")
        seen: list[str] = []
        got = threading.Event()

        def look(sample: Sample) -> None:
            seen.append(cell.get())
            got.set()

        token = cell.set("the cell that asked")
        start_sampler(look)
        cell.reset(token)

        assert got.wait(PATIENCE_S)
        assert set(seen) == {"the cell that asked"}

    def test_a_read_that_hangs_holds_nobody_up(self) -> None:
        """Stopping gives up on it, a new start works, and nothing more comes of it."""
        hangs, release = threading.Event(), threading.Event()
        arrivals = Arrivals()

        def read() -> tuple[Reading, ...]:
            if not hangs.is_set():
                hangs.set()
                release.wait(PATIENCE_S)
                return (host(666),)
            return (host(1),)

        sampler = Sampler(
            read,
            clock=Clock(),
            on_sample=arrivals,
            on_error=lambda _: None,
            idle_interval_s=0.001,
        )
        sampler.start()
        assert hangs.wait(PATIENCE_S)
        stuck = next(
            thread for thread in threading.enumerate() if thread.name == "gpumemwidget-sampler"
        )

        sampler.stop()
        gave_up = sampler.join(0.01)
        sampler.start()
        assert arrivals.wait_for(2)
        release.set()
        stuck.join(PATIENCE_S)
        sampler.stop()
        ended = sampler.join(PATIENCE_S)

        assert (gave_up, ended, stuck.is_alive()) == (False, True, False)
        assert {sample.readings for sample in arrivals.samples} == {(host(1),)}
