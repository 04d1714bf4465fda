"""Set and read the share of a GPU that PyTorch may reserve, to the byte.

PyTorch takes a share and allows ``share * total`` bytes: a double, cut to a whole number. Before
2.11, and with allocators other than its own, it brings a device into use to do so
(https://github.com/pytorch/pytorch/pull/161035), hundreds of MB of the user's memory, and makes it
the current one: there a limit waits until the user has touched the device. Otherwise it waits for
CUDA alone, and is set before the first byte is allocated: in the last step of its initialisation.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import threading
from collections.abc import Callable, Collection, Iterable
from types import ModuleType
from typing import Any

from gpumemwidget.backends.cuda.torch_hooks import CudaStartHook
from gpumemwidget.errors import BackendError, describe_exception, read_first_line
from gpumemwidget.model.devices import HardwareNote, HardwareNoteKind, LimitRequest
from gpumemwidget.units import format_bytes

#: From this release on no device is touched by setting or reading its limit.
_TOUCHES_NOTHING = (2, 11)


class CudaLimits:
    """The limits of one process.

    Args:
        torch: the imported module ``torch``.
        on_failure: is told of a limit that waited and could not be set.
    """

    def __init__(self, torch: Any, on_failure: Callable[[HardwareNote], object]) -> None:
        self._torch = torch
        self._on_failure = on_failure
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._totals: dict[int, int] = {}
        self._waiting: dict[int, LimitRequest] = {}
        #: Bytes of the limits that were set from here.
        self._set: dict[int, int] = {}
        self._is_new = read_release(torch) >= _TOUCHES_NOTHING
        self._cuda_start = CudaStartHook(torch, self._set_at_start)

    @property
    def waiting(self) -> dict[int, LimitRequest]:
        """The limits that wait, by device."""
        with self._lock:
            return dict(self._waiting)

    def read(self, index: int) -> int | None:
        """Return the limit of a device in use, whoever set it: 1 µs, or 10 µs where there is one.

        ``None``: there is none, or the allocator (a pluggable one) has none to tell of.
        """
        # Before 2.7 PyTorch does not tell, and only limits that were set from here are known.
        read_share = getattr(self._torch._C, "_cuda_getMemoryFraction", None)  # noqa: SLF001 - the public call would initialise CUDA
        if read_share is None:
            return self._set.get(index)
        try:
            with self._keep_current_device(index):
                share = read_share(index)
            # The share is a double that stands for a whole number of bytes.
            return round(share * self.read_total(index)) if share < 1.0 else None
        except RuntimeError:
            return None

    def read_total(self, index: int) -> int:
        """Return the total bytes of a device in use, as PyTorch counts them for its limits.

        Raises:
            RuntimeError: CUDA refuses.
        """
        total_bytes = self._totals.get(index)
        if total_bytes is None:
            if self._is_early:
                total_bytes = self._torch.cuda.get_device_properties(index).total_memory
            else:
                with self._keep_current_device(index):
                    total_bytes = self._torch.cuda.mem_get_info(index)[1]
            self._totals[index] = total_bytes
        return total_bytes

    def list_limited(self) -> set[int]:
        """Return the devices whose limit was set from here, or waits."""
        with self._lock:
            return {*self._set, *self._waiting}

    def set(self, index: int, request: LimitRequest, touched: Collection[int]) -> None:
        """Set a device's limit or take it away, now or when the device comes into use.

        Raises:
            BackendError: it is more than the device has, or PyTorch refuses.
        """
        is_ready = self._torch.cuda.is_initialized()
        with self._lock:
            self._waiting.pop(index, None)
            if index in touched or (self._is_early and is_ready):
                self._set_now(index, request)
                return
            if request.is_off:
                return
            self._waiting[index] = request
        # Not under our lock: torch holds its own while it calls us.
        if not is_ready:
            self._cuda_start.expect()

    def set_waiting(self, indices: Iterable[int], *, is_first: bool = False) -> None:
        """Set the limits that wait for devices which are in use.

        With ``is_first`` nobody can have set another limit since ours was asked for.
        """
        if not self._waiting:
            return
        for index in indices:
            with self._lock:
                request = self._waiting.pop(index, None)
                if request is None:
                    continue
                try:
                    known = None if is_first else self.read(index)
                    if known is None:
                        self._set_now(index, request)
                        continue
                    note = HardwareNote(
                        HardwareNoteKind.LIMIT_SET_SINCE, device=f"cuda:{index}", n_bytes=known
                    )
                except BackendError as exc:
                    note = HardwareNote(HardwareNoteKind.LIMIT_FAILED, str(exc), f"cuda:{index}")
            self._on_failure(note)

    def close(self) -> None:
        """Forget the limits that wait. A limit that is set stays, as one set through torch does."""
        with self._lock:
            self._waiting.clear()
        self._cuda_start.cancel()

    def _set_at_start(self) -> None:
        """Set the limits that wait, in the last step of CUDA's initialisation: nothing may fail."""
        # A forked child has a copy of the waiting limits, and no limit was asked for it.
        if os.getpid() != self._pid:
            return
        try:
            n_devices = self._torch.cuda.device_count()
            for index in tuple(self._waiting):
                if index >= n_devices:
                    with self._lock:
                        self._waiting.pop(index, None)
                    kind = HardwareNoteKind.LIMIT_WITHOUT_DEVICE
                    self._on_failure(HardwareNote(kind, device=f"cuda:{index}"))
                elif self._is_early or self._torch._C._cuda_hasPrimaryContext(index):  # noqa: SLF001 - no public call asks without creating one
                    self.set_waiting((index,), is_first=self._is_early)
        except Exception as exc:  # noqa: BLE001 - this runs within the user's first use of CUDA
            cause = describe_exception(exc)
            self._on_failure(HardwareNote(HardwareNoteKind.LIMIT_FAILED, cause, "cuda"))

    def _set_now(self, index: int, request: LimitRequest) -> None:
        try:
            total_bytes = self.read_total(index)
            share = 1.0 if request.share is None else request.share
            if request.limit_bytes is not None:
                if request.limit_bytes > total_bytes:
                    raise BackendError(
                        f"{request.limit_bytes} bytes are more than the {total_bytes} "
                        f"({format_bytes(total_bytes)}) of cuda:{index}: give less, or off for no "
                        "limit"
                    )
                share = find_share(request.limit_bytes, total_bytes)
            with self._keep_current_device(index):
                self._torch.cuda.set_per_process_memory_fraction(share, index)
        except RuntimeError as exc:
            raise BackendError(
                f"PyTorch could not limit cuda:{index} ({read_first_line(exc)}): "
                "only its own allocator has limits"
            ) from exc
        self._set.pop(index, None)
        if share < 1.0:
            self._set[index] = int(share * total_bytes)

    @property
    def _is_early(self) -> bool:
        """True if a limit can be set without touching its device, as by PyTorch's own allocator."""
        return self._is_new and self._torch.cuda.memory.get_allocator_backend() == "native"

    def _keep_current_device(self, index: int) -> contextlib.AbstractContextManager[object]:
        """Return a context in which torch may make a device current; none where it does not."""
        context: contextlib.AbstractContextManager[object]
        context = contextlib.nullcontext() if self._is_early else self._torch.cuda.device(index)
        return context


def find_share(limit_bytes: int, total_bytes: int) -> float:
    """Return the share whose product with the total, a double cut to a whole number, is the limit.

    The limit is up to the total, and that is below 2**51, which is more than any device has.
    """
    share = limit_bytes / total_bytes
    # The nearest double may lie a little below; the one above it is less than a byte away.
    while int(share * total_bytes) < limit_bytes:
        share = math.nextafter(share, 2.0)
    return min(share, 1.0)


def read_release(torch: ModuleType) -> tuple[int, int]:
    """Return the release of PyTorch, such as ``(2, 13)``."""
    version = re.match(r"(\d+)\.(\d+)", str(torch.__version__))
    return (0, 0) if version is None else (int(version[1]), int(version[2]))
