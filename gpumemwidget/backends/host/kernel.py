"""Read what the kernel tells of this process's memory: resident size, its mark, and limits.

``/proc/self/status`` tells both, and writing 5 to ``/proc/self/clear_refs`` sets the mark back to
the present (proc(5), Linux 4.0). The files are kept open and read in place: opening them each time
costs half as much again. Where there are no such files, psutil tells what it can.

The same mark is ``ru_maxrss`` of ``resource.getrusage``. So the marks that were wiped are
remembered, and ``resource.getrusage`` is overlaid by a function that returns the highest.

In a container the machine's total is not the process's: the kernel kills it at its cgroup's limit.
Groups nest and each has its own limit, so every level counts. Version 1 and version 2 are read, and
a hybrid of both. https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import psutil  # type: ignore[import-untyped]  # no types are published with it

from gpumemwidget.backends.patching import Patch

#: Resident size and its high-water mark, in KiB; the mark is ``None`` where there is none.
Resident = tuple[int, "int | None"]

#: More than a status file has: its longest line lists the user's groups.
_STATUS_BYTES = 16 * 1024
_RESET_PEAK = b"5"
#: The two lines, which every kernel writes one below the other; some sandboxes leave the mark out.
_MARK_AND_SIZE = re.compile(rb"\n(?:VmHWM:\s*(\d+) kB\n)?VmRSS:\s*(\d+) kB")
#: Limits from here on stand for none: version 1 has no word for that.
_NO_LIMIT_BYTES = 1 << 62


class ResidentFiles:
    """Files of this process under ``/proc``, held open.

    The files tell of the process that opened them: after a fork, open new ones.

    Args:
        proc: where procfs is mounted.

    Raises:
        OSError: there is no status file that may be read.
        ValueError: the status file holds no resident size.
    """

    def __init__(self, proc: Path) -> None:
        self._clear_refs = -1
        self._status = os.open(proc / "self" / "status", os.O_RDONLY)
        try:
            self.read()
        except (OSError, ValueError):
            self.close()
            raise
        try:
            self._clear_refs = os.open(proc / "self" / "clear_refs", os.O_WRONLY)
        except OSError:
            # A kernel without it, or a container that mounts it read-only: no resets then.
            self._clear_refs = -1

    @property
    def resets(self) -> bool:
        """True if the mark can be set back."""
        return self._clear_refs >= 0

    def read(self) -> Resident:
        """Return the resident size and its mark now.

        Raises:
            OSError: the file can't be read any more.
            ValueError: the file holds no process's status.
        """
        found = _MARK_AND_SIZE.search(os.pread(self._status, _STATUS_BYTES, 0))
        if found is None:
            raise ValueError("no resident size in the process's status")
        return int(found[2]), None if found[1] is None else int(found[1])

    def reset(self) -> bool:
        """Set the mark back to the present resident size; return whether that was done."""
        try:
            os.write(self._clear_refs, _RESET_PEAK)
        except OSError:
            # Before Linux 4.0, or forbidden since the file was opened: it will not work again.
            os.close(self._clear_refs)
            self._clear_refs = -1
            return False
        return True

    def close(self) -> None:
        """Close the files. May be called twice."""
        for descriptor in (self._status, self._clear_refs):
            if descriptor >= 0:
                os.close(descriptor)
        self._status = self._clear_refs = -1


class MaxrssOverlay:
    """An overlay of ``resource.getrusage`` that keeps ``ru_maxrss`` at the marks that we wiped."""

    #: The place of ``ru_maxrss`` in ``struct_rusage``.
    _PLACE = 2

    def __init__(self) -> None:
        self._patch = Patch()
        #: The highest mark that was wiped, in KiB as Linux counts ``ru_maxrss``, and the pid of its
        #: process: a forked child begins with marks of its own.
        self._wiped = (0, 0)

    def remember(self, mark_kib: int) -> None:
        """Note a high-water mark, in KiB, that is about to be wiped, and lay the overlay."""
        import resource  # noqa: PLC0415 - Windows has no such module

        pid = os.getpid()
        if pid != self._wiped[0] or mark_kib > self._wiped[1]:
            self._wiped = (pid, mark_kib)
        if not self._patch.is_applied:
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
            values = list(usage)
            values[self._PLACE] = mark_kib
            return resource.struct_rusage(values)

        getrusage.__module__ = original.__module__
        return getrusage


def read_resident_elsewhere() -> Resident:
    """Return this process's resident size without procfs, which comes without a mark."""
    return psutil.Process().memory_info().rss // 1024, None


# -- What there is ---------------------------------------------------------------------------------


def read_machine_bytes() -> tuple[int, int]:
    """Return the machine's memory, and how much of it is available."""
    memory = psutil.virtual_memory()
    return int(memory.total), int(memory.available)


@dataclass(frozen=True, slots=True)
class LimitedGroup:
    """A control group with a limit, which is read once: it seldom changes while a process lives."""

    limit_bytes: int
    usage_file: Path
    stat_file: Path
    #: The line of the statistics with the page cache that is given up first, subgroups included.
    cache_key: str

    def read_room_bytes(self) -> int | None:
        """Return how much more fits under the limit now; ``None`` where that can't be read.

        Page cache that the kernel drops before it kills counts as free, as in ``kubectl top``.
        """
        usage_bytes = _parse_number(_read_text(self.usage_file).strip())
        if usage_bytes is None:
            return None
        for line in _read_text(self.stat_file).splitlines():
            name, _, value = line.partition(" ")
            if name == self.cache_key:
                usage_bytes = max(0, usage_bytes - (_parse_number(value) or 0))
        return max(0, self.limit_bytes - usage_bytes)


def list_limited_groups(proc: Path, cgroup: Path) -> tuple[LimitedGroup, ...]:
    """Return the groups with a limit, from the process's own up to the one that is mounted.

    Args:
        proc: where procfs is mounted.
        cgroup: where the control groups are mounted.
    """
    return tuple(_list_limited(proc, cgroup))


def _list_limited(proc: Path, cgroup: Path) -> Iterator[LimitedGroup]:
    for line in _read_text(proc / "self" / "cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, separator, path = rest.partition(":")
        if not separator:
            continue
        base = cgroup
        limit_file, usage_file, cache_key = "memory.max", "memory.current", "inactive_file"
        if "memory" in controllers.split(","):
            base = cgroup / "memory"
            limit_file, usage_file = "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache_key = "total_inactive_file"
        elif number != "0" or controllers:
            continue
        # Without a cgroup namespace a container reads the host's path here, which its own mount
        # does not have; with ".." the group is outside the mount. Both times the mount itself is
        # the innermost group that can be read, and files that aren't there are passed over.
        parts = [part for part in PurePosixPath(path).parts if part != "/"]
        if ".." in parts:
            parts = []
        for depth in range(len(parts), -1, -1):
            folder = base.joinpath(*parts[:depth])
            limit_bytes = _parse_number(_read_text(folder / limit_file).strip())
            if limit_bytes is not None and limit_bytes < _NO_LIMIT_BYTES:
                stat_file = folder / "memory.stat"
                yield LimitedGroup(limit_bytes, folder / usage_file, stat_file, cache_key)


def _read_text(path: Path) -> str:
    """Return the file's text; ``""`` where it can't be read, as kernels differ in these files."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _parse_number(text: str) -> int | None:
    """Return the number in a text; ``None`` for "max", and for rubbish."""
    return int(text) if text.isascii() and text.isdigit() else None
