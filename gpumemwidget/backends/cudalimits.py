"""The share of a GPU that PyTorch may reserve, set and read to the byte.

PyTorch takes a share and allows ``share * total`` bytes: a double, cut to a whole number. Before
2.11, and with allocators other than its own, it brings a device into use to do so
(https://github.com/pytorch/pytorch/pull/161035), hundreds of MB of the user's memory, and makes it
the current one: there a limit waits until the user has touched the device. Else it waits for CUDA
alone, and is there before the first byte is allocated: PyTorch calls us as the last step of CUDA's
initialisation.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from gpumemwidget.errors import BackendError
from gpumemwidget.units import format_bytes

__all__ = ["CudaLimits", "Wish", "find_share", "read_release"]

#: From this release on no device is touched by setting or reading its limit.
_TOUCHES_NOTHING = (2, 11)


@dataclass(frozen=True, slots=True)
class Wish:
    """What a limit is to be: bytes, or a share of the whole."""

    limit_bytes: int | None = None
    share: float | None = None


class CudaLimits:
    """The limits of one process.

    Args:
        torch: the imported module ``torch``.
        on_failure: is told, in a sentence, of a limit that waited and could not be set.
    """

    def __init__(self, torch: Any, on_failure: Callable[[str], None]) -> None:
        self._torch = torch
        self._on_failure = on_failure
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._totals: dict[int, int] = {}
        self._waiting: dict[int, Wish] = {}
        #: What we have set.
        self._set: dict[int, int] = {}
        self._is_new = read_release(torch) >= _TOUCHES_NOTHING
        # One object for each asking would not be found again.
        self._queued = self._apply_at_start

    @property
    def waiting(self) -> dict[int, Wish]:
        """The limits that wait, by device."""
        with self._lock:
            return dict(self._waiting)

    def read(self, index: int) -> int | None:
        """The limit of a device in use, whoever has set it: 1 µs, or 10 where there is one.

        ``None``: there is none, or the allocator (a pluggable one) has none to tell of.
        """
        # Since 2.7; before, nobody tells but we.
        read_share = getattr(self._torch._C, "_cuda_getMemoryFraction", None)  # noqa: SLF001 - the public call would initialise CUDA
        if read_share is None:
            return self._set.get(index)
        try:
            with self._kept_current(index):
                share = read_share(index)
            # Out of the double again: it stands for a whole number of bytes.
            return round(share * self.read_total(index)) if share < 1.0 else None
        except RuntimeError:
            return None

    def read_total(self, index: int) -> int:
        """What the whole of a device in use is to PyTorch.

        Raises:
            RuntimeError: CUDA refuses.
        """
        total_bytes = self._totals.get(index)
        if total_bytes is None:
            if self._is_early:
                total_bytes = self._torch.cuda.get_device_properties(index).total_memory
            else:
                with self._kept_current(index):
                    total_bytes = self._torch.cuda.mem_get_info(index)[1]
            self._totals[index] = total_bytes
        return total_bytes

    def list_limited(self) -> tuple[int, ...]:
        """Devices that are not in use and have a limit of ours already."""
        with self._lock:
            return tuple(sorted(self._set))

    def set(self, index: int, wish: Wish | None, touched: Collection[int]) -> None:
        """Set a device's limit, or let it wait; ``None`` takes it away.

        Args:
            index: of the device.
            wish: what it is to be.
            touched: the devices that are in use.

        Raises:
            BackendError: it is more than the device has, or PyTorch refuses.
        """
        is_ready = self._torch.cuda.is_initialized()
        with self._lock:
            self._waiting.pop(index, None)
            if index in touched or (self._is_early and is_ready):
                self._set_now(index, wish)
                return
            if wish is not None:
                self._waiting[index] = wish
        # Not under our lock: torch holds its own while it calls us.
        if wish is not None and not is_ready:
            self._queue()

    def apply(self, indices: Collection[int], *, is_first: bool = False) -> None:
        """Set what waits for these devices, which have come into use.

        Args:
            indices: of the devices.
            is_first: nobody can have set another limit since ours was asked for.
        """
        if not self._waiting:
            return
        for index in indices:
            with self._lock:
                wish = self._waiting.pop(index, None)
                if wish is None:
                    continue
                try:
                    known = None if is_first else self.read(index)
                    if known is None:
                        self._set_now(index, wish)
                        continue
                    reason = f"it has one of {format_bytes(known)}, which was set since"
                except BackendError as exc:
                    reason = str(exc)
            self._on_failure(f"the limit that waited for cuda:{index} was not set: {reason}")

    def close(self) -> None:
        """Forget what waits. What is set stays, as what the user sets through torch does."""
        with self._lock:
            self._waiting.clear()
        queued = getattr(self._torch.cuda, "_queued_calls", None)
        if type(queued) is list:
            queued[:] = [call for call in queued if call[0] is not self._queued]

    # -- When CUDA or a device comes into use ------------------------------------------------------

    def _queue(self) -> None:
        """Have PyTorch call us as the last step of CUDA's initialisation."""
        queued = getattr(self._torch.cuda, "_queued_calls", None)
        if type(queued) is list and not any(call[0] is self._queued for call in queued):
            self._torch.cuda._lazy_call(self._queued)  # noqa: SLF001 - has no public name

    def _apply_at_start(self) -> None:
        """CUDA is initialised, or in the last step of it: what fails here would fail all of it."""
        # A forked child has a copy of what waits here, and no limit was asked for it.
        if os.getpid() != self._pid:
            return
        try:
            n_devices = self._torch.cuda.device_count()
            for index in tuple(self._waiting):
                if index >= n_devices:
                    self.set(index, None, ())
                    self._on_failure(f"the limit that waited for cuda:{index} is gone: no such GPU")
                elif self._is_early or self._torch._C._cuda_hasPrimaryContext(index):  # noqa: SLF001 - no public call asks without creating one
                    self.apply((index,), is_first=self._is_early)
        except Exception as exc:  # noqa: BLE001 - this runs within the user's first use of CUDA
            self._on_failure(f"a limit that waited was not set: {type(exc).__name__}: {exc}")

    # -- With torch --------------------------------------------------------------------------------

    def _set_now(self, index: int, wish: Wish | None) -> None:
        try:
            total_bytes = self.read_total(index)
            share = 1.0
            if wish is not None and wish.limit_bytes is not None:
                if wish.limit_bytes > total_bytes:
                    raise BackendError(
                        f"{wish.limit_bytes} bytes are more than the {total_bytes} "
                        f"({format_bytes(total_bytes)}) of cuda:{index}: give less, or off for no "
                        "limit"
                    )
                share = find_share(wish.limit_bytes, total_bytes)
            elif wish is not None and wish.share is not None:
                share = wish.share
            with self._kept_current(index):
                self._torch.cuda.set_per_process_memory_fraction(share, index)
        except RuntimeError as exc:
            line = str(exc).strip().partition("\n")[0]
            raise BackendError(
                f"PyTorch could not limit cuda:{index} ({line}): only its own allocator has limits"
            ) from exc
        self._set.pop(index, None)
        if share < 1.0:
            self._set[index] = int(share * total_bytes)

    @property
    def _is_early(self) -> bool:
        """Whether a limit can be set without touching its device.

        Not with CUDA's own allocator (``backend:cudaMallocAsync``) or a pluggable one.
        """
        return self._is_new and self._torch.cuda.memory.get_allocator_backend() == "native"

    def _kept_current(self, index: int) -> contextlib.AbstractContextManager[object]:
        """What is current stays so, and unused, where torch would make this device the current."""
        if self._is_early:
            return contextlib.nullcontext()
        context: contextlib.AbstractContextManager[object] = self._torch.cuda.device(index)
        return context


def find_share(limit_bytes: int, total_bytes: int) -> float:
    """The share whose product with the total, a double cut to a whole number, is the limit.

    Args:
        limit_bytes: above 0 and up to the total.
        total_bytes: below 2**51, which is more than any device has.
    """
    share = limit_bytes / total_bytes
    # The nearest double may lie a little below; the one above it is less than a byte away.
    while int(share * total_bytes) < limit_bytes:
        share = math.nextafter(share, 2.0)
    return min(share, 1.0)


def read_release(torch: ModuleType) -> tuple[int, int]:
    """Which release of PyTorch it is: ``(2, 13)``."""
    version = re.match(r"(\d+)\.(\d+)", str(torch.__version__))
    return (0, 0) if version is None else (int(version[1]), int(version[2]))
