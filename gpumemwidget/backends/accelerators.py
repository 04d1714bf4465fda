"""Counters of accelerators other than CUDA: XPU (Intel) and MPS (Apple).

XPU has the caching allocator's statistics since PyTorch 2.6, and MPS since ``torch.accelerator``'s
memory functions reach it (2.13); in earlier releases they are not read. Nothing here brings a
device into use: whether one is, is always asked first.
"""

from __future__ import annotations

import contextlib
from typing import Any

from gpumemwidget.backends.counters import TouchedCounters
from gpumemwidget.errors import BackendError
from gpumemwidget.model.devices import DeviceInfo


class AcceleratorBackend(TouchedCounters):
    """Counters of the touched devices of the accelerator.

    Args:
        torch: the imported module ``torch``; it is never imported from here.

    Raises:
        BackendError: this build of PyTorch has no accelerator with statistics, or it is CUDA.
    """

    def __init__(self, torch: Any) -> None:
        kind = _find_kind(torch._C)  # noqa: SLF001 - the public functions may start the device
        if kind is None:
            raise BackendError(
                f"PyTorch {torch.__version__} has no statistics of a GPU: what is on one can't be "
                "read, install a build for it to record it"
            )
        super().__init__(torch, kind)

    def _read_info(self, index: int) -> DeviceInfo:
        if self.kind != "mps":
            return super()._read_info(index)
        # Metal's recommended maximum: the memory is the machine's own.
        total_bytes = int(self._module.recommended_max_memory())
        return DeviceInfo("mps:0", str(self._torch.backends.mps.get_name()), total_bytes)

    def _list_touched(self) -> list[int]:
        return self._ask(self._find_touched, self.kind, "devices in use", [])

    def _find_touched(self) -> list[int]:
        # Once an accelerator is in use, all of its devices are, and can be asked at no cost.
        if not self._is_in_use():
            return []
        return [0] if self.kind == "mps" else list(range(int(self._module.device_count())))

    def _is_in_use(self) -> bool:
        if self._module._is_in_bad_fork():  # noqa: SLF001 - has no public name
            return False
        if self.kind == "xpu":
            return bool(self._module.is_initialized())
        return bool(self._bindings._accelerator_isAllocatorInitialized())  # noqa: SLF001 - has no public name


def _find_kind(bindings: Any) -> str | None:
    """Return ``"xpu"`` or ``"mps"``, if this build has the one, with its statistics.

    PyTorch is not asked whether the machine has such a device: in some releases that starts CUDA or
    XPU, and forking fails then.
    """
    if hasattr(bindings, "_cuda_memoryStats"):
        return None
    if hasattr(bindings, "_xpu_memoryStats"):
        return "xpu"
    # Before 2.13 the allocator of MPS is of a kind without statistics.
    with contextlib.suppress(AttributeError, RuntimeError):
        bindings._accelerator_isAllocatorInitialized()  # noqa: SLF001 - has no public name
        return "mps" if getattr(bindings, "_has_mps", False) else None
    return None
