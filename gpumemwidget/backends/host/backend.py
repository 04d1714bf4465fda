"""Read this process's own memory: the device that is always there beside the GPUs.

Releasing a GPU's memory to the CPU fills it, and on a machine without a GPU it is all there is to
watch. malloc's count stands for *allocated*, the resident size for *reserved*, and the kernel's
high-water mark gives an exact peak.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from gpumemwidget.backends.host.kernel import (
    LimitedGroup,
    MaxrssOverlay,
    Resident,
    ResidentFiles,
    list_limited_groups,
    read_machine_bytes,
    read_resident_elsewhere,
)
from gpumemwidget.backends.host.malloc import Glibc, find_malloc
from gpumemwidget.backends.protocol import MemoryBackend
from gpumemwidget.model.devices import HOST, BytesByDevice, DeviceInfo, PeakIs, Reading

_KIB = 1024
#: Minimum difference, in KiB, from which on a wiped peak is told: that of an idle process is less.
_TELLING_KIB = 1024
#: Maximum time, in seconds, of a count of malloc's that is read as often as anyone asks.
_CHEAP_S = 0.001
#: Maximum share of the time that slower counts may take: a walk over a fragmented heap stops malloc
#: for everybody.
_MAX_SHARE = 0.01


class HostBackend(MemoryBackend):
    """Process memory as a ``MemoryBackend``.

    * *allocated* is what glibc's malloc has handed out: tensors and arrays, but not Python's small
      objects, which live in arenas that Python maps itself. ``None`` with another malloc.
    * *reserved* is the resident size. Its peak is the kernel's own mark ("exact", to the few pages
      for each CPU by which the kernel lets it trail) where Linux lets us reset that, else the
      highest that was seen ("sampled").
    * The peak of *allocated* is unknown: glibc keeps no mark of it.

    Args:
        proc: where procfs is mounted.
        cgroup: where the control groups are mounted.
        find_malloc: finds the malloc that can tell what is in use.
        timer: returns seconds, to know when malloc's count may be read again.
        cpu_timer: returns seconds of the calling thread's work, to know what the count costs.
    """

    kind = HOST

    def __init__(
        self,
        proc: Path = Path("/proc"),
        cgroup: Path = Path("/sys/fs/cgroup"),
        *,
        find_malloc: Callable[[], Glibc | None] = find_malloc,
        timer: Callable[[], float] = time.perf_counter,
        cpu_timer: Callable[[], float] = time.thread_time,
    ) -> None:
        self._proc = proc
        self._cgroup = cgroup
        self._timer = timer
        self._cpu_timer = cpu_timer
        self._malloc = find_malloc()
        self._count_again_at_s = 0.0
        self._tolerance_kib = _mark_tolerance_kib()
        self._maxrss = MaxrssOverlay()
        self._is_closed = False
        self._info: DeviceInfo | None = None
        self._groups: tuple[LimitedGroup, ...] = ()
        self._is_in_span = False
        #: The highest known resident size of this process, over all spans.
        self._highest_kib = 0
        self._was_ever_cut = False
        #: The mark at the span's start, if it could not be reset: a mark above that is the span's.
        self._base_kib: int | None = None
        self._files: ResidentFiles | None = None
        self._begin_span(None)
        self._open()

    def list_devices(self) -> tuple[DeviceInfo, ...]:
        """Return the host; its total is the machine's memory, or its control group's limit."""
        if self._info is None:
            self._groups = list_limited_groups(self._proc, self._cgroup)
            totals = [read_machine_bytes()[0], *(group.limit_bytes for group in self._groups)]
            self._info = DeviceInfo(HOST, "host memory", min(totals))
        return (self._info,)

    def read(self) -> tuple[Reading, ...]:
        """Return the memory now, from one read of the status file and one of malloc's count.

        *allocated* is ``None`` in between where malloc's count is too slow to be read this often.
        """
        with self._lock_of_this_process():
            return (self._measure(self._read_resident(), self._count_often()),)

    def start_span(self) -> tuple[Reading, ...]:
        """Reset the kernel's mark, which ``resource.getrusage`` doesn't show; return a reading."""
        with self._lock_of_this_process():
            resident = self._read_resident()
            in_use_bytes = self._count()
            self._is_in_span = True
            self._begin_span(resident)
            if resident[1] is not None:
                if self._reset(resident[1]):
                    # The mark is the resident size now; another read would tell no more.
                    resident = (resident[0], resident[0])
                else:
                    self._base_kib = resident[1]
            return (self._measure(resident, in_use_bytes),)

    def end_span(self) -> tuple[Reading, ...]:
        """Return the memory now, with the peak since the span began."""
        with self._lock_of_this_process():
            return (self._measure(self._read_resident(), self._count()),)

    def read_as_user(self) -> tuple[Reading, ...]:
        """Return the memory now, with the peak since the process began.

        The user has no call of PyTorch's for that peak; ``resource.getrusage`` tells it.
        """
        with self._lock_of_this_process():
            resident = self._read_resident()
            reading = self._measure(resident, self._count_often())
            peak_kib = self._highest_kib
            peak_is: PeakIs = "sampled"
            if resident[1] is not None:
                peak_kib = max(peak_kib, resident[1], self._maxrss.read_wiped_kib())
                peak_is = "at least" if self._was_ever_cut else "exact"
        return (replace(reading, reserved_peak_bytes=peak_kib * _KIB, peak_is=peak_is),)

    def find_counter(self) -> Callable[[], int] | None:
        """Return a call that gives the bytes in use now; ``None`` with another malloc.

        The call takes a third of a microsecond, and with a heap in many pieces up to some 30 ms.
        """
        return None if self._malloc is None else self._malloc.make_counter()

    def empty_cache(self) -> None:
        """Have malloc give its free memory back to the system."""
        if self._malloc is not None:
            self._malloc.trim()

    def read_memory(self, device: str) -> tuple[int, int] | None:
        """Return what can be taken without swapping or being killed, and the total.

        The first is the lower of the machine's available memory and the room under the limits of
        the control groups.
        """
        (info,) = self.list_devices()
        if device != HOST or info.total_bytes is None:
            return None
        rooms = [group.read_room_bytes() for group in self._groups]
        known = [room for room in rooms if room is not None]
        return min(info.total_bytes, read_machine_bytes()[1], *known), info.total_bytes

    def list_lost_peaks(self) -> BytesByDevice:
        """Return the peak, in bytes, that ``resource.getrusage`` does not tell after ``close``."""
        resident = self._read_resident()
        wiped_kib = self._maxrss.read_wiped_kib()
        if wiped_kib - max(resident[0], resident[1] or 0) < _TELLING_KIB:
            return ()
        return ((HOST, wiped_kib * _KIB),)

    def close(self) -> None:
        """Close the files and give ``resource.getrusage`` back; readings go on, less exactly."""
        with self._lock_of_this_process():
            self._is_closed = True
            if self._files is not None:
                self._files.close()
                self._files = None
            self._maxrss.take_away()

    # -- The process --------------------------------------------------------------------------

    def _open(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._files = None
        if self._is_closed:
            return
        try:
            self._files = ResidentFiles(self._proc)
        except (OSError, ValueError):
            return  # Without procfs, psutil tells the resident size.

    def _lock_of_this_process(self) -> threading.Lock:
        """Return the lock; a forked child starts anew.

        The open files still tell of the parent, and another thread of the parent may have held the
        lock. The old descriptors are left alone: a child that closed everything may have given
        their numbers to files of its own.
        """
        if os.getpid() != self._pid:
            self._begin_span(None)
            self._highest_kib = 0
            self._was_ever_cut = False
            # The marks of a running span were the parent's; those of a fresh process are its own.
            self._is_cut = self._is_in_span
            self._open()
        return self._lock

    def _read_resident(self) -> Resident:
        if self._files is not None:
            try:
                return self._files.read()
            except (OSError, ValueError):
                # Somebody closed our descriptors, perhaps all there were, and the numbers may be
                # another's by now: don't touch them again.
                self._files = None
        return read_resident_elsewhere()

    def _reset(self, mark_kib: int) -> bool:
        if self._files is None or not self._files.resets:
            return False
        # The mark is remembered before it is wiped, so that nobody sees it missing.
        self._maxrss.remember(mark_kib)
        return self._files.reset()

    # -- malloc's count -----------------------------------------------------------------------

    def _count(self) -> int | None:
        return None if self._malloc is None else self._malloc.read_in_use()

    def _count_often(self) -> int | None:
        if self._malloc is None or self._timer() < self._count_again_at_s:
            return None
        start_s = self._cpu_timer()
        in_use_bytes = self._malloc.read_in_use()
        # The thread's own work: on a busy machine its waiting would look like a slow malloc.
        cost_s = self._cpu_timer() - start_s
        if cost_s > _CHEAP_S:
            self._count_again_at_s = self._timer() + cost_s / _MAX_SHARE
        return in_use_bytes

    # -- The span's peak ----------------------------------------------------------------------

    def _begin_span(self, resident: Resident | None) -> None:
        #: The highest known resident size within the span.
        self._seen_kib = resident[0] if resident is not None else 0
        self._base_kib = None
        #: True if somebody else has reset the mark.
        self._is_cut = False

    def _measure(self, resident: Resident, in_use_bytes: int | None) -> Reading:
        resident_kib, mark_kib = resident
        seen_kib = max(self._seen_kib, resident_kib)
        peak_is: PeakIs = "sampled"
        if mark_kib is not None:
            known_kib = mark_kib + self._tolerance_kib
            if known_kib < seen_kib or known_kib < (self._base_kib or 0):
                self._is_cut = self._was_ever_cut = True
                self._base_kib = None
            if self._base_kib is None or mark_kib > self._base_kib:
                peak_is = "at least" if self._is_cut else "exact"
                seen_kib = max(seen_kib, mark_kib)
        self._seen_kib = seen_kib
        self._highest_kib = max(self._highest_kib, seen_kib)
        return Reading(
            HOST,
            in_use_bytes,
            resident_kib * _KIB,
            None,
            seen_kib * _KIB,
            peak_is,
        )


def _mark_tolerance_kib() -> int:
    """Return how far a mark may trail the resident size that was read just before, in KiB.

    The kernel counts pages for each CPU apart and adds them up in batches (percpu_counter, Linux
    6.2), or for each thread, 64 at a time, before that; reading adds up more than marking does.
    """
    n_cpus = os.cpu_count() or 1
    page_kib = 4
    return n_cpus * max(64, 2 * n_cpus) * page_kib
