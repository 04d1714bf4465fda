"""What devices have now, each whole device in parts, and the limits and peaks that are set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from gpumemwidget.model.breakdowns import (
    Breakdown,
    BreakdownDoubt,
    BreakdownPart,
    PartKey,
    SegmentMap,
)
from gpumemwidget.model.devices import (
    HOST,
    Budget,
    ChildProcess,
    DeviceState,
    DeviceUse,
    HardwareNote,
    Limit,
    Reading,
    rank_device,
)
from gpumemwidget.model.ownership import DeviceAccount, MemoryAccount, MemoryKind
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
    explain_marks,
    make_group,
    make_heading,
    name_columns,
    number_columns,
    peak_cell,
    share_cell,
    sort_devices,
    split_rest,
    warn,
)
from gpumemwidget.report.render.output import Report
from gpumemwidget.report.render.palette import name_class
from gpumemwidget.report.render.wording import (
    HIDDEN,
    UNALLOCATED,
    UNATTRIBUTED,
    bind_bytes,
    count,
    find_look,
    join_words,
    list_merged,
    name_kind,
    name_library,
    name_part,
    name_reserved,
    word_driver_failure,
    word_hardware_note,
)
from gpumemwidget.units import UNKNOWN, format_bytes

# -- In use now ------------------------------------------------------------------------------------


def report_stat(
    devices: Sequence[DeviceState],
    notes: Sequence[HardwareNote] = (),
    account: MemoryAccount | None = None,
) -> Report:
    """Report the counters of this process, then whole devices with other processes in them."""
    words = [word_hardware_note(note) for note in notes]
    ordered = sorted(devices, key=lambda device: rank_device(device.info.device))
    if not ordered:
        return Report([Note("No device was found."), *warn(*words)])
    # One reading for both tables: the walk itself changes what malloc has in use.
    owners = [] if account is None else account.devices
    owned = {device.device: device.allocated_bytes for device in owners if device.owned}
    own_columns = (
        *name_columns("device", "memory"),
        *number_columns("now", "peak"),
        Column("limit", is_optional=True),
    )
    own_rows = [_list_process_rows(device, owned.get(device.info.device)) for device in ordered]
    uses = [device.use or DeviceUse(device.info.device, None, None, None) for device in ordered]
    columns = (
        *name_columns("device"),
        *number_columns("used", "free", "total"),
        Column("busy", is_optional=True),
        Column("name", "words", last="wrap"),
    )
    rows = [make_group(_list_use(*pair)) for pair in zip(ordered, uses, strict=True)]
    blocks: list[Block] = [
        Table("This process", own_columns, own_rows, 1),
        *_list_kinds(account),
        Table("Whole devices", columns, rows),
    ]
    blocks.extend(explain_marks(blocks))
    failures = [word_driver_failure(use.device, use.failure) for use in uses if use.failure]
    blocks.extend(warn(*dict.fromkeys([*failures, *words])))
    return Report(blocks)


def _list_process_rows(device: DeviceState, owned_bytes: int | None) -> Group:
    name, reading = device.info.device, device.reading
    if reading is None:
        return make_group((name, Cell("not in use", tone="muted")))
    allocated = bytes_cell(reading.allocated_bytes if owned_bytes is None else owned_bytes)
    limit = "" if device.info.limit_bytes is None else bytes_cell(device.info.limit_bytes)
    peaks = [
        peak_cell(peak_bytes, reading.peak_is)
        for peak_bytes in (reading.allocated_peak_bytes, reading.reserved_peak_bytes)
    ]
    # A limit is one of reserved bytes.
    return make_group(
        ("allocated", allocated, peaks[0], ""),
        (name_reserved(name), bytes_cell(reading.reserved_bytes), peaks[1], limit),
        shared=(name,),
    )


def _list_use(device: DeviceState, use: DeviceUse) -> Sequence[Cell | str]:
    total = device.info.total_bytes if use.total_bytes is None else use.total_bytes
    percent = use.utilization_percent
    return (
        device.info.device,
        *map(bytes_cell, (use.used_bytes, use.free_bytes, total)),
        Cell(UNKNOWN, tone="muted") if percent is None else f"{percent} %",
        device.info.name,
    )


def _list_kinds(account: MemoryAccount | None) -> list[Block]:
    accounts = [] if account is None else [part for part in account.devices if part.owned]
    if account is None or not accounts:
        return []
    columns = (
        *name_columns("device"),
        Column("kind", "words"),
        *number_columns("bytes", "share"),
    )
    table = Table("Used for", columns, [*map(_list_kind_rows, sort_devices(accounts))], n_shared=1)
    words = (
        f"There were too many objects to look at in time: some {UNATTRIBUTED} memory has a name."
    )
    return [table, *warn(*[words] * (not account.is_complete))]


def _list_kind_rows(account: DeviceAccount) -> Group:
    """Return a row for each kind, always one for what is unattributed, and their sum."""
    sums = dict(account.sum_kinds())
    unknown_bytes = sums.pop("unknown", 0)
    found_bytes = sum(sums.values()) + unknown_bytes
    total = max(account.allocated_bytes or 0, found_bytes)
    rows = [
        *((Cell(name_kind(kind, account.device)), n_bytes) for kind, n_bytes in sums.items()),
        (Cell(UNATTRIBUTED, tone="bad" if unknown_bytes else "muted"), unknown_bytes),
    ]
    if total > found_bytes:
        rows.append((Cell("not accounted for", tone="warn"), total - found_bytes))
    name = "allocated" if account.allocated_bytes == total else "total"
    rows.append((Cell(name, tone="strong"), total))
    cells = [(cell, bytes_cell(n), share_cell(n, total)) for cell, n in rows]
    return make_group(*cells, shared=(account.device,))


# -- What the user sets: limits, budgets, peaks ----------------------------------------------------


def report_limits(limits: Sequence[Limit], notes: Sequence[HardwareNote] = ()) -> Report:
    """Report the limits, with a warning for each that is below what is reserved already."""
    ordered = sort_devices(limits)
    blocks: list[Block] = [Note("There is no GPU that PyTorch could limit.")]
    if ordered:
        columns = (*name_columns("device"), *number_columns("limit", "of", "reserved", "left"))
        groups = [make_group(_list_limit(limit)) for limit in ordered]
        caption = "Limit of what PyTorch may reserve"
        blocks = [Table(caption, columns, groups, caption_is_seen=False)]
    if any(limit.is_waiting for limit in ordered):
        blocks.append(Note("PyTorch sets these limits when CUDA is first used."))
    for limit in ordered:
        if excess := _find_excess(limit):
            words = (
                f"{limit.device} has {format_bytes(excess)} more reserved than its limit. What is "
                "allocated stays allocated; new requests must fit into the cache. "
                "torch.cuda.empty_cache() gives back what is cached, and %memvars "
                f"--device {limit.device} shows who holds the rest."
            )
            blocks.extend(warn(words))
    blocks.extend(warn(*map(word_hardware_note, notes)))
    return Report(blocks)


def _list_limit(limit: Limit) -> Sequence[Cell | str]:
    total, reserved = limit.total_bytes, limit.reserved_bytes
    amount = bytes_cell(limit.limit_bytes)
    if limit.share is not None:
        amount = Cell(f"{100 * limit.share:.10g} %")
    elif limit.limit_bytes is None and (total is not None or reserved is None):
        amount = Cell("none", tone="muted")
    start = (limit.device, amount, "" if total is None else bytes_cell(total))
    if reserved is None:
        return (*start, Cell("not in use yet", tone="muted"), "")
    top = total if limit.limit_bytes is None else limit.limit_bytes
    left = bytes_cell(None if top is None else max(top - reserved, 0))
    left = replace(left, tone="bad") if _find_excess(limit) else left
    return (*start, bytes_cell(reserved), left)


def _find_excess(limit: Limit) -> int:
    if limit.is_waiting or limit.limit_bytes is None or limit.reserved_bytes is None:
        return 0
    return max(limit.reserved_bytes - limit.limit_bytes, 0)


def report_reset(devices: Sequence[str], before: Sequence[Reading]) -> Report:
    """Report on which devices the peaks were reset, and what they were."""
    if not devices:
        return Report([Note("No GPU in use yet: nothing to reset.")])
    peaks = [
        (reading.device, reading.allocated_peak_bytes, reading.reserved_peak_bytes, reading.peak_is)
        for reading in before
        if reading.device in devices
    ]
    groups = [
        make_group((device, peak_cell(allocated, kind), peak_cell(reserved, kind)))
        for device, allocated, reserved, kind in peaks
    ]
    columns = number_columns("allocated, peak was", "reserved, peak was")
    table = Table("PyTorch's peaks, now reset", (*name_columns("device"), *columns), groups)
    return Report([table, *explain_marks([table]), Note("The recorded cells keep their peaks.")])


def describe_budgets(budgets: Sequence[Budget], *, has_new: bool = False) -> str:
    """Return what ``%membudget`` answers: the budgets, and what follows where one is new."""
    listed = [f"{budget.device} {format_bytes(budget.budget_bytes)}" for budget in budgets]
    words = f"membudget: {'; '.join(listed) or 'no budget is set'}"
    return f"{words}\nFrom the next cell on, cells that exceed it are marked." if has_new else words


# -- Whole devices in parts ------------------------------------------------------------------------


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
        columns = (
            *number_columns("pid", "resident"),
            Column("on devices", "words"),
            Column("process", "words", last="wrap"),
        )
        blocks.append(Table("This notebook's children", columns, [rows]))
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
        columns=(
            *name_columns("what"),
            *number_columns("bytes", "share"),
            Column("what it is, and what can be done", "words", last="wrap"),
        ),
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
        # Of many processes the largest are listed.
        listed, rest = split_rest(part.parts, 20)
        rows.extend(_list_cells(inner, breakdown, level=1) for inner in listed)
        if rest:
            more = Cell(f"{len(rest):,} more", tone="muted", level=1)
            n_bytes = sum(inner.n_bytes for inner in rest)
            share = share_cell(n_bytes, breakdown.total_bytes).text
            rows.append((more, bytes_cell(n_bytes), share, ""))
    if rows:
        yield make_group(*rows)
    others = (
        (
            "pinned",
            breakdown.pinned_bytes,
            "On top of malloc's: pages that stay in place for fast copies to a GPU, each request "
            "rounded up to a power of two. %memvars shows which tensors are pinned; from PyTorch "
            "2.13 on torch.accelerator.empty_host_cache() gives back what no tensor holds.",
        ),
        (
            "asleep",
            breakdown.asleep_bytes or None,
            "In addition to the device's: PyTorch has reserved it, and no memory is behind it now, "
            "as in vLLM's sleep mode. It is at least so much, and needs memory again when it wakes "
            "up.",
        ),
    )
    for name, amount, words in others:
        if amount is not None:
            yield make_group((Cell(name, tone="strong"), bytes_cell(amount), "", words))


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
_HOST_SENTENCES: dict[PartKey, str] = {
    "allocated": "Handed out by malloc to tensors on the CPU, arrays and Python's objects.",
    # The system counts pages of files as available if it could read them again.
    "others": "The rest: other processes and the system. Files that this process has mapped, such "
    "as libraries, may also count as available.",
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
    if part.kind == "other" and on_host:
        return (
            "Python's own objects and libraries, such as arrays and data frames. Freed with these "
            "objects."
        )
    if part.kind is not None:
        return _KINDS.get(part.kind, "")
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
        sentence = f"Arrays of {name}, freed when nothing holds them any more."
        if part.library.limit_bytes is not None:
            sentence += f" {name}'s own limit here is {bind_bytes(part.library.limit_bytes)}."
        if part.library.cached_bytes is None:
            sentence += " What it may keep for later is part of the CUDA context here."
        return sentence
    if part.library.can_empty:
        return f"Kept by {name} for its next arrays. %memrelease --libraries gives it back."
    until = "until the kernel restarts"
    if name == "JAX":
        until += (
            "; XLA_PYTHON_CLIENT_PREALLOCATE=false, set before it is imported, has it take less"
        )
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
        return _HOST_SENTENCES["others"]
    if set(keys) == UNALLOCATED:
        return "Kept for the next tensors. torch.cuda.empty_cache() gives some of it back."
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
