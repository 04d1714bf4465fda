"""The words that the reports share: names of counters and cells, lists, marks, traces, progress."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from gpumemwidget.model.cells import CellRecord
from gpumemwidget.model.devices import HOST, PeakIs
from gpumemwidget.model.ownership import DeviceBytes, MemoryKind
from gpumemwidget.model.traces import NoteKind, Origin, TraceNote
from gpumemwidget.progress import Progress, Stage
from gpumemwidget.units import format_bytes, format_duration

#: Maximum number of characters of a first line that stands for a cell's number.
_MAX_FIRST_LINE = 60

_MARKS: dict[PeakIs | None, str] = {"at least": "≥", "sampled": "~"}

#: Kinds of memory that have no plural.
_UNCOUNTED: frozenset[MemoryKind] = frozenset(
    {"optimizer state", "saved for backward", "other", "unknown"}
)

#: Meanings of the marks before numbers, in the order of the legend.
MARK_MEANINGS = {
    "≥": "lower bound: the peak counter was reset during the cell, or recording began later",
    "~": "sampled: the highest reading, taken at intervals",
    "*": "peak of resident memory (malloc has no peak counter)",
    "!": "above the cell's budget (%membudget)",
}

_NUMBER = re.compile(r"\d+", re.ASCII)


@dataclass(frozen=True, slots=True)
class CounterNames:
    """Names of a device's two counters."""

    allocated: str
    reserved: str


def name_counters(device: str) -> CounterNames:
    """Return the names of a device's counters: the host's are malloc's and the process's."""
    if device == HOST:
        return CounterNames("allocated", "resident")
    return CounterNames("allocated", "reserved")


def mark_peak(peak_is: PeakIs | None) -> str:
    """Return the mark of a peak that is not exact; ``""`` for an exact one."""
    return _MARKS.get(peak_is, "")


def say_peak(peak_bytes: int | None, peak_is: PeakIs | None) -> str:
    """Return ``3.40 GiB`` or ``at least 3.40 GiB``: a mark in a sentence would need a legend."""
    kind = "" if peak_is in ("exact", None) else f"{peak_is} "
    return f"{kind}{format_bytes(peak_bytes)}"


def bind_bytes(n_bytes: int) -> str:
    """Return an amount that no line break divides."""
    return format_bytes(n_bytes).replace(" ", "\xa0")


def format_device_bytes(amounts: DeviceBytes) -> str:
    """Return ``1.40 GiB on cuda:0 and 12.00 MiB on host``, without devices that have nothing.

    A lower bound says so once, in front: ``at least 1.40 GiB on cuda:0``. ``""`` is exactly
    nothing.
    """
    parts = [
        f"{format_bytes(n_bytes)} on {device}"
        for device, n_bytes in amounts.by_device
        if n_bytes > 0
    ]
    if amounts.is_at_least:
        return f"at least {join_words(parts) or format_bytes(0)}"
    return join_words(parts)


def name_cell(execution_count: int | None) -> str:
    """Return ``In [7]``, or ``In [ ]`` if IPython gave no number."""
    return f"In [{' ' if execution_count is None else execution_count}]"


def name_record(record: CellRecord) -> str:
    """Return ``In [7]``, or a first line: ``with trace() in train.py, line 12``."""
    if record.execution_count is not None or not record.first_line:
        return name_cell(record.execution_count)
    return cut_words(record.first_line, _MAX_FIRST_LINE)


def count_kind(kind: MemoryKind, number: int | None = None) -> str:
    """Return ``parameters``, ``148 parameters``, or ``parameter`` for 1; some have no plural."""
    if kind in _UNCOUNTED or number == 1:
        return kind
    return f"{kind}s" if number is None else f"{number} {kind}s"


def count(number: int, noun: str, plural: str = "") -> str:
    """Return ``1 line`` or ``2 lines``."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def join_words(words: Sequence[str]) -> str:
    """Return ``a``, ``a and b`` or ``a, b and c``."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"


def list_some(words: Sequence[str], most: int) -> list[str]:
    """Return the first words, and ``3 more`` for the rest."""
    n_more = len(words) - most
    return [*words[:most], f"{n_more} more"] if n_more > 0 else list(words)


def name_range(names: Sequence[str]) -> str:
    """Return names that differ in numbers alone as one: ``transformer.h.0…11.mlp``."""
    texts = _NUMBER.split(names[0])
    ranges = []
    for column in zip(*(_NUMBER.findall(name) for name in names), strict=True):
        # Numbers stay text, so that they keep leading zeros.
        numbers = sorted(set(column), key=lambda number: (len(number.lstrip("0")), number))
        ranges.append(numbers[0] if len(numbers) == 1 else f"{numbers[0]}…{numbers[-1]}")
    return "".join(map(str.__add__, texts, [*ranges, ""]))


def cut_words(text: str, max_length: int) -> str:
    """Return a text of at most ``max_length`` characters, ended with an ellipsis if it was cut."""
    return text if len(text) <= max_length else text[: max_length - 1].rstrip() + "…"


# -- Traces ----------------------------------------------------------------------------------------

_ORIGINS = {
    Origin.BEFORE_CELL: "before the cell",
    Origin.OTHER_LINES: "other lines",
    Origin.OUTSIDE_LINES: "outside the cell's lines",
}
_COUNTED = "By the counters, {n_bytes} were {text} "
_REPLAYED = ", by the history {history_bytes}."
_NOTES = {
    NoteKind.MESSAGE: "{text}",
    NoteKind.START_DIFFERS: f"{_COUNTED}before the cell{_REPLAYED}",
    NoteKind.END_DIFFERS: f"{_COUNTED}after it{_REPLAYED}",
    NoteKind.PEAK_DIFFERS: f"{_COUNTED}at its peak{_REPLAYED}",
    NoteKind.EVENTS_MISSING: "The history has lost its oldest events: lines are complete only from "
    "{seconds} after the cell's start.",
    NoteKind.PEAK_NOT_IN_EVENTS: "The peak of {n_bytes} came before that. The lines shown at the "
    "peak are those of {history_bytes}, the highest since.",
    NoteKind.REPLAY_DIFFERS: "The history does not lead to what is allocated at the end: the "
    "figures of lines are not exact, and the peak is that of the counters.",
    NoteKind.BACKWARD_INFERRED: "{n_bytes} allocated on autograd's threads, which show no line of "
    "the cell, are attributed to the line last seen before.",
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


# -- Progress --------------------------------------------------------------------------------------

_STAGES = {
    Stage.WALK_OBJECTS: "Looking through objects",
    Stage.FIND_HOLDERS: "Looking for what holds tensors without a variable",
    Stage.DESCRIBE_ROWS: "Adding up what each variable would free",
    Stage.MOVE_BYTES: "Moving tensors to another device",
    Stage.READ_BYTES: "Reading the file",
    Stage.REPLAY_EVENTS: "Replaying the allocator's events",
    Stage.PLACE_EVENTS: "Looking up the lines of the allocator's events",
}
_IN_BYTES = (Stage.MOVE_BYTES, Stage.READ_BYTES)


def format_progress(progress: Progress) -> str:
    """Return how far long work has got: ``Looking through objects: 340,000 so far``."""
    done, total = f"{progress.done:,}", f"{progress.total or 0:,}"
    if progress.stage in _IN_BYTES:
        done, total = format_bytes(progress.done), format_bytes(progress.total)
    figures = f"{done} so far" if progress.total is None else f"{done} of {total}"
    return f"{_STAGES[progress.stage]}: {figures}"
