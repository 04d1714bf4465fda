"""The report of a traced cell: each byte once, the source as it was typed, and not too much."""

from __future__ import annotations

import pytest

from gpumemwidget.model.traces import NoteKind, TraceNote
from gpumemwidget.report.trace import report_trace, word_note
from tests.report.trace_examples import (
    make_lines_device,
    make_trace,
    use,
)


def _list_rows(text: str) -> list[str]:
    """The rows of the first listing of source."""
    lines = text.split("\n")
    start = next(index for index, line in enumerate(lines) if line.endswith("  line"))
    return lines[start + 1 : lines.index("", start)]


def test_tabs_and_wide_letters_keep_their_places() -> None:
    """A tab is an indentation, and wide letters take two columns."""
    trace = make_trace(make_lines_device([("if 模型:", None), ("\tx = '🤗' * 1000", use(1))]))

    report = report_trace(trace, [])

    assert any(row.endswith("1  if 模型:") for row in _list_rows(report.text))
    assert any(row.endswith("2      x = '🤗' * 1000") for row in _list_rows(report.text))
    assert 'white-space:pre">    x = &#x27;🤗&#x27; * 1000</code>' in report.html


@pytest.mark.parametrize("kind", NoteKind)
def test_each_kind_of_note_has_a_sentence(kind: NoteKind) -> None:
    """With its figures, and without what the note does not have."""
    words = word_note(TraceNote(kind, "text", 1, 2, 3.0))

    assert words[-1] == "."
    assert "None" not in words.replace("(None)", "")
