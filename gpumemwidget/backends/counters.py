"""Read the counters of the touched devices of one kind: of CUDA, or of another accelerator.

Others are XPU, MPS, and what extensions of PyTorch bring. Releases of PyTorch differ in what can be
read of them; the rest is ``None``:

- XPU has the caching allocator's statistics since 2.6, and its blocks in later releases.
- MPS has statistics since ``torch.accelerator``'s memory functions reach it (2.13).
- Extensions have what they hand to ``torch.accelerator``, whose functions came with 2.9.

Peaks are exact where the marks can be reset unseen by the user, as on CUDA, XPU and MPS (see
``peak_overlay.py``). Elsewhere nothing is reset, and the peaks of cells are unknown.

Nothing here brings a device into use: whether one is, is always asked first. Much of what is asked
is an extension's own code, which may fail with whatever it likes: then a figure is unknown, a note
says why once, and recording goes on.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, TypeVar

from gpumemwidget.backends.peak_overlay import NestedStats, PeakOverlay, find_extension
from gpumemwidget.backends.protocol import MemoryBackend
from gpumemwidget.backends.snapshot import parse_segments
from gpumemwidget.errors import BackendError, Notes, describe_exception, read_first_line
from gpumemwidget.model.devices import (
    DeviceInfo,
    HardwareNote,
    HardwareNoteKind,
    PeakIs,
    Reading,
    Segment,
)

_T = TypeVar("_T")


class TouchedCounters(MemoryBackend):
    """Counters of the touched devices of one kind.

    Args:
        torch: the imported module ``torch``.
        kind: ``"cuda"``, ``"xpu"``, ``"mps"``: the beginning of the devices' names.
        overlay: resets peaks unseen by the user; ``None`` where nothing may be reset, so that spans
            have no peaks.
    """

    def __init__(self, torch: Any, kind: str, overlay: PeakOverlay | None) -> None:
        self.kind = kind
        self._torch = torch
        self._bindings = torch._C  # noqa: SLF001 - the public functions may start the device
        self._module: Any = getattr(torch, kind, None)
        self._overlay = overlay
        self._notes: Notes[HardwareNote] = Notes()
        self._infos: dict[int, DeviceInfo] = {}

    @abstractmethod
    def _list_touched(self) -> list[int]:
        """Return the indices of the devices that the user has used."""

    def _read_stats(self, index: int) -> NestedStats:  # noqa: ARG002 - an overlay reads them
        """Return a device's statistics with PyTorch's own peaks, where there is no overlay."""
        return {}

    @abstractmethod
    def _is_in_use(self) -> bool: ...

    def _describe_device(self, index: int) -> DeviceInfo:
        """Return a device's name, total and UUID, which are asked for once."""
        info = self._infos.get(index)
        if info is None:
            device = self._name(index)
            unknown = DeviceInfo(device, self.kind.upper(), None)
            read = partial(self._read_info, index)
            info = self._infos[index] = self._ask(read, device, "name", unknown)
        return info

    def _read_info(self, index: int) -> DeviceInfo:
        properties = None
        if hasattr(self._module, "get_device_properties"):
            properties = self._module.get_device_properties(index)
        total_bytes = getattr(properties, "total_memory", None)
        uuid = getattr(properties, "uuid", None)
        return DeviceInfo(
            device=self._name(index),
            name=str(getattr(properties, "name", self.kind.upper())),
            total_bytes=None if total_bytes is None else int(total_bytes),
            uuid=None if uuid is None else str(uuid),
        )

    def list_devices(self) -> tuple[DeviceInfo, ...]:
        """Return the touched devices, by index."""
        return tuple([self._describe_device(index) for index in self._list_touched()])

    def read(self) -> tuple[Reading, ...]:
        """Return a reading of each touched device, with the peaks of the running span."""

        def read(index: int) -> Reading:
            if self._overlay is None:
                return self._to_reading(index, self._read_stats(index), "", None)
            stats, peak_is = self._overlay.read(index)
            return self._to_reading(index, stats, "peak", peak_is)

        return self._read_touched(read)

    def start_span(self) -> tuple[Reading, ...]:
        """Reset the peaks of the touched devices, where the user does not see it."""
        overlay = self._overlay
        if overlay is None:
            return self.read()
        return self._read_touched(
            # After the reset a peak is the current value.
            lambda index: self._to_reading(index, overlay.start_span(index), "current", "exact")
        )

    def read_as_user(self) -> tuple[Reading, ...]:
        """Return readings whose peaks are those of PyTorch's own functions."""
        read = self._read_stats if self._overlay is None else self._overlay.read_as_user
        return self._read_touched(
            lambda index: self._to_reading(index, read(index), "peak", "exact")
        )

    def reset_peaks(self, devices: Collection[str] | None = None) -> tuple[str, ...]:
        """Reset the peaks as the user's own call does, on each touched device that has one.

        Raises:
            BackendError: PyTorch refuses.
        """
        # The bindings are looked up anew, as the overlay wraps them.
        names = (f"_{self.kind}_resetPeakMemoryStats", "_accelerator_resetPeakStats")
        calls = [call for name in names if (call := getattr(self._bindings, name, None))]
        if not calls:
            return ()
        reset = []
        for index in self._list_touched():
            device = self._name(index)
            if devices is not None and device not in devices:
                continue
            try:
                calls[0](index)
            except Exception as exc:
                raise BackendError(
                    f"the peaks of {device} could not be reset ({describe_refusal(exc)}): restart "
                    "the kernel if the device is in error"
                ) from exc
            reset.append(device)
        return tuple(reset)

    def empty_cache(self) -> None:
        """Call PyTorch's own ``empty_cache``, where a device is in use.

        Raises:
            BackendError: PyTorch refuses, as after a fault on the device.
        """
        owners = (self._module, getattr(self._torch, "accelerator", None))
        calls = [call for owner in owners if (call := getattr(owner, "empty_cache", None))]
        try:
            if calls and self._is_in_use():
                calls[0]()
        except Exception as exc:
            raise BackendError(
                f"{self.kind.upper()} could not empty its cache ({describe_refusal(exc)}): "
                "restart the kernel if the device is in error"
            ) from exc

    def read_memory(self, device: str) -> tuple[int, int] | None:
        """Return the free and total bytes of a touched device, 5 µs on CUDA; ``None`` on MPS."""
        ask_driver = getattr(self._module, "mem_get_info", None)
        index = next((i for i in self._list_touched() if device == self._name(i)), None)
        if ask_driver is None or index is None:
            return None
        memory: tuple[int, int] | None
        memory = self._ask(partial(ask_driver, index), device, "free memory", None)
        return memory

    def take_notes(self) -> tuple[HardwareNote, ...]:
        """Return notes on what failed, each once."""
        return self._notes.take()

    def close(self) -> None:
        """Take away what hides our resets. May be called twice."""
        if self._overlay is not None:
            self._overlay.uninstall()

    def _name(self, index: int) -> str:
        return f"{self.kind}:{index}"

    def _read_touched(self, read: Callable[[int], Reading]) -> tuple[Reading, ...]:
        """Return a reading of each touched device; where PyTorch refuses, it is unknown.

        Pluggable allocators have no statistics: https://pytorch.org/docs/stable/notes/cuda.html
        """
        readings = []
        for index in self._list_touched():
            try:
                readings.append(read(index))
            except Exception as exc:  # noqa: BLE001 - becomes a note
                self._note_unread(self._name(index), "counters", exc)
                readings.append(Reading(self._name(index), None, None))
        return tuple(readings)

    def _to_reading(
        self, index: int, stats: NestedStats, peak: str, peak_is: PeakIs | None
    ) -> Reading:
        """Return statistics as a reading; what this release of PyTorch does not have is ``None``.

        The figure ``peak`` of each statistic is its peak: "peak", or "current" after a reset; ""
        where there is none.
        """
        allocated: dict[str, int] = stats.get("allocated_bytes", {}).get("all", {})
        reserved: dict[str, int] = stats.get("reserved_bytes", {}).get("all", {})
        return Reading(
            device=self._name(index),
            allocated_bytes=allocated.get("current"),
            reserved_bytes=reserved.get("current"),
            allocated_peak_bytes=allocated.get(peak),
            reserved_peak_bytes=reserved.get(peak),
            peak_is=peak_is if allocated or reserved else None,
            num_alloc_retries=stats.get("num_alloc_retries"),
            num_ooms=stats.get("num_ooms"),
        )

    def _ask(self, ask: Callable[[], _T], device: str, what: str, unknown: _T) -> _T:
        try:
            return ask()
        except Exception as exc:  # noqa: BLE001 - becomes a note
            self._note_unread(device, what, exc)
            return unknown

    def _note_unread(self, device: str, what: str, exc: Exception) -> None:
        reason = describe_refusal(exc)
        self._notes.add(HardwareNote(HardwareNoteKind.UNREAD, reason, device, what))


def describe_refusal(exc: Exception) -> str:
    """Return an exception's first line, with its type unless it is PyTorch's ``RuntimeError``."""
    return read_first_line(exc) if type(exc) is RuntimeError else describe_exception(exc)


# -- Accelerators other than CUDA ------------------------------------------------------------------


class AcceleratorBackend(TouchedCounters):
    """Counters of the touched devices of the accelerator.

    Args:
        torch: the imported module ``torch``; it is never imported from here.

    Raises:
        BackendError: this build of PyTorch has no accelerator, or it is CUDA, or this release has
            no statistics of it.
    """

    def __init__(self, torch: Any) -> None:
        bindings = torch._C  # noqa: SLF001 - the public functions may start the device
        kind = _find_kind(bindings)
        stats_binding = None if kind is None else _find_stats_binding(bindings, kind)
        if kind is None or stats_binding is None:
            raise BackendError(
                f"PyTorch {torch.__version__} was built without a GPU's support, or has no "
                "counters of it: what is on one can't be read, install a build for it to record it"
            )
        self._stats_binding = stats_binding
        # Of XPU and MPS the user reads peaks only through calls that an overlay covers.
        overlay = PeakOverlay(bindings, kind=kind) if kind in ("xpu", "mps") else None
        super().__init__(torch, kind, overlay)

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

    # -- One device --------------------------------------------------------------------------------

    def _read_stats(self, index: int) -> NestedStats:
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
        return bool(self._bindings._accelerator_isAllocatorInitialized())  # noqa: SLF001 - has no public name


def _find_kind(bindings: Any) -> str | None:
    """Return the accelerator of this build beside CUDA: ``"xpu"``, ``"mps"``, an extension's.

    PyTorch is not asked whether the machine has such a device: in some releases that starts CUDA or
    XPU, and forking fails then.
    """
    extension = find_extension(bindings)
    if extension is not None or hasattr(bindings, "_cuda_memoryStats"):
        return extension
    if hasattr(bindings, "_xpu_init"):
        return "xpu"
    return "mps" if getattr(bindings, "_has_mps", False) else None


def _find_stats_binding(bindings: Any, kind: str) -> str | None:
    """Return the name of the binding that reads the statistics; ``None`` where none does."""
    if hasattr(bindings, f"_{kind}_memoryStats"):
        return f"_{kind}_memoryStats"
    try:
        # MPS has the other binding before 2.13, too, and refuses both.
        bindings._accelerator_isAllocatorInitialized()  # noqa: SLF001 - has no public name
    except (AttributeError, RuntimeError):
        return None
    return "_accelerator_getDeviceStats"
