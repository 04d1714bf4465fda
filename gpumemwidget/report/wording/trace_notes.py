"""Put into words what a trace inferred or is missing, and where memory was allocated."""

from __future__ import annotations

from gpumemwidget.model.traces import NoteKind, Origin, TraceNote
from gpumemwidget.units import format_bytes, format_duration

_ORIGINS = {
    Origin.BEFORE_CELL: "before the cell",
    Origin.OTHER_LINES: "other lines",
    Origin.OUTSIDE_LINES: "outside the cell's lines",
}
_INFERRED = (
    "{n_bytes} allocated on autograd's threads, which show no line of the cell, are attributed to "
)
_COMPLETE = "lines are complete only from {seconds} after the cell's start."
_COUNTED = "By the counters, {n_bytes} were {text} "
_REPLAYED = ", by the history {history_bytes}."
_NOTES = {
    NoteKind.MESSAGE: "{text}",
    NoteKind.START_DIFFERS: f"{_COUNTED}before the cell{_REPLAYED}",
    NoteKind.END_DIFFERS: f"{_COUNTED}after it{_REPLAYED}",
    NoteKind.PEAK_DIFFERS: f"{_COUNTED}at its peak{_REPLAYED}",
    NoteKind.OLDEST_EVENTS_LOST: f"The history has lost its oldest events: {_COMPLETE}",
    NoteKind.EVENTS_MISSING: f"Events are missing in the history: {_COMPLETE}",
    NoteKind.PEAK_NOT_IN_EVENTS: "The peak of {n_bytes} came before that. The lines shown at the "
    "peak are those of {history_bytes}, the highest since.",
    NoteKind.REPLAY_DIFFERS: "The history does not lead to what is allocated at the end: the "
    "figures of lines are not exact, and the peak is that of the counters.",
    NoteKind.BACKWARD_BEGUN: f"{_INFERRED}the line last seen to start a backward pass.",
    NoteKind.BACKWARD_AFTER_LINE: f"{_INFERRED}the line last seen before.",
    NoteKind.NO_STACKS: "The history was recorded without stacks: no line can be named.",
    NoteKind.READING_FAILED: "Reading the lines failed ({text}) and ended there.",
    NoteKind.TRACING_REPLACED: "Tracing was switched off or replaced during the cell (by "
    "sys.settrace, or by recursion up to its limit); the lines after that were not read.",
    NoteKind.OTHER_THREADS: "Only the thread that ran the cell was read line by line.",
}


def name_origin(origin: Origin, line: int | None) -> str:
    """Return ``line 3``, or words for memory that is no line's."""
    return _ORIGINS.get(origin, f"line {line}")


def word_note(note: TraceNote) -> str:
    """Return a note as a sentence."""
    return _NOTES[note.kind].format(
        text=note.text,
        n_bytes=format_bytes(note.n_bytes),
        history_bytes=format_bytes(note.history_bytes),
        seconds=format_duration(note.seconds or 0.0),
    )
