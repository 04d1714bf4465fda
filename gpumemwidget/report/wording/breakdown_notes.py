"""Put into words why parts of a breakdown are merged, or may not be exact."""

from __future__ import annotations

from collections.abc import Sequence

from gpumemwidget.model.breakdowns import Breakdown, BreakdownDoubt, BreakdownNote
from gpumemwidget.model.devices import ProcessUse
from gpumemwidget.report.wording.words import list_some
from gpumemwidget.units import format_bytes

#: Maximum number of processes that a note names.
_MAX_NAMED = 4
_SENTENCES = {
    BreakdownDoubt.MOVED_MEANWHILE: (
        "{device}: memory was allocated or freed during the reading, so its figures are not all of "
        "one moment."
    ),
    BreakdownDoubt.USE_UNKNOWN: "{device}: the driver does not report what is in use there.",
    BreakdownDoubt.TOTAL_OF_PYTORCH: (
        "{device}: the driver reports no figures, so the total is PyTorch's, which leaves out what "
        "the driver reserves."
    ),
    BreakdownDoubt.DRIVER_PART_UNKNOWN: (
        "{device}: what the driver reserves is not reported; it is part of what is in use."
    ),
    BreakdownDoubt.PROCESSES_EXCEED_USE: (
        "{device}: the processes add up to more than is in use, as they share memory or were not "
        "read at one moment, so they are not told apart."
    ),
    BreakdownDoubt.OWN_OVERLAPS_FREE: (
        "{device}: this process and free memory add up to more than the total, as they overlap or "
        "were not read at one moment, so the rest is not told apart."
    ),
    BreakdownDoubt.OWN_EXCEEDS_TOTAL: (
        "{device}: this process would have more than the total of {n_bytes}, so nothing is told "
        "apart."
    ),
    BreakdownDoubt.NOT_RESIDENT: (
        "malloc has handed out {n_bytes}, some of which is not resident: pages that were never "
        "written to, or are swapped out, take no memory."
    ),
    BreakdownDoubt.ALLOCATED_EXCEEDS: (
        "{device}: the counters report {n_bytes} allocated of {other_bytes} reserved, so the two "
        "are not told apart."
    ),
    BreakdownDoubt.SEGMENTS_UNKNOWN: (
        "{device}: the allocator reports no segments (cudaMallocAsync does not), so what is "
        "reserved but unallocated is one part."
    ),
    BreakdownDoubt.SEGMENTS_OF_ANOTHER_MOMENT: (
        "{device}: the segments were read at another moment than the counters, so what is reserved "
        "but unallocated is one part."
    ),
    BreakdownDoubt.OWNERS_DIFFER: (
        "{device}: owners of {n_bytes} were found, but {other_bytes} are allocated, so what is "
        "allocated is not divided by kind."
    ),
    BreakdownDoubt.ROUNDING_UNKNOWN: (
        "{device}: the requested size is not known of all blocks, so each kind includes its "
        "rounding."
    ),
    BreakdownDoubt.OWNERS_INCOMPLETE: (
        "{device}: there were too many objects to look at, so less may be without a variable."
    ),
    BreakdownDoubt.NOT_LISTED: (
        "{device}: the driver lists {processes}; one of these may be this process under another "
        "number."
    ),
    BreakdownDoubt.PID_OF_ANOTHER: (
        "{device}: the driver reports {n_bytes} for this process, less than the {other_bytes} of "
        "PyTorch alone, so that figure belongs to another process or moment."
    ),
    BreakdownDoubt.BYTES_UNKNOWN: (
        "{device}: the driver does not report how much {processes} {have}."
    ),
}
_NONE_LISTED = (
    "{device}: the driver lists no process there, not even this one, as in a container or without "
    "permission, so they are not told apart."
)


def list_breakdown_notes(breakdown: Breakdown) -> tuple[str, ...]:
    """Return the sentences that go with a breakdown, those of the driver first."""
    words = (_word_note(note, breakdown.device) for note in breakdown.notes)
    return (*breakdown.failures, *words)


def _word_note(note: BreakdownNote, device: str) -> str:
    sentence = _SENTENCES[note.doubt]
    if note.doubt is BreakdownDoubt.NOT_LISTED and not note.processes:
        sentence = _NONE_LISTED
    return sentence.format(
        device=device,
        n_bytes=format_bytes(note.n_bytes),
        other_bytes=format_bytes(note.other_bytes),
        processes=_name_processes(note.processes),
        have="has" if len(note.processes) == 1 else "have",
    )


def _name_processes(processes: Sequence[ProcessUse]) -> str:
    names = [
        f"pid {each.pid}"
        + ("" if each.n_bytes is None or each.n_bytes < 0 else f" ({format_bytes(each.n_bytes)})")
        for each in processes
    ]
    return ", ".join(list_some(names, _MAX_NAMED))
