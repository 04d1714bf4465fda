"""The caching allocator's own counters, for each CUDA (or ROCm) device that the user has touched.

All goes through PyTorch's nested statistics, one dictionary a device and read: the public functions
flatten it, which takes five times as long. A device is touched once it has a primary context; to
ask anything else of a device without one would create it, hundreds of MB of the user's memory.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Collection
from pathlib import Path
from types import ModuleType
from typing import Literal

from gpumemwidget.backends.cudalimits import CudaLimits, Wish, read_release
from gpumemwidget.backends.overlay import NestedStats, PeakOverlay
from gpumemwidget.backends.snapshot import SnapshotReader
from gpumemwidget.backends.tracer import CudaTracer
from gpumemwidget.devices import Limit, PinnedUse
from gpumemwidget.errors import BackendError
from gpumemwidget.records import DeviceInfo, Reading, Segment
from gpumemwidget.traces import AllocatorTrace

__all__ = ["CudaBackend"]

#: The first release whose count of pinned memory in use falls when it is freed.
_COUNTS_FREED_PINS = (2, 13)
#: Where a failure's words are other ones each time, as with an address in them.
_MOST_NOTES = 100


class CudaBackend:
    """Counters of the touched CUDA devices.

    Args:
        torch: the imported module ``torch``; it is never imported from here.

    Raises:
        BackendError: this build of PyTorch has no CUDA.
    """

    kind = "cuda"

    def __init__(self, torch: ModuleType) -> None:
        if not hasattr(torch._C, "_cuda_memoryStats"):  # noqa: SLF001 - the one sign of a CUDA build that initialises nothing
            raise BackendError(
                f"PyTorch {torch.__version__} was built without CUDA: its GPU can't be read, "
                "install a CUDA build to record it"
            )
        self._torch = torch
        self._overlay = PeakOverlay(torch._C)  # noqa: SLF001 - see the overlay
        self._overlay.install()
        self._snapshots = SnapshotReader(torch)
        self._tracer = CudaTracer(torch, self._snapshots)
        self._limits = CudaLimits(torch, self._note)
        self._touched: list[int] = []
        self._infos: dict[int, DeviceInfo] = {}
        #: Sentences on failures, and whether each was told.
        self._failures: dict[str, bool] = {}

    def list_devices(self) -> tuple[DeviceInfo, ...]:
        """The touched devices, by index."""
        return tuple(self._describe(index) for index in self._find_touched())

    def read(self) -> tuple[Reading, ...]:
        """One reading a touched device, with the peaks of the running span."""
        readings = []
        for index in self._find_touched():
            try:
                stats, exact = self._overlay.read(index)
            except RuntimeError as exc:
                readings.append(self._fail(index, exc))
            else:
                readings.append(_to_reading(index, stats, exact=exact))
        return tuple(readings)

    def start_span(self) -> tuple[Reading, ...]:
        """Reset the peaks of the touched devices, behind the overlay."""
        readings = []
        for index in self._find_touched():
            try:
                stats = self._overlay.start_span(index)
            except RuntimeError as exc:
                readings.append(self._fail(index, exc))
            else:
                # Now that they are reset, the peaks are what stands.
                readings.append(_to_reading(index, stats, exact=True, peak="current"))
        return tuple(readings)

    def end_span(self) -> tuple[Reading, ...]:
        """As ``read``: the marks of the span stay until the next one begins."""
        return self.read()

    def read_as_user(self) -> tuple[Reading, ...]:
        """Readings whose peaks are what ``torch.cuda.max_memory_allocated()`` tells the user."""
        readings = []
        for index in self._find_touched():
            try:
                stats = self._overlay.read_as_user(index)
            except RuntimeError as exc:
                readings.append(self._fail(index, exc))
            else:
                readings.append(_to_reading(index, stats, exact=True))
        return tuple(readings)

    def read_segments(self) -> tuple[Segment, ...]:
        """The touched devices' segments and blocks: 2 ms with 600 blocks.

        Where the user records a history, or did, torch says which line allocated each. The first
        time that takes it some seconds, and it notes the snapshot in the history.

        ``()``, with a note, where CUDA refuses, or where it would take all events of a history that
        the user records.
        """
        touched = self._find_touched()
        if not touched:
            return ()
        if self._snapshots.is_costly and not self._tracer.keeps_no_events:
            self._note(
                "the allocator's blocks are not read while a memory history is recorded: "
                f"PyTorch {self._torch.__version__} would fetch all of its events with them"
            )
            return ()
        try:
            return self._snapshots.read(touched)
        except RuntimeError as exc:
            self._note(f"the allocator's blocks can't be read: {_first_line(exc)}")
            return ()

    @property
    def is_tracing(self) -> bool:
        """Whether a trace runs."""
        return self._tracer.is_tracing

    def start_trace(self, *, n_events: int) -> tuple[str, ...]:
        """Have the history written; one of the user's that runs is used as it is.

        The first time this takes some seconds, where CUDA is in use. Devices that come into use
        later, and CUDA itself, are traced from their first event on.
        """
        return self._tracer.start(self._find_touched(), n_events=n_events)

    def end_trace(self, *, snapshot_to: Path | None = None) -> tuple[AllocatorTrace, ...]:
        """The touched devices' events since the start: 2.5 s for a million, a ms for a thousand."""
        return self._tracer.end(self._find_touched(), snapshot_to=snapshot_to)

    def set_sites(self, *, is_on: bool) -> str:
        """Keep the line that allocated each live block, between traces too: 2 µs an allocation."""
        return self._tracer.set_sites(is_on=is_on)

    def read_memory(self, device: str) -> tuple[int, int] | None:
        """What is free of a touched device, and its total, other processes too: 5 µs.

        ``None`` where it is not touched, or CUDA refuses.
        """
        index = int(device.partition(":")[2])
        if index not in self._find_touched():
            return None
        try:
            free_bytes, total_bytes = self._torch.cuda.mem_get_info(index)
        except RuntimeError as exc:
            self._note(f"{device} does not tell what is free: {_first_line(exc)}")
            return None
        return free_bytes, total_bytes

    def read_pinned(self) -> PinnedUse | None:
        """What PyTorch's allocator of pinned host memory counts: 10 µs.

        ``None`` before its first use, and where this release does not tell (before 2.7). What
        tensors hold of it is told from 2.13 on: before, that counter seldom fell when they went
        (https://github.com/pytorch/pytorch/pull/171662).
        """
        read_stats = getattr(self._torch._C, "_cuda_hostMemoryStats", None)  # noqa: SLF001 - the public call flattens
        if read_stats is None or not self._torch.cuda.is_initialized():
            return None
        try:
            stats = read_stats()
        except RuntimeError as exc:
            self._note(f"pinned host memory is not told: {_first_line(exc)}")
            return None
        # What it has from the system had another name before 2.9.
        is_old = "reserved_bytes" in stats
        held = stats.get("allocated_bytes" if is_old else "active_bytes")
        taken = stats.get("reserved_bytes" if is_old else "allocated_bytes")
        if held is None or taken is None or not any(taken.values()):
            return None
        if read_release(self._torch) < _COUNTS_FREED_PINS:
            return PinnedUse(None, taken["current"], None, taken["peak"])
        return PinnedUse(held["current"], taken["current"], held["peak"], taken["peak"])

    def set_limit(
        self, device: str, limit_bytes: int | None, *, share: float | None = None
    ) -> None:
        """``torch.cuda.set_per_process_memory_fraction``, to the byte; see ``CudaLimits``.

        Raises:
            BackendError: there is no such device, or it refuses.
        """
        touched = self._find_touched()
        kind, _, index = device.partition(":")
        is_known = kind == self.kind and index.isascii() and index.isdigit()
        if is_known and self._torch.cuda.is_initialized():
            is_known = int(index) < self._torch.cuda.device_count()
        if not is_known:
            raise BackendError(f"there is no {device} here: name one that %memstat lists")
        wish = None if limit_bytes is None and share is None else Wish(limit_bytes, share)
        self._limits.set(int(index), wish, touched)

    def read_limits(self) -> tuple[Limit, ...]:
        """Those of the devices in use, of others that have one, and those that wait."""
        touched = self._find_touched()
        waiting = self._limits.waiting
        limits = []
        for index in sorted({*touched, *waiting, *self._limits.list_limited()}):
            device, wish = f"cuda:{index}", waiting.get(index)
            if wish is not None:
                limits.append(
                    Limit(device, wish.limit_bytes, None, None, is_waiting=True, share=wish.share)
                )
            elif self._torch.cuda.is_initialized():
                limits.append(
                    Limit(
                        device,
                        self._limits.read(index),
                        self._read_total(index),
                        self._read_reserved(index) if index in touched else None,
                    )
                )
        return tuple(limits)

    def reset_peaks(self, devices: Collection[str] | None = None) -> tuple[str, ...]:
        """``torch.cuda.reset_peak_memory_stats()`` of each touched device, as the user calls it."""
        reset = []
        for index in self._find_touched():
            if devices is None or f"cuda:{index}" in devices:
                self._torch._C._cuda_resetPeakMemoryStats(index)  # noqa: SLF001 - it finds the overlay's, as the user's call does
                reset.append(f"cuda:{index}")
        return tuple(reset)

    def empty_cache(self) -> None:
        """``torch.cuda.empty_cache()``, where CUDA is in use.

        Raises:
            BackendError: CUDA refuses, as it does after a fault on the device.
        """
        if not self._torch.cuda.is_initialized():
            return
        try:
            self._torch.cuda.empty_cache()
        except RuntimeError as exc:
            raise BackendError(
                f"CUDA could not empty its cache ({_first_line(exc)}): restart the kernel if "
                "the device is in error"
            ) from exc

    def release_workspaces(self) -> str | None:
        """Free the workspaces of cuBLAS: 32 MiB and more a handle and stream, made when needed.

        Raises:
            BackendError: CUDA refuses, as it does after a fault on the device; or a CUDA graph is
                alive. One that was captured after a warm-up on the same stream writes into that
                stream's workspace whenever it is replayed: freed, that would be another's memory.
        """
        if not self._torch.cuda.is_initialized():
            return None
        if self._has_graphs():
            raise BackendError(
                "cuBLAS's workspaces stay while a CUDA graph is alive, which may use them: delete "
                "the graphs first (those of torch.compile with torch._dynamo.reset())"
            )
        clear = getattr(self._torch._C, "_cuda_clearCublasWorkspaces", None)  # noqa: SLF001 - has no public name
        if clear is None:
            return f"PyTorch {self._torch.__version__} can't free cuBLAS workspaces"
        try:
            clear()
        except RuntimeError as exc:
            raise BackendError(
                f"CUDA could not free cuBLAS's workspaces ({_first_line(exc)}): restart the kernel "
                "if the device is in error"
            ) from exc
        return "cuBLAS workspaces freed"

    def _has_graphs(self) -> bool:
        """Whether any ``torch.cuda.CUDAGraph`` is alive."""
        graph_type = getattr(self._torch._C, "_CUDAGraph", None)  # noqa: SLF001 - the base of all
        read_bases = vars(type)["__mro__"].__get__
        # By identity: a class of the user's may have an == or a hash of its own.
        classes = {id(cls): cls for cls in map(type, gc.get_objects())}
        return any(base is graph_type for cls in classes.values() for base in read_bases(cls))

    def list_lost_peaks(self) -> tuple[tuple[str, int], ...]:
        """Devices and the peaks, in bytes, that ``close`` takes from the user's view."""
        if not self._torch.cuda.is_initialized():
            return ()
        return tuple((f"cuda:{index}", peak) for index, peak in self._overlay.list_lost_marks())

    def take_notes(self) -> tuple[str, ...]:
        """Sentences on what failed, each once."""
        new = tuple(note for note, told in self._failures.items() if not told)
        self._failures.update(dict.fromkeys(new, True))
        return new + self._tracer.take_notes()

    def close(self) -> None:
        """Take the overlay away, forget limits that wait, switch our history off; twice if need be.

        Limits that are set stay.
        """
        self._tracer.close()
        self._limits.close()
        self._overlay.uninstall()

    def _find_touched(self) -> list[int]:
        cuda = self._torch.cuda
        # False in a forked child too, where the parent's CUDA can't be used.
        if not cuda.is_initialized():
            return []
        count = cuda.device_count()
        if len(self._touched) < count:
            has_context = self._torch._C._cuda_hasPrimaryContext  # noqa: SLF001 - no public call asks without creating one
            self._touched = [index for index in range(count) if has_context(index)]
        self._limits.apply(self._touched)
        return self._touched

    def _describe(self, index: int) -> DeviceInfo:
        info = self._infos.get(index)
        if info is None:
            properties = self._torch.cuda.get_device_properties(index)
            uuid = getattr(properties, "uuid", None)
            info = self._infos[index] = DeviceInfo(
                device=f"cuda:{index}",
                name=properties.name,
                total_bytes=properties.total_memory,
                uuid=None if uuid is None else f"GPU-{uuid}",
            )
        # The user may set one at any time.
        limit_bytes = self._limits.read(index)
        if limit_bytes != info.limit_bytes:
            info = self._infos[index] = dataclasses.replace(info, limit_bytes=limit_bytes)
        return info

    def _read_total(self, index: int) -> int | None:
        try:
            return self._limits.read_total(index)
        except RuntimeError as exc:
            self._note(f"cuda:{index} does not tell its total: {_first_line(exc)}")
            return None

    def _read_reserved(self, index: int) -> int | None:
        try:
            stats = self._overlay.read_as_user(index)
        except RuntimeError:
            return None  # the readings say why
        reserved: int = stats["reserved_bytes"]["all"]["current"]
        return reserved

    def _fail(self, index: int, exc: RuntimeError) -> Reading:
        """Unknown counters, and a sentence why.

        Pluggable allocators have no statistics: https://pytorch.org/docs/stable/notes/cuda.html
        """
        self._note(f"cuda:{index} gives no counters: {_first_line(exc)}")
        return Reading(device=f"cuda:{index}", allocated_bytes=None, reserved_bytes=None)

    def _note(self, note: str) -> None:
        if note not in self._failures and len(self._failures) < _MOST_NOTES:
            self._failures[note] = False


def _to_reading(
    index: int, stats: NestedStats, *, exact: bool, peak: Literal["peak", "current"] = "peak"
) -> Reading:
    allocated = stats["allocated_bytes"]["all"]
    reserved = stats["reserved_bytes"]["all"]
    return Reading(
        device=f"cuda:{index}",
        allocated_bytes=allocated["current"],
        reserved_bytes=reserved["current"],
        allocated_peak_bytes=allocated[peak],
        reserved_peak_bytes=reserved[peak],
        peak_is="exact" if exact else "at least",
        num_alloc_retries=stats["num_alloc_retries"],
        num_ooms=stats["num_ooms"],
    )


def _first_line(exc: BaseException) -> str:
    return str(exc).strip().partition("\n")[0]
