"""What each part of a device's memory is called, what it is, and what can be done about it.

Each sentence stands here alone: the table, plotly's figure and the dashboard show the same.
"""

from __future__ import annotations

from gpumemwidget.devices import Bridge, BridgePart, PartKey, PinnedUse, ProcessUse
from gpumemwidget.records import HOST, MemoryKind
from gpumemwidget.report.words import count_kind, join_words
from gpumemwidget.units import format_bytes

__all__ = [
    "CACHED",
    "HIDDEN",
    "find_look",
    "list_pinned",
    "name_key",
    "name_kind",
    "name_library",
    "name_part",
    "name_process",
    "tell_part",
]

_NAMES: dict[PartKey, str] = {
    "allocated": "allocated",
    "unnamed": "no name",
    "rounding": "rounding",
    "pending": "cached, pending free",
    "releasable": "cached, releasable",
    "fragmented": "cached, fragmented",
    "pools": "cached, private pools",
    "outside": "this process outside PyTorch",
    "children": "this notebook's children",
    "others": "other processes",
    "unlisted": "of no listed process",
    "driver": "reserved by the driver",
    "free": "free",
    "cached": "resident beyond that",
}
_HOST_NAMES: dict[PartKey, str] = {
    "free": "available",
    "others": "other processes and the system",
}

#: PyTorch's own words, in its errors.
CACHED = "reserved but unallocated"

#: What has a name together.
_GROUPS: tuple[tuple[frozenset[PartKey], str], ...] = (
    (frozenset({"pending", "releasable", "fragmented", "pools"}), CACHED),
    (
        frozenset({"allocated", "pending", "releasable", "fragmented", "pools"}),
        "reserved by PyTorch",
    ),
    (
        frozenset({"allocated", "pending", "releasable", "fragmented", "pools", "outside"}),
        "this process",
    ),
    (frozenset({"allocated", "cached"}), "this process"),
    (frozenset({"children", "others"}), "other processes"),
)

#: Within a sentence.
_CACHED_WORDS = f"what is {CACHED}"
_WORDS: dict[PartKey, str] = {
    "allocated": "what is allocated",
    "pending": "what is pending free",
    "releasable": "what empty_cache() would give back",
    "fragmented": "what is fragmented",
    "pools": "private pools",
    "outside": "what this process has outside PyTorch",
    "unlisted": "what is of no listed process",
    "driver": "what the driver reserves",
    "free": "what is free",
    "cached": "what is resident beyond that",
}

_KINDS: dict[MemoryKind, str] = {
    "parameter": "The weights of your modules: a smaller dtype such as bfloat16 halves them, and "
    "%memrelease NAME lets a model go.",
    "gradient": "As large as the parameters that they belong to: optimizer.zero_grad() lets them "
    "go until the next backward(), and so does %memrelease --grads.",
    "optimizer state": "What the optimizer keeps for each parameter, from the first step() on "
    "(Adam: two values): it goes with the optimizer.",
    "saved for backward": "Activations that backward() will need: smaller batches, checkpointing "
    "and torch.no_grad() keep fewer, and they go with the loss.",
    "buffer": "State of modules that is not trained, such as running means: it goes with its "
    "module.",
    "tensor": "Batches, outputs, caches and the like: %memvars tells under which names, and "
    "%memrelease NAME lets them go.",
    "cuBLAS workspace": "Room that matrix products work in, kept for the next one: %memrelease "
    "--cublas frees it until then.",
    "CUDA-graph pool": "What CUDA graphs need whenever they are replayed: it goes with the graph, "
    "and torch.compile's goes with %memrelease --compile.",
    "compile cache": "What torch.compile keeps: %memrelease --compile frees it, and the next call "
    "compiles anew.",
    "other": "What libraries keep through PyTorch, such as cuDNN's random state for dropout: it "
    "stays as long as the process does.",
}
_HOST_OTHER = (
    "Python's own objects and libraries, such as arrays and data frames: it goes with these "
    "objects."
)
_WHOSE = " %memvars tells whose it is."

_SENTENCES: dict[PartKey, str] = {
    "allocated": "Held now by tensors, and by libraries that ask PyTorch for memory.",
    "unnamed": "No variable, module or running function leads to it: %memwhy --unnamed looks for "
    "what holds it, and gc.collect() frees what is only a cycle.",
    "rounding": "Requests are rounded up to 512 bytes, and a large block may keep up to "
    "1\xa0MiB at its end: nothing needs to be done.",
    "pending": "Freed, but work on another stream may still use it: torch.cuda.synchronize() waits "
    "for that.",
    "releasable": "Kept for the next tensors, and nothing in use holds it back: PyTorch reuses "
    "it, and torch.cuda.empty_cache() gives it back.",
    "pools": "Kept for a CUDA graph or a MemPool alone: torch.cuda.empty_cache() gives it back "
    "once the graph or the pool is gone.",
    "outside": "The CUDA context with its kernels, NCCL's buffers, other libraries: most of it "
    "goes only when the kernel restarts.",
    "children": "Processes that this notebook has started, such as workers of a DataLoader and "
    "ranks of a launcher: what they have is free when they end.",
    "others": "Other programs on this device: what they have is free when they end, and a "
    "forgotten kernel of your own can be shut down.",
    "unlisted": "In use, but of no process that the driver lists here: what it needs itself to "
    "serve them, or processes that it does not show, such as another container's.",
    "driver": "For the driver and the firmware: the total that PyTorch tells leaves it out, and "
    "nobody can have it.",
    "free": "Nobody has it: this process or any other can take it.",
    "cached": "Code, stacks, and what was freed and is kept by malloc, which %memrelease gives "
    "back at its end.",
}
#: The system counts pages of files as available where it could read them again.
_MAPPED = (
    "They may have more, as what this process has mapped of files, such as libraries, may count as "
    "available too."
)
_HOST_SENTENCES: dict[PartKey, str] = {
    "allocated": "Handed out by malloc to tensors on the CPU, arrays and Python's objects.",
    "others": f"The rest: other processes and the system. {_MAPPED}",
    "free": "Can be taken without swapping: it is unused, or holds files that can be dropped.",
}
_HOST_REST = (
    "The rest, this notebook's children included: pages that they share with it are resident in "
    f"both, so they have a table of their own. {_MAPPED}"
)
#: On a GPU of which the driver numbers processes otherwise.
_STRANGERS = (
    "Other programs on this device, and perhaps processes that this notebook has started: the "
    "driver's numbers are not those that they have here."
)
#: Of PyTorch's cache where the allocator does not tell more.
_CACHE = (
    "Kept for the next tensors: torch.cuda.empty_cache() gives back what of it can be given, and "
    "how much that is, is not known here."
)
#: Of a process whose name can't be read.
HIDDEN = "not visible from here"


def name_part(part: BridgePart, device: str = "") -> str:
    """A part in a few words; of a process its name and pid.

    Args:
        part: the part.
        device: whose; some parts of the host have names of their own.
    """
    if part.process is not None:
        return name_process(part.process)
    if part.kind is not None:
        return name_kind(part.kind)
    if part.key == "rest":
        merged = frozenset(part.merged)
        if device == HOST and merged == {"children", "others"}:
            return _HOST_NAMES["others"]
        return next((name for group, name in _GROUPS if group == merged), "not told apart")
    return name_key(part.key, device)


def name_kind(kind: MemoryKind) -> str:
    """What is allocated for the same, in a word or two."""
    return "other tensors" if kind == "tensor" else count_kind(kind)


def name_process(process: ProcessUse) -> str:
    """``python train.py (pid 4711)``."""
    return f"{process.name or HIDDEN} (pid {process.pid})"


def tell_part(part: BridgePart, bridge: Bridge) -> str:
    """What it is and what can be done about it: a sentence, or two short ones.

    ``""`` of a single process: its name says what there is to say.
    """
    on_host = bridge.device == HOST
    if part.kind is not None:
        return _HOST_OTHER if on_host and part.kind == "other" else _KINDS.get(part.kind, "")
    if part.key == "fragmented":
        return _tell_fragmented(bridge)
    if part.key == "rest":
        return _tell_rest(part, bridge.device).replace("torch.cuda", name_library(bridge.device))
    if part.key == "free" and bridge.limit_bytes is not None and not on_host:
        left = max(bridge.limit_bytes - (bridge.reserved_bytes or 0), 0)
        if left < part.n_bytes:
            return (
                f"Nobody has it, but the limit leaves this process only {_format(left)} more: "
                "%memlimit off lifts it."
            )
    sentence = (_HOST_SENTENCES if on_host else {}).get(part.key) or _SENTENCES.get(part.key, "")
    if part.key == "allocated" and not part.parts:
        sentence += _WHOSE
    return sentence.replace("torch.cuda", name_library(bridge.device))


def list_pinned(pinned: PinnedUse) -> list[tuple[str, int, str]]:
    """The rows of pinned memory: what it is called, its bytes, and the sentence on it."""
    held, taken = pinned.allocated_bytes, pinned.reserved_bytes
    peak = pinned.reserved_peak_bytes if held is None else pinned.allocated_peak_bytes
    highest = "" if peak is None else f" The peak was {_format(peak)}."
    what = (
        "Beside malloc's: pages that stay in place for fast copies to a GPU, each request rounded "
        "up to a power of two. %memvars shows which tensors are pinned."
    )
    if held is None:
        unknown = " How much of it is in use, this release of PyTorch does not count."
        return [("pinned", taken, f"{what}{unknown}{highest}")]
    rows = [("pinned, in use", held, f"{what}{highest}")]
    if taken > held:
        # Releases that count what is held have this call too.
        kept = "Pinned and kept for the next such tensors: torch.accelerator.empty_host_cache()"
        rows.append(("pinned, cached", taken - held, f"{kept} gives it back."))
    return rows


def name_library(device: str) -> str:
    """The module of PyTorch's that the device belongs to: ``torch.cuda``, ``torch.xpu``."""
    kind = device.partition(":")[0]
    if kind in ("cuda", HOST):
        return "torch.cuda"
    return f"torch.{kind}" if kind in ("xpu", "mps") else "torch.accelerator"


def _tell_fragmented(bridge: Bridge) -> str:
    largest = bridge.largest_free_block_bytes
    # It may be one of those that can be released.
    piece = "" if largest is None else f" (the cache's largest free block: {_format(largest)})"
    pages = ", as far as they are no whole pages" if bridge.has_expandable else ""
    start = f"Gaps beside blocks in use{pages}: PyTorch reuses them for what fits in{piece}"
    if pages or name_library(bridge.device) != "torch.cuda":
        return f"{start}."
    return (
        f"{start}; with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True from the start there are "
        "fewer."
    )


def _tell_rest(part: BridgePart, device: str) -> str:
    keys, cached = part.merged, _GROUPS[0][0]
    if device == HOST and keys == ("children", "others"):
        return _HOST_REST
    if keys == ("children", "others"):
        return _STRANGERS
    if cached == set(keys):
        return _CACHE
    words = [
        _CACHED_WORDS if cached < set(keys) and key in cached else _find_words(key, device)
        for key in keys
    ]
    names = join_words(list(dict.fromkeys(words)))
    return f"{names[:1].upper()}{names[1:]}: here only their sum is known."


def _find_words(key: PartKey, device: str) -> str:
    if device == HOST and key in _HOST_NAMES:
        return _HOST_NAMES[key]
    return _WORDS.get(key) or _NAMES.get(key, key)


def find_look(part: BridgePart) -> str:
    """The key of its colour."""
    if part.kind is not None:
        return part.kind
    return part.key


def name_key(key: PartKey, device: str = "") -> str:
    """What the parts of a kind are called."""
    names = _HOST_NAMES if device == HOST else {}
    return names.get(key) or _NAMES.get(key, key)


def _format(n_bytes: int) -> str:
    """An amount that no line's end divides."""
    return format_bytes(n_bytes).replace(" ", "\xa0")
