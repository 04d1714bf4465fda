"""Bytes and durations as text, and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumemwidget.errors import BadInputError
from gpumemwidget.units import (
    UNKNOWN,
    format_bytes,
    format_change,
    format_duration,
    parse_bytes,
)

KIB, MIB, GIB, TIB = 1024, 1024**2, 1024**3, 1024**4


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (None, UNKNOWN),
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (GIB - 1, "1.00 GiB"),
        (1536 * MIB, "1.50 GiB"),
        (-3 * GIB, "-3.00 GiB"),
        (2000 * 1024 * TIB, "2000.00 PiB"),
    ],
)
def test_bytes_read_in_the_unit_that_suits_them(n_bytes: int | None, text: str) -> None:
    """Binary units, two decimals; whole numbers below a KiB; a dash for unknown, never a zero."""
    assert format_bytes(n_bytes) == text


@given(st.integers(min_value=-1023 * 1024 * TIB, max_value=1023 * 1024 * TIB))
def test_formatted_bytes_are_never_four_digits_long(n_bytes: int) -> None:
    """Rounding may not write ``1024.00 MiB`` where ``1.00 GiB`` is meant."""
    number, unit = format_bytes(n_bytes).split()

    assert abs(float(number)) < 1024
    assert "-" not in number or n_bytes < 0
    assert unit == "B" or abs(float(number)) >= 1


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [(None, UNKNOWN), (0, "0 B"), (MIB, "+1.00 MiB"), (-MIB, "-1.00 MiB")],
)
def test_a_change_shows_its_sign(n_bytes: int | None, text: str) -> None:
    """A rise has a plus, so that nobody takes it for an amount; nothing has no sign."""
    assert format_change(n_bytes) == text


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [
        (None, UNKNOWN),
        (0.0, "0 µs"),
        (0.9996e-3, "1.0 ms"),
        (0.99996, "1.00 s"),
        (4.56, "4.56 s"),
        (59.996, "1 min 00 s"),
        (3599.6, "1 h 00 min"),
        (7500.0, "2 h 05 min"),
    ],
)
def test_durations_read_in_the_unit_that_suits_them(duration_s: float | None, text: str) -> None:
    """From microseconds to hours, and rounding goes over into the next unit."""
    assert format_duration(duration_s) == text


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("4096", 4096),
        ("12GiB", 12 * GIB),
        ("1.5 gib", 1536 * MIB),
        (" 500 MB ", 500_000_000),
        ("1KiB", KIB),
    ],
)
def test_amounts_are_understood_as_people_write_them(text: str, n_bytes: int) -> None:
    """Binary and decimal units, any case, with or without a space."""
    assert parse_bytes(text) == n_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1 GiB", "1e9", "12 gigs", "1,5 GiB", "nan"])
def test_what_is_no_amount_is_refused_with_its_reason(text: str) -> None:
    """The message holds what was given and what would have been right."""
    with pytest.raises(BadInputError, match="give a number and a unit") as caught:
        parse_bytes(text)

    assert repr(text) in str(caught.value)
