"""Samples as bytes, and as few samples that show the same."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumemwidget.jupyter.stream import count_rows, pack_rows, thin_samples
from gpumemwidget.records import Reading, Sample
from tests.jupyter.rows import unpack_rows

_MIB = 1024**2


def _sample(time_s: float, *readings: Reading) -> Sample:
    return Sample(time_s, readings)


def test_row_holds_a_sample_exactly() -> None:
    """Bytes up to the petabytes are whole numbers in a float64."""
    huge = 2**52 + 1
    sample = _sample(1.5, Reading("cuda:0", huge, huge + 1, huge + 2))

    data = pack_rows([sample], ["cuda:0"])

    assert unpack_rows(data, 1) == [(1.5, [(huge, huge + 1, huge + 2)])]


def test_unknown_is_not_zero() -> None:
    """What was not read, and a device that was not there, are NaN."""
    sample = _sample(1.0, Reading("cuda:0", None, 5))

    ((_, (known, missing)),) = unpack_rows(pack_rows([sample], ["cuda:0", "cuda:1"]), 2)

    assert math.isnan(known[0])
    assert known[1] == 5
    assert math.isnan(known[2])
    assert all(math.isnan(figure) for figure in missing)


def test_host_shows_the_peak_that_it_has() -> None:
    """Its high-water mark is that of the resident size."""
    sample = _sample(1.0, Reading("host", 10, 20, None, 30, "exact"))

    assert unpack_rows(pack_rows([sample], ["host"]), 1) == [(1.0, [(10, 20, 30)])]


def test_columns_have_the_order_that_was_asked_for() -> None:
    """Whatever order the readings come in."""
    sample = _sample(1.0, Reading("host", 1, 1, 1), Reading("cuda:0", 2, 2, 2))

    assert unpack_rows(pack_rows([sample], ["cuda:0", "host"]), 2) == [
        (1.0, [(2, 2, 2), (1, 1, 1)])
    ]


@pytest.mark.parametrize(("n_devices", "n_rows"), [(1, 32), (2, 18), (9, 4)])
def test_rows_are_counted_by_their_width(n_devices: int, n_rows: int) -> None:
    """A row of n devices takes 8 bytes for its time and 24 for each."""
    assert count_rows(1024, n_devices) == n_rows


@given(
    figures=st.lists(st.integers(0, 1000), min_size=1, max_size=400),
    most=st.integers(10, 100),
)
def test_thinning_keeps_the_extremes_and_the_newest(figures: list[int], most: int) -> None:
    """Never more than asked for, in order, nothing invented."""
    samples = [
        _sample(float(i), Reading("cuda:0", figure, 1000 - figure, 2 * figure))
        for i, figure in enumerate(figures)
    ]

    kept = thin_samples(samples, most)

    assert len(kept) <= most
    assert list(kept) == [sample for sample in samples if sample in kept]
    assert kept[-1] == samples[-1]
    assert max(_allocated(kept)) == max(figures)
    assert min(_allocated(kept)) == min(figures)


def test_few_samples_stay_as_they_are() -> None:
    """What fits is not touched."""
    samples = [_sample(float(i), Reading("host", i, i)) for i in range(10)]

    assert thin_samples(samples, 10) is samples


def _allocated(samples: Sequence[Sample]) -> list[int]:
    return [sample.readings[0].allocated_bytes or 0 for sample in samples]
