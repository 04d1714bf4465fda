"""Read this process's own memory: the device that is always there beside the GPUs.

malloc's count is *allocated*, the resident size is *reserved*, and the kernel's high-water mark
gives an exact peak.

glibc keeps the count, read with ``mallinfo2`` (2.33 and later). ``/proc/self/status`` has the
resident size and its mark, and writing 5 to ``/proc/self/clear_refs`` sets the mark back to the
present (proc(5), Linux 4.0). Where there are no such files, psutil has the resident size. The same
mark is ``ru_maxrss`` of ``resource.getrusage``, so the marks that were wiped are remembered, and an
overlay of that function returns the highest.

In a container the machine's total is not the process's: the kernel kills it at its cgroup's limit.
Groups nest and each has its own limit, so every level counts:
https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]  # no types are published with it

from gpumemwidget.backends.hooks import Patch
from gpumemwidget.backends.protocol import MemoryBackend
from gpumemwidget.model.devices import HOST, DeviceInfo, PeakIs, Reading

#: Resident size and its high-water mark, in KiB; the mark is ``None`` where there is none.
Resident = tuple[int, "int | None"]

#: The two lines, which every kernel writes one below the other; some sandboxes leave the mark out.
_MARK_AND_SIZE = re.compile(rb"\n(?:VmHWM:\s*(\d+) kB\n)?VmRSS:\s*(\d+) kB")

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
        return self.uordblks + self.hblkhd  # from the heaps, and mapped one by one


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

        With jemalloc, tcmalloc or the like preloaded, ``mallinfo2`` is still there and counts a
        glibc heap that nobody uses.
        """
        # Few enough bytes to come from the heap: freeing a block that malloc took from ``mmap``
        # would raise its threshold for good (mallopt(3), M_MMAP_THRESHOLD).
        n_bytes = 64 * 1024
        for _ in range(5):  # Threads outside Python may free memory in the middle of a probe.
            before_bytes = self.read_in_use()
            block = self._malloc(n_bytes)
            held_bytes = self.read_in_use()
            self._free(block)
            if held_bytes - max(before_bytes, self.read_in_use()) >= n_bytes:
                return True
        return False


def _declare(function: Any, result: Any, *arguments: Any) -> Any:
    function.restype, function.argtypes = result, arguments
    return function


def find_malloc() -> Glibc | None:
    """Return the process's malloc, or ``None`` where it can't count what is in use."""
    try:
        glibc = Glibc()
    except (AttributeError, OSError, TypeError):
        return None
    return glibc if glibc.counts() else None


# -- resource.getrusage ----------------------------------------------------------------------------


class _MaxrssOverlay:
    """An overlay of ``resource.getrusage`` that keeps ``ru_maxrss`` at the marks that we wiped."""

    def __init__(self) -> None:
        self._patch = Patch()
        #: The pid of a process, and the highest of its marks that was wiped, in KiB: a forked child
        #: begins with marks of its own.
        self._wiped = (0, 0)

    def remember(self, mark_kib: int) -> None:
        """Note a high-water mark, in KiB, that is about to be wiped, and lay the overlay."""
        self._wiped = (os.getpid(), max(mark_kib, self.read_wiped_kib()))
        if not self._patch.is_applied:
            import resource  # noqa: PLC0415 - Windows has no such module

            self._patch.replace(resource, "getrusage", self._wrap)

    def read_wiped_kib(self) -> int:
        """Return the highest mark of this process that was wiped, in KiB; 0 where none was."""
        pid, mark_kib = self._wiped
        return mark_kib if pid == os.getpid() else 0

    def take_away(self) -> None:
        """Give ``resource.getrusage`` back, and forget the marks. May be called twice."""
        self._patch.undo()
        self._wiped = (0, 0)

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        import resource  # noqa: PLC0415 - Windows has no such module

        def getrusage(who: int, /) -> resource.struct_rusage:
            usage: resource.struct_rusage = original(who)
            mark_kib = self.read_wiped_kib()
            # A thread's ru_maxrss is the whole process's too; only the children's is another.
            if who == resource.RUSAGE_CHILDREN or mark_kib <= usage.ru_maxrss:
                return usage
            return resource.struct_rusage([*usage[:2], mark_kib, *usage[3:]])

        getrusage.__module__ = original.__module__
        return getrusage


# -- Control groups --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LimitedGroup:
    """A control group with a limit, which is read once: it seldom changes while a process lives."""

    folder: Path
    limit_bytes: int

    def read_room_bytes(self) -> int | None:
        """Return how much more fits under the limit now; ``None`` where that can't be read.

        Page cache that the kernel drops before it kills counts as free, as in ``kubectl top``.
        """
        usage_bytes = _parse_number(_read_text(self.folder / "memory.current"))
        if usage_bytes is None:
            return None
        statistics = _read_text(self.folder / "memory.stat")
        cache = re.search(r"^inactive_file (\d+)$", statistics, re.MULTILINE)
        return max(0, self.limit_bytes - max(0, usage_bytes - (int(cache[1]) if cache else 0)))


def list_limited_groups(proc: Path, cgroup: Path) -> Iterator[LimitedGroup]:
    """Yield the groups with a limit, from the process's own up to the one that is mounted."""
    groups = _read_text(proc / "self" / "cgroup")
    for path in re.findall(r"^0::/(.*)$", groups, re.MULTILINE):
        # Without a cgroup namespace a container reads the host's path here, which its own mount
        # does not have; with ".." the group is outside the mount. Both times the mount itself is
        # the innermost group that can be read, and files that aren't there are passed over.
        parts = [part for part in path.split("/") if part]
        for depth in range(0 if ".." in parts else len(parts), -1, -1):
            folder = cgroup.joinpath(*parts[:depth])
            limit_bytes = _parse_number(_read_text(folder / "memory.max"))
            if limit_bytes is not None:
                yield LimitedGroup(folder, limit_bytes)


def _read_text(path: Path) -> str:
    """Return the file's text; ``""`` where it can't be read, as kernels differ in these files."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def list_mapped_files() -> list[tuple[int, int]]:
    """Return the address ranges where this process has files or shared memory mapped (Linux)."""
    # A mapping with a file behind it, proc_pid_maps(5): its address, and that beyond its last.
    found = re.findall(
        r"^([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \d+ +/",
        _read_text(Path("/proc/self/maps")),
        re.MULTILINE,
    )
    return [(int(first, 16), int(end, 16)) for first, end in found]


def _parse_number(text: str) -> int | None:
    """Return the number in a text; ``None`` for "max", and for rubbish."""
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() else None


# -- Files of procfs -------------------------------------------------------------------------------


class _ProcFile:
    """A file of procfs that stays open: opening it for each reading would cost half as much again.

    A program may close all files that it knows nothing of, as a daemon does, and its own next file
    gets the number: that one must be neither written to nor closed.

    Raises:
        OSError: the file can't be opened.
    """

    def __init__(self, path: Path, flags: int) -> None:
        self._descriptor = os.open(path, flags)
        self._stat = os.fstat(self._descriptor)

    @property
    def is_open(self) -> bool:
        """True unless the program has closed the descriptor, or another file has got it."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), self._stat)
        except OSError:
            return False

    def close(self) -> None:
        """Close the file, if it still is this one."""
        if self.is_open:
            os.close(self._descriptor)

    def read(self) -> bytes:
        """Return the file's first 16 KiB, or ``b""``; the longest line lists the user's groups."""
        try:
            return os.pread(self._descriptor, 16 * 1024, 0)
        except OSError:
            return b""

    def write(self, data: bytes) -> bool:
        """Write some bytes, and return whether that was done."""
        try:
            return self.is_open and os.write(self._descriptor, data) == len(data)
        except OSError:
            return False


def _open(path: Path, flags: int) -> _ProcFile | None:
    try:
        return _ProcFile(path, flags)
    except OSError:
        return None


# -- The backend -----------------------------------------------------------------------------------


class HostBackend(MemoryBackend):
    """Process memory as a ``MemoryBackend``.

    * *allocated* is what glibc's malloc has handed out: tensors and arrays, but not Python's small
      objects, which live in arenas that Python maps itself. ``None`` with another malloc.
    * *reserved* is the resident size. Its peak is the kernel's own mark ("exact", to the few pages
      for each CPU by which the kernel lets it trail) where Linux lets us reset that, else the
      highest that was seen ("sampled"). Once somebody else has reset it, peaks are "at least".
    * The peak of *allocated* is unknown: glibc keeps no mark of it.

    Args:
        proc: where procfs is mounted.
        cgroup: where the control groups are mounted.
        find_malloc: finds the malloc that can count what is in use.
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
        self._maxrss = _MaxrssOverlay()
        self._info: DeviceInfo | None = None
        self._groups: tuple[LimitedGroup, ...] = ()
        self._is_in_span = False
        self._is_closed = False
        self._begin_process()

    def _begin_process(self) -> None:
        self._pid = os.getpid()
        # A forked child opens its own, as its copies are the parent's.
        self._status: _ProcFile | None = None
        self._clear_refs: _ProcFile | None = None
        if not self._is_closed:
            self._status = _open(self._proc / "self" / "status", os.O_RDONLY)
            self._clear_refs = _open(self._proc / "self" / "clear_refs", os.O_WRONLY)
        self._lock = threading.Lock()
        #: The highest known resident size, within the span and over all spans.
        self._seen_kib = self._highest_kib = 0
        #: True if the kernel's mark counts from the span's start.
        self._has_mark = True
        #: True if somebody else has reset the mark, within the span or ever.
        self._is_cut = self._is_in_span
        self._was_ever_cut = False

    def _lock_of_this_process(self) -> threading.Lock:
        """Return the lock; a forked child starts anew, as its copy of the lock may be held.

        The marks of a running span were the parent's; the child's own are cut short.
        """
        if os.getpid() != self._pid:
            self._begin_process()
        return self._lock

    def list_devices(self) -> tuple[DeviceInfo, ...]:
        """Return the host; its total is the machine's memory, or its control group's limit."""
        if self._info is None:
            self._groups = tuple(list_limited_groups(self._proc, self._cgroup))
            total_bytes = int(psutil.virtual_memory().total)
            limits = (group.limit_bytes for group in self._groups)
            self._info = DeviceInfo(HOST, "host memory", min([total_bytes, *limits]))
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
            resident_kib, mark_kib = self._read_resident()
            in_use_bytes = self._count()
            self._is_in_span = True
            self._is_cut = False
            self._seen_kib = resident_kib
            self._has_mark = mark_kib is not None and self._reset_mark(mark_kib)
            # The mark is the resident size now; another read would show no more.
            return (self._measure((resident_kib, resident_kib), in_use_bytes),)

    def read_exact(self) -> tuple[Reading, ...]:
        """Return the memory now, with the peak since the span began."""
        with self._lock_of_this_process():
            return (self._measure(self._read_resident(), self._count()),)

    def read_as_user(self) -> tuple[Reading, ...]:
        """Return the memory now, with the peak since the process began.

        The user has no call of PyTorch's for that peak; ``resource.getrusage`` has it.
        """
        with self._lock_of_this_process():
            resident = self._read_resident()
            reading = self._measure(resident, self._count_often())
            peak_kib = self._highest_kib
            peak_is: PeakIs = "sampled"
            if resident[1] is not None:
                peak_kib = max(peak_kib, resident[1], self._maxrss.read_wiped_kib())
                peak_is = "at least" if self._was_ever_cut else "exact"
        return (replace(reading, reserved_peak_bytes=peak_kib << 10, peak_is=peak_is),)

    def find_counter(self) -> Callable[[], int] | None:
        """Return a call that gives the bytes in use: 0.3 µs; ``None`` with another malloc."""
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
        available_bytes = int(psutil.virtual_memory().available)
        return min(info.total_bytes, available_bytes, *known), info.total_bytes

    def close(self) -> None:
        """Give ``resource.getrusage`` back; readings go on, less exactly."""
        with self._lock_of_this_process():
            self._is_closed = True
            for file in (self._status, self._clear_refs):
                if file is not None:
                    file.close()
            self._status = self._clear_refs = None
            self._maxrss.take_away()

    # -- The kernel's figures ----------------------------------------------------------------------

    def _read_resident(self) -> Resident:
        status = b"" if self._status is None else self._status.read()
        found = _MARK_AND_SIZE.search(status)
        if found is None:
            return psutil.Process().memory_info().rss >> 10, None
        return int(found[2]), None if found[1] is None else int(found[1])

    def _reset_mark(self, mark_kib: int) -> bool:
        """Set the mark back to the present resident size; return whether that was done."""
        if self._clear_refs is None:
            return False  # Before Linux 4.0, or a container that mounts it read-only.
        # The mark is remembered before it is wiped, so that nobody sees it missing.
        self._maxrss.remember(mark_kib)
        return self._clear_refs.write(b"5")

    def _measure(self, resident: Resident, in_use_bytes: int | None) -> Reading:
        resident_kib, mark_kib = resident
        self._seen_kib = max(self._seen_kib, resident_kib)
        peak_is: PeakIs = "sampled"
        if mark_kib is not None and self._has_mark:
            if mark_kib + self._tolerance_kib < self._seen_kib:
                self._is_cut = self._was_ever_cut = True
            peak_is = "at least" if self._is_cut else "exact"
            self._seen_kib = max(self._seen_kib, mark_kib)
        self._highest_kib = max(self._highest_kib, self._seen_kib)
        peak_bytes = self._seen_kib << 10
        return Reading(HOST, in_use_bytes, resident_kib << 10, None, peak_bytes, peak_is)

    # -- malloc's count ----------------------------------------------------------------------------

    def _count(self) -> int | None:
        """Return malloc's count, however long that takes."""
        return None if self._malloc is None else self._malloc.read_in_use()

    def _count_often(self) -> int | None:
        if self._malloc is None or self._timer() < self._count_again_at_s:
            return None
        start_s = self._cpu_timer()
        in_use_bytes = self._malloc.read_in_use()
        # The thread's own work: on a busy machine its waiting would look like a slow malloc.
        cost_s = self._cpu_timer() - start_s
        if cost_s > 0.001:
            # A walk over a fragmented heap, which stops malloc for everybody, may take a hundredth
            # of the time.
            self._count_again_at_s = self._timer() + 100 * cost_s
        return in_use_bytes


def _mark_tolerance_kib() -> int:
    """Return how far a mark may trail the resident size that was read just before, in KiB.

    The kernel counts pages for each CPU apart and adds them up in batches (percpu_counter, Linux
    6.2), or for each thread, 64 at a time, before that; reading adds up more than marking does.
    """
    n_cpus = os.cpu_count() or 1
    page_kib = 4
    return n_cpus * max(64, 2 * n_cpus) * page_kib
