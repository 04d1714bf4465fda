"""Pinned host memory in miniature: PyTorch's allocator for it, less streams.

Requests are rounded up to a power of two, and what is freed stays with the allocator
(https://docs.pytorch.org/docs/stable/generated/torch.cuda.memory.host_memory_stats.html).
"""

from __future__ import annotations

from typing import Any

from gpumemwidget.errors import BadInputError

__all__ = ["SimulatedPinned"]


class SimulatedPinned:
    """The pinned memory of one process. Not safe to use from several threads."""

    def __init__(self) -> None:
        self._held: dict[int, int] = {}
        self._cached: list[int] = []
        self._next_handle = 1
        self._active = _Sum()
        self._allocated = _Sum()

    def allocate(self, n_bytes: int) -> int:
        """Pin memory; the handle to free it with.

        Raises:
            BadInputError: the size is not positive.
        """
        if n_bytes <= 0:
            raise BadInputError(f"can't pin {n_bytes} bytes: ask for at least 1")
        block_bytes = 1 << (n_bytes - 1).bit_length()
        if block_bytes in self._cached:
            self._cached.remove(block_bytes)
        else:
            self._allocated.add(block_bytes)
        self._active.add(block_bytes)
        handle, self._next_handle = self._next_handle, self._next_handle + 1
        self._held[handle] = block_bytes
        return handle

    def free(self, handle: int) -> None:
        """Give a block back to the allocator.

        Raises:
            BadInputError: there is no such block, or it was freed already.
        """
        if handle not in self._held:
            raise BadInputError(f"{handle} is no handle of pinned memory in use: free each once")
        block_bytes = self._held.pop(handle)
        self._cached.append(block_bytes)
        self._active.add(-block_bytes)

    def flush(self) -> None:
        """Give what is free back to the system."""
        self._allocated.add(-sum(self._cached))
        self._cached.clear()

    def to_dict(self) -> dict[str, Any]:
        """The counters, as ``torch.cuda.memory.host_memory_stats_as_nested_dict`` has them."""
        return {
            "active_bytes": self._active.to_dict(),
            "allocated_bytes": self._allocated.to_dict(),
        }


class _Sum:
    """What a counter is, was at most, and all that it ever rose and fell."""

    __slots__ = ("allocated", "current", "freed", "peak")

    def __init__(self) -> None:
        self.current = self.peak = self.allocated = self.freed = 0

    def add(self, n_bytes: int) -> None:
        self.current += n_bytes
        self.peak = max(self.peak, self.current)
        self.allocated += max(n_bytes, 0)
        self.freed += max(-n_bytes, 0)

    def to_dict(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in self.__slots__}
