"""The caching allocators of simulated GPUs: CUDA's counters on a machine without one.

Tests run the CUDA backend's logic on it, and scripted replays are made with it.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from gpumemwidget.backends.caching import Block, CachingAllocator, DeviceFullError
from gpumemwidget.backends.expandable import ExpandableAllocator
from gpumemwidget.backends.simhistory import SimulatedHistory
from gpumemwidget.backends.simpinned import SimulatedPinned
from gpumemwidget.errors import BadInputError
from gpumemwidget.records import Frame

__all__ = ["DeviceFullError", "ReplayAllocator"]


class ReplayAllocator:
    """The allocators of one or several devices, which are named by index or as ``"cuda:0"``.

    Deterministic, and safe to use from several threads. A device is in use from ``touch`` or from
    its first allocation on.

    Args:
        n_devices: how many devices there are.
        total_bytes: the memory of each.
        clock_ns: nanoseconds since the epoch, for the history.
        expandable: whether segments grow, as with ``expandable_segments:True``.

    Attributes:
        pinned: pinned host memory, which is the process's.
    """

    def __init__(
        self,
        n_devices: int = 1,
        *,
        total_bytes: int = 80 * 1024**3,
        clock_ns: Callable[[], int] = time.time_ns,
        expandable: bool = False,
    ) -> None:
        self.pinned = SimulatedPinned()
        self._history = SimulatedHistory(n_devices, clock_ns)
        kind = ExpandableAllocator if expandable else CachingAllocator
        self._devices = [kind(total_bytes) for _ in range(n_devices)]
        self._is_expandable = expandable
        self._touched: set[int] = set()
        self._blocks: dict[int, tuple[CachingAllocator, Block]] = {}
        self._next_handle = 1
        self._lock = threading.Lock()

    @property
    def n_devices(self) -> int:
        """How many devices there are, touched or not."""
        return len(self._devices)

    def list_touched(self) -> tuple[int, ...]:
        """The indices of the devices that are in use."""
        with self._lock:
            return tuple(sorted(self._touched))

    def touch(self, device: int | str = 0) -> None:
        """Begin to use a device, as its first tensor does."""
        with self._lock:
            self._touched.add(self._index(device))

    def allocate(
        self, n_bytes: int, device: int | str = 0, *, stack: tuple[Frame, ...] | None = None
    ) -> int:
        """Take a block; the handle to free it with.

        Args:
            n_bytes: what is asked for.
            device: where.
            stack: what a history shall say is running, innermost first; what is, if not given.

        Raises:
            BadInputError: the size is not positive, or there is no such device.
            DeviceFullError: the device has no room, the cache given back included.
        """
        if n_bytes <= 0:
            raise BadInputError(f"can't allocate {n_bytes} bytes: ask for at least 1")
        with self._lock:
            allocator = self._use(device)
            with self._history.at(stack):
                block = allocator.allocate(n_bytes)
            handle = self._next_handle
            self._next_handle += 1
            self._blocks[handle] = (allocator, block)
            return handle

    def free(self, handle: int, *, stack: tuple[Frame, ...] | None = None) -> None:
        """Give a block back to the cache.

        Args:
            handle: which one.
            stack: as for ``allocate``.

        Raises:
            BadInputError: there is no such block, or it was freed already.
        """
        with self._lock:
            if handle not in self._blocks:
                raise BadInputError(f"{handle} is no handle of a block in use: free each once")
            allocator, block = self._blocks.pop(handle)
            with self._history.at(stack):
                allocator.free(block)

    def empty_cache(self, *, stack: tuple[Frame, ...] | None = None) -> None:
        """As ``torch.cuda.empty_cache``: on every device."""
        with self._lock, self._history.at(stack):
            for allocator in self._devices:
                allocator.flush()

    def retry(self, device: int | str = 0, *, stack: tuple[Frame, ...] | None = None) -> None:
        """Let the device be found full for a moment: its cache is flushed and a retry counted."""
        with self._lock, self._history.at(stack):
            self._use(device).retry()

    def oom(self, device: int | str = 0, *, stack: tuple[Frame, ...] | None = None) -> None:
        """Let an allocation fail: the cache is flushed, a retry and an out-of-memory counted."""
        with self._lock, self._history.at(stack):
            allocator = self._use(device)
            allocator.retry()
            allocator.fail()

    # -- What PyTorch tells -------------------------------------------------------------------

    def total_bytes(self, device: int | str = 0) -> int:
        """The device's memory."""
        return self._devices[self._index(device)].total_bytes

    def set_fraction(self, fraction: float, device: int | str = 0) -> None:
        """As ``torch.cuda.set_per_process_memory_fraction``: so much of the device, to the byte."""
        with self._lock:
            allocator = self._devices[self._index(device)]
            allocator.allowed_bytes = int(fraction * allocator.total_bytes)

    def get_fraction(self, device: int | str = 0) -> float:
        """As ``torch.cuda.get_per_process_memory_fraction``."""
        with self._lock:
            allocator = self._devices[self._index(device)]
            return allocator.allowed_bytes / allocator.total_bytes

    def stats(self, device: int | str = 0) -> dict[Any, Any]:
        """As ``torch.cuda.memory_stats_as_nested_dict``: a new dictionary each time."""
        with self._lock:
            return self._devices[self._index(device)].to_dict()

    def snapshot(self, *, include_traces: bool = True) -> list[dict[str, Any]]:  # noqa: ARG002 - torch's own
        """As ``torch.cuda.memory_snapshot``: the segments of all devices, without their events."""
        segments: list[dict[str, Any]] = self.take_snapshot()["segments"]
        return segments

    def take_snapshot(self) -> dict[str, Any]:
        """As ``torch.cuda.memory._snapshot``: the segments, and the events of the history."""
        with self._lock:
            segments = [
                segment
                for index, allocator in enumerate(self._devices)
                for segment in allocator.to_snapshot(index)
            ]
            for segment in segments:
                for block in segment["blocks"]:
                    block["frames"] = self._history.get_stack(segment["device"], block["address"])
            events = self._history.list_events()
            for index in range(len(self._devices)):
                self._history.note(index, "snapshot", 0, 0)
            return {
                "segments": segments,
                "device_traces": events,
                "allocator_settings": {
                    "max_split_size": -1,
                    "expandable_segments": self._is_expandable,
                },
            }

    @property
    def is_history_on(self) -> bool:
        """As ``torch._C._cuda_isHistoryEnabled``."""
        return self._history.is_on

    def record_history(
        self,
        enabled: str | None = "all",
        context: str | None = "all",
        stacks: str = "all",  # noqa: ARG002 - torch's own; there are none of C++
        max_entries: int = sys.maxsize,
        *,
        clear_history: bool = False,
    ) -> None:
        """As ``torch.cuda.memory._record_memory_history``."""
        with self._lock:
            self._history.set(enabled, context, max_entries, clear=clear_history)
            for index, allocator in enumerate(self._devices):
                allocator.on_event = functools.partial(self._history.note, index)

    def find_address(self, handle: int) -> int:
        """Where a block lies.

        Raises:
            BadInputError: there is no such block, or it was freed.
        """
        with self._lock:
            if handle not in self._blocks:
                raise BadInputError(f"{handle} is no handle of a block in use")
            allocator, block = self._blocks[handle]
            return allocator.find_address(block)

    def reset_peak(self, device: int | str = 0) -> None:
        """As ``torch.cuda.reset_peak_memory_stats``."""
        with self._lock:
            self._devices[self._index(device)].reset_peak()

    def reset_totals(self, device: int | str = 0) -> None:
        """As ``torch.cuda.reset_accumulated_memory_stats``."""
        with self._lock:
            self._devices[self._index(device)].reset_totals()

    def _use(self, device: int | str) -> CachingAllocator:
        index = self._index(device)
        self._touched.add(index)
        return self._devices[index]

    def _index(self, device: int | str) -> int:
        text = str(device).removeprefix("cuda:")
        if not text.isdecimal() or int(text) >= len(self._devices):
            raise BadInputError(
                f"there is no device {device!r}: this allocator has {len(self._devices)}"
            )
        return int(text)
