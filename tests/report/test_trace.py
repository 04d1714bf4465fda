"""What a traced cell notes has words."""

from __future__ import annotations

import pytest

from gpumemwidget.model.traces import NoteKind, TraceNote
from gpumemwidget.report.trace import word_note


@pytest.mark.parametrize("kind", NoteKind)
def test_each_kind_of_note_has_a_sentence(kind: NoteKind) -> None:
    """With its figures, and without what the note does not have."""
    words = word_note(TraceNote(kind, "text", 1, 2, 3.0))

    assert words[-1] == "."
    assert "None" not in words.replace("(None)", "")
