"""The caching allocators of simulated GPUs: CUDA's counters on a machine without one.

Tests run the CUDA backend's logic on it, and scripted replays are made with it.
"""

from __future__ import annotations

import threading
from typing import Any

from gpumemwidget.backends.caching import Block, CachingAllocator, DeviceFullError
from gpumemwidget.errors import BadInputError

__all__ = ["DeviceFullError", "ReplayAllocator"]


class ReplayAllocator:
    """The allocators of one or several devices, which are named by index or as ``"cuda:0"``.

    Deterministic, and safe to use from several threads. A device is in use from ``touch`` or from
    its first allocation on.

    Args:
        n_devices: how many devices there are.
        total_bytes: the memory of each.
    """

    def __init__(self, n_devices: int = 1, *, total_bytes: int = 80 * 1024**3) -> None:
        self._devices = [CachingAllocator(total_bytes) for _ in range(n_devices)]
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

    def allocate(self, n_bytes: int, device: int | str = 0) -> int:
        """Take a block; the handle to free it with.

        Raises:
            BadInputError: the size is not positive, or there is no such device.
            DeviceFullError: the device has no room, the cache given back included.
        """
        if n_bytes <= 0:
            raise BadInputError(f"can't allocate {n_bytes} bytes: ask for at least 1")
        with self._lock:
            allocator = self._use(device)
            block = allocator.allocate(n_bytes)
            handle = self._next_handle
            self._next_handle += 1
            self._blocks[handle] = (allocator, block)
            return handle

    def free(self, handle: int) -> None:
        """Give a block back to the cache.

        Raises:
            BadInputError: there is no such block, or it was freed already.
        """
        with self._lock:
            if handle not in self._blocks:
                raise BadInputError(f"{handle} is no handle of a block in use: free each once")
            allocator, block = self._blocks.pop(handle)
            allocator.free(block)

    def empty_cache(self) -> None:
        """As ``torch.cuda.empty_cache``: on every device."""
        with self._lock:
            for allocator in self._devices:
                allocator.flush()

    def retry(self, device: int | str = 0) -> None:
        """Let the device be found full for a moment: its cache is flushed and a retry counted."""
        with self._lock:
            self._use(device).retry()

    def oom(self, device: int | str = 0) -> None:
        """Let an allocation fail: the cache is flushed, a retry and an out-of-memory counted."""
        with self._lock:
            allocator = self._use(device)
            allocator.retry()
            allocator.fail()

    # -- What PyTorch tells -------------------------------------------------------------------

    def total_bytes(self, device: int | str = 0) -> int:
        """The device's memory."""
        return self._devices[self._index(device)].total_bytes

    def stats(self, device: int | str = 0) -> dict[Any, Any]:
        """As ``torch.cuda.memory_stats_as_nested_dict``: a new dictionary each time."""
        with self._lock:
            return self._devices[self._index(device)].to_dict()

    def snapshot(self, *, include_traces: bool = True) -> list[dict[str, Any]]:  # noqa: ARG002 - torch's own
        """As ``torch.cuda.memory_snapshot``: the segments of all devices. There are no traces."""
        with self._lock:
            return [
                segment
                for index, allocator in enumerate(self._devices)
                for segment in allocator.to_snapshot(index)
            ]

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
