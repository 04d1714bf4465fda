"""Accelerators other than CUDA as a source of counters: XPU, MPS, and what extensions bring.

What PyTorch does not tell of them is ``None``. Their peaks are exact where the marks can be reset
unseen by the user (see ``overlay``), as on XPU and on MPS since ``torch.accelerator`` reaches it;
elsewhere nothing is reset, and a peak is the highest that was seen.

Much of what is asked here is an extension's own code, which may fail with whatever it likes: then a
figure is unknown, it is said once why, and what else is recorded goes on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from gpumemwidget.backends.accelcounters import AcceleratorCounters, find_kind
from gpumemwidget.backends.overlay import NestedStats, PeakOverlay
from gpumemwidget.devices import Limit
from gpumemwidget.errors import BackendError
from gpumemwidget.records import DeviceInfo, PeakIs, Reading, Segment
from gpumemwidget.traces import AllocatorTrace

__all__ = ["AcceleratorBackend"]

_T = TypeVar("_T")
#: Allocated and reserved, or their peaks.
_Pair = tuple[int | None, int | None]
_UNKNOWN: _Pair = (None, None)
#: Where a failure's words are other ones each time, as with an address in them.
_MOST_NOTES = 20


class AcceleratorBackend:
    """Counters of the touched devices of the accelerator.

    Args:
        torch: the imported module ``torch``; it is never imported from here.

    Raises:
        BackendError: this build of PyTorch has no accelerator, or it is CUDA.
    """

    def __init__(self, torch: Any) -> None:
        kind = find_kind(torch)
        if kind in (None, "cuda", "cpu"):
            raise BackendError(
                f"PyTorch {torch.__version__} was built without a GPU's support: what is on one "
                "can't be read, install a build for it to record it"
            )
        #: ``"xpu"``, ``"mps"``: what the names of its devices begin with.
        self.kind: str = str(kind)
        self._torch = torch
        self._counters = AcceleratorCounters(torch, self.kind)
        self._overlay: PeakOverlay | None = None
        if self._counters.has_marks:
            self._overlay = PeakOverlay(torch._C, kind=self.kind)  # noqa: SLF001 - see the overlay
            self._overlay.install()
        #: Without an overlay: the highest that was seen in the running span, and ever.
        self._highest: dict[int, _Pair] = {}
        self._highest_ever: dict[int, _Pair] = {}
        self._infos: dict[int, DeviceInfo] = {}
        #: Sentences on failures, and whether each was told.
        self._failures: dict[str, bool] = {}

    def list_devices(self) -> tuple[DeviceInfo, ...]:
        """The touched devices, by index."""
        return tuple(self._describe(index) for index in self._list_touched())

    def read(self) -> tuple[Reading, ...]:
        """One reading a touched device, with the peaks of the running span."""
        return tuple(self._read(index) for index in self._list_touched())

    def start_span(self) -> tuple[Reading, ...]:
        """Reset the peaks of the touched devices, where the user does not see it."""
        self._highest.clear()
        touched = self._list_touched()
        return tuple(self._read(index, starts=True) for index in touched)

    def end_span(self) -> tuple[Reading, ...]:
        """As ``read``: the marks of the span stay until the next one begins."""
        return self.read()

    def read_as_user(self) -> tuple[Reading, ...]:
        """Readings whose peaks are what PyTorch's own functions tell the user.

        Where they tell none, the highest that was seen.
        """
        return tuple(self._read_as_user(index) for index in self._list_touched())

    def read_segments(self) -> tuple[Segment, ...]:
        """The touched devices' segments and blocks, where this release of PyTorch tells them."""
        touched = self._list_touched()
        if not touched:
            return ()
        failure = f"the allocator's blocks on {self.kind} can't be read"
        return self._ask(partial(self._counters.read_segments, touched), failure) or ()

    @property
    def is_tracing(self) -> bool:
        """False: nothing is traced."""
        return False

    def start_trace(self, *, n_events: int) -> tuple[str, ...]:  # noqa: ARG002 - the protocol's
        """Why nothing is traced, a sentence for each device in use."""
        return tuple(
            f"{self.kind}:{index} is not traced: only on CUDA is the allocator's history read"
            for index in self._list_touched()
        )

    def end_trace(self, *, snapshot_to: Path | None = None) -> tuple[AllocatorTrace, ...]:  # noqa: ARG002 - as above
        """Nothing."""
        return ()

    def set_sites(self, *, is_on: bool) -> str:  # noqa: ARG002 - as above
        """Nothing: no lines of blocks are kept here."""
        return ""

    def read_pinned(self) -> None:
        """Nothing: PyTorch counts the pinned memory of CUDA alone."""

    def set_limit(
        self,
        device: str,
        limit_bytes: int | None,  # noqa: ARG002 - as above
        *,
        share: float | None = None,  # noqa: ARG002 - as above
    ) -> NoReturn:
        """Nothing that is set from here.

        Raises:
            BackendError: always.
        """
        set_share = f"torch.{self.kind}.set_per_process_memory_fraction"
        raise BackendError(
            f"{device} can't be limited from here: limits are set on CUDA alone; PyTorch itself "
            f"may have {set_share}"
        )

    def read_limits(self) -> tuple[Limit, ...]:
        """What the user has set, on each touched device; none where PyTorch does not tell it."""
        if not self._counters.tells_limits:
            return ()
        reserved = {reading.device: reading.reserved_bytes for reading in self.read_as_user()}
        return tuple(
            Limit(info.device, info.limit_bytes, info.total_bytes, reserved.get(info.device))
            for info in self.list_devices()
        )

    def reset_peaks(self, devices: Collection[str] | None = None) -> tuple[str, ...]:
        """What the user's own reset does, on each touched device that has one.

        Raises:
            BackendError: PyTorch refuses.
        """
        reset = []
        for index in self._list_touched():
            device = f"{self.kind}:{index}"
            call = self._counters.find_peak_reset()
            if call is not None and (devices is None or device in devices):
                try:
                    call(index)
                except Exception as exc:
                    raise BackendError(
                        f"the peaks of {device} could not be reset ({_tell(exc)}): restart the "
                        "kernel if the device is in error"
                    ) from exc
                self._highest_ever.pop(index, None)
                reset.append(device)
        return tuple(reset)

    def empty_cache(self) -> None:
        """PyTorch's own ``empty_cache``, where the accelerator is in use.

        Raises:
            BackendError: PyTorch refuses, as after a fault on the device.
        """
        try:
            self._counters.empty_cache()
        except Exception as exc:
            raise BackendError(
                f"{self.kind} could not empty its cache ({_tell(exc)}): restart the kernel if the "
                "device is in error"
            ) from exc

    def release_workspaces(self) -> None:
        """Nothing: cuBLAS works on CUDA's GPUs."""

    def read_memory(self, device: str) -> tuple[int, int] | None:
        """What is free and what there is of a touched device, other processes too.

        ``None`` where PyTorch does not ask the driver for it.
        """
        failure = f"{device} does not tell what is free"
        asks = [partial(self._counters.read_memory, index) for index in self._find(device)]
        return self._ask(asks[0], failure) if asks else None

    def read_own_use(self, device: str) -> int | None:
        """What this process takes of a touched device, other libraries too; ``None``: not told."""
        failure = f"{device} does not tell what this process has"
        return self._ask(self._counters.read_own_use, failure) if self._find(device) else None

    def list_lost_peaks(self) -> tuple[tuple[str, int], ...]:
        """Devices and the peaks, in bytes, that ``close`` takes from the user's view."""
        if self._overlay is None or not self._list_touched():
            return ()
        failure = f"the peaks of {self.kind} can't be read"
        marks = self._ask(self._overlay.list_lost_marks, failure) or ()
        return tuple((f"{self.kind}:{index}", peak) for index, peak in marks)

    def take_notes(self) -> tuple[str, ...]:
        """Sentences on what failed, each once."""
        new = tuple(note for note, told in self._failures.items() if not told)
        self._failures.update(dict.fromkeys(new, True))
        return new

    def close(self) -> None:
        """Take the overlay away. May be called twice."""
        if self._overlay is not None:
            self._overlay.uninstall()

    # -- One device --------------------------------------------------------------------------------

    def _read(self, index: int, *, starts: bool = False) -> Reading:
        try:
            if self._overlay is None:
                return self._see(index, self._counters.read(index))
            if starts:
                stats = self._overlay.start_span(index)
                # Now that they are reset, the peaks are what stands.
                return self._to_reading(index, stats, _pick(stats, "current"), "exact")
            stats, is_exact = self._overlay.read(index)
        except Exception as exc:  # noqa: BLE001 - said once
            return self._fail(index, exc)
        return self._to_reading(
            index, stats, _pick(stats, "peak"), "exact" if is_exact else "at least"
        )

    def _read_as_user(self, index: int) -> Reading:
        try:
            if self._overlay is not None:
                stats = self._overlay.read_as_user(index)
            else:
                stats = self._counters.read(index)
                self._see(index, stats)
        except Exception as exc:  # noqa: BLE001 - said once
            return self._fail(index, exc)
        peaks = _pick(stats, "peak")
        if peaks == _UNKNOWN:
            return self._to_reading(
                index, stats, self._highest_ever.get(index, _UNKNOWN), "sampled"
            )
        return self._to_reading(index, stats, peaks, "exact")

    def _see(self, index: int, stats: NestedStats) -> Reading:
        """What stands, and the highest that was seen in the span."""
        now = _pick(stats, "current")
        self._highest[index] = _join(self._highest.get(index, _UNKNOWN), now)
        self._highest_ever[index] = _join(self._highest_ever.get(index, _UNKNOWN), now)
        return self._to_reading(index, stats, self._highest[index], "sampled")

    def _to_reading(self, index: int, stats: NestedStats, peaks: _Pair, peak_is: PeakIs) -> Reading:
        allocated_bytes, reserved_bytes = _pick(stats, "current")
        return Reading(
            device=f"{self.kind}:{index}",
            allocated_bytes=allocated_bytes,
            reserved_bytes=reserved_bytes,
            allocated_peak_bytes=peaks[0],
            reserved_peak_bytes=peaks[1],
            peak_is=None if peaks == _UNKNOWN else peak_is,
        )

    def _find(self, device: str) -> list[int]:
        """The index of a touched device, if it is one."""
        touched = self._list_touched()
        return [index for index in touched if device == f"{self.kind}:{index}"]

    def _describe(self, index: int) -> DeviceInfo:
        device = f"{self.kind}:{index}"
        info = self._infos.get(index)
        if info is None:
            asked = self._ask(partial(self._counters.describe, index), f"{device} has no name")
            info = self._infos[index] = asked or DeviceInfo(device, self.kind.upper(), None)
        # The user may set one at any time.
        ask = partial(self._counters.read_limit, index, info.total_bytes)
        limit_bytes = self._ask(ask, f"{device} does not tell its limit")
        if limit_bytes != info.limit_bytes:
            info = self._infos[index] = dataclasses.replace(info, limit_bytes=limit_bytes)
        return info

    def _list_touched(self) -> list[int]:
        failure = f"it is not known which devices of {self.kind} are in use"
        return self._ask(self._counters.list_touched, failure) or []

    def _ask(self, ask: Callable[[], _T], failure: str) -> _T | None:
        """The answer; ``None`` and a sentence where there is none."""
        try:
            return ask()
        except Exception as exc:  # noqa: BLE001 - said once
            self._note(f"{failure}: {_tell(exc)}")
            return None

    def _fail(self, index: int, exc: Exception) -> Reading:
        """Unknown counters, and a sentence why."""
        self._note(f"{self.kind}:{index} gives no counters: {_tell(exc)}")
        return Reading(f"{self.kind}:{index}", allocated_bytes=None, reserved_bytes=None)

    def _note(self, note: str) -> None:
        if note not in self._failures and len(self._failures) < _MOST_NOTES:
            self._failures[note] = False


def _pick(stats: NestedStats, which: str) -> _Pair:
    """Allocated and reserved of all pools together, as far as they are told."""
    allocated = stats.get("allocated_bytes", {}).get("all", {}).get(which)
    reserved = stats.get("reserved_bytes", {}).get("all", {}).get(which)
    return allocated, reserved


def _join(one: _Pair, other: _Pair) -> _Pair:
    """The higher of each."""
    return _higher(one[0], other[0]), _higher(one[1], other[1])


def _higher(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return other if one is None else one
    return max(one, other)


def _tell(exc: Exception) -> str:
    """Its first line, and what it is where it is not as PyTorch refuses."""
    line = str(exc).strip().partition("\n")[0]
    return line if type(exc) is RuntimeError else f"{type(exc).__name__}: {line}"
