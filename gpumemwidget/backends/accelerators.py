"""Counters of accelerators other than CUDA: XPU, MPS, and what extensions of PyTorch bring.

Releases of PyTorch differ in what can be read; the rest is ``None``:

- XPU has the caching allocator's statistics since 2.6, and its blocks in later releases.
- MPS has statistics since ``torch.accelerator``'s memory functions reach it (2.13). In earlier
  releases nobody knows whether it is in use, and it is not read.
- Extensions have what they hand to ``torch.accelerator``, whose functions came with 2.9.

Peaks are exact where the marks can be reset unseen by the user, as on XPU and MPS (see
``peak_overlay.py``). Elsewhere nothing is reset, and the peaks of cells are unknown.

Nothing here brings a device into use: whether one is, is always asked first. Much of what is asked
is an extension's own code, which may fail with whatever it likes: then a figure is unknown, a note
says why once, and recording goes on.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from gpumemwidget.backends.counters import TouchedCounters
from gpumemwidget.backends.peak_overlay import NestedStats, PeakOverlay, find_extension
from gpumemwidget.backends.snapshot import parse_segments
from gpumemwidget.errors import BackendError
from gpumemwidget.model.devices import DeviceInfo, Segment

#: Bindings that read the statistics of all accelerators, since PyTorch 2.9.
_GENERAL_STATS = "_accelerator_getDeviceStats"


class AcceleratorBackend(TouchedCounters):
    """Counters of the touched devices of the accelerator.

    Args:
        torch: the imported module ``torch``; it is never imported from here.

    Raises:
        BackendError: this build of PyTorch has no accelerator, or it is CUDA.
    """

    def __init__(self, torch: Any) -> None:
        kind = _find_kind(torch)
        if kind is None or kind in ("cuda", "cpu"):
            raise BackendError(
                f"PyTorch {torch.__version__} was built without a GPU's support: what is on one "
                "can't be read, install a build for it to record it"
            )
        bindings = torch._C  # noqa: SLF001 - the public functions may start the device
        self._stats_binding = _find_stats_binding(bindings, kind)
        # Of these the user reads peaks only through calls that an overlay covers.
        has_overlay = kind in ("xpu", "mps") and self._stats_binding is not None
        super().__init__(torch, kind, PeakOverlay(bindings, kind=kind) if has_overlay else None)

    # -- Blocks, whole devices ---------------------------------------------------------------------

    def read_segments(self) -> tuple[Segment, ...]:
        """Return the segments of touched devices, where this release of PyTorch lists them."""
        read = getattr(getattr(self._module, "memory", None), "memory_snapshot", None)
        touched = self._list_touched()
        if read is None or not touched:
            return ()
        return self._ask(
            lambda: parse_segments(
                (raw for raw in read() if raw["device"] in touched), kind=self.kind
            ),
            self.kind,
            "the allocator's blocks",
            (),
        )

    def read_memory(self, device: str) -> tuple[int, int] | None:
        """Return the free and total bytes of a touched device; ``None`` on MPS."""
        ask_driver = getattr(self._module, "mem_get_info", None)
        index = self._find_index(device)
        if ask_driver is None or index is None:
            return None

        memory: tuple[int, int] | None
        memory = self._ask(partial(ask_driver, index), device, "free memory", None)
        return memory

    # -- One device --------------------------------------------------------------------------------

    def _read_stats(self, index: int) -> NestedStats:
        """Return the statistics of a device in use, without those that torch does not have."""
        if self._stats_binding is None:
            return {}
        # Looked up anew, as an overlay may wrap the binding.
        stats: NestedStats = getattr(self._bindings, self._stats_binding)(index)
        return stats

    def _read_info(self, index: int) -> DeviceInfo:
        if self.kind != "mps":
            return super()._read_info(index)
        read_name = getattr(self._torch.backends.mps, "get_name", None)
        name = "Apple GPU" if read_name is None else str(read_name())
        # Metal's recommended maximum: the memory is the machine's own.
        read_total = getattr(self._module, "recommended_max_memory", None)
        return DeviceInfo("mps:0", name, None if read_total is None else int(read_total()))

    # -- Devices in use ----------------------------------------------------------------------------

    def _list_touched(self) -> list[int]:
        return self._ask(self._find_touched, self.kind, "devices in use", [])

    def _find_touched(self) -> list[int]:
        # Once an accelerator is in use, all of its devices are, and can be asked at no cost.
        if not self._is_in_use():
            return []
        if self.kind == "mps":
            return [0]
        owner = self._module if hasattr(self._module, "device_count") else self._torch.accelerator
        return list(range(int(owner.device_count())))

    def _is_in_use(self) -> bool:
        is_bad_fork = getattr(self._module, "_is_in_bad_fork", None)
        if is_bad_fork is not None and is_bad_fork():
            return False
        is_initialized = getattr(self._module, "is_initialized", None)
        if is_initialized is not None:
            return bool(is_initialized())
        if self._stats_binding is None:
            return False
        return bool(self._bindings._accelerator_isAllocatorInitialized())  # noqa: SLF001 - has no public name


def _find_kind(torch: Any) -> str | None:
    """Return the accelerator of this build beside CUDA: ``"xpu"``, ``"mps"``, an extension's.

    PyTorch is not asked whether the machine has such a device: in some releases that starts CUDA or
    XPU, and forking fails then.
    """
    bindings = torch._C  # noqa: SLF001 - the public functions may start the device
    extension = find_extension(bindings)
    if extension is not None:
        return extension
    if hasattr(bindings, "_cuda_memoryStats"):
        return None
    if hasattr(bindings, "_xpu_init"):
        return "xpu"
    if getattr(bindings, "_has_mps", False):
        return "mps"
    find = getattr(bindings, "_accelerator_getAccelerator", None)
    device = None if find is None else find()
    return None if device is None or device.type in ("cpu", "cuda") else str(device.type)


def _find_stats_binding(bindings: Any, kind: str) -> str | None:
    """Return the name of the binding that reads the statistics; ``None`` where none does."""
    own = f"_{kind}_memoryStats"
    if hasattr(bindings, own):
        return own
    if not hasattr(bindings, _GENERAL_STATS):
        return None
    try:
        bindings._accelerator_isAllocatorInitialized()  # noqa: SLF001 - has no public name
    except (AttributeError, RuntimeError):
        return None  # The allocator is of a kind without statistics: MPS before 2.13.
    return _GENERAL_STATS
