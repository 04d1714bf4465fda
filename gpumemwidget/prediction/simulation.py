"""Play a dry run into a simulated allocator: the peaks of each step, and what is in use at them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from gpumemwidget.allocator.blocks import SimulatedBlock
from gpumemwidget.allocator.caching import CachingAllocator, DeviceFullError
from gpumemwidget.model.devices import Frame
from gpumemwidget.model.traces import ACTIONS, AllocatorTrace, TraceEvents
from gpumemwidget.prediction.operations import DryRun, Operation, TensorMeta
from gpumemwidget.prediction.plans import Bound, WorkspacePlan

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

    def note(action: str, address: int, n_bytes: int, *_: object) -> None:
        events.append((ACTIONS.index(action), address, n_bytes, now_us, stack))

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
