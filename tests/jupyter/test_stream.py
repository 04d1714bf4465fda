"""Samples as bytes."""

from __future__ import annotations

import math

import pytest

from gpumemwidget.model.devices import Reading, Sample
from gpumemwidget.widgets.feed import count_rows, pack_rows
from tests.jupyter.rows import unpack_rows

_MIB = 1024**2


def _sample(time_s: float, *readings: Reading) -> Sample:
    return Sample(time_s, readings)


def test_row_holds_a_sample_exactly() -> None:
    """Bytes up to the petabytes are whole numbers in a float64."""
    huge = 2**52 + 1
    sample = _sample(1.5, Reading("cuda:0", huge, huge + 1, huge + 2, huge + 3))

    data = pack_rows([sample], ["cuda:0"])

    assert unpack_rows(data, 1) == [(1.5, [(huge, huge + 1, huge + 2, huge + 3)])]


def test_unknown_is_not_zero() -> None:
    """What was not read, and a device that was not there, are NaN."""
    sample = _sample(1.0, Reading("cuda:0", None, 5))

    ((_, (known, missing)),) = unpack_rows(pack_rows([sample], ["cuda:0", "cuda:1"]), 2)

    assert math.isnan(known[0])
    assert known[1] == 5
    assert math.isnan(known[2])
    assert math.isnan(known[3])
    assert all(math.isnan(figure) for figure in missing)


def test_columns_have_the_order_that_was_asked_for() -> None:
    """Whatever order the readings come in."""
    sample = _sample(1.0, Reading("host", 1, 1, 1, 1), Reading("cuda:0", 2, 2, 2, 2))

    assert unpack_rows(pack_rows([sample], ["cuda:0", "host"]), 2) == [
        (1.0, [(2, 2, 2, 2), (1, 1, 1, 1)])
    ]


@pytest.mark.parametrize(("n_devices", "n_rows"), [(1, 25), (2, 14), (9, 3)])
def test_rows_are_counted_by_their_width(n_devices: int, n_rows: int) -> None:
    """A row of n devices takes 8 bytes for its time and 32 for each."""
    assert count_rows(1024, n_devices) == n_rows
