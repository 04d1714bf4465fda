"""The words for what was inferred in a trace, or is missing."""

from __future__ import annotations

import pytest

from gpumemwidget.model.traces import NoteKind, Origin, TraceNote
from gpumemwidget.report.render.wording import name_origin
from gpumemwidget.report.trace import word_note

MIB = 1 << 20


@pytest.mark.parametrize(
    ("note", "words"),
    [
        (
            TraceNote(NoteKind.PEAK_DIFFERS, "reserved", 6 * MIB, 5 * MIB),
            "By the counters, 6.00 MiB were reserved at its peak, by the history 5.00 MiB.",
        ),
        (
            TraceNote(NoteKind.EVENTS_MISSING, seconds=6e-6),
            "The history has lost its oldest events: lines are complete only from 6 µs after the "
            "cell's start.",
        ),
        (
            TraceNote(NoteKind.PEAK_NOT_IN_EVENTS, "", 5 * MIB, MIB),
            "The peak of 5.00 MiB came before that. The lines shown at the peak are those of "
            "1.00 MiB, the highest since.",
        ),
        (
            TraceNote(NoteKind.BACKWARD_INFERRED, n_bytes=MIB),
            "1.00 MiB allocated on autograd's threads, which show no line of the cell, are "
            "attributed to the line last seen before.",
        ),
        (
            TraceNote(NoteKind.READING_FAILED, "OSError: {gone}"),
            "Reading the lines failed (OSError: {gone}) and ended there.",
        ),
    ],
)
def test_notes_have_their_figures(note: TraceNote, words: str) -> None:
    assert word_note(note) == words


@pytest.mark.parametrize("kind", NoteKind)
def test_each_kind_has_a_sentence(kind: NoteKind) -> None:
    words = word_note(TraceNote(kind, "text", 1, 2, 3.0))

    assert words == "text" or (words[-1] == "." and "None" not in words)


def test_origins_have_names() -> None:
    assert name_origin(Origin.LINE, 3) == "line 3"
    assert len({name_origin(origin, 3) for origin in Origin}) == len(Origin)
