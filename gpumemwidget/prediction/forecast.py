"""Play a dry run into a simulated allocator, and say what it would take of a device.

Peaks with their bounds, whether it fits, and who owns what at the peak.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from gpumemwidget.allocator.blocks import SimulatedBlock
from gpumemwidget.allocator.caching import CachingAllocator, DeviceFullError
from gpumemwidget.allocator.rules import UNLIMITED_BYTES, AllocatorSettings
from gpumemwidget.backends.snapshot import LARGE_PAGE_BYTES
from gpumemwidget.errors import PredictionError
from gpumemwidget.model.devices import Frame, Segment
from gpumemwidget.model.predictions import (
    Bytes,
    PeakPlace,
    Phase,
    PredictedKind,
    PredictedOwner,
    PredictionDevice,
    PredictionRecord,
    SourcePlace,
)
from gpumemwidget.model.traces import AllocatorTrace, TraceAction, TraceEvents
from gpumemwidget.prediction.operations import (
    H200,
    Bound,
    DryRun,
    GpuFacts,
    Operation,
    TensorMeta,
    WorkspacePlan,
)
from gpumemwidget.prediction.workspaces import WorkspacePlanner
from gpumemwidget.tracing.device_trace import describe_device
from gpumemwidget.tracing.sources import Sources
from gpumemwidget.units import format_bytes

# -- The simulation --------------------------------------------------------------------------------

#: Microseconds between two operators in the trace of a step, which has no clock: a second each.
OPERATOR_US = 1_000_000


@dataclass(frozen=True, slots=True)
class StepPeaks:
    """The most memory, in bytes, during one run of the step."""

    allocated_bytes: int
    reserved_bytes: int
    #: The operator during which the most was allocated, by its place in the dry run.
    operation: int


@dataclass(frozen=True, slots=True)
class LiveBlock:
    """A block that is in use at the peak."""

    #: The storage's number in the dry run; ``None`` for memory within an operator.
    storage: int | None
    #: The operator that allocated it, by its place; ``None``: it was there before.
    operation: int | None
    #: Bytes as the allocator counts them.
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Simulation:
    """A dry run as the allocator of a device would have served it."""

    #: The runs that were carried out: all, unless the device was full.
    steps: tuple[StepPeaks, ...]
    #: The operator that found no room, by its place in the dry run; ``None``: all did.
    out_of_memory_at: int | None = None

    @property
    def peak_step(self) -> int:
        """The step with the most allocated; the first of equals."""
        peaks = [step.allocated_bytes for step in self.steps]
        return peaks.index(max(peaks))

    @property
    def allocated_peak_bytes(self) -> int:
        """The most bytes in use during any step."""
        return max(step.allocated_bytes for step in self.steps)

    @property
    def reserved_peak_bytes(self) -> int:
        """The most bytes reserved during any step."""
        return max(step.reserved_bytes for step in self.steps)


def simulate(
    run: DryRun,
    allocator: CachingAllocator,
    plans: Sequence[WorkspacePlan],
    *,
    bound: Bound = "expected",
) -> Simulation:
    """Return what a dry run would take of a device, operator by operator.

    Args:
        run: the dry run.
        allocator: the state from which it begins; changed by the call. Storages that have no block
            in it are allocated first, as a model is that is moved to the device.
        plans: the allocations within each operator.
        bound: which figure of those that are estimated.
    """
    player = _Player(run, allocator, plans, bound)
    steps: list[StepPeaks] = []
    begin = place = 0
    highest, at = allocator.allocated_bytes, 0
    try:
        player.begin()
        for end in run.step_ends:
            allocator.reset_peaks()
            highest, at = allocator.allocated_bytes, begin
            for place in range(begin, end):
                peak_bytes = player.carry_out(place)
                if peak_bytes > highest:
                    highest, at = peak_bytes, place
            begin = end
            steps.append(StepPeaks(highest, allocator.reserved_peak_bytes, at))
    except DeviceFullError:
        steps.append(StepPeaks(highest, allocator.reserved_peak_bytes, place))
        return Simulation(tuple(steps), place)
    return Simulation(tuple(steps))


def record_step(
    run: DryRun,
    allocator: CachingAllocator,
    plans: Sequence[WorkspacePlan],
    simulation: Simulation,
    device: str,
) -> tuple[AllocatorTrace, tuple[LiveBlock, ...]]:
    """Carry a simulated run out again, up to the step with the peak; return what happens in it.

    Returns:
        The allocator's events during the step, as a history has them, an operator a second; and
        what is in use at the peak.
    """
    player = _Player(run, allocator, plans, "expected")
    begin, end = (0, *run.step_ends)[simulation.peak_step :][:2]
    player.begin()
    for place in range(begin):
        player.carry_out(place)
    before = allocator.list_segments(device)
    #: The action, the address, the bytes, the time and the stack of each event.
    events: list[tuple[int, int, int, int, int]] = []
    stacks: dict[tuple[Frame, ...], int] = {(): 0}
    now_us = stack = 0

    def note(action: TraceAction, address: int, n_bytes: int, *_: object) -> None:
        events.append((action, address, n_bytes, now_us, stack))

    allocator.on_event = note
    player.awaited_bytes = simulation.steps[simulation.peak_step].allocated_bytes
    for place in range(begin, end):
        now_us = (place - begin) * OPERATOR_US
        stack = stacks.setdefault(run.operations[place].frames, len(stacks))
        player.carry_out(place)
    allocator.on_event = None
    actions, addresses, sizes, times_us, numbers = list(zip(*events, strict=True)) or [()] * 5
    trace = AllocatorTrace(
        device=device,
        before=before,
        events=TraceEvents(
            actions=bytes(actions),
            addresses=array("Q", addresses),
            sizes=array("q", sizes),
            times_us=array("q", times_us),
            streams=array("q", [0]) * len(actions),
            stacks=array("i", numbers),
            stack_table=tuple(stacks),
        ),
        after=allocator.list_segments(device),
        start_us=0,
        end_us=(end - begin) * OPERATOR_US,
    )
    return trace, player.live


class _Player:
    """Allocates and frees in the allocator what the operators of a dry run do.

    Attributes:
        awaited_bytes: ``live`` is set when so many bytes are allocated for the first time.
        live: what is in use then.
    """

    def __init__(
        self,
        run: DryRun,
        allocator: CachingAllocator,
        plans: Sequence[WorkspacePlan],
        bound: Bound,
    ) -> None:
        self._run = run
        self._allocator = allocator
        self._plans = plans
        self._bound = bound
        self.awaited_bytes: int | None = None
        self.live: tuple[LiveBlock, ...] = ()
        #: The blocks of storages, by their number in the dry run.
        self._blocks = {
            storage: allocator.active_blocks[address]
            for storage, address in run.addresses.items()
            if address in allocator.active_blocks
        }
        #: The operator that allocated each of them, by its place.
        self._makers: dict[int, int] = {}
        #: Workspaces that stay, each with the operator that allocated it.
        self._kept: list[tuple[int, SimulatedBlock]] = []

    def begin(self) -> None:
        """Allocate what exists before the first step and has no block yet."""
        for use in self._run.initial:
            if use.storage not in self._blocks and use.n_bytes:
                self._blocks[use.storage] = self._allocator.allocate(use.n_bytes)

    def carry_out(self, place: int) -> int:
        """Return the most bytes in use during an operator."""
        operation = self._run.operations[place]
        if not operation.freed and not self._plans[place].steps:
            # Views and operators in place neither allocate nor free.
            return self._allocator.allocated_bytes
        if place in self._run.sums_in_place and self._move_sum(operation):
            highest = self._allocator.allocated_bytes
        else:
            highest = self._allocate(place, operation)
        for storage in operation.freed:
            # A storage without bytes, or that is no allocation on the device, has no block.
            if (block := self._blocks.pop(storage, None)) is not None:
                self._allocator.free(block)
        return highest

    def _allocate(self, place: int, operation: Operation) -> int:
        allocator = self._allocator
        highest = allocator.allocated_bytes
        temporaries: dict[int, SimulatedBlock] = {}
        for step in self._plans[place].steps:
            if step.kind == "free":
                if step.index in temporaries:
                    allocator.free(temporaries.pop(step.index))
                continue
            n_bytes = step.read_bytes(self._bound)
            if not n_bytes:
                continue
            block = allocator.allocate(n_bytes)
            if step.kind == "output":
                storage = operation.allocated[step.index].storage
                self._blocks[storage] = block
                self._makers[storage] = place
            elif step.kind == "temporary":
                temporaries[step.index] = block
            else:
                self._kept.append((place, block))
            highest = max(highest, allocator.allocated_bytes)
            if allocator.allocated_bytes == self.awaited_bytes and not self.live:
                self.live = tuple(self._list_live(place, temporaries.values()))
        for block in temporaries.values():
            allocator.free(block)
        return highest

    def _move_sum(self, operation: Operation) -> bool:
        """Give a sum the block of its first tensor, which is freed next; return whether it has one.

        Freeing the first tensor then frees nothing.
        """
        total, (result,) = operation.arguments[0], operation.allocated
        if not isinstance(total, TensorMeta) or total.storage not in self._blocks:
            return False
        self._blocks[result.storage] = self._blocks.pop(total.storage)
        self._makers[result.storage] = self._makers[total.storage]
        return True

    def _list_live(self, place: int, temporaries: Iterable[SimulatedBlock]) -> Iterator[LiveBlock]:
        for storage, block in self._blocks.items():
            yield LiveBlock(storage, self._makers.get(storage), block.n_bytes)
        for made_by, block in self._kept:
            yield LiveBlock(None, made_by, block.n_bytes)
        for block in temporaries:
            yield LiveBlock(None, place, block.n_bytes)


# -- The forecast ----------------------------------------------------------------------------------

#: A segment that blocks of 1 to 10 MiB share: a prediction is never surer than that, as the
#: driver's addresses decide which of two cached blocks of one size serves.
SLACK_BYTES = LARGE_PAGE_BYTES
_OwnerKey: TypeAlias = "tuple[PredictedKind, str, Phase | None, SourcePlace | None]"


@dataclass(frozen=True, slots=True)
class Target:
    """A device as a step would find it."""

    device: PredictionDevice
    #: What decides the kernels that it runs.
    facts: GpuFacts
    settings: AllocatorSettings
    #: What PyTorch has reserved.
    segments: Sequence[Segment] = ()
    #: The cuBLAS workspaces that the process has already.
    n_workspaces: int = 0

    def make_allocator(self, n_bytes: int) -> CachingAllocator:
        """Return an allocator in the state before the step, if the device had so many bytes."""
        settings = self.settings
        if settings.allowed_bytes is not None and self.device.available_bytes is not None:
            # The process's limit moves with the size.
            allowed_bytes = settings.allowed_bytes + n_bytes - self.device.available_bytes
            settings = replace(settings, allowed_bytes=allowed_bytes)
        allocator = CachingAllocator.from_snapshot(
            self.segments, total_bytes=n_bytes, settings=settings
        )
        allocator.addresses_fall = True
        return allocator

    def make_expandable(self) -> Target | None:
        """Return the same device, empty, with segments that grow; ``None``: they do already."""
        if self.settings.is_expandable:
            return None
        settings = replace(self.settings, is_expandable=True)
        return Target(self.device, self.facts, settings)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What is not known of a GPU that the rules of workspaces were not measured on."""
        if (self.facts.capability, self.facts.torch_version) == (
            H200.capability,
            H200.torch_version,
        ):
            return ()
        major, minor = H200.torch_version
        return (
            "operators need the workspaces that were measured on an NVIDIA H200 with PyTorch "
            f"{major}.{minor}",
        )


def forecast(run: DryRun, target: Target, sources: Sources) -> PredictionRecord:
    """Return what a dry run would take of a device.

    It is simulated with the least, the expected and the most that operators may need inside. Where
    that does not fit, the peaks are those of a device without an end. The sources say which lines
    are the step's own.
    """
    room = target.device.available_bytes
    planner = WorkspacePlanner(target.facts, target.n_workspaces)
    plans = [planner.plan(operation) for operation in run.operations]
    bounds: tuple[Bound, ...] = ("expected",)
    if any(plan.is_estimated for plan in plans):
        bounds = ("expected", "least", "most")

    def play(bound: Bound, n_bytes: int) -> Simulation:
        return simulate(run, target.make_allocator(n_bytes), plans, bound=bound)

    found = {bound: play(bound, UNLIMITED_BYTES) for bound in bounds}
    if (beyond := found["expected"].out_of_memory_at) is not None:
        raise _describe_endless(_place(run, beyond, sources))
    allocated = _bound([simulation.allocated_peak_bytes for simulation in found.values()])
    reserved = _bound([simulation.reserved_peak_bytes for simulation in found.values()])
    # Of the 39 steps of ``benchmarks fit`` most are predicted to half a percent.
    slack_bytes = max(SLACK_BYTES, int(0.005 * reserved.expected))
    # Larger workspaces may also need a segment more, however the blocks lie.
    reserved = Bytes(
        max(reserved.at_least - slack_bytes, allocated.at_least),
        reserved.expected,
        reserved.at_most + allocated.at_most - allocated.expected + slack_bytes,
    )
    fits, full, size = None, None, UNLIMITED_BYTES
    if room is not None and reserved.at_most <= room:
        fits = True
    elif room is not None:
        expected = play("expected", room)
        if expected.out_of_memory_at is None:
            # A full allocator gives its cache back, and goes on with less.
            found["expected"], size = expected, room
            n_bytes = expected.reserved_peak_bytes
            reserved = Bytes(min(reserved.at_least, n_bytes), n_bytes, reserved.at_most)
            less = [play(bound, max(0, room - SLACK_BYTES)) for bound in bounds]
            if all(simulation.out_of_memory_at is None for simulation in less):
                fits = True
                reserved = replace(reserved, at_most=min(reserved.at_most, room))
        else:
            more = [play(bound, room + SLACK_BYTES) for bound in bounds]
            if all(simulation.out_of_memory_at is not None for simulation in more):
                fits, full = False, more[0].out_of_memory_at
    expected = found["expected"]
    peak = expected.steps[expected.peak_step]
    allocator = target.make_allocator(size)
    history, live = record_step(run, allocator, plans, expected, target.device.name)
    trace = describe_device(history, sources=sources, start_us=0)
    return PredictionRecord(
        device=target.device,
        allocated=allocated,
        reserved=reserved,
        fits=fits,
        peak=_place(run, peak.operation, sources),
        owners=_list_owners(run, live, peak.allocated_bytes, sources),
        trace=replace(trace, timeline=replace(trace.timeline, unit="operators")),
        runs=tuple((step.allocated_bytes, step.reserved_bytes) for step in expected.steps),
        assumptions=(
            *target.assumptions,
            *_describe_unknown(run, plans),
            *_describe_first_step(run),
            *run.assumptions,
        ),
        full_at=None if full is None else _place(run, full, sources),
    )


def _describe_endless(place: PeakPlace) -> PredictionError:
    line = "" if place.line is None else f", line {place.line.line}"
    return PredictionError(
        f"The step needs more than {format_bytes(UNLIMITED_BYTES)} at once ({place.operator}"
        f"{line}). Make the tensor smaller."
    )


def _describe_unknown(run: DryRun, plans: Sequence[WorkspacePlan]) -> tuple[str, ...]:
    """Return a sentence on the operators whose inside is not known, if there are any."""
    pairs = zip(run.operations, plans, strict=True)
    names = sorted(
        {op.name.partition(".")[0] for op, plan in pairs if not plan.is_known and plan.is_estimated}
    )
    if not names:
        return ()
    shown = ", ".join(names[:8]) + (" …" if len(names) > 8 else "")
    return (
        "what these operators need inside is not known, from nothing to as much as they take and "
        f"return: {shown}",
    )


def _describe_first_step(run: DryRun) -> tuple[str, ...]:
    """Return a sentence on the next run, if the only one makes the optimizer's state."""
    states = {number for number, role in run.roles.items() if role.kind == "optimizer state"}
    makes_state = any(
        use.storage in states for operation in run.operations for use in operation.allocated
    )
    if len(run.step_ends) > 1 or not makes_state:
        return ()
    return (
        "this is the first step: later ones also hold the optimizer's state and may need more "
        "(--steps 2)",
    )


def _bound(figures: Sequence[int]) -> Bytes:
    """Return the expected figure, which is the first, between the lowest and the highest."""
    return Bytes(min(figures), figures[0], max(figures))


def _place(run: DryRun, operation: int, sources: Sources) -> PeakPlace:
    found = run.operations[operation]
    n_before = sum(end <= operation for end in run.step_ends)
    line = _find_line(found, sources)
    return PeakPlace(found.name, found.phase, found.module, line, n_before + 1)


def _find_line(operation: Operation, sources: Sources) -> SourcePlace | None:
    """Return the user's innermost line, by the name that the user knows its source by."""
    if not operation.frames:
        return None
    frame = operation.frames[0]
    source = sources.find(frame.filename)
    name = frame.filename if source is None else source.name
    return SourcePlace("" if source is sources.traced else name, frame.line)


# -- What is in use at the peak --------------------------------------------------------------------


def _list_owners(
    run: DryRun, live: tuple[LiveBlock, ...], allocated_bytes: int, sources: Sources
) -> tuple[PredictedOwner, ...]:
    #: The phase in which each storage was freed; one that stays to the end has none.
    ends = {storage: operation.phase for operation in run.operations for storage in operation.freed}
    sizes: Counter[_OwnerKey] = Counter()
    n_blocks: Counter[_OwnerKey] = Counter()
    for block in live:
        key = _describe(run, block, ends, sources)
        sizes[key] += block.n_bytes
        n_blocks[key] += 1
    others = allocated_bytes - sum(sizes.values())
    if others:
        key = ("other memory", "", None, None)
        sizes[key] += others
        n_blocks[key] += 1

    def rank(key: _OwnerKey) -> tuple[object, ...]:
        line = key[3]
        return -sizes[key], *key[:2], key[2] or "", line.line if line is not None else 0

    return tuple(PredictedOwner(*key, sizes[key], n_blocks[key]) for key in sorted(sizes, key=rank))


def _describe(
    run: DryRun, block: LiveBlock, ends: Mapping[int, Phase], sources: Sources
) -> _OwnerKey:
    if block.operation is None:
        role = run.roles.get(block.storage) if block.storage is not None else None
        return (
            (role.kind, role.path, None, None) if role is not None else ("tensor", "", None, None)
        )
    made_by = run.operations[block.operation]
    line = _find_line(made_by, sources)
    place = made_by.module or made_by.short_name
    if block.storage is None:
        return "workspace", place, made_by.phase, line
    role = run.roles.get(block.storage)
    if role is not None:
        return role.kind, role.path, made_by.phase, line
    kind: PredictedKind = "temporary"
    if made_by.phase == "forward" and ends.get(block.storage) == "backward":
        kind = "saved for backward"
    return kind, place, made_by.phase, line
