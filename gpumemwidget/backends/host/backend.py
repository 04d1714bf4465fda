"""Read this process's own memory: the device that is always there beside the GPUs.

Releasing a GPU's memory to the CPU fills it, and on a machine without a GPU it is all there is to
watch. malloc's count stands for *allocated*, the resident size for *reserved*, and the kernel's
high-water mark gives an exact peak.

glibc keeps the count and tells it through ``mallinfo2`` (2.33 and later). Other allocators keep
none that can be asked for the same way, so with these *allocated* is unknown.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpumemwidget.backends.host.kernel import (
    LimitedGroup,
    MaxrssOverlay,
    Resident,
    ResidentFiles,
    list_limited_groups,
    read_machine_bytes,
    read_resident_elsewhere,
)
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
#: Bytes of a probe, few enough to come from the heap: freeing a block that malloc took from
#: ``mmap`` would raise its threshold for good (mallopt(3), M_MMAP_THRESHOLD).
_PROBE_BYTES = 64 * 1024
#: Maximum number of probes: threads outside Python may free memory in the middle of one.
_PROBE_ATTEMPTS = 5


# -- malloc ----------------------------------------------------------------------------------------


class _MallInfo2(ctypes.Structure):
    """``struct mallinfo2`` of malloc.h, mallinfo(3)."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )
    hblkhd: int
    uordblks: int

    def sum_in_use(self) -> int:
        """Return the bytes handed out, from the heaps and mapped one by one."""
        return self.uordblks + self.hblkhd


class Glibc:
    """glibc's malloc.

    ``mallinfo2`` walks the free chunks of every arena: 0.3 µs on a heap that has few, 8 ms on
    a heap with half a million. Callers that ask often keep an eye on the time.

    Raises:
        AttributeError: the C library has no ``mallinfo2`` (musl, macOS, glibc before 2.33).
        OSError: the process's own symbols can't be looked up (Windows).
        TypeError: the process's own symbols can't be looked up (Windows).
    """

    def __init__(self) -> None:
        # Not PyDLL: a long walk or trim must not hold up Python's other threads.
        library = ctypes.CDLL(None)
        self._mallinfo2 = _declare(library.mallinfo2, _MallInfo2)
        self._trim = _declare(library.malloc_trim, ctypes.c_int, ctypes.c_size_t)
        # The process's own malloc, which is another library's where one is preloaded.
        self._malloc = _declare(library.malloc, ctypes.c_void_p, ctypes.c_size_t)
        self._free = _declare(library.free, None, ctypes.c_void_p)

    def read_in_use(self) -> int:
        """Return the bytes handed out and not yet freed."""
        info: _MallInfo2 = self._mallinfo2()
        return info.sum_in_use()

    def make_counter(self) -> Callable[[], int]:
        """Return a call that gives the bytes in use, and holds the interpreter's lock meanwhile.

        Letting go of the lock at every line would let other threads in at every line.
        """
        mallinfo2 = _declare(ctypes.PyDLL(None).mallinfo2, _MallInfo2)
        return lambda: mallinfo2().sum_in_use()

    def trim(self) -> None:
        """Give free memory at the top of the heaps and whole free pages back: malloc_trim(3)."""
        self._trim(0)

    def counts(self) -> bool:
        """Return whether this count follows the malloc that the process really uses.

        With jemalloc, tcmalloc or the like preloaded, ``mallinfo2`` is still there and tells of a
        glibc heap that nobody uses.
        """
        for _ in range(_PROBE_ATTEMPTS):
            before_bytes = self.read_in_use()
            block = self._malloc(_PROBE_BYTES)
            held_bytes = self.read_in_use()
            self._free(block)
            after_bytes = self.read_in_use()
            rise_bytes, fall_bytes = held_bytes - before_bytes, held_bytes - after_bytes
            if min(rise_bytes, fall_bytes) >= _PROBE_BYTES:
                return True
        return False


def _declare(function: Any, result: Any, *arguments: Any) -> Any:
    function.restype, function.argtypes = result, arguments
    return function


def find_malloc() -> Glibc | None:
    """Return the process's malloc, or ``None`` where it can't tell what is in use."""
    try:
        glibc = Glibc()
    except (AttributeError, OSError, TypeError):
        return None
    return glibc if glibc.counts() else None


# -- The backend -----------------------------------------------------------------------------------


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
