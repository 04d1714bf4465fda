"""A bounded history in which every peak is still to be found."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpumemwidget.model.devices import PeakIs, Reading, Sample
from gpumemwidget.recording.history import History
from tests.recording.scripted import gpu, host

#: What is never lost, by name: a column of the readings and the pick among its values.
EXTREMES: dict[str, tuple[Callable[[Reading], int | None], Callable[[Iterable[int]], int]]] = {
    "highest allocated": (lambda reading: reading.allocated_bytes, max),
    "lowest allocated": (lambda reading: reading.allocated_bytes, min),
    "highest reserved": (lambda reading: reading.reserved_bytes, max),
    "highest allocated peak": (lambda reading: reading.allocated_peak_bytes, max),
    "highest reserved peak": (lambda reading: reading.reserved_peak_bytes, max),
}
DEVICES = ("cuda:0", "cuda:1", "cuda:2", "cuda:3", "host")


def find_extremes(samples: Iterable[Sample]) -> dict[tuple[str, str], int]:
    """The extremes of samples for every device that has any known value."""
    columns: dict[tuple[str, str], list[int]] = {}
    for sample in samples:
        for reading in sample.readings:
            for name, (take, _) in EXTREMES.items():
                value = take(reading)
                if value is not None:
                    columns.setdefault((reading.device, name), []).append(value)
    return {key: EXTREMES[key[1]][1](values) for key, values in columns.items()}


def make_sample(number: int, *values: int) -> Sample:
    """The sample of second ``number``: a GPU and the host, with these bytes allocated."""
    gpu_bytes, host_bytes = values or (number, number)
    return Sample(float(number), (gpu(gpu_bytes), host(host_bytes)))


def make_readings(device: str, spread: int) -> list[Reading]:
    """A thousand readings with values below ``spread``, of which some are unknown."""
    dice = random.Random(f"{device} {spread}")

    def roll() -> int | None:
        return None if dice.random() < 0.1 else dice.randrange(spread)

    kinds: list[PeakIs | None] = [None, "exact", "at least", "sampled"]
    return [
        Reading(device, roll(), roll(), roll(), roll(), dice.choice(kinds), roll(), roll())
        for _ in range(1000)
    ]


#: From quiet to restless.
SPREADS = (1, 4, 2**40)
POOL = {(device, spread): make_readings(device, spread) for device in DEVICES for spread in SPREADS}


@st.composite
def sessions(draw: st.DrawFn) -> list[Sample]:
    """Quiet and restless stretches, in which devices come and go."""
    samples: list[Sample] = []
    stretches = st.tuples(
        st.sets(st.sampled_from(DEVICES)),
        st.integers(1, 4000),
        st.sampled_from(SPREADS),
        st.integers(0, 999),
        st.integers(0, 999),
    )
    for devices, n_samples, spread, first, step in draw(st.lists(stretches, min_size=1)):
        # Whoever is there comes in the same order each time, as from the hardware.
        pools = [POOL[device, spread] for device in sorted(devices)]
        for number in range(n_samples):
            readings = tuple([pool[(first + step * number) % 1000] for pool in pools])
            samples.append(Sample(float(len(samples)), readings))
    return samples


def build_restless_session() -> list[Sample]:
    """Every device moves at every moment, so that much has to be merged."""
    pools = [POOL[device, 2**40] for device in DEVICES]
    return [
        Sample(float(number), tuple([pool[number * 7 % 1000] for pool in pools]))
        for number in range(12_000)
    ]


class TestUnderItsCapacity:
    """Nothing is thinned yet."""

    def test_devices_stand_as_the_hardware_has_them(self) -> None:
        """By index and not by alphabet, the host last, whoever came first."""
        history = History()
        later = (gpu(1, device="cuda:9"), gpu(2, device="cuda:10"), host(3))

        history.append(Sample(0.0, (host(3),)))
        history.append(Sample(1.0, (later[1], host(3))))
        history.append(Sample(2.0, later))

        assert history.devices() == ("cuda:9", "cuda:10", "host")
        assert history.samples()[-1] == Sample(2.0, later)

    def test_refuses_what_is_older_than_the_last(self) -> None:
        """Time goes forward; two samples of one moment are fine."""
        history = History()
        history.append(make_sample(5))

        older, same = history.append(make_sample(4)), history.append(make_sample(5))

        assert (older, same) == (False, True)
        assert [sample.time_s for sample in history.samples()] == [5.0, 5.0]

    @pytest.mark.parametrize(
        ("since_s", "until_s", "expected"),
        [
            (None, None, range(300)),
            (250.0, None, range(250, 300)),
            (249.5, 251.5, range(250, 252)),
            (64.0, 64.0, [64]),
            (60.0, 70.0, range(60, 71)),
            (None, 3.0, range(4)),
            (300.0, None, []),
            (None, -1.0, []),
        ],
    )
    def test_gives_a_window(
        self, since_s: float | None, until_s: float | None, expected: Iterable[int]
    ) -> None:
        """Both ends of the window belong to it."""
        history = History()
        for number in range(300):
            history.append(make_sample(number))

        samples = history.samples(since_s, until_s)

        assert [sample.time_s for sample in samples] == list(expected)


class TestThinning:
    """More was appended than there is room for."""

    @given(session=sessions())
    @example(session=build_restless_session())
    def test_keeps_every_extreme_and_the_recent_samples(self, session: list[Sample]) -> None:
        """What is kept was read, in order, and its extremes are those of the whole session."""
        history = History(capacity=1000)

        for sample in session:
            history.append(sample)
            history.thin(nullcontext())

        kept = history.samples()
        by_time = {sample.time_s: sample for sample in session}
        assert all(by_time[sample.time_s] == sample for sample in kept)
        assert [sample.time_s for sample in kept] == sorted({sample.time_s for sample in kept})
        assert len(kept) == len(history) <= 1000
        assert find_extremes(kept) == find_extremes(session)
        assert kept[-192:] == session[-192:]

    def test_every_spike_and_every_dip_is_still_there(self) -> None:
        """Not the highest alone: one in each few thousand samples, however old."""
        history = History(capacity=1000)
        unusual = {number: 10**6 + number for number in range(500, 40_000, 5000)}
        unusual |= {number + 2500: -number for number in unusual}
        for number in range(40_000):
            history.append(make_sample(number, unusual.get(number, 1000 + number * 7919 % 4096), 5))
            history.thin(nullcontext())

        values = {
            int(sample.time_s): sample.readings[0].allocated_bytes for sample in history.samples()
        }

        assert {number: values.get(number) for number in unusual} == unusual

    def test_old_samples_stand_in_equal_stretches_of_time(self) -> None:
        """However quiet the session, and however long ago it began."""
        history = History(capacity=1000)

        for number in range(100_000):
            history.append(make_sample(number, 5, 5))
            history.thin(nullcontext())

        times = [sample.time_s for sample in history.samples()]
        assert times[0] == 0.0
        assert max(later - earlier for earlier, later in pairwise(times)) < 4 * 100_000 // 87


def test_reads_while_another_thread_appends() -> None:
    """A view may take its snapshot in the middle of sampling, and sees a consistent one."""
    history = History(capacity=1000)
    done = threading.Event()
    snapshots: list[list[Sample]] = []

    def append_all() -> None:
        for number in range(5000):
            history.append(make_sample(number))
            history.thin(nullcontext())
        done.set()

    thread = threading.Thread(target=append_all)
    thread.start()
    while not done.is_set():
        snapshots.append(history.samples())
    thread.join()

    for snapshot in snapshots[:: 1 + len(snapshots) // 50]:
        assert snapshot == [make_sample(int(sample.time_s)) for sample in snapshot]
        times = [sample.time_s for sample in snapshot]
        assert times == sorted(set(times))


def test_a_stretch_without_samples_is_a_gap_however_much_is_thinned() -> None:
    """Its two ends are kept; the distances that thinning leaves are no gaps."""
    history = History(capacity=100)
    for number in (*range(90), *range(200, 290)):
        history.append(make_sample(number))

    history.thin(nullcontext())

    assert history.gaps == [(89.0, 200.0)]
    assert len(history) < 180
