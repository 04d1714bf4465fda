"""Play a dry run into a simulated allocator: the peaks of each step, and what is in use at them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gpumemwidget.prediction.allocator import CachingAllocator, DeviceFullError
from gpumemwidget.prediction.allocator_blocks import SimulatedBlock
from gpumemwidget.prediction.operations import DryRun, Operation
from gpumemwidget.prediction.workspaces import WorkspacePlan


@dataclass(frozen=True, slots=True)
class StepPeaks:
    """The most memory, in bytes, during one run of the step."""

    allocated_bytes: int
    reserved_bytes: int
    #: The operation during which the most was allocated, by its place in the dry run.
    operation: int


@dataclass(frozen=True, slots=True)
class Simulation:
    """A dry run as the allocator of a device would have served it."""

    steps: tuple[StepPeaks, ...]
    #: Bytes in use after each operation.
    allocated_bytes: tuple[int, ...]
    reserved_bytes: tuple[int, ...]
    #: The operation that found no room, by its place in the dry run; ``None``: all did.
    out_of_memory_at: int | None = None

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
    plan: Callable[[Operation], WorkspacePlan],
    *,
    standing: Mapping[int, SimulatedBlock] | None = None,
) -> Simulation:
    """Return what a dry run would take of a device, operator by operator.

    Args:
        run: the dry run.
        allocator: the state from which it begins; changed by the call.
        plan: returns the allocations within an operator; called in their order.
        standing: the blocks of the storages that stood before, by their number in the dry run.
            Those without a block are allocated first, as a model is that is moved to the device.

    Example:
        >>> planner = WorkspacePlanner(H200)
        >>> simulation = simulate(run, CachingAllocator(80 << 30), planner.plan)
        >>> simulation.reserved_peak_bytes >= simulation.allocated_peak_bytes
        True
    """
    player = _Player(run, allocator, dict(standing or {}))
    steps: list[StepPeaks] = []
    allocated: list[int] = []
    reserved: list[int] = []
    place = 0
    try:
        player.begin()
        for end in run.step_ends:
            allocator.reset_peaks()
            highest, at = allocator.allocated_bytes, place
            for place in range(place, end):  # noqa: B020 - each step goes on where the last ended
                peak_bytes = player.carry_out(run.operations[place], plan)
                allocated.append(allocator.allocated_bytes)
                reserved.append(allocator.reserved_bytes)
                if peak_bytes > highest:
                    highest, at = peak_bytes, place
            place = end
            steps.append(StepPeaks(highest, _read_reserved_peak(allocator), at))
    except DeviceFullError:
        steps.append(StepPeaks(allocator.allocated_bytes, allocator.reserved_bytes, place))
        return Simulation(tuple(steps), tuple(allocated), tuple(reserved), place)
    return Simulation(tuple(steps), tuple(allocated), tuple(reserved))


class _Player:
    """Allocates and frees in the allocator what the operators of a dry run do."""

    def __init__(
        self, run: DryRun, allocator: CachingAllocator, blocks: dict[int, SimulatedBlock]
    ) -> None:
        self._run = run
        self._allocator = allocator
        #: The blocks of storages, by their number in the dry run.
        self._blocks = blocks

    def begin(self) -> None:
        """Allocate what stands before the first step and has no block yet."""
        for use in self._run.initial:
            if use.storage not in self._blocks and use.n_bytes:
                self._blocks[use.storage] = self._allocator.allocate(use.n_bytes)

    def carry_out(self, operation: Operation, plan: Callable[[Operation], WorkspacePlan]) -> int:
        """Return the most bytes in use during an operator."""
        allocator = self._allocator
        for storage in operation.freed:
            self._free(storage)
        highest = allocator.allocated_bytes
        temporaries: dict[int, SimulatedBlock] = {}
        for step in plan(operation).steps:
            if step.kind == "free":
                allocator.free(temporaries.pop(step.index))
                continue
            block = allocator.allocate(step.n_bytes)
            if step.kind == "output":
                self._blocks[operation.allocated[step.index].storage] = block
            elif step.kind == "temporary":
                temporaries[step.index] = block
            highest = max(highest, allocator.allocated_bytes)
        for block in temporaries.values():
            allocator.free(block)
        return highest

    def _free(self, storage: int) -> None:
        block = self._blocks.pop(storage, None)
        # What has no bytes, or is no allocation on the device, has no block.
        if block is not None:
            self._allocator.free(block)


def _read_reserved_peak(allocator: CachingAllocator) -> int:
    peak: int = allocator.to_stats()["reserved_bytes"]["all"]["peak"]
    return peak
