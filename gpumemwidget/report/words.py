"""The words that the reports share: names of counters and cells, what a mark means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpumemwidget.records import HOST, CellRecord, MemoryKind, PeakIs
from gpumemwidget.units import format_bytes

__all__ = [
    "MARK_MEANINGS",
    "CounterNames",
    "count_kind",
    "cut_words",
    "format_peak",
    "join_words",
    "mark_peak",
    "name_cell",
    "name_counters",
    "name_record",
    "rank_device",
    "say_peak",
]

#: Of a line that stands for a number.
_MOST_CHARACTERS = 60

_MARKS: dict[PeakIs | None, str] = {"at least": "≥", "sampled": "~"}

_PLURALS: dict[MemoryKind, str] = {
    "parameter": "parameters",
    "gradient": "gradients",
    "buffer": "buffers",
    "tensor": "tensors",
    "cuBLAS workspace": "cuBLAS workspaces",
    "CUDA-graph pool": "CUDA-graph pools",
    "compile cache": "compile caches",
}

#: What a mark before a number says, in the order in which the legends stand.
MARK_MEANINGS = {
    "≥": "at least: the counter was reset meanwhile, or ran before the recording did",
    "~": "sampled: the highest of what was seen at intervals",
    "*": "resident: malloc keeps no peak of what it has handed out",
    "!": "beyond the budget that the cell had (%membudget)",
    "!!": "beyond the budget that the cell had, which interrupted it (%membudget --stop)",
}


@dataclass(frozen=True, slots=True)
class CounterNames:
    """What a device's two counters are called, and what the first is on the host."""

    allocated: str
    reserved: str
    allocated_detail: str = ""


def name_counters(device: str) -> CounterNames:
    """The names of a device's counters: the host's are those of malloc and of the process."""
    if device == HOST:
        return CounterNames("allocated", "resident", "malloc")
    return CounterNames("allocated", "reserved")


def mark_peak(peak_is: PeakIs | None) -> str:
    """What stands before a peak that is not the exact one; nothing before one that is."""
    return _MARKS.get(peak_is, "")


def format_peak(peak_bytes: int, peak_is: PeakIs | None) -> str:
    """``3.40 GiB``, ``≥ 3.40 GiB``, ``~ 3.40 GiB``."""
    return f"{mark_peak(peak_is)} {format_bytes(peak_bytes)}".lstrip()


def say_peak(peak_bytes: int, peak_is: PeakIs | None) -> str:
    """``3.40 GiB``, ``at least 3.40 GiB``: within a sentence a mark would need its legend."""
    kind = "" if peak_is in ("exact", None) else f"{peak_is} "
    return f"{kind}{format_bytes(peak_bytes)}"


def name_cell(execution_count: int | None) -> str:
    """``In [7]``, and ``In [ ]`` where IPython gave no number."""
    return f"In [{' ' if execution_count is None else execution_count}]"


def name_record(record: CellRecord) -> str:
    """``In [7]``; the first line of what has no number: ``with trace() in train.py, line 12``."""
    first_line = record.first_line
    if record.execution_count is not None or not first_line:
        return name_cell(record.execution_count)
    return cut_words(first_line, _MOST_CHARACTERS)


def count_kind(kind: MemoryKind, number: int | None = None) -> str:
    """``parameters``, ``148 parameters``, ``parameter`` where there is one; some have no plural."""
    plural = _PLURALS.get(kind)
    if plural is None or number == 1:
        return kind
    return plural if number is None else f"{number} {plural}"


def rank_device(device: str) -> tuple[bool, str, int, str]:
    """The key to sort devices by: GPUs by their number, others by name, the host last."""
    kind, _, index = device.partition(":")
    is_numbered = index.isascii() and index.isdigit() and len(index) < 10
    return device == HOST, kind, int(index) if is_numbered else -1, device


def join_words(words: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"


def cut_words(text: str, most: int) -> str:
    """The text with an ellipsis for what is beyond so many characters."""
    return text if len(text) <= most else text[: most - 1].rstrip() + "…"
