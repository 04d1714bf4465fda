"""Play a dry run into a simulated allocator: the peaks of each step, and what is in use at them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from gpumemwidget.allocator.blocks import SimulatedBlock
from gpumemwidget.allocator.caching import CachingAllocator, DeviceFullError
from gpumemwidget.model.devices import Frame, Segment
from gpumemwidget.model.traces import ACTIONS, AllocatorTrace, TraceEvents
from gpumemwidget.prediction.operations import DryRun, Operation, TensorMeta
from gpumemwidget.prediction.workspaces.plans import Bound, WorkspacePlan

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
    recorder: StepRecorder | None = None,
) -> Simulation:
    """Return what a dry run would take of a device, operator by operator.

    Args:
        run: the dry run.
        allocator: the state from which it begins; changed by the call. Storages that have no block
            in it are allocated first, as a model is that is moved to the device.
        plans: the allocations within each operator.
        bound: which figure of those that are estimated.
        recorder: notes the events of one step, after which nothing more is simulated.
    """
    player = _Player(run, allocator, recorder)
    steps: list[StepPeaks] = []
    begin = place = 0
    highest, at = allocator.allocated_bytes, 0
    try:
        player.begin()
        for number, end in enumerate(run.step_ends):
            allocator.reset_peaks()
            highest, at = allocator.allocated_bytes, begin
            if recorder is not None:
                recorder.begin_step(number, begin, allocator)
            for place in range(begin, end):
                operation = run.operations[place]
                if recorder is not None:
                    recorder.begin_operation(place, operation)
                peak_bytes = player.carry_out(place, operation, plans[place], bound)
                if peak_bytes > highest:
                    highest, at = peak_bytes, place
            begin = end
            steps.append(StepPeaks(highest, allocator.reserved_peak_bytes, at))
            if recorder is not None and recorder.end_step(end, allocator):
                break
    except DeviceFullError:
        steps.append(StepPeaks(highest, allocator.reserved_peak_bytes, place))
        return Simulation(tuple(steps), place)
    return Simulation(tuple(steps))


class StepRecorder:
    """Notes the allocator's events during one step of a simulation, as a history has them.

    Args:
        step: the number of the step, from 0.
        peak_bytes: the most that is allocated during the step.
        device: the device that the trace names.

    Attributes:
        live: what is in use when the peak is reached.
    """

    def __init__(self, step: int, peak_bytes: int, device: str) -> None:
        self._step = step
        self._peak_bytes = peak_bytes
        self._device = device
        self.live: tuple[LiveBlock, ...] = ()
        self._trace: AllocatorTrace | None = None
        self._is_on = False
        self._first = self._now_us = self._stack = 0
        self._before: tuple[Segment, ...] = ()
        #: The action, the address, the bytes, the time and the stack of each event.
        self._events: list[tuple[int, int, int, int, int]] = []
        self._stack_numbers: dict[tuple[Frame, ...], int] = {(): 0}

    @property
    def trace(self) -> AllocatorTrace:
        """The step's events, an operator a second; complete once the simulation has ended."""
        if self._trace is None:
            raise ValueError(f"step {self._step} was not carried out")
        return self._trace

    def begin_step(self, number: int, place: int, allocator: CachingAllocator) -> None:
        """Begin to note, if it is the step."""
        if number == self._step:
            self._is_on = True
            self._first = place
            self._before = allocator.list_segments(self._device)
            allocator.on_event = self._note

    def begin_operation(self, place: int, operation: Operation) -> None:
        """Note where the next events come from."""
        if self._is_on:
            self._now_us = (place - self._first) * OPERATOR_US
            numbers = self._stack_numbers
            self._stack = numbers.setdefault(operation.frames, len(numbers))

    def waits_for(self, allocated_bytes: int) -> bool:
        """Return whether this is the peak, and seen for the first time."""
        return self._is_on and not self.live and allocated_bytes == self._peak_bytes

    def end_step(self, place: int, allocator: CachingAllocator) -> bool:
        """Make the trace, and return whether it is the step."""
        if not self._is_on:
            return False
        self._is_on = False
        allocator.on_event = None
        columns = list(zip(*self._events, strict=True)) or [()] * 5
        actions, addresses, sizes, times_us, stacks = columns
        self._trace = AllocatorTrace(
            device=self._device,
            before=self._before,
            events=TraceEvents(
                actions=bytes(actions),
                addresses=array("Q", addresses),
                sizes=array("q", sizes),
                times_us=array("q", times_us),
                streams=array("q", [0]) * len(actions),
                stacks=array("i", stacks),
                stack_table=tuple(self._stack_numbers),
            ),
            after=allocator.list_segments(self._device),
            start_us=0,
            end_us=(place - self._first) * OPERATOR_US,
        )
        return True

    def _note(self, action: str, address: int, n_bytes: int, *_: object) -> None:
        code = ACTIONS.index(action)
        self._events.append((code, address, n_bytes, self._now_us, self._stack))


class _Player:
    """Allocates and frees in the allocator what the operators of a dry run do."""

    def __init__(
        self,
        run: DryRun,
        allocator: CachingAllocator,
        recorder: StepRecorder | None,
    ) -> None:
        self._run = run
        self._allocator = allocator
        self._recorder = recorder
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

    def carry_out(self, place: int, operation: Operation, plan: WorkspacePlan, bound: Bound) -> int:
        """Return the most bytes in use during an operator."""
        if place in self._run.sums_in_place and self._move_sum(operation):
            highest = self._allocator.allocated_bytes
        else:
            highest = self._allocate(place, operation, plan, bound)
        for storage in operation.freed:
            self._free(storage)
        return highest

    def _allocate(self, place: int, operation: Operation, plan: WorkspacePlan, bound: Bound) -> int:
        allocator = self._allocator
        highest = allocator.allocated_bytes
        temporaries: dict[int, SimulatedBlock] = {}
        for step in plan.steps:
            if step.kind == "free":
                if step.index in temporaries:
                    allocator.free(temporaries.pop(step.index))
                continue
            n_bytes = step.read_bytes(bound)
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
            if self._recorder is not None and self._recorder.waits_for(allocator.allocated_bytes):
                self._recorder.live = tuple(self._list_live(place, temporaries.values()))
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

    def _free(self, storage: int) -> None:
        block = self._blocks.pop(storage, None)
        # A storage without bytes, or that is no allocation on the device, has no block.
        if block is not None:
            self._allocator.free(block)
