"""Carries a script's steps out on simulated devices, and tells what these count after each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpumemwidget.backends.allocator import DeviceFullError, ReplayAllocator
from gpumemwidget.backends.company import COMPANY_ACTIONS, Company
from gpumemwidget.backends.events import parse_events
from gpumemwidget.backends.recording import Event
from gpumemwidget.backends.snapshot import parse_segments
from gpumemwidget.backends.statechanges import Change
from gpumemwidget.errors import BadInputError
from gpumemwidget.records import DeviceUse, Reading

if TYPE_CHECKING:
    from gpumemwidget.backends.script import Step

__all__ = ["Stage"]

#: The shares of a device that a context takes beside the allocator's memory, and that others use:
#: of 80 GiB 512 and 320 MiB.
_CONTEXT_SHARE = 1 / 160
_OTHERS_SHARE = 1 / 256
_BUSY_PERCENT = 93


class Stage:
    """The simulated devices while a script runs.

    Args:
        n_devices: how many there are.
        total_bytes: the memory of each.
        company: who else is on them; ``None`` where the driver tells of nobody.
        snapshots: take the allocators' snapshot with every event.
        history: write the allocators' events down too.
    """

    def __init__(
        self,
        n_devices: int,
        total_bytes: int,
        company: Company | None,
        *,
        snapshots: bool,
        history: bool,
    ) -> None:
        self.now_s = 0.0
        self._takes_snapshots = snapshots or history
        self._has_history = history
        self._total_bytes = total_bytes
        self._others_bytes = int(total_bytes * _OTHERS_SHARE)
        self._context_bytes = int(total_bytes * _CONTEXT_SHARE)
        # What the allocator can have at most is what these leave.
        room_bytes = total_bytes - self._others_bytes - self._context_bytes
        self._company = company
        if company is not None:
            room_bytes = company.room_bytes
        self._allocator = ReplayAllocator(
            n_devices, total_bytes=room_bytes, clock_ns=lambda: round(self.now_s * 1e9)
        )
        if history:
            self._allocator.record_history()
        #: ``None`` for a block that was not to be had.
        self._handles: dict[str, int | None] = {}
        self._was_allocated: dict[int, int] = {}

    def carry_out(self, step: Step) -> None:
        """One step.

        Raises:
            BadInputError: it can't be carried out.
        """
        if step.action == "allocate":
            if step.name in self._handles:
                raise BadInputError(f"{step.name!r} at {step.time_s} s is in use: free it first")
            try:
                self._handles[step.name] = self._allocator.allocate(
                    step.n_bytes, step.device, stack=step.stack
                )
            except DeviceFullError:
                self._handles[step.name] = None
        elif step.action == "free":
            if step.name not in self._handles:
                raise BadInputError(f"{step.name!r} at {step.time_s} s is not in use")
            handle = self._handles.pop(step.name)
            if handle is not None:
                self._allocator.free(handle, stack=step.stack)
        elif step.action == "empty_cache":
            self._allocator.empty_cache(stack=step.stack)
        elif step.action == "touch":
            self._allocator.touch(step.device)
        elif self._company is not None and step.action in COMPANY_ACTIONS:
            self._company.carry_out(step)
            if step.action == "limit":
                share = (step.n_bytes + 0.5) / self._allocator.total_bytes(step.device)
                self._allocator.set_fraction(min(1.0, share) if step.n_bytes else 1.0, step.device)
        else:
            getattr(self._allocator, step.action)(step.device, stack=step.stack)

    def to_event(self, time_s: float) -> Event:
        """What stands now, with the peaks since this was asked last."""
        readings, uses = [], []
        taken_bytes: dict[int, int | None] = {}
        for index in range(self._allocator.n_devices):
            stats = self._allocator.stats(index)
            allocated = stats["allocated_bytes"]["all"]
            reserved = stats["reserved_bytes"]["all"]
            used_bytes = self._others_bytes
            is_touched = index in self._allocator.list_touched()
            if is_touched:
                used_bytes += self._context_bytes + reserved["current"]
                readings.append(
                    Reading(
                        device=f"cuda:{index}",
                        allocated_bytes=allocated["current"],
                        reserved_bytes=reserved["current"],
                        allocated_peak_bytes=allocated["peak"],
                        reserved_peak_bytes=reserved["peak"],
                        peak_is="exact",
                        num_alloc_retries=stats["num_alloc_retries"],
                        num_ooms=stats["num_ooms"],
                    )
                )
                self._allocator.reset_peak(index)
            was_busy = allocated["current"] != self._was_allocated.get(index, 0)
            self._was_allocated[index] = allocated["current"]
            percent = _BUSY_PERCENT if was_busy else 0
            if self._company is not None:
                taken = taken_bytes[index] = reserved["current"] if is_touched else None
                uses.append(self._company.to_use(index, taken, percent=percent))
                continue
            free_bytes = self._total_bytes - used_bytes
            uses.append(
                DeviceUse(f"cuda:{index}", used_bytes, free_bytes, self._total_bytes, percent)
            )
        segments, traced = None, []
        if self._takes_snapshots:
            snapshot = self._allocator.take_snapshot()
            segments = parse_segments(snapshot["segments"])
            for index, raw in enumerate(snapshot["device_traces"]):
                if raw:
                    traced.append((f"cuda:{index}", parse_events(raw)))
        if self._has_history:
            self._allocator.record_history(clear_history=True)
        change = Change() if self._company is None else self._company.to_change(taken_bytes)
        return Event(time_s, "tick", tuple(readings), tuple(uses), segments, tuple(traced), change)
