"""Whole devices: each in parts that add up, its processes, and the map of its segments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gpumemwidget.model.breakdowns import (
    Breakdown,
    BreakdownDoubt,
    BreakdownPart,
    PartKey,
    SegmentMap,
)
from gpumemwidget.model.devices import HOST, ChildProcess
from gpumemwidget.model.ownership import MemoryKind
from gpumemwidget.report.charts.device import DeviceBar, plot_segments, tabulate_tools
from gpumemwidget.report.render.blocks import (
    MOST_ROWS_OF_ALL,
    Block,
    Cell,
    Column,
    Fold,
    Group,
    Note,
    Run,
    Table,
    Tone,
    bound_items,
    bytes_cell,
    make_group,
    make_heading,
    name_columns,
    number_columns,
    share_cell,
    sort_devices,
    warn,
)
from gpumemwidget.report.render.output import Report
from gpumemwidget.report.render.palette import name_class
from gpumemwidget.report.render.wording import (
    HIDDEN,
    UNALLOCATED,
    bind_bytes,
    count,
    find_look,
    join_words,
    list_merged,
    name_library,
    name_part,
    word_driver_failure,
)
from gpumemwidget.units import format_bytes

#: Maximum number of processes that are listed of one part, the largest first.
_MOST_PARTS = 20
_COLUMNS = (
    *name_columns("what"),
    *number_columns("bytes", "share"),
    Column("what it is, and what can be done", "words", last="wrap"),
)
_CHILD_COLUMNS = (
    *number_columns("pid", "resident"),
    Column("on devices", "words"),
    Column("process", "words", last="wrap"),
)


def report_breakdown(
    breakdowns: Sequence[Breakdown],
    children: Sequence[ChildProcess] = (),
    maps: Mapping[str, SegmentMap] | None = None,
    notes: Sequence[str] = (),
) -> Report:
    """Report each device as a bar, with the figures of other tools and its parts in a table."""
    blocks: list[Block] = []
    for breakdown in sort_devices(breakdowns):
        blocks.extend(_list_device(breakdown))
        segment_map = (maps or {}).get(breakdown.device)
        if segment_map is not None:
            number = count(len(segment_map.segments), "segment")
            size = Run(f"{format_bytes(segment_map.reserved_bytes)} in {number}")
            title = Run("Map of segments", "strong")
            blocks.append(Fold((title, size), [plot_segments(segment_map)]))
    if not breakdowns:
        blocks.append(Note("There is no device with a known total."))
    if children:
        rows = make_group(*map(_list_child_cells, sorted(children, key=_weigh_child)))
        blocks.append(Table("This notebook's children", _CHILD_COLUMNS, [rows]))
    known = {note for breakdown in breakdowns for note in _list_notes(breakdown)}
    blocks.extend(warn(*(note for note in notes if note not in known)))
    return Report(blocks)


def _list_device(breakdown: Breakdown) -> Iterator[Block]:
    names = dict.fromkeys((breakdown.device, breakdown.name))
    yield make_heading(*names, format_bytes(breakdown.total_bytes))
    yield DeviceBar(breakdown)
    if (tools := tabulate_tools(breakdown)).groups:
        yield tools
    yield Table(
        caption=f"All of {'the memory' if breakdown.device == HOST else breakdown.device}",
        columns=_COLUMNS,
        groups=list(_list_groups(breakdown)),
        caption_is_seen=False,
        most=MOST_ROWS_OF_ALL,
        stacks=True,
    )
    yield from warn(*_list_notes(breakdown))


def _list_groups(breakdown: Breakdown) -> Iterator[Group]:
    rows: list[Sequence[Cell | str]] = []
    for part in breakdown.parts:
        rows.append(_list_cells(part, breakdown))
        rows.extend(_list_cells(inner, breakdown, level=1) for inner in part.parts[:_MOST_PARTS])
        if rest := part.parts[_MOST_PARTS:]:
            more = Cell(f"{len(rest):,} more", tone="muted", level=1)
            n_bytes = sum(inner.n_bytes for inner in rest)
            share = share_cell(n_bytes, breakdown.total_bytes).text
            rows.append((more, bytes_cell(n_bytes), share, ""))
    if rows:
        yield make_group(*rows)
    if breakdown.pinned_bytes is not None:
        amount = bytes_cell(breakdown.pinned_bytes)
        yield make_group((Cell("pinned", tone="strong"), amount, "", _PINNED))
    if breakdown.asleep_bytes:
        amount = bytes_cell(breakdown.asleep_bytes)
        yield make_group((Cell("asleep", tone="strong"), amount, "", _ASLEEP))


def _list_cells(part: BreakdownPart, breakdown: Breakdown, level: int = 0) -> Sequence[Cell | str]:
    if part.process is not None:
        name = Cell(f"pid {part.process.pid}", level=level)
        what = part.process.name or HIDDEN
    else:
        has_kinds = part.key == "allocated" and part.parts
        swatch = "" if has_kinds else name_class(find_look(part))
        tone: Tone = "plain" if level else "strong"
        is_host = breakdown.is_shared and part.key == "unlisted"
        label = "host memory in use" if is_host else name_part(part, breakdown.device)
        name = Cell(label, level=level, tone=tone, swatch=swatch)
        what = describe_part(part, breakdown)
    share = share_cell(part.n_bytes, breakdown.total_bytes).text
    return name, bytes_cell(part.n_bytes), share, what


def _weigh_child(child: ChildProcess) -> tuple[int, int, int]:
    """Return the sort key of a child: bytes on devices before bytes on the host."""
    on_devices = sum(n_bytes or 0 for _, n_bytes in child.devices)
    return -on_devices, -(child.resident_bytes or 0), child.pid


def _list_child_cells(child: ChildProcess) -> Sequence[Cell | str]:
    devices = [f"{device} {format_bytes(n_bytes)}" for device, n_bytes in child.devices]
    listed = ", ".join(bound_items(devices, str))
    return str(child.pid), bytes_cell(child.resident_bytes), listed, child.name


# -- What each part is, and what can be done about it ----------------------------------------------

_KINDS: dict[MemoryKind, str] = {
    "parameter": "The weights of your modules. A smaller dtype such as bfloat16 halves them; "
    "%memrelease NAME frees a model.",
    "gradient": "As large as their parameters. optimizer.zero_grad() frees them until the next "
    "backward().",
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
    "torch.compile's graphs: torch._dynamo.reset().",
    "compile cache": "What torch.compile keeps. torch._dynamo.reset() frees it, and the next "
    "call compiles again.",
    "other": "What libraries keep through PyTorch, such as cuDNN's random state for dropout. It "
    "stays until the process ends.",
}
_OTHER_ON_HOST = (
    "Python's own objects and libraries, such as arrays and data frames. Freed with these objects."
)
_SENTENCES: dict[PartKey, str] = {
    "allocated": "Held by tensors, and by libraries that ask PyTorch for memory.",
    "unnamed": "No variable, module or running function leads to it. %memwhy --unnamed looks for "
    "what holds it; gc.collect() frees what only a reference cycle holds.",
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
    "context": "The CUDA context with its kernels, NCCL's buffers, libraries that don't say what "
    "they have. Most of it is freed only when the kernel restarts.",
    "children": "Processes started by this notebook, such as DataLoader workers and ranks of a "
    "launcher. Their memory is freed when they end.",
    "others": "Other programs on this device. Their memory is freed when they end; a forgotten "
    "kernel of your own can be shut down.",
    "unlisted": "In use, but by no process that the driver lists here: its own overhead, or "
    "processes that it does not show, such as those of another container.",
    "driver": "Reserved by driver and firmware; not part of PyTorch's total, not usable.",
    "free": "Free for this process or any other.",
    "cached": "Code, stacks, and freed memory that malloc keeps and %memrelease gives back.",
}
#: How long libraries keep what they don't give back when asked.
_KEPT_UNTIL = {
    "JAX": "until the kernel restarts; XLA_PYTHON_CLIENT_PREALLOCATE=false, set before it is "
    "imported, has it take less",
    "RMM": "until its pool is replaced, as by rmm.reinitialize()",
}
#: Sentence on pages of files, which the system counts as available if it could read them again.
_MAPPED = "Files that this process has mapped, such as libraries, may also count as available."
_PINNED = (
    "On top of malloc's: pages that stay in place for fast copies to a GPU, each request rounded "
    "up to a power of two. %memvars shows which tensors are pinned; from PyTorch 2.13 on "
    "torch.accelerator.empty_host_cache() gives back what no tensor holds."
)
_ASLEEP = (
    "In addition to the device's: PyTorch has reserved it, and no memory is behind it now, as in "
    "vLLM's sleep mode. It is at least so much, and needs memory again when it wakes up."
)
_HOST_SENTENCES: dict[PartKey, str] = {
    "allocated": "Handed out by malloc to tensors on the CPU, arrays and Python's objects.",
    "others": f"The rest: other processes and the system. {_MAPPED}",
    "free": "Can be taken without swapping: unused, or holding files that can be dropped.",
}
_SHARED_SENTENCES: dict[PartKey, str] = {
    "unlisted": "The rest that is in use: this GPU shares the host's memory, so the host memory of "
    "all processes, this one too, and of the system is in here.",
    "free": _HOST_SENTENCES["free"],
}


def describe_part(part: BreakdownPart, breakdown: Breakdown) -> str:
    """Return what a part is and what can be done about it, in a sentence or two.

    The name of a single process says enough: its sentence is ``""``.
    """
    on_host = breakdown.device == HOST
    if part.kind is not None:
        return _OTHER_ON_HOST if part.kind == "other" and on_host else _KINDS.get(part.kind, "")
    if part.key == "fragmented":
        return _describe_fragmented(breakdown)
    if part.key in ("outside", "library", "library cache", "context"):
        return _describe_outside(part, breakdown)
    if part.merged:
        sentence = _describe_merged(part.merged, breakdown.device)
    else:
        sentences = {**_SENTENCES, **_HOST_SENTENCES} if on_host else _SENTENCES
        sentence = sentences.get(part.key, "")
    if part.key == "free" and breakdown.limit_bytes is not None and not on_host:
        left = max(breakdown.limit_bytes - (breakdown.reserved_bytes or 0), 0)
        if left < part.n_bytes:
            sentence = (
                f"Free, but the limit allows this process only {bind_bytes(left)} more: "
                "%memlimit off removes it."
            )
    if breakdown.is_shared:
        sentence = _SHARED_SENTENCES.get(part.key, sentence)
    if part.key == "allocated" and not part.parts and not part.merged:
        sentence += " %memvars shows the owners."
    return sentence.replace("torch.cuda", name_library(breakdown.device))


def _describe_outside(part: BreakdownPart, breakdown: Breakdown) -> str:
    if part.library is None:
        if part.parts:
            return "In other libraries, and in the CUDA context."
        names = join_words(breakdown.silent_libraries)
        return _SENTENCES[part.key] + f" Imported, and perhaps in here: {names}." * bool(names)
    name = part.library.name
    if part.key == "library":
        rest = " What it may keep for later is part of the CUDA context here."
        is_unknown = part.library.cached_bytes is None
        return f"Arrays of {name}, freed when nothing holds them any more.{rest * is_unknown}"
    if part.library.can_empty:
        return f"Kept by {name} for its next arrays. %memrelease --libraries gives it back."
    until = _KEPT_UNTIL.get(name, "until the kernel restarts")
    return f"Kept by {name} for its next arrays {until}."


def _describe_fragmented(breakdown: Breakdown) -> str:
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


def _describe_merged(keys: tuple[PartKey, ...], device: str) -> str:
    if keys == ("children", "others"):
        return (
            "The rest, with this notebook's children, which share pages with it: they have a table "
            f"of their own. {_MAPPED}"
        )
    if set(keys) == UNALLOCATED:
        return (
            "Kept for the next tensors. torch.cuda.empty_cache() gives some of it back; how much "
            "is not known here."
        )
    return f"Only the sum is known here: {join_words(list_merged(keys, device))}."


# -- Doubts ----------------------------------------------------------------------------------------

_DOUBTS = {
    BreakdownDoubt.FIGURES_DIFFER: (
        "some figures do not add up: memory was allocated or freed while they were read, or some "
        "is counted twice or not resident."
    ),
    BreakdownDoubt.NO_DRIVER: (
        "the driver reports no figures, so the total of a device in use is PyTorch's, which leaves "
        "out what the driver reserves."
    ),
    BreakdownDoubt.SEGMENTS_UNKNOWN: (
        "the allocator reports no segments (cudaMallocAsync does not), or those of another moment, "
        "so what is cached is one part."
    ),
    BreakdownDoubt.OWNERS_DIFFER: (
        "the owners that were found do not add up to what is allocated, so it is not divided by "
        "kind."
    ),
    BreakdownDoubt.OWNERS_INCOMPLETE: (
        "there were too many objects to look at, so less may be unattributed."
    ),
    BreakdownDoubt.NOT_LISTED: (
        "the driver does not report the memory of each process here (as on Windows, in a container "
        "or without permission), so only the sum is shown."
    ),
}


def _list_notes(breakdown: Breakdown) -> list[str]:
    """Return the sentences that go with a breakdown, the driver's first."""
    words = [f"{breakdown.device}: {_DOUBTS[doubt]}" for doubt in breakdown.doubts]
    if breakdown.driver_failure:
        words.insert(0, word_driver_failure(breakdown.device, breakdown.driver_failure))
    return words
