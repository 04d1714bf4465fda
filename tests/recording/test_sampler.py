"""The sampler's rhythm, by a clock that the test moves, and its thread, by events."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator

import pytest

from gpumemwidget.errors import BadInputError
from gpumemwidget.model.devices import Reading, Sample
from gpumemwidget.recording.sampler import Clock, Sampler
from tests.clock import ManualClock
from tests.recording.scripted import ScriptedHardware, gpu, host

PATIENCE_S = 20.0
MIB = 1024**2


class Ticker:
    """A sampler whose ticks the test makes, with all that came of them."""

    def __init__(self, *readings: Reading, interval_s: float = 0.125) -> None:
        self.clock = ManualClock(now_s=1000.0)
        self.hardware = ScriptedHardware(*readings)
        self.samples: list[Sample] = []
        self.errors: list[Exception] = []
        self.sampler = Sampler(
            self.hardware.read,
            clock=self.clock,
            on_sample=self.samples.append,
            on_error=self.errors.append,
            interval_s=interval_s,
            slowest_s=1.0,
        )

    def tick(self) -> float:
        """Let the next sample fall due and take it; how long it is to the one after."""
        self.clock.advance(self.sampler.due_s - self.clock.now())
        self.sampler.tick()
        return self.sampler.due_s - self.clock.now()


class TestRhythm:
    """When the next sample falls due."""

    def test_slows_down_by_doubling_while_nothing_changes(self) -> None:
        """The first sample says nothing of change; from the second on each wait is doubled."""
        ticker = Ticker(gpu(5 * MIB), host(5 * MIB))

        waits = [ticker.tick() for _ in range(6)]

        assert waits == [0.125, 0.25, 0.5, 1.0, 1.0, 1.0]
        assert [sample.time_s for sample in ticker.samples] == [
            1000.0, 1000.125, 1000.375, 1000.875, 1001.875, 1002.875,
        ]  # fmt: skip

    @pytest.mark.parametrize(
        "changed",
        [
            (gpu(6 * MIB), host(0)),
            (gpu(5 * MIB, reserved=6 * MIB), host(0)),
            (gpu(5 * MIB), gpu(0, device="cuda:1"), host(0)),
            (host(0),),
            (Reading("cuda:0", None, None), host(0)),
        ],
        ids=["allocated", "reserved", "new", "gone", "unknown"],
    )
    def test_is_back_at_its_interval_with_the_first_change(
        self, changed: tuple[Reading, ...]
    ) -> None:
        """A MiB more or less, a device more or less, or a counter that is lost."""
        ticker = Ticker(gpu(5 * MIB), host(0))
        for _ in range(5):
            ticker.tick()

        ticker.hardware.readings = changed

        assert ticker.tick() == 0.125
        assert ticker.tick() == 0.25

    def test_noise_is_no_change_but_a_slow_growth_is(self) -> None:
        """A quarter of a MiB each time is seen when it has become a whole one."""
        ticker = Ticker(host(0))
        waits = []

        for number in range(5):
            ticker.hardware.readings = (host(number * MIB // 4),)
            waits.append(ticker.tick())

        assert waits == [0.125, 0.25, 0.5, 1.0, 0.125]

    def test_a_running_cell_keeps_the_interval(self) -> None:
        """As long as a cell runs, every sample is wanted."""
        ticker = Ticker(host(0))
        ticker.sampler.start_cell()

        in_cell = [ticker.tick() for _ in range(4)]
        ticker.sampler.end_cell()
        after = [ticker.tick() for _ in range(2)]

        assert in_cell == [0.125] * 4
        assert after == [0.25, 0.5]

    def test_late_ticks_are_dropped(self) -> None:
        """After a stall of 30 intervals there is one sample, and the next an interval later."""
        ticker = Ticker(host(0))
        ticker.sampler.start_cell()
        ticker.tick()

        ticker.clock.advance(30 * 0.125)
        ticker.sampler.tick()

        assert len(ticker.samples) == 2
        assert ticker.sampler.due_s == ticker.clock.now() + 0.125

    def test_a_slow_read_is_followed_by_a_whole_interval(self) -> None:
        """Hardware that takes longer than the interval is not asked again at once."""
        ticker = Ticker(host(0))
        ticker.sampler.start_cell()
        ticker.hardware.on_ask = lambda _: ticker.clock.advance(0.5)

        wait = ticker.tick()

        assert wait == 0.125
        assert [sample.time_s for sample in ticker.samples] == [1000.0]

    def test_a_failure_is_told_and_slows_down(self) -> None:
        """Each is handed on; sampling goes on, and is back at its interval once it works."""
        ticker = Ticker(host(0))
        ticker.tick()
        ticker.hardware.failure = OSError("the driver is gone")

        failed = ticker.tick()
        ticker.hardware.failure = None
        ticker.hardware.readings = (host(5 * MIB),)
        worked = ticker.tick()

        assert (failed, worked) == (1.0, 0.125)
        assert [str(error) for error in ticker.errors] == ["the driver is gone"]
        assert len(ticker.samples) == 2

    def test_the_interval_can_be_changed(self) -> None:
        """From the next sample on; one above the slowest is the slowest."""
        ticker = Ticker(host(0))

        ticker.sampler.interval_s = 4.0
        waits = [ticker.tick() for _ in range(3)]

        assert ticker.sampler.interval_s == 4.0
        assert waits == [4.0, 4.0, 4.0]

    @pytest.mark.parametrize("interval_s", [0.0, -1.0, float("nan"), float("inf")])
    def test_refuses_what_is_no_interval(self, interval_s: float) -> None:
        """At the start and later on."""
        with pytest.raises(BadInputError, match="give a positive number of seconds"):
            Ticker(interval_s=interval_s)

        ticker = Ticker()
        with pytest.raises(BadInputError, match="give a positive number of seconds"):
            ticker.sampler.interval_s = interval_s
        assert ticker.sampler.interval_s == 0.125


@pytest.fixture
def start_sampler() -> Iterator[Callable[..., Sampler]]:
    """Makes samplers on the real clock, a millisecond apart, and stops them."""
    samplers: list[Sampler] = []

    def start(on_sample: Callable[[Sample], None], **options: object) -> Sampler:
        arguments = {
            "read": lambda: (host(1),),
            "on_error": lambda _: None,
            "interval_s": 0.001,
            "slowest_s": 0.001,
            **options,
        }
        sampler = Sampler(clock=Clock(), on_sample=on_sample, **arguments)
        samplers.append(sampler)
        sampler.start()
        return sampler

    yield start

    for sampler in samplers:
        assert sampler.stop(timeout_s=PATIENCE_S)


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

    def test_stops_from_its_own_thread(self, start_sampler: Callable[..., Sampler]) -> None:
        """Whoever draws may find out that nobody looks any more."""
        stopped = threading.Event()

        def stop(sample: Sample) -> None:
            ready.wait(PATIENCE_S)
            sampler.stop()
            stopped.set()

        ready = threading.Event()
        sampler = start_sampler(stop)
        ready.set()

        assert stopped.wait(PATIENCE_S)
        assert not sampler.is_running

    def test_a_cell_wakes_it_at_once(self, start_sampler: Callable[..., Sampler]) -> None:
        """It does not sleep through a cell's first seconds: here it would for an hour."""
        arrivals = Arrivals()
        failed = threading.Event()

        def read() -> tuple[Reading, ...]:
            if not failed.is_set():
                raise OSError("the first read fails, so the next would come in an hour")
            return (host(1),)

        sampler = start_sampler(
            arrivals, read=read, on_error=lambda _: failed.set(), slowest_s=3600.0
        )
        assert failed.wait(PATIENCE_S)

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
            interval_s=0.001,
            slowest_s=0.001,
        )
        sampler.start()
        assert hangs.wait(PATIENCE_S)
        stuck = next(
            thread for thread in threading.enumerate() if thread.name == "gpumemwidget-sampler"
        )

        gave_up = sampler.stop(timeout_s=0.01)
        sampler.start()
        assert arrivals.wait_for(2)
        release.set()
        stuck.join(PATIENCE_S)
        ended = sampler.stop(timeout_s=PATIENCE_S)

        assert (gave_up, ended, stuck.is_alive()) == (False, True, False)
        assert {sample.readings for sample in arrivals.samples} == {(host(1),)}
