"""The names of the parts of a device's memory, what can be done about each, and what is in doubt.

The table of parts, plotly's figure and the dashboard all take their sentences from here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from gpumemwidget.model.breakdowns import (
    Breakdown,
    BreakdownDoubt,
    BreakdownPart,
    PartKey,
)
from gpumemwidget.model.devices import HOST, PinnedUse, ProcessUse
from gpumemwidget.model.ownership import MemoryKind
from gpumemwidget.report.wording.words import bind_bytes, count_kind, join_words

# -- Names -----------------------------------------------------------------------------------------

#: Name of a process that can't be read.
HIDDEN = "not visible from here"
#: Name of the kind ``unknown``, and of the host's kind ``other``.
UNATTRIBUTED = "unattributed"
_PYTHON = "Python & libraries"

_NAMES: dict[PartKey, str] = {
    "allocated": "allocated",
    "unnamed": "no variable",
    "rounding": "rounding",
    "pending": "cached, pending free",
    "releasable": "cached, releasable",
    "fragmented": "cached, fragmented",
    "pools": "cached, private pools",
    "outside": "this process outside PyTorch",
    "children": "this notebook's children",
    "others": "other processes",
    "unlisted": "not attributed by the driver",
    "driver": "reserved by the driver",
    "free": "free",
    "cached": "other resident memory",
}
_HOST_NAMES: dict[PartKey, str] = {
    "free": "available",
    "others": "other processes and the system",
}

#: Blocks in the map of segments that are not allocated.
_BLOCK_STATES = {
    "pending": "pending free",
    "releasable": "free, releasable",
    "fragmented": "free, beside blocks in use",
    "pools": "free, in a private pool",
}

#: The parts that PyTorch's errors call "reserved but unallocated".
_UNALLOCATED: frozenset[PartKey] = frozenset({"pending", "releasable", "fragmented", "pools"})
_RESERVED_BUT_UNALLOCATED = "reserved but unallocated"
#: The parts of this process, which stand at the left end of a device's bar.
OWN_PARTS: frozenset[PartKey] = _UNALLOCATED | {"allocated", "cached", "outside"}

#: Names of parts that can't be told apart.
_MERGED_NAMES: tuple[tuple[Collection[PartKey], str], ...] = (
    (_UNALLOCATED | {"allocated"}, "reserved by PyTorch"),
    (_UNALLOCATED | {"allocated", "outside"}, "this process"),
    ({"allocated", "cached"}, "this process"),
)


def name_part(part: BreakdownPart, device: str = "", *, lists_merged: bool = False) -> str:
    """Return a part's name in a few words; of a process its name and pid."""
    if part.process is not None:
        return name_process(part.process)
    if part.kind is not None:
        return name_kind(part.kind, device)
    if not part.merged:
        return _name_key(part.key, device)
    # Processes that are not told apart may be children, or processes that the driver does not list.
    hidden = {"children", "unlisted"} if "others" in part.merged else set()
    names = _list_merged([key for key in part.merged if key not in hidden], device)
    listed = join_words(names) if lists_merged or len(names) == 1 else "not told apart"
    return next((name for keys, name in _MERGED_NAMES if set(part.merged) == keys), listed)


def _list_merged(keys: Sequence[PartKey], device: str) -> list[str]:
    names = (
        _RESERVED_BUT_UNALLOCATED if key in _UNALLOCATED else _name_key(key, device) for key in keys
    )
    return list(dict.fromkeys(names))


def _name_key(key: PartKey, device: str = "") -> str:
    names = _HOST_NAMES if device == HOST else {}
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
        return _PYTHON
    return UNATTRIBUTED if kind == "unknown" else kind


def name_look(look: str) -> str:
    """Return the name of a colour in the map of segments."""
    if look in _BLOCK_STATES:
        return _BLOCK_STATES[look]
    if look in ("allocated", "unnamed"):
        return _name_key(look)  # type: ignore[arg-type]  # these are parts
    return name_kind(look)  # type: ignore[arg-type]  # all others are kinds of memory


def find_look(part: BreakdownPart) -> str:
    """Return the key of a part's colour in the palette."""
    merged = set(part.merged)
    if merged and merged <= _UNALLOCATED:
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


# -- Sentences -------------------------------------------------------------------------------------

_KINDS: dict[MemoryKind, str] = {
    "parameter": "The weights of your modules. A smaller dtype such as bfloat16 halves them; "
    "%memrelease NAME frees a model.",
    "gradient": "As large as their parameters. optimizer.zero_grad() frees them until the next "
    "backward(), and so does %memrelease --grads.",
    "optimizer state": "What the optimizer keeps for each parameter from the first step() on "
    "(Adam: two values). Freed when the optimizer is deleted.",
    "saved for backward": "Activations that backward() needs. Smaller batches, checkpointing and "
    "torch.no_grad() keep fewer; freed when the loss is deleted.",
    "buffer": "State of modules that is not trained, such as running means. Freed with its module.",
    "tensor": "Batches, outputs, caches and the like. %memvars shows under which names, and "
    "%memrelease NAME frees them.",
    "cuBLAS workspace": "Workspace of matrix products, kept for the next one. %memrelease --cublas "
    "frees it until then.",
    "CUDA-graph pool": "Memory that CUDA graphs need at every replay. Freed with the graph; for "
    "torch.compile's graphs: %memrelease --compile.",
    "compile cache": "What torch.compile keeps. %memrelease --compile frees it, and the next call "
    "compiles again.",
    "other": "What libraries keep through PyTorch, such as cuDNN's random state for dropout. It "
    "stays until the process ends.",
}
_HOST_OTHER = (
    "Python's own objects and libraries, such as arrays and data frames. Freed with these objects."
)
_WHOSE = " %memvars shows the owners."

_SENTENCES: dict[PartKey, str] = {
    "allocated": "Held by tensors, and by libraries that ask PyTorch for memory.",
    "unnamed": "No variable, module or running function leads to it. %memwhy --unnamed looks for "
    "what holds it; gc.collect() frees what is only a reference cycle.",
    "rounding": "Requests are rounded up to 512 bytes, and a large block may keep up to "
    "1\xa0MiB at its end. Nothing needs to be done.",
    "pending": "Freed, but work on another stream may still use it: torch.cuda.synchronize() waits "
    "for that.",
    "releasable": "Kept for the next tensors, in segments without a block in use. PyTorch reuses "
    "it; torch.cuda.empty_cache() gives it back.",
    "pools": "Kept for a CUDA graph or a MemPool alone. torch.cuda.empty_cache() gives it back "
    "once the graph or the pool is deleted.",
    "outside": "The CUDA context with its kernels, NCCL's buffers, other libraries. Most of it is "
    "freed only when the kernel restarts.",
    "children": "Processes started by this notebook, such as DataLoader workers and ranks of a "
    "launcher. Their memory is freed when they end.",
    "others": "Other programs on this device. Their memory is freed when they end; a forgotten "
    "kernel of your own can be shut down.",
    "unlisted": "In use, but by no process that the driver lists here: its own overhead, or "
    "processes that it does not show, such as those of another container.",
    "driver": "Reserved by driver and firmware; not part of PyTorch's total, not usable.",
    "free": "Free for this process or any other.",
    "cached": "Code, stacks, and freed memory that malloc keeps; %memrelease gives the latter back "
    "at its end.",
}
#: Sentence on pages of files, which the system counts as available if it could read them again.
_MAPPED = (
    "They may have more: files that this process has mapped, such as libraries, may also count as "
    "available."
)
_HOST_SENTENCES: dict[PartKey, str] = {
    "allocated": "Handed out by malloc to tensors on the CPU, arrays and Python's objects.",
    "others": f"The rest: other processes and the system. {_MAPPED}",
    "free": "Can be taken without swapping: unused, or holding files that can be dropped.",
}
_HOST_REST = (
    "The rest, including this notebook's children: pages that they share with it are resident in "
    f"both, so the children have a table of their own. {_MAPPED}"
)
#: Sentence on other processes where the driver numbers processes differently.
_STRANGERS = (
    "Other programs on this device, and perhaps processes started by this notebook: the driver's "
    "process numbers differ from those here."
)
#: Sentence on the whole cache where the allocator does not tell more.
_CACHE = (
    "Kept for the next tensors. torch.cuda.empty_cache() gives some of it back; how much is not "
    "known here."
)


def tell_part(part: BreakdownPart, breakdown: Breakdown) -> str:
    """Return what a part is and what can be done about it, in a sentence or two.

    The name of a single process says enough: its sentence is ``""``.
    """
    on_host = breakdown.device == HOST
    library = name_library(breakdown.device)
    if part.kind is not None:
        return _HOST_OTHER if on_host and part.kind == "other" else _KINDS.get(part.kind, "")
    if part.key == "fragmented":
        return _tell_fragmented(breakdown)
    if part.merged:
        return _tell_merged(part.merged, breakdown.device).replace("torch.cuda", library)
    if part.key == "free" and breakdown.limit_bytes is not None and not on_host:
        left = max(breakdown.limit_bytes - (breakdown.reserved_bytes or 0), 0)
        if left < part.n_bytes:
            return (
                f"Free, but the limit allows this process only {bind_bytes(left)} more: "
                "%memlimit off removes it."
            )
    sentence = (_HOST_SENTENCES if on_host else {}).get(part.key) or _SENTENCES.get(part.key, "")
    if part.key == "allocated" and not part.parts:
        sentence += _WHOSE
    return sentence.replace("torch.cuda", library)


def _tell_fragmented(breakdown: Breakdown) -> str:
    largest = breakdown.largest_free_block_bytes
    # The largest block may be one that can be released.
    piece = "" if largest is None else f" (the cache's largest free block: {bind_bytes(largest)})"
    start = f"Free gaps in segments in use. PyTorch reuses them for requests that fit{piece}."
    if breakdown.has_expandable or name_library(breakdown.device) != "torch.cuda":
        return start
    return (
        f"{start} PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, set before torch is imported, "
        "reduces them."
    )


def _tell_merged(keys: tuple[PartKey, ...], device: str) -> str:
    if keys == ("children", "others"):
        return _HOST_REST if device == HOST else _STRANGERS
    if set(keys) == _UNALLOCATED:
        return _CACHE
    return f"Only the sum is known here: {join_words(_list_merged(keys, device))}."


def tell_pinned(pinned: PinnedUse) -> str:
    """Return what pinned memory is, and how much of it is in use where that is known."""
    words = (
        "In addition to malloc's: pages that stay in place for fast copies to a GPU, each request "
        "rounded up to a power of two. %memvars shows which tensors are pinned."
    )
    held, peak = pinned.allocated_bytes, pinned.allocated_peak_bytes
    if held is None:
        return f"{words} This release of PyTorch does not count how much of it is in use."
    if peak is not None:
        words += f" In use: {bind_bytes(held)}, at most {bind_bytes(peak)}."
    # Releases that count what is in use have this call too.
    return f"{words} torch.accelerator.empty_host_cache() gives back the rest."


# -- Doubts ----------------------------------------------------------------------------------------

_DOUBTS = {
    BreakdownDoubt.MOVED_MEANWHILE: (
        "{device}: memory was allocated or freed during the reading, so its figures are not all of "
        "one moment."
    ),
    BreakdownDoubt.NO_DRIVER: (
        "{device}: the driver reports no figures; without them the total of a device in use is "
        "PyTorch's, which leaves out what the driver reserves."
    ),
    BreakdownDoubt.FIGURES_EXCEED_TOTAL: (
        "{device}: the figures add up to more than the total, as they overlap or were not read at "
        "one moment, so some parts are not told apart."
    ),
    BreakdownDoubt.NOT_RESIDENT: (
        "malloc has handed out more than is resident: pages that were never written to, or are "
        "swapped out, take no memory."
    ),
    BreakdownDoubt.SEGMENTS_UNKNOWN: (
        "{device}: the allocator reports no segments (cudaMallocAsync does not), or those of "
        "another moment, so what is reserved but unallocated is one part."
    ),
    BreakdownDoubt.OWNERS_DIFFER: (
        "{device}: the owners that were found do not add up to what is allocated, so it is not "
        "divided by kind."
    ),
    BreakdownDoubt.ROUNDING_UNKNOWN: (
        "{device}: the requested size is not known of all blocks, so each kind includes its "
        "rounding."
    ),
    BreakdownDoubt.OWNERS_INCOMPLETE: (
        "{device}: there were too many objects to look at, so less may be without a variable."
    ),
    BreakdownDoubt.NOT_LISTED: (
        "{device}: the driver does not list this process with all that it has there, as in a "
        "container or without permission, so processes are not told apart."
    ),
    BreakdownDoubt.BYTES_UNKNOWN: (
        "{device}: the driver does not report how much some of the processes have."
    ),
}


def list_breakdown_notes(breakdown: Breakdown) -> tuple[str, ...]:
    """Return the sentences that go with a breakdown, those of the driver first."""
    words = (_DOUBTS[doubt].format(device=breakdown.device) for doubt in breakdown.doubts)
    return (*breakdown.failures, *words)
