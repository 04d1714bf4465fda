"""What PyTorch tells of an accelerator other than CUDA: XPU, MPS, or what an extension brings.

Releases differ in it:

- XPU has the caching allocator's statistics since 2.6, and its blocks in later releases.
- MPS has them since ``torch.accelerator``'s memory functions reach it. Before, there is one figure,
  what tensors hold; the driver's beside it counts other libraries' memory too, so it is no
  *reserved*.
- Others have what they hand to ``torch.accelerator``, whose functions came with 2.9.

Nothing here brings a device into use: whether one is, is always asked first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from gpumemwidget.backends.overlay import NestedStats, find_extension
from gpumemwidget.backends.snapshot import parse_segments
from gpumemwidget.records import DeviceInfo, Segment

__all__ = ["AcceleratorCounters", "find_kind"]

#: Kinds whose peaks no calls of the user's tell but those that an overlay covers.
_COVERED = ("xpu", "mps")
#: So many modules and tensors are looked at for one on MPS.
_MOST_LOOKS = 2_000


def find_kind(torch: Any) -> str | None:
    """What the accelerator of this build is: ``"xpu"``, ``"mps"``; ``None`` where it has none.

    CUDA is none of these, but an extension may bring a device beside it. It is not asked whether
    the machine has one: in some releases that starts CUDA or XPU, and what forks after that fails.
    """
    bindings = torch._C  # noqa: SLF001 - of these alone it is known that they start nothing
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


class AcceleratorCounters:
    """The counters of one kind of accelerator, as torch gives them.

    Args:
        torch: the imported module ``torch``.
        kind: of the accelerator.
    """

    def __init__(self, torch: Any, kind: str) -> None:
        self._torch = torch
        self._bindings = torch._C  # noqa: SLF001 - what the public functions call initialises devices
        self._module: Any = getattr(torch, kind, None)
        self._kind = kind
        self._touched: list[int] = []
        self._reader = self._find_reader()

    @property
    def has_marks(self) -> bool:
        """Whether there are high-water marks that can be reset unseen by the user."""
        return self._kind in _COVERED and self._reader is not None

    def read(self, index: int) -> NestedStats:
        """The statistics of a device in use; those that torch does not tell are missing.

        Raises:
            RuntimeError: PyTorch refuses.
        """
        if self._reader is not None:
            return self._reader(index)
        held = getattr(self._bindings, "_mps_currentAllocatedMemory", None)
        if held is None:
            return {}
        return {"allocated_bytes": {"all": {"current": held()}}}

    def list_touched(self) -> list[int]:
        """The devices that the user has used, by index.

        Once an accelerator is in use, all of its devices can be asked at no cost. One is touched
        once its allocator has had memory.
        """
        if not self._is_in_use():
            return []
        count = 1 if self._kind == "mps" else self._count_devices()
        if len(self._touched) < count:
            fresh = (index for index in range(count) if index not in self._touched)
            self._touched = sorted([*self._touched, *filter(self._has_had_memory, fresh)])
        return self._touched

    def describe(self, index: int) -> DeviceInfo:
        """Name and total of a device in use, as far as this release tells."""
        device = f"{self._kind}:{index}"
        if self._kind == "mps":
            read_name = getattr(self._torch.backends.mps, "get_name", None)
            read_total = getattr(self._module, "recommended_max_memory", None)
            return DeviceInfo(
                device=device,
                name="Apple GPU" if read_name is None else str(read_name()),
                # What Metal recommends as the most: the memory is the machine's own.
                total_bytes=None if read_total is None else int(read_total()),
            )
        properties = None
        if hasattr(self._module, "get_device_properties"):
            properties = self._module.get_device_properties(index)
        total_bytes = getattr(properties, "total_memory", None)
        uuid = getattr(properties, "uuid", None)
        return DeviceInfo(
            device=device,
            name=str(getattr(properties, "name", self._kind.upper())),
            total_bytes=None if total_bytes is None else int(total_bytes),
            uuid=None if uuid is None else str(uuid),
        )

    def read_segments(self, touched: Iterable[int]) -> tuple[Segment, ...]:
        """The allocator's blocks on these devices; ``()`` where this release does not tell.

        Raises:
            RuntimeError: PyTorch refuses.
        """
        read = getattr(getattr(self._module, "memory", None), "memory_snapshot", None)
        if read is None:
            return ()
        known = set(touched)
        return parse_segments((raw for raw in read() if raw["device"] in known), kind=self._kind)

    def read_memory(self, index: int) -> tuple[int, int] | None:
        """What is free and what there is of a device in use; ``None`` where that is not told.

        Of MPS it is left out: there it is this process's alone.
        """
        read = getattr(self._module, "mem_get_info", None)
        if read is None:
            return None
        try:
            free_bytes, total_bytes = read(index)
        except RuntimeError:
            # Not every driver lets everybody ask.
            return None
        return int(free_bytes), int(total_bytes)

    @property
    def tells_limits(self) -> bool:
        """Whether it is told what the user lets this process reserve."""
        return hasattr(self._bindings, f"_{self._kind}_getMemoryFraction")

    def read_limit(self, index: int, total_bytes: int | None) -> int | None:
        """What the user has let this process reserve of a device in use; XPU alone tells.

        ``None`` where there is no limit, too.
        """
        read_share = getattr(self._bindings, f"_{self._kind}_getMemoryFraction", None)
        if read_share is None or total_bytes is None:
            return None
        try:
            share = read_share(index)
        except RuntimeError:
            return None
        return round(share * total_bytes) if share < 1.0 else None

    def read_own_use(self) -> int | None:
        """What this process has of the device in use, other libraries too; MPS alone tells."""
        read = getattr(self._module, "driver_allocated_memory", None)
        return None if read is None else int(read())

    def find_peak_reset(self) -> Callable[[int], None] | None:
        """What the user's own reset of the peaks calls; looked up anew, for it may be wrapped."""
        names = (f"_{self._kind}_resetPeakMemoryStats", "_accelerator_resetPeakStats")
        found = (getattr(self._bindings, name, None) for name in names)
        return None if self._reader is None else next((each for each in found if each), None)

    def empty_cache(self) -> None:
        """Give back what is cached, if the accelerator is in use.

        Raises:
            RuntimeError: PyTorch refuses.
        """
        if not self._is_in_use():
            return
        for owner in (self._module, getattr(self._torch, "accelerator", None)):
            empty = getattr(owner, "empty_cache", None)
            if empty is not None:
                empty()
                return

    # -- Whether it is in use ----------------------------------------------------------------------

    def _is_in_use(self) -> bool:
        is_bad_fork = getattr(self._module, "_is_in_bad_fork", None)
        if is_bad_fork is not None and is_bad_fork():
            return False
        is_initialized = getattr(self._module, "is_initialized", None)
        if is_initialized is not None:
            return bool(is_initialized())
        if self._reader is not None:
            return self._is_allocator_ready()
        return self._kind == "mps" and (bool(self._touched) or self._is_named())

    def _is_allocator_ready(self) -> bool:
        try:
            return bool(self._bindings._accelerator_isAllocatorInitialized())  # noqa: SLF001 - has no public name
        except RuntimeError:
            # Its allocator is of a kind that tells nothing: MPS before 2.13.
            return False

    def _is_named(self) -> bool:
        """Whether a variable of the main program is, or leads through modules to, a tensor on MPS.

        In releases where nothing else tells: to ask the allocator would make it.
        """
        tensor_types = (self._torch.Tensor, self._torch.nn.Parameter)
        module_type = self._torch.nn.Module
        read_bases = vars(type)["__mro__"].__get__
        read_device = self._bindings.TensorBase.device.__get__
        pending = list(vars(_import_main()).values())
        met: set[int] = set()
        with self._bindings.DisableTorchFunction():
            while pending and len(met) < _MOST_LOOKS:
                each = pending.pop()
                if id(each) in met:
                    continue
                cls = type(each)
                # By identity: a class of the user's may have an == of its own.
                if any(cls is each_type for each_type in tensor_types):
                    met.add(id(each))
                    if read_device(each).type == "mps":
                        return True
                elif any(base is module_type for base in read_bases(cls)):
                    met.add(id(each))
                    state = object.__getattribute__(each, "__dict__")
                    for name in ("_parameters", "_buffers", "_modules"):
                        parts = state.get(name)
                        pending.extend(parts.values() if type(parts) is dict else ())
        return False

    # -- What there is -----------------------------------------------------------------------------

    def _find_reader(self) -> Callable[[int], NestedStats] | None:
        """What gives the statistics; an overlay may take its place later."""
        own = f"_{self._kind}_memoryStats"
        if hasattr(self._bindings, own):
            return lambda index: _call(self._bindings, own, index)
        general = "_accelerator_getDeviceStats"
        if not hasattr(self._bindings, general):
            return None
        try:
            self._bindings._accelerator_isAllocatorInitialized()  # noqa: SLF001 - as above
        except (AttributeError, RuntimeError):
            return None
        return lambda index: _call(self._bindings, general, index)

    def _count_devices(self) -> int:
        count = getattr(self._module, "device_count", None)
        if count is None:
            count = self._torch.accelerator.device_count
        return int(count())

    def _has_had_memory(self, index: int) -> bool:
        if self._reader is None:
            return True
        try:
            stats = self._reader(index)
        except RuntimeError:
            return False
        for key in ("reserved_bytes", "allocated_bytes"):
            figures = stats.get(key, {}).get("all", {})
            if any(figures.get(name) for name in ("current", "peak", "allocated")):
                return True
        return False


def _call(bindings: Any, name: str, index: int) -> NestedStats:
    stats: NestedStats = getattr(bindings, name)(index)
    return stats


def _import_main() -> ModuleType:
    import __main__  # noqa: PLC0415 - a notebook puts its own in the place of the first one

    return __main__
