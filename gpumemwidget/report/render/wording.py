"""The words that the reports share: names of counters, cells and parts, lists, progress."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gpumemwidget.model.breakdowns import BreakdownPart, PartKey
from gpumemwidget.model.cells import CellRecord
from gpumemwidget.model.devices import (
    HOST,
    MEMORY_IN_USE,
    HardwareNote,
    HardwareNoteKind,
    PeakIs,
    ProcessUse,
    Reading,
)
from gpumemwidget.model.ownership import CutSearch, DeviceBytes, MemoryKind, Slices
from gpumemwidget.model.traces import Origin, Timeline
from gpumemwidget.progress import Progress, Stage
from gpumemwidget.report.render.blocks import MOST_ROWS, bound_items
from gpumemwidget.report.render.text import SHORT_WIDTH, cut
from gpumemwidget.units import format_bytes

_NUMBER = re.compile(r"\d+", re.ASCII)


def name_reserved(device: str) -> str:
    """Return the name of a device's counter beside *allocated*; the host's is of the process."""
    return "resident" if device == HOST else "reserved"


def name_device(device: str) -> str:
    """Return a device's name within a sentence: ``the host``, and a GPU's own name."""
    return "the host" if device == HOST else device


def name_memory(device: str) -> str:
    """Return ``host memory`` for the host, and a GPU's own name."""
    return "host memory" if device == HOST else device


def word_reading(reading: Reading) -> str:
    """Return ``Now 1.00 GiB allocated, 2.00 GiB reserved.``, without what is unknown."""
    words = f"Now {format_bytes(reading.allocated_bytes)} allocated"
    if reading.reserved_bytes is not None:
        words += f", {format_bytes(reading.reserved_bytes)} {name_reserved(reading.device)}"
    return f"{words}."


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
    return cut(record.first_line, SHORT_WIDTH)


def count_kind(kind: MemoryKind, number: int | None = None) -> str:
    """Return ``parameters``, ``148 parameters``, or ``parameter`` for 1; some have no plural."""
    if number == 1 or kind in ("optimizer state", "saved for backward", "other", "unknown"):
        return kind
    return f"{kind}s" if number is None else f"{number} {kind}s"


def count(number: int, noun: str, plural: str = "") -> str:
    """Return ``1 line`` or ``2 lines``."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def word_slices(slices: Slices) -> str:
    """Return that tensors keep much more than they show, and what to do; ``""`` if none do."""
    if not slices.n_storages:
        return ""
    size = format_bytes(slices.n_bytes // slices.n_storages)
    keeps = f".clone() keeps {format_bytes(slices.shown_bytes)}"
    if slices.n_storages == 1:
        return f"a slice of a {size} storage: {keeps}"
    return f"slices of {slices.n_storages:,} storages of {size}: {keeps}"


def join_words(words: Sequence[str], most: int = MOST_ROWS) -> str:
    """Return ``a``, ``a and b`` or ``a, b and c``; of very many the first, and how many more."""
    words = bound_items(words, str, most)
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"


def name_range(names: Sequence[str]) -> str:
    """Return names that differ in numbers alone as one: ``transformer.h.0…11.mlp``."""
    texts = _NUMBER.split(names[0])
    ranges = []
    for column in zip(*(_NUMBER.findall(name) for name in names), strict=True):
        # Numbers stay text, so that they keep leading zeros.
        numbers = sorted(set(column), key=lambda number: (len(number.lstrip("0")), number))
        ranges.append(numbers[0] if len(numbers) == 1 else f"{numbers[0]}…{numbers[-1]}")
    return "".join(map(str.__add__, texts, [*ranges, ""]))


# -- Parts of a device's memory ----------------------------------------

#: Name of a process that can't be read.
HIDDEN = "not visible from here"
#: Name of the kind ``unknown``, and of the host's kind ``other``.
UNATTRIBUTED = "unattributed"

_NAMES: dict[PartKey, str] = {
    "allocated": "allocated",
    "unnamed": UNATTRIBUTED,
    "rounding": "rounding",
    "pending": "cached, pending free",
    "releasable": "cached, releasable",
    "fragmented": "cached, fragmented",
    "pools": "cached, private pools",
    "outside": "this process outside PyTorch",
    "context": "CUDA context and the rest",
    "children": "this notebook's children",
    "others": "other processes",
    "unlisted": "not attributed by the driver",
    "driver": "reserved by the driver",
    "free": "free",
    "cached": "other resident memory",
}

#: The parts that PyTorch's errors call "reserved but unallocated".
UNALLOCATED: frozenset[PartKey] = frozenset({"pending", "releasable", "fragmented", "pools"})
#: The parts of this process, which stand at the left end of a device's bar.
OWN_PARTS: frozenset[PartKey] = UNALLOCATED | {"allocated", "cached", "outside"}

#: Names of parts that can't be separated.
_MERGED_NAMES: dict[frozenset[PartKey], str] = {
    UNALLOCATED | {"allocated"}: "reserved by PyTorch",
    UNALLOCATED | {"allocated", "outside"}: "this process",
    frozenset({"allocated", "cached"}): "this process",
}


def name_part(part: BreakdownPart, device: str = "", *, lists_merged: bool = False) -> str:
    """Return a part's name in a few words; of a process its name and pid."""
    if part.process is not None:
        return name_process(part.process)
    if part.kind is not None:
        return name_kind(part.kind, device)
    if part.library is not None:
        return f"{part.library.name}, {'in use' if part.key == 'library' else 'cached'}"
    if not part.merged:
        return _name_key(part.key, device)
    # Processes that are not separated may be children, or processes that the driver does not list.
    hidden = {"children", "unlisted"} if "others" in part.merged else set()
    names = list_merged([key for key in part.merged if key not in hidden], device)
    listed = join_words(names) if lists_merged or len(names) == 1 else "not broken down"
    return _MERGED_NAMES.get(frozenset(part.merged), listed)


def list_merged(keys: Sequence[PartKey], device: str) -> list[str]:
    """Return the names of parts that are one, without repeating that of the cache."""
    names = ("cached" if key in UNALLOCATED else _name_key(key, device) for key in keys)
    return list(dict.fromkeys(names))


def _name_key(key: PartKey, device: str) -> str:
    of_host = {"free": "available", "others": "other processes and the system"}
    names = of_host if device == HOST else {}
    return names.get(key) or _NAMES.get(key, key)


def name_process(process: ProcessUse) -> str:
    """Return ``python train.py (pid 4711)``."""
    return f"{process.name or HIDDEN} (pid {process.pid})"


def name_kind(kind: MemoryKind, device: str = "") -> str:
    """Return the name of all memory of a kind: ``parameters``, ``other tensors``."""
    if kind in ("other", "unknown"):
        return name_one_kind(kind, device)
    return "other tensors" if kind == "tensor" else count_kind(kind)


def name_one_kind(kind: MemoryKind, device: str) -> str:
    """Return the name for the kind of one owner: ``parameter``, ``unattributed``."""
    if kind == "other" and device == HOST:
        return "Python & libraries"
    return UNATTRIBUTED if kind == "unknown" else kind


def name_look(look: str) -> str:
    """Return the name of a colour in the map of segments."""
    return _NAMES.get(look) or name_kind(look)  # type: ignore[call-overload, arg-type]


def find_look(part: BreakdownPart) -> str:
    """Return the key of a part's colour in the palette."""
    merged = set(part.merged)
    if part.key in ("library", "library cache", "context"):
        return "outside"
    if merged and merged <= UNALLOCATED:
        return "cached"
    if merged and merged <= OWN_PARTS:
        return "allocated"
    if merged and merged <= {"children", "others", "unlisted"}:
        return "others"
    return part.kind or part.key


def name_library(device: str) -> str:
    """Return the module of PyTorch for a device: ``torch.cuda``, ``torch.xpu``."""
    kind = device.partition(":")[0]
    if kind in ("cuda", HOST):
        return "torch.cuda"
    return f"torch.{kind}" if kind in ("xpu", "mps") else "torch.accelerator"


_ORIGINS = {
    Origin.BEFORE_CELL: "before the {traced}",
    Origin.OTHER_LINES: "other lines",
    Origin.OUTSIDE_LINES: "outside the {traced}'s lines",
}


def name_traced(timeline: Timeline) -> str:
    """Return what a timeline is of: ``cell``, or ``step`` where it is a prediction's."""
    return "step" if timeline.unit == "operators" else "cell"


def name_origin(origin: Origin, line: int | None, *, traced: str = "cell") -> str:
    """Return ``line 3``, or words for memory that is no line's; ``traced`` is what has lines."""
    return _ORIGINS.get(origin, f"line {line}").format(traced=traced)


# -- Notes of the hardware's ----------------------------------------

_HARDWARE_NOTES = {
    HardwareNoteKind.MESSAGE: "{text}",
    HardwareNoteKind.NO_TOTAL: "{device}: neither PyTorch nor a driver knows its total, so it "
    "can't be shown in parts that add up; %memvars shows who holds what on it.",
    HardwareNoteKind.UNREAD: "{device}: {what} can't be read: {text}",
    HardwareNoteKind.NO_DRIVER: "whole-device figures are missing: {text} (nvidia-smi may show "
    "more; a container needs the driver capability 'utility')",
    HardwareNoteKind.GPUS_UNNUMBERED: "this machine has GPUs of different models, and CUDA numbers "
    "the fastest first: whole-device figures appear once CUDA is in use, or from the start with "
    "CUDA_DEVICE_ORDER=PCI_BUS_ID",
    HardwareNoteKind.BLOCKS_COSTLY: "the allocator's blocks are not read while a memory history is "
    "recorded: PyTorch {text} would fetch all of its events with them",
    HardwareNoteKind.NOT_RECORDED: "GPU memory is not recorded: {text}",
    HardwareNoteKind.LIMIT_FAILED: "The limit of {device} is not set: {text}",
    HardwareNoteKind.NOT_TRACED: "{device} is not traced: only on CUDA is the allocator's history "
    "read",
    HardwareNoteKind.NO_HISTORY: "The CUDA allocator {text} keeps no history: to see lines, start "
    "the kernel with PyTorch's own (backend:native).",
    HardwareNoteKind.HISTORY_REFUSED: "CUDA refuses a memory history: {text}",
}


def word_hardware_note(note: HardwareNote) -> str:
    """Return a note of the hardware's in words."""
    return _HARDWARE_NOTES[note.kind].format(text=note.text, device=note.device, what=note.what)


def word_driver_failure(device: str, failure: str) -> str:
    """Return why the driver has no figures of a device, in the words of the note on it."""
    kind = HardwareNoteKind.UNREAD
    return word_hardware_note(HardwareNote(kind, failure, device, MEMORY_IN_USE))


def word_cut(search: CutSearch) -> str:
    """Return where alone a search that ended early has looked, in words."""
    among = f" among the {search.n_objects:,} objects that could be looked at"
    if search.limit_s is None:
        return f"{among}; not all of the autograd graphs were"
    return f"{among} in {search.limit_s:g} s"


# -- Progress ----------------------------------------

_STAGES = {
    Stage.WALK_OBJECTS: "Looking through objects",
    Stage.FIND_HOLDERS: "Looking for what holds tensors without a variable",
    Stage.DESCRIBE_ROWS: "Adding up what each variable would free",
    Stage.MOVE_BYTES: "Moving tensors to another device",
    Stage.READ_BYTES: "Reading the file",
    Stage.REPLAY_EVENTS: "Replaying the allocator's events",
    Stage.PLACE_EVENTS: "Looking up the lines of the allocator's events",
    Stage.CALL_OPERATORS: "Predicting the operators of the step",
}


def format_progress(progress: Progress) -> str:
    """Return how far long work has got: ``Looking through objects: 340,000 so far``."""
    done, total = f"{progress.done:,}", f"{progress.total or 0:,}"
    if progress.stage in (Stage.MOVE_BYTES, Stage.READ_BYTES):
        done, total = format_bytes(progress.done), format_bytes(progress.total)
    figures = f"{done} so far" if progress.total is None else f"{done} of {total}"
    return f"{_STAGES[progress.stage]}: {figures}"
