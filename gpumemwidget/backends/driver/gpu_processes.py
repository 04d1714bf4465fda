"""Find the processes below this one and their kernels, and say whose the driver's pids are.

Workers of a ``DataLoader`` and ranks that a cell has launched take memory of their own. They are
read with psutil.

A process is named by its program and its script. Arguments may hold passwords, and reports are
saved with notebooks: they are left out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TypeVar

import psutil  # type: ignore[import-untyped]  # no types are published with it

from gpumemwidget.backends.protocol import ProcessesByBytes, ProcessSource, Relation
from gpumemwidget.model.devices import HOST, ChildProcess, DeviceState, ProcessUse, Reading

_T = TypeVar("_T")


class ProcessTree:
    """The operating system as a ``ProcessSource``."""

    def __init__(self, *, get_own_pid: Callable[[], int] = os.getpid) -> None:
        self._get_own_pid = get_own_pid
        #: True in the outermost pid namespace; ``None`` until it is read, once for the process.
        self._is_outermost: bool | None = None

    @property
    def own_pid(self) -> int:
        """The pid of this process."""
        return self._get_own_pid()

    def are_pids_certain(self, pids: Collection[int]) -> bool:
        """Return whether pids mean the same processes here and to the driver."""
        if not psutil.LINUX:
            return True
        if self._is_outermost is None:
            # The outermost pid namespace has this number on every Linux (PROC_PID_INIT_INO in
            # include/linux/proc_ns.h). In others the driver may count processes differently.
            link = Path(psutil.PROCFS_PATH, "self/ns/pid")
            self._is_outermost = str(_read(link.readlink, None)) == "pid:[4026531836]"
        if self._is_outermost:
            return True
        using_cuda = [pid for pid in pids if pid != self.own_pid and has_cuda_context(pid)]
        return bool(using_cuda) and not self._find_children().keys().isdisjoint(using_cuda)

    def list_children(self) -> tuple[ChildProcess, ...]:
        """Return the running processes below this one."""
        found = filter(None, map(_read_child, self._find_children().values()))
        return tuple(sorted(found, key=lambda child: child.pid))

    def describe(self, pids: Collection[int]) -> Mapping[int, tuple[Relation, str | None]]:
        """Return the relation and the name of each pid; see ``ProcessSource``."""
        children = self._find_children()
        found: dict[int, tuple[Relation, str | None]] = {}
        for pid in pids:
            process = children.get(pid) or _find_process(pid)
            relation: Relation = "child" if pid in children else "other"
            name = None if process is None else _name(process)
            found[pid] = ("own" if pid == self.own_pid else relation), name
        return found

    def _find_children(self) -> dict[int, psutil.Process]:
        own = _find_process(self.own_pid)
        if own is None:
            return {}
        children: list[psutil.Process] = _read(partial(own.children, recursive=True), [])
        return {child.pid: child for child in children}


def _read(ask: Callable[[], _T], unknown: _T) -> _T:
    """Return an answer of psutil's; unknown of a process that has ended, or is another user's."""
    try:
        return ask()
    except (psutil.Error, OSError, OverflowError):
        return unknown


def _find_process(pid: int) -> psutil.Process | None:
    return _read(lambda: psutil.Process(pid), None)


def _read_child(process: psutil.Process) -> ChildProcess | None:
    """Return a running child; ``None`` for one that has ended or is a zombie, without memory."""
    if _read(process.status, "") == psutil.STATUS_ZOMBIE or not process.is_running():
        return None
    memory = _read(process.memory_info, None)
    return ChildProcess(
        pid=process.pid,
        parent_pid=_read(process.ppid, 0),
        name=_name(process) or f"process {process.pid}",
        resident_bytes=None if memory is None else memory.rss,
    )


def _name(process: psutil.Process) -> str | None:
    return name_process(_read(process.cmdline, []), _read(process.name, ""))


def has_cuda_context(pid: int) -> bool:
    """Return whether a process has a file open that CUDA opens for a context, on Linux or WSL."""
    # psutil lists regular files only.
    folder = Path(psutil.PROCFS_PATH, str(pid), "fd")
    links: list[Path] = _read(lambda: list(folder.iterdir()), [])
    files = ("/dev/nvidia-uvm", "/dev/dxg")
    return any(str(_read(link.readlink, None)) in files for link in links)


# -- Whose the pids are ----------------------------------------------------------------------------


def add_processes(
    states: Sequence[DeviceState],
    listed: Mapping[str, ProcessesByBytes | None],
    source: ProcessSource,
) -> tuple[DeviceState, ...]:
    """Return the states with the processes that the driver lists on each device."""
    readings = {state.info.device: state.reading for state in states}
    known = _describe_listed(listed, readings, source)
    return tuple(
        replace(state, processes=_sort_processes(listed[state.info.device], known))
        for state in states
    )


def join_children(
    children: Sequence[ChildProcess],
    listed: Mapping[str, ProcessesByBytes | None],
    readings: Mapping[str, Reading | None],
    source: ProcessSource,
) -> tuple[ChildProcess, ...]:
    """Return the children with what the driver lists of each, by device."""
    known = _describe_listed(listed, readings, source) or {}
    found: dict[int, list[tuple[str, int | None]]] = {child.pid: [] for child in children}
    for device, processes in listed.items():
        for pid, n_bytes in processes or ():
            if pid in found and pid in known and known[pid][0] == "child":
                found[pid].append((device, n_bytes))
    return tuple(replace(child, devices=tuple(found[child.pid])) for child in children)


def _describe_listed(
    listed: Mapping[str, ProcessesByBytes | None],
    readings: Mapping[str, Reading | None],
    source: ProcessSource,
) -> Mapping[int, tuple[Relation, str | None]] | None:
    """Return the relation and the name of each listed process.

    Where the driver may count processes differently, as within a container, its pids are believed
    if a child shows that it does not, or this process is listed with as much as PyTorch has
    reserved.

    Returns:
        ``None`` where the driver's pids may mean other processes here.
    """
    pids = {pid for processes in listed.values() for pid, _ in processes or ()}
    if not source.are_pids_certain(pids):
        own = [
            (device, n_bytes)
            for device, processes in listed.items()
            for pid, n_bytes in processes or ()
            if pid == source.own_pid
        ]
        silent = [device for device, processes in listed.items() if processes is None]
        known = [reading for device, reading in readings.items() if device not in silent]
        if not has_reserved(own, filter(None, known)):
            return None
    return source.describe(pids)


def has_reserved(own: Iterable[tuple[str, int | None]], readings: Iterable[Reading]) -> bool:
    """Return whether what is listed for a process may be this one's: PyTorch has some of it.

    That is, as much as PyTorch has reserved, on each GPU where it has any.
    """
    listed = dict(own)
    enough = [
        (listed.get(reading.device) or 0) >= reading.reserved_bytes
        for reading in readings
        if reading.device != HOST and reading.reserved_bytes
    ]
    return bool(enough) and all(enough)


def _sort_processes(
    listed: ProcessesByBytes | None, known: Mapping[int, tuple[Relation, str | None]] | None
) -> tuple[ProcessUse, ...] | None:
    """Return this process first, then its children, then the others; each biggest first."""
    if listed is None or known is None:
        return None
    uses = [ProcessUse(pid, known[pid][1], known[pid][0], n_bytes) for pid, n_bytes in listed]
    order = ("own", "child", "other")
    uses.sort(key=lambda use: (order.index(use.relation), -(use.n_bytes or 0), use.pid))
    return tuple(uses)


# -- Jupyter's kernels ----------------------------------------------------------------------------


def find_kernel(pid: int) -> str | None:
    """Return the id of the kernel that a process is, or that it was started in.

    ``None`` for a process that belongs to no kernel, has ended, or can't be read.
    """
    process = _find_process(pid)
    if process is None:
        return None
    for ancestor in (process, *_read(process.parents, [])):
        kernel_id = parse_kernel_id(_read(ancestor.cmdline, []))
        if kernel_id is not None:
            return kernel_id
    return None


def parse_kernel_id(command: Sequence[str]) -> str | None:
    """Return the kernel's id in a kernel's command; ``None`` for any other command.

    Example:
        >>> parse_kernel_id(["python", "-m", "ipykernel_launcher", "-f", "/run/kernel-6f0e.json"])
        '6f0e'
    """
    # The file with a kernel's ports, which a Jupyter server passes to it; by the same id the
    # server and the front ends know the kernel:
    # https://jupyter-client.readthedocs.io/en/stable/kernels.html#connection-files.
    found = [re.search(r"kernel-([^/\\]+)\.json$", word) for word in command]
    return next((match[1] for match in found if match is not None), None)


# -- Names ----------------------------------------------------------------------------------------


def name_process(command: Sequence[str], thread_name: str = "") -> str | None:
    """Return a process's name in 60 characters at most: ``python train.py``.

    Args:
        command: the process's command line.
        thread_name: the main thread's name, which PyTorch's workers set.

    Returns:
        ``None`` where there is nothing to name it by.
    """
    # A title that the program has set itself is one text.
    words = list(command) if len(command) > 1 else " ".join(command).split()
    if thread_name == "pt_data_worker" or not any(words):
        # A data loader's worker, a thread of the system's kernel, or a process that shows no more.
        words = [thread_name]
    else:
        program = _strip_folders(words[0])
        is_python = re.fullmatch(r"(python|pypy)[0-9.]*(\.exe)?", program, re.IGNORECASE)
        words = ["python", *_find_started(words[1:])] if is_python else [program]
    text = "".join(character if character.isprintable() else " " for character in " ".join(words))
    name = " ".join(text.split())
    return (name if len(name) <= 60 else f"{name[:59].rstrip()}…") or None


def _find_started(words: Sequence[str]) -> list[str]:
    """Return what Python runs: a script, ``-m`` and a module, or ``-c``."""
    left = iter(words)
    for word in left:
        if word in ("-W", "-X", "--check-hash-based-pycs"):
            next(left, "")  # the option's value
        elif word in ("-m", "-c") or not word.startswith("-"):
            return [word, next(left, "")] if word == "-m" else [_strip_folders(word)]
    return []


def _strip_folders(path: str) -> str:
    name = PureWindowsPath(path).name if "\\" in path else PurePosixPath(path).name
    return name or path
