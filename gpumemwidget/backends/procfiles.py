"""What the operating system tells of one process: from ``/proc``, or by psutil where there is none.

A process may end at any moment, between two lines here too. What it no longer tells is ``None``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil  # type: ignore[import-untyped]  # no types are published with it

__all__ = ["ProcFiles", "ProcessFacts", "ProcessReader", "PsutilReader", "find_reader"]

#: Longer command lines are read so far: names are cut at a fraction of it.
_LONGEST_COMMAND_BYTES = 4096
#: The namespace of the numbers that the machine itself counts by (PROC_PID_INIT_INO in Linux).
_OUTERMOST = "pid:[4026531836]"
#: Opened by CUDA for a context, and by nothing that only asks the driver; WSL has the other.
_GPU_FILES = ("/dev/nvidia-uvm", "/dev/dxg")


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """A process as it is now."""

    pid: int
    parent_pid: int
    #: The number of its session's leader; 0 where that is unknown.
    session: int
    #: When it began, on a clock of the system's own: with the number it is the process's identity.
    start: float
    #: The name of its main thread, in 15 characters.
    thread_name: str
    #: It has ended, and nobody has asked how.
    is_zombie: bool


class ProcessReader(Protocol):
    """Where processes are read."""

    def list_pids(self) -> set[int]:
        """The numbers of all processes that can be seen."""
        ...

    def read(self, pid: int) -> ProcessFacts | None:
        """A process; ``None`` where there is none of this number."""
        ...

    def read_command(self, pid: int) -> Sequence[str]:
        """What it was started with; ``()`` where that can't be read."""
        ...

    def read_resident_bytes(self, pid: int) -> int | None:
        """Its resident size, shared pages included."""
        ...

    def uses_gpu(self, pid: int) -> bool | None:
        """Whether it has opened what CUDA opens; ``None`` where that can't be read."""
        ...

    def are_numbers_the_machines(self) -> bool:
        """Whether these numbers are certain to be those by which drivers count."""
        ...


class ProcFiles:
    """Processes as Linux shows them.

    Args:
        proc: where procfs is mounted.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = str(proc)
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")

    def list_pids(self) -> set[int]:
        """All folders that are numbers."""
        try:
            return {int(name) for name in os.listdir(self._proc) if name.isdigit()}  # noqa: PTH208 - a third of the time
        except OSError:
            return set()

    def read(self, pid: int) -> ProcessFacts | None:
        """Its ``stat``, see proc(5); some 15 µs."""
        text = self._read(pid, "stat")
        # The thread's name stands in brackets and may hold some itself.
        start, end = text.find(b"("), text.rfind(b")")
        fields = text[end + 1 :].split()
        try:
            return ProcessFacts(
                pid=pid,
                parent_pid=int(fields[1]),
                session=int(fields[3]),
                start=float(fields[19]),
                thread_name=text[start + 1 : end].decode("utf-8", "replace"),
                is_zombie=fields[0] in (b"Z", b"X"),
            )
        except (IndexError, ValueError):
            return None  # nothing was there to be read, or half of it

    def read_command(self, pid: int) -> Sequence[str]:
        """Its ``cmdline``; programs may have written another text there."""
        text = self._read(pid, "cmdline").rstrip(b"\0")
        return text.decode("utf-8", "replace").split("\0") if text else ()

    def read_resident_bytes(self, pid: int) -> int | None:
        """Its ``statm``."""
        fields = self._read(pid, "statm").split()
        try:
            return int(fields[1]) * self._page_bytes
        except (IndexError, ValueError):
            return None

    def uses_gpu(self, pid: int) -> bool | None:
        """Whether one of its open files is CUDA's; only a process of the same user tells."""
        folder = Path(self._proc, str(pid), "fd")
        try:
            names = list(folder.iterdir())
        except OSError:
            return None
        for name in names:
            try:
                if str(name.readlink()) in _GPU_FILES:
                    return True
            except OSError:
                continue  # closed since it was listed
        return False

    def are_numbers_the_machines(self) -> bool:
        """True outside of containers."""
        try:
            return str(Path(self._proc, "self/ns/pid").readlink()) == _OUTERMOST
        except OSError:
            return False

    def _read(self, pid: int, name: str) -> bytes:
        try:
            file = os.open(f"{self._proc}/{pid}/{name}", os.O_RDONLY)
        except OSError:
            return b""  # gone, or another user's where these are hidden
        try:
            return os.read(file, _LONGEST_COMMAND_BYTES)
        except OSError:
            return b""
        finally:
            os.close(file)


class PsutilReader:
    """Processes as psutil shows them, on systems without procfs."""

    def list_pids(self) -> set[int]:
        """All processes."""
        try:
            return set(psutil.pids())
        except (psutil.Error, OSError):
            return set()

    def read(self, pid: int) -> ProcessFacts | None:
        """Some system calls."""
        try:
            process = psutil.Process(pid)
            with process.oneshot():
                return ProcessFacts(
                    pid=pid,
                    parent_pid=process.ppid(),
                    session=0,
                    start=process.create_time(),
                    thread_name="",
                    is_zombie=process.status() == psutil.STATUS_ZOMBIE,
                )
        except (psutil.Error, OSError):
            return None

    def read_command(self, pid: int) -> Sequence[str]:
        """Its command line, or its program's name where that is all there is."""
        try:
            process = psutil.Process(pid)
            return list(process.cmdline()) or [str(process.name())]
        except (psutil.Error, OSError):
            return ()

    def read_resident_bytes(self, pid: int) -> int | None:
        """Its resident size."""
        try:
            return int(psutil.Process(pid).memory_info().rss)
        except (psutil.Error, OSError):
            return None

    def uses_gpu(self, pid: int) -> bool | None:  # noqa: ARG002 - the protocol's
        """``None``: there is no cheap sign of it."""
        return None

    def are_numbers_the_machines(self) -> bool:
        """True: these systems have one numbering."""
        return True


def find_reader(proc: Path = Path("/proc")) -> ProcessReader:
    """Procfs where it is mounted, psutil elsewhere."""
    if (proc / "self" / "stat").exists():
        return ProcFiles(proc)
    return PsutilReader()
