"""Fewer samples and values, in which no extreme is lost."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from gpumemwidget.model.devices import Reading, Sample
from gpumemwidget.recording.thinning import thin_samples


def make_sample(time_s: float, *readings: Reading) -> Sample:
    return Sample(time_s, readings)


def list_allocated(samples: Sequence[Sample]) -> list[int]:
    return [sample.readings[0].allocated_bytes or 0 for sample in samples]


@given(
    figures=st.lists(st.integers(0, 1000), min_size=1, max_size=400),
    most=st.integers(10, 100),
)
def test_thinning_keeps_the_extremes_and_the_newest(figures: list[int], most: int) -> None:
    """Never more than asked for, in order, nothing invented."""
    samples = [
        make_sample(float(i), Reading("cuda:0", figure, 1000 - figure, 2 * figure))
        for i, figure in enumerate(figures)
    ]

    kept = thin_samples(samples, most)

    assert len(kept) <= most
    assert list(kept) == [sample for sample in samples if sample in kept]
    assert kept[-1] == samples[-1]
    assert max(list_allocated(kept)) == max(figures)
    assert min(list_allocated(kept)) == min(figures)


def test_few_samples_stay_as_they_are() -> None:
    """What fits is not touched."""
    samples = [make_sample(float(i), Reading("host", i, i)) for i in range(10)]

    assert thin_samples(samples, 10) is samples


def test_every_device_keeps_its_peaks_whenever_it_was_there() -> None:
    """Also a device that the newest sample has no more."""
    samples = [
        make_sample(float(i), Reading("cuda:0", i % 7, i % 5), Reading("cuda:1", 900 - i, 0))
        for i in range(400)
    ]
    samples += [
        make_sample(400.0 + i, Reading("cuda:0", 3, 3, 50 if i == 9 else 4)) for i in range(400)
    ]

    kept = thin_samples(samples, 40)

    assert len(kept) <= 40
    assert max(each.allocated_bytes or 0 for sample in kept for each in sample.readings) == 900
    assert max(each.allocated_peak_bytes or 0 for sample in kept for each in sample.readings) == 50
