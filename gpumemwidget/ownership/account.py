"""Account for every allocated byte of every device, once, and for what each variable holds.

Storages come from the walk, blocks from the allocator. On CUDA a storage's bytes are those of the
block it lies in, so the lines add up to the allocator's own figure; what no storage claims is named
by the block's size and pool. On the host malloc has no list of what it handed out: what is no
tensor's is one line.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import CellType

from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.errors import UnknownNameError, forgets_frames
from gpumemwidget.model.devices import HOST, Block, Reading
from gpumemwidget.model.ownership import (
    AccountNote,
    BlockNames,
    DeviceAccount,
    DeviceBytes,
    MemoryAccount,
    MemoryKind,
    MemorySource,
    Owned,
    RootKind,
    Variable,
)
from gpumemwidget.model.releases import ReleaseSum
from gpumemwidget.ownership.blocks import (
    BlockMap,
    add_known,
    find_rounding,
    list_library_arrays,
    name_pools,
)
from gpumemwidget.ownership.graph.kinds import Kind
from gpumemwidget.ownership.graph.objects import (
    is_a,
    is_one_of,
    iterate_frames,
    name_class,
    paused_collector,
    read_attribute,
)
from gpumemwidget.ownership.holdings import ELSEWHERE, Holdings, Row, join_marks, take_holdings
from gpumemwidget.ownership.labels import PathStep, StepKind, find_kind_name
from gpumemwidget.ownership.partition import ReleasePartition
from gpumemwidget.ownership.paths import Paths, find_fix
from gpumemwidget.ownership.shell import Shell
from gpumemwidget.progress import Stage, report_progress
from gpumemwidget.tracing.sources import format_allocation

#: Seconds for the full account, for which the user waits.
FULL_BUDGET_S = 10.0
#: Seconds for a walk that fills the panel after a cell; a release may take longer.
LIST_BUDGET_S = 1.0

#: The roots that are no variable of the notebook, displayed value or exception.
UNNAMED_ROOTS: tuple[RootKind, ...] = ("module", "thread", "nowhere")


@forgets_frames
def take_memory_account(
    shell: Shell, hardware: Hardware, *, budget_s: float = FULL_BUDGET_S
) -> MemoryAccount:
    """Return who owns the allocated memory of every device, in lines that add up to it.

    Nothing is changed: no hook runs, nothing is computed, and what is allocated on a device is the
    same before and after. After ``budget_s`` seconds the walk stops, and the account says that it
    is not complete; other libraries' arrays are searched for in a tenth of that.
    """
    with paused_collector():
        started_s = time.perf_counter()
        blocks = read_blocks(shell, hardware)
        holdings = take_holdings(shell, budget_s=budget_s, depth="holders", blocks=blocks)
        taken, _ = describe_memory(holdings, shell, hardware, blocks)
        arrays, unread, is_whole = list_library_arrays(shell, time.perf_counter() + budget_s / 10)
        taken = replace(
            taken,
            library_arrays=arrays,
            unread_libraries=unread,
            has_all_library_arrays=is_whole,
        )
        if holdings is None:
            return taken
        variables = describe_rows(holdings, deadline_s=started_s + budget_s)
        duration_s = time.perf_counter() - started_s
        return replace(taken, variables=variables, duration_s=duration_s)


@forgets_frames
def take_block_account(
    shell: Shell, hardware: Hardware, *, budget_s: float
) -> tuple[MemoryAccount, dict[str, BlockNames]]:
    """Return the account without variables, and what is in each block, from one walk.

    Of each device whose allocator lists its blocks: what each allocated one is for and the path
    that a person would type for it, ``""`` where no name leads to what is in the block. After
    ``budget_s`` seconds the walk stops.
    """
    with paused_collector():
        blocks = read_blocks(shell, hardware)
        holdings = take_holdings(shell, budget_s=budget_s, depth="holders", blocks=blocks)
        return describe_memory(holdings, shell, hardware, blocks)


@forgets_frames
def take_running_account(
    shell: Shell, hardware: Hardware, device: str, *, budget_s: float
) -> MemoryAccount:
    """Return who owns the allocated memory of one device, quickly, while a cell is running.

    For the moment of an OOM: on whatever thread, deep in the user's code, before its functions are
    unwound. Their variables are named as names are (``running: train() line 7: batch``). Nothing
    is allocated on a device, and nothing is collected. What neither a name nor a running function
    leads to has its kind alone; so has what a graph holds whose backward runs beside this.

    The walk ends after ``budget_s`` seconds; what was not met by then has no name. The biggest have
    their paths; the others their rows, and what has the same row and kind is one line.
    """
    with paused_collector():
        blocks = read_blocks(shell, hardware, device)
        holdings = take_holdings(
            shell,
            budget_s=budget_s,
            depth="running",
            reads_graphs=may_read_graphs(hardware),
            blocks=blocks,
        )
        return describe_memory(holdings, shell, hardware, blocks, device)[0]


def read_blocks(shell: Shell, hardware: Hardware, device: str | None = None) -> BlockMap:
    """Return the blocks of all allocators, or of one device's alone."""
    segments = [segment for segment in hardware.read_segments() if device in (None, segment.device)]
    return BlockMap(segments, cells=shell.read_cell_numbers())


def may_read_graphs(hardware: Hardware) -> bool:
    """Return whether no backward beside this thread changes its graph meanwhile."""
    return not has_backward_beside(sum(reading.device != HOST for reading in hardware.read()))


def describe_memory(
    holdings: Holdings | None,
    shell: Shell,
    hardware: Hardware,
    blocks: BlockMap,
    device: str | None = None,
) -> tuple[MemoryAccount, dict[str, BlockNames]]:
    """Return the lines of each device, without variables, and the kind and path of each block.

    The holdings are ``None`` where torch is not imported; the blocks are those that the walk had.
    One ``device`` alone is described as ``take_running_account`` does.
    """
    # The exact figures: a count that takes long is left out where it is read often.
    readings = [reading for reading in hardware.read_exact() if device in (None, reading.device)]
    cells = shell.read_cell_numbers()
    names: dict[str, dict[int, tuple[MemoryKind, str]]] = {
        name: {block.address: (kind, "") for block, kind in blocks.list_kinds(name)}
        for name in blocks.devices
    }
    pools: dict[tuple[int, int], str] = {}
    owned: list[Owned] = []
    claimed: set[tuple[str, int]] = set()
    outside: Counter[tuple[str, MemorySource]] = Counter()
    if holdings is not None:
        paths = holdings.find_paths()
        alike: list[Owned] = []
        # The account of one device does not search for other holders.
        no_name = "held where Python can't see" if device is None else "none of your variables"
        describer = _Describer(holdings, paths, cells, no_name=no_name)
        claims = _list_claims(holdings, paths, device, outside)
        for number, (place, block, n_bytes) in enumerate(claims):
            # Only the biggest have paths of their own: nobody reads more rows, and each path takes
            # time.
            is_short = device is not None and number >= 128
            line = describer.describe(place, block, n_bytes, is_short=is_short)
            (alike if is_short else owned).append(line)
            if block is not None:
                claimed.add((line.device, block.address))
                path = "" if line.root == "nowhere" else line.owner
                names[line.device][block.address] = (line.kind, path)
        owned.extend(_join_alike(alike))
        pools = name_pools(
            (row.name, holdings.graph.objects[place])
            for row in holdings.rows.values()
            for place in row.places
        )
    notes = [AccountNote(where, n_bytes, source) for (where, source), n_bytes in outside.items()]
    unclaimed = blocks.describe_unclaimed(claimed, pools)
    if holdings is not None:
        unclaimed = tuple(_name_buckets(holdings, paths, unclaimed))
    owned.extend(unclaimed)
    devices = tuple(_balance_device(reading, owned, notes) for reading in readings)
    taken = MemoryAccount(
        devices=devices,
        variables=(),
        is_complete=holdings is None or holdings.graph.is_complete,
        duration_s=0.0 if holdings is None else time.perf_counter() - holdings.started_s,
        notes=tuple(notes),
    )
    return taken, dict(names)


def _list_claims(
    holdings: Holdings,
    paths: Paths,
    device: str | None,
    outside: Counter[tuple[str, MemorySource]],
) -> Iterator[tuple[int, Block | None, int]]:
    """Yield the storages that are a line each, with their blocks and bytes.

    Of several in the same memory (DLPack) only one is. Of one ``device`` alone the biggest come
    first. What no allocator counts is added to ``outside``.
    """
    storages = holdings.graph.storages
    groups: dict[tuple[str, int], list[int]] = {}
    for place, info in storages.items():
        if device is None or info.device == device:
            groups.setdefault(info.find_key(rounded=True), []).append(place)
    found = [
        min(places, key=paths.rank) if len(places) > 1 else places[0] for places in groups.values()
    ]
    if device is not None:
        found.sort(key=lambda place: -storages[place].n_bytes)
    for place in found:
        info = storages[place]
        if not info.freed_bytes:
            outside[info.device, info.source] += info.n_bytes
            continue
        yield place, info.block, info.freed_bytes


def _name_buckets(holdings: Holdings, paths: Paths, unclaimed: Sequence[Owned]) -> Iterator[Owned]:
    """Yield the lines of blocks without a storage, gradient buckets named by their module.

    The reducer of ``DistributedDataParallel`` joins gradients in blocks of its own
    (https://docs.pytorch.org/docs/stable/notes/ddp.html), which together have the bytes of the
    parameters. Where the unknown blocks of a device have just these, they are buckets.
    """
    graph = holdings.graph
    wrappers = graph.list_wrappers()
    needed: Counter[str] = Counter()
    for place in wrappers:
        listed = read_attribute(graph.objects[place], "_module_parameters")
        with graph.reader.quiet():
            for parameter in listed if type(listed) is list else ():
                info = graph.reader.read_storage(graph.reader.read_tensor(parameter).storage)
                needed[info.device if info else ""] += graph.reader.count_bytes(parameter)
    found: Counter[str] = Counter()
    for line in unclaimed:
        if line.kind == "unknown":
            found[line.device] += line.n_bytes - (line.rounding_bytes or 0)
    for line in unclaimed:
        if line.kind != "unknown" or not needed[line.device]:
            yield line
        elif len(wrappers) > 1 or needed[line.device] != found[line.device]:
            words = "perhaps a gradient bucket of DistributedDataParallel"
            yield replace(line, steps=(f"{line.owner}; {words}",))
        else:
            root = paths.find_root(wrappers[0])
            steps = tuple(step.text for step in paths.list_steps(wrappers[0]))
            yield replace(
                line,
                kind="gradient",
                steps=(*steps, "'s gradient buckets"),
                root="nowhere" if root is None else root.kind,
                rows=holdings.name_holders(holdings.marks[wrappers[0]]),
            )


def _join_alike(lines: Iterable[Owned]) -> Iterator[Owned]:
    """Yield one line for those that differ in their bytes alone."""
    alike: dict[tuple[object, ...], list[Owned]] = {}
    for line in lines:
        key = (line.steps, line.kind, line.root, line.rows, line.held_elsewhere, line.allocated_at)
        alike.setdefault(key, []).append(line)
    for group in alike.values():
        yield replace(
            group[0],
            n_bytes=sum(one.n_bytes for one in group),
            rounding_bytes=add_known(one.rounding_bytes for one in group),
        )


class _Describer:
    """Describes the storages of a walk, one line each; ``no_name`` replaces a missing path."""

    def __init__(
        self, holdings: Holdings, paths: Paths, cells: Mapping[str, int], *, no_name: str
    ) -> None:
        self._holdings = holdings
        self._graph = holdings.graph
        self._paths = paths
        self._cells = cells
        self._no_name = no_name
        self._parameters = set(paths.parameters)
        self._states: set[int] = set()
        self._buffers: set[int] = set()
        objects = holdings.graph.objects
        for place in paths.modules:
            self._buffers |= self._graph.find_tensors([read_attribute(objects[place], "_buffers")])
        for place in paths.optimizers:
            groups = read_attribute(objects[place], "param_groups")
            self._parameters |= self._graph.find_tensors([groups])
            state = read_attribute(objects[place], "state")
            if is_a(state, dict):
                # The keys are the parameters.
                self._states |= self._graph.find_tensors(dict.values(state))

    def describe(self, place: int, block: Block | None, n_bytes: int, *, is_short: bool) -> Owned:
        """Return the line of a storage, with the root alone for its path if ``is_short``."""
        holdings = self._holdings
        marks = holdings.marks[place]
        root = self._paths.find_root(place)
        kind: RootKind = "nowhere" if root is None else root.kind
        steps = root.steps if root is not None and is_short else self._paths.list_steps(place)
        rows = holdings.name_holders(marks)
        if root is not None and root.word in rows and rows[0] != root.word:
            rows = (root.word, *(row for row in rows if row != root.word))
        if kind == "nowhere":
            steps = (PathStep(StepKind.ROOT, self._no_name), *steps[1:])
            if not marks & ELSEWHERE and root is not None:
                rubbish = PathStep(StepKind.RUBBISH, "rubbish (gc.collect() frees it)")
                owner = self._name_rubbish(root.place)
                steps = (rubbish, PathStep(StepKind.PART, f": {owner}"))
        purpose = self._find_purpose(place)
        return Owned(
            device=holdings.graph.storages[place].device,
            n_bytes=n_bytes,
            kind=purpose,
            steps=tuple([step.text for step in steps]),
            root=kind,
            rows=rows,
            held_elsewhere=bool(marks & ELSEWHERE),
            allocated_at=None if block is None else format_allocation(block.frames, self._cells),
            rounding_bytes=None if block is None else find_rounding(block),
            fix=find_fix(kind, steps, kind=purpose) if kind in UNNAMED_ROOTS else None,
            shown_bytes=holdings.find_shown_bytes(place),
        )

    def _find_purpose(self, storage: int) -> MemoryKind:
        """Return what a storage is for: of several things that it is at once, the first."""
        tensors = self._graph.tensors_on.get(storage, ())
        kinds: tuple[tuple[set[int], MemoryKind], ...] = (
            (self._parameters, "parameter"),
            (self._graph.grads, "gradient"),
            (self._states, "optimizer state"),
            (self._buffers, "buffer"),
        )
        for places, kind in kinds:
            if not places.isdisjoint(tensors):
                return kind
        if self._paths.passes_graph(storage):
            return "saved for backward"
        root = self._paths.find_root(storage)
        # Modules of torch whose globals keep what compiled code needs.
        compilers = r"torch\._(inductor|dynamo|functorch)\b"
        if root is not None and root.kind == "module" and re.match(compilers, root.word):
            return "compile cache"
        return "tensor"

    def _name_rubbish(self, place: int) -> str:
        """Return the class of the instance that an object is, or whose dictionary it is."""
        graph = self._graph
        holders = [holder for holder, parts in enumerate(graph.edges) if place in parts]
        classes = [type(graph.objects[holder]) for holder in (place, *holders)]
        named = [cls for cls in classes if not is_one_of(cls, dict, list, tuple, set, CellType)]
        return name_class((named or classes)[0]).rpartition(".")[2]


def _balance_device(
    reading: Reading, owned: Iterable[Owned], notes: list[AccountNote]
) -> DeviceAccount:
    """Return the lines of one device, with one for the remainder, so that they add up."""
    lines = [line for line in owned if line.device == reading.device]
    allocated = reading.allocated_bytes
    if allocated is not None:
        left = allocated - sum(line.n_bytes for line in lines)
        if left < 0:
            # Tensors in shared memory are not malloc's; another thread may have freed some.
            notes.append(AccountNote(reading.device, -left))
            allocated = None
        elif left:
            is_host = reading.device == HOST
            kind: MemoryKind = "other" if is_host else "unknown"
            words = "Python's own objects and libraries" if is_host else "unattributed"
            lines.append(Owned(reading.device, left, kind, (words,), "nowhere"))
    lines.sort(key=lambda line: (-line.n_bytes, line.steps))
    return DeviceAccount(device=reading.device, allocated_bytes=allocated, owned=tuple(lines))


def has_backward_beside(n_devices: int) -> bool:
    """Return whether a backward may be running beside this thread and changing its graph.

    Autograd has a thread for each of the ``n_devices`` in use beside the host, which needs no
    interpreter: what a node has saved may go while it is being read. The one backward on one device
    stops while its own thread asks, or the thread that called it.
    """
    own = threading.get_ident()
    # Autograd's threads are no threads of Python's; a dummy is one that asked for itself.
    idents = {
        thread.ident
        for thread in threading.enumerate()
        if not isinstance(thread, threading._DummyThread)  # noqa: SLF001 - has no public name
    }
    callers = {
        ident
        for ident, frame in iterate_frames()
        # Python's side of a running backward.
        if frame.f_code.co_name == "_engine_run_backward" and ident in idents
    }
    if not callers:
        return False
    is_ours = own in callers or own not in idents
    return len(callers) > 1 or n_devices > 1 or not is_ours


# -- The rows of variables ------------------------------------------------------------------------


@forgets_frames
def list_variables(shell: Shell) -> tuple[Variable, ...]:
    """Return what variables, displayed values and the last exception hold, biggest first.

    By storage, each counted once in a row. ``held_bytes`` is what the row reaches; ``frees_bytes``
    what goes away if exactly this row is released, what would be moved to the CPU in place
    included, on CUDA rounded up to the allocator's 512 bytes. The latter errs on the side of too
    little: what something unknown holds as well is left out, and ``held_elsewhere`` is true.

    Returns:
        The rows that hold memory; ``()`` where torch is not imported.
    """
    deadline_s = time.perf_counter() + LIST_BUDGET_S
    with paused_collector():
        holdings = take_holdings(shell, budget_s=LIST_BUDGET_S, depth="rows")
        return () if holdings is None else describe_rows(holdings, deadline_s=deadline_s)


def describe_rows(holdings: Holdings, *, deadline_s: float = math.inf) -> tuple[Variable, ...]:
    """Return the rows of one walk that hold memory, as ``list_variables`` gives them.

    After ``deadline_s``, on ``time.perf_counter``, it is no longer computed what a release would
    move to the CPU: what the rows concerned free is a lower bound then.
    """
    variables = []
    for number, row in enumerate(holdings.rows.values()):
        report_progress(Stage.DESCRIBE_ROWS, number, len(holdings.rows))
        if holdings.groups.find(row.mark):
            is_late = time.perf_counter() > deadline_s
            variables.append(_describe_row(holdings, row, is_late=is_late))
    return tuple(sorted(variables, key=lambda row: (-row.held_bytes.total_bytes, row.name)))


@forgets_frames
def sum_frees(
    shell: Shell, names: Sequence[str], *, keep: bool = False, budget_s: float
) -> ReleaseSum:
    """Return what is freed if exactly these rows are released together.

    After ``budget_s`` seconds the search stops, and the sum is a lower bound.

    Raises:
        UnknownNameError: there is no such row.
    """
    holdings = take_holdings(shell, budget_s=budget_s)
    if holdings is None:
        return ReleaseSum(DeviceBytes())
    for name in names:
        if name not in holdings.rows:
            raise UnknownNameError(f"{name!r} holds nothing now: look at the variables again")
    partition = ReleasePartition(holdings, names, keep=keep)
    return ReleaseSum(partition.frees_bytes, partition.find_joint())


def _describe_row(holdings: Holdings, row: Row, *, is_late: bool) -> Variable:
    graph = holdings.graph
    reached = join_marks(holdings.groups.find(row.mark))
    partition = ReleasePartition(holdings, [row.name])
    if is_late and partition.can_move:
        frees_bytes = replace(partition.sum_dying(), is_at_least=True)
    else:
        frees_bytes = partition.frees_bytes
    target = graph.objects[row.places[0]]
    cls = type(target)
    shape, dtype = None, None
    if graph.kinds[row.places[0]] is Kind.TENSOR and not graph.reader.is_dispatched(cls):
        with graph.reader.quiet():
            shape, dtype = graph.reader.read_shape(target)
    return Variable(
        name=row.name,
        root=row.root,
        kind=find_kind_name(graph, row.places[0]),
        type_name=name_class(cls),
        shape=shape,
        dtype=dtype,
        held_bytes=holdings.sum_held(row.mark),
        frees_bytes=frees_bytes,
        shared_with=holdings.name_holders(reached & ~row.mark),
        held_elsewhere=bool(reached & ELSEWHERE),
        holds_training_state=bool(row.mark & holdings.training_marks),
        joint=None if is_late else partition.find_joint(),
    )
