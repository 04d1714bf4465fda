"""The resident size and its high-water mark, from the kernel's own files.

``/proc/self/status`` tells both, and writing 5 to ``/proc/self/clear_refs`` sets the mark back to
the present (proc(5), Linux 4.0). The files are kept open and read in place: opening them each time
costs half as much again. Where there are no such files, psutil tells what it can.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # no types are published with it

__all__ = [
    "Resident",
    "ResidentFiles",
    "read_addresses",
    "read_available_elsewhere",
    "read_resident_elsewhere",
    "read_total_elsewhere",
]

#: Resident size and its high-water mark, in KiB; the mark is ``None`` where there is none.
Resident = tuple[int, "int | None"]

_FIRST_READ_BYTES = 4096
#: Far above any real one: a process in 65,536 groups has 600 KB.
_LONGEST_STATUS_BYTES = 4 * 1024 * 1024
_RESET_PEAK = b"5"
#: The two lines, which every kernel writes one below the other: found in one step, in every cell.
_MARK_AND_SIZE = re.compile(rb"\nVmHWM:\s*(\d+) kB\nVmRSS:\s*(\d+) kB")


class ResidentFiles:
    """This process's files under ``/proc``, held open.

    They belong to the process that opened them: after a fork, open new ones.

    Args:
        proc: where procfs is mounted.

    Raises:
        OSError: there is no status file that may be read.
        ValueError: it holds no resident size.
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
        """Whether the mark can be set back."""
        return self._clear_refs >= 0

    def read(self) -> Resident:
        """The resident size and its mark now.

        Raises:
            OSError: the file can't be read any more.
            ValueError: what it holds is not a process's status.
        """
        text = os.pread(self._status, _FIRST_READ_BYTES, 0)
        both = _MARK_AND_SIZE.search(text)
        if both is not None:
            return int(both[2]), int(both[1])
        resident_kib = _parse(text, b"\nVmRSS:")
        if resident_kib is None and len(text) == _FIRST_READ_BYTES:
            # The list of groups stands before it and can be long.
            text = os.pread(self._status, _LONGEST_STATUS_BYTES, 0)
            resident_kib = _parse(text, b"\nVmRSS:")
        if resident_kib is None:
            raise ValueError("no resident size in the process's status")
        return resident_kib, _parse(text, b"\nVmHWM:")

    def reset(self) -> bool:
        """Set the mark back to the present resident size; whether that was done."""
        if self._clear_refs < 0:
            return False
        try:
            os.write(self._clear_refs, _RESET_PEAK)
        except OSError:
            # Before Linux 4.0, or forbidden since it was opened: it will not work next time either.
            os.close(self._clear_refs)
            self._clear_refs = -1
            return False
        return True

    def close(self) -> None:
        """Close the files; twice is fine."""
        for descriptor in (self._status, self._clear_refs):
            if descriptor >= 0:
                os.close(descriptor)
        self._status = self._clear_refs = -1


def _parse(text: bytes, key: bytes) -> int | None:
    """The number behind a key of the status file: ``VmRSS:  1024 kB`` gives 1024."""
    start = text.find(key)
    if start < 0:
        return None
    start += len(key)
    end = text.find(b" kB", start)
    return int(text[start:end]) if end >= 0 else None


def read_addresses() -> int | None:
    """Bytes of the addresses that this process has, which is what ``ulimit -v`` counts."""
    try:
        return int(psutil.Process().memory_info().vms)
    except (psutil.Error, OSError):
        return None


def read_resident_elsewhere() -> Resident | None:
    """This process's resident size without procfs; it comes without a mark."""
    try:
        return psutil.Process().memory_info().rss // 1024, None
    except (psutil.Error, OSError):
        return None


def read_total_elsewhere() -> int | None:
    """The machine's memory in bytes without procfs."""
    try:
        return int(psutil.virtual_memory().total)
    except (psutil.Error, OSError):
        return None


def read_available_elsewhere() -> int | None:
    """What the machine has available, in bytes, without procfs."""
    try:
        return int(psutil.virtual_memory().available)
    except (psutil.Error, OSError):
        return None
