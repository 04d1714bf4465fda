"""What stands under a traced cell keeps together, and takes no room before it is there."""

from __future__ import annotations

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.display import display
from IPython.utils.capture import capture_output

from gpumemwidget.jupyter.slots import Slots
from gpumemwidget.report.output import Report

_PIECES = [Report(text, f"<p>{text}</p>") for text in ("head", "timeline", "lines")]


def test_they_are_filled_in_their_order(shell: InteractiveShell) -> None:
    """Each piece takes the place of an output that was there before what the cell printed."""
    with capture_output() as captured:
        slots = Slots(display("chart", display_id=True), 2)
        display("what the cell shows")
        slots.fill(_PIECES)

    chart, first, second, own, *updates = captured.outputs
    assert first.data == second.data == {"text/plain": "", "text/html": ""}
    assert own.data["text/plain"] == "'what the cell shows'"
    assert [each.update for each in updates] == [True, True, True]
    assert [each.data["text/plain"] for each in updates] == ["head", "timeline", "lines"]
    assert [each.transient for each in updates] == [
        each.transient for each in (chart, first, second)
    ]


def test_what_is_left_over_stays_empty(shell: InteractiveShell) -> None:
    """A report without a timeline is one piece."""
    with capture_output() as captured:
        slots = Slots(display("chart", display_id=True), 2)
        slots.fill(_PIECES[:1])

    assert [each.update for each in captured.outputs] == [False, False, False, True]


def test_too_much_is_refused(shell: InteractiveShell) -> None:
    """Nothing is dropped in silence."""
    with capture_output():
        slots = Slots(display("chart", display_id=True), 1)

        with pytest.raises(ValueError, match="3 things for 2 outputs"):
            slots.fill(_PIECES)
