"""What records work out of their own fields."""

from __future__ import annotations

import pytest

from gpumemwidget.model.cells import Span


@pytest.mark.parametrize(
    ("span", "change_bytes", "rise_bytes"),
    [
        (Span(100, 150, 300), 50, 200),
        (Span(100, 40, 100), -60, 0),
        (Span(None, 150, 300), None, None),
        (Span(100, None, 300), None, 200),
        (Span(100, 150, None), 50, None),
        (Span(0, 0, 0), 0, 0),
    ],
)
def test_span_tells_its_change_and_its_rise(
    span: Span, change_bytes: int | None, rise_bytes: int | None
) -> None:
    """Unknown stays unknown: it is never taken for 0, nor 0 for unknown."""
    assert span.change_bytes == change_bytes
    assert span.rise_bytes == rise_bytes
