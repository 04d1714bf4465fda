"""Set and read the share of a GPU that PyTorch may reserve, to the byte.

PyTorch takes a share and allows ``share * total`` bytes: a double, cut to a whole number. From 2.11
on, its own allocator is limited without a device coming into use: before CUDA is, a limit waits for
the last step of CUDA's initialisation. Other allocators and earlier releases would bring the device
into use (https://github.com/pytorch/pytorch/pull/161035), hundreds of MB of the user's memory, and
make it the current one: there only a device in use can be limited.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable
from typing import Any

from gpumemwidget.backends.cuda.torch_hooks import CudaStartHook
from gpumemwidget.errors import BackendError, read_first_line
from gpumemwidget.model.devices import HardwareNote, HardwareNoteKind, LimitRequest

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
        #: Limits that wait for CUDA, by device.
        self.waiting: dict[int, LimitRequest] = {}
        #: Bytes of the limits that were set from here.
        self._set: dict[int, int] = {}
        self._pid = os.getpid()
        self._cuda_start = CudaStartHook(torch, self._set_at_start)

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
        total_bytes: int
        if self._is_early:
            total_bytes = self._torch.cuda.get_device_properties(index).total_memory
        else:
            with self._keep_current_device(index):
                total_bytes = self._torch.cuda.mem_get_info(index)[1]
        return total_bytes

    def list_limited(self) -> set[int]:
        """Return the devices whose limit was set from here, or waits."""
        return {*self._set, *self.waiting}

    def set(self, index: int, request: LimitRequest, *, is_touched: bool) -> None:
        """Set a device's limit or take it away, now or as soon as CUDA is in use.

        Raises:
            BackendError: PyTorch refuses, or would have to bring the device into use.
        """
        self.waiting.pop(index, None)
        if is_touched or (self._is_early and self._torch.cuda.is_initialized()):
            self._set_now(index, request)
        elif self._is_early and not request.is_off:
            self.waiting[index] = request
            self._cuda_start.expect()
        elif not request.is_off:
            raise self._refuse_unused(index)

    def close(self) -> None:
        """Forget the limits that wait. A limit that is set stays, as one set through torch does."""
        self.waiting.clear()
        self._cuda_start.cancel()

    def _set_at_start(self) -> None:
        """Set the limits that wait, in the last step of CUDA's initialisation: nothing may fail."""
        waiting, self.waiting = self.waiting, {}
        if os.getpid() != self._pid:
            # A forked child has a copy of what waits, and no limit was asked for it.
            return
        for index, request in waiting.items():
            try:
                if not self._is_early:
                    # The user has chosen another allocator since.
                    raise self._refuse_unused(index)
                self._set_now(index, request)
            except Exception as exc:  # noqa: BLE001 - this runs within the user's first use of CUDA
                kind = HardwareNoteKind.LIMIT_FAILED
                self._on_failure(HardwareNote(kind, read_first_line(exc), f"cuda:{index}"))

    def _refuse_unused(self, index: int) -> BackendError:
        return BackendError(
            f"cuda:{index} is not in use yet, and PyTorch {self._torch.__version__} can't "
            "limit it before: allocate something there first"
        )

    def _set_now(self, index: int, request: LimitRequest) -> None:
        try:
            total_bytes = self.read_total(index)
            share = 1.0 if request.share is None else request.share
            if request.limit_bytes is not None:
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
        release = re.findall(r"\d+", str(self._torch.__version__))[:2]
        is_new = tuple(map(int, release)) >= _TOUCHES_NOTHING
        return is_new and self._torch.cuda.memory.get_allocator_backend() == "native"

    def _keep_current_device(self, index: int) -> contextlib.AbstractContextManager[object]:
        """Return a context in which torch may make a device current; none where it does not."""
        context: contextlib.AbstractContextManager[object]
        context = contextlib.nullcontext() if self._is_early else self._torch.cuda.device(index)
        return context


def find_share(limit_bytes: int, total_bytes: int) -> float:
    """Return the share whose product with the total, a double cut to a whole number, is the limit.

    The total is below 2**51, which is more than any device has; a limit above it is 1.0, none.
    """
    share = limit_bytes / total_bytes
    # The nearest double may lie a little below; the one above it is less than a byte away.
    while int(share * total_bytes) < limit_bytes:
        share = math.nextafter(share, 2.0)
    return min(share, 1.0)
