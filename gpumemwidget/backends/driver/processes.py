"""Find the processes below this one, and the relation of any process on a device to it.

Workers of a ``DataLoader`` and ranks that a cell has launched take memory of their own. They are
read with psutil. A process that was once below this one counts as its child until it ends, also
after its parent has ended and another process has adopted it.

A process is named as a person would, by its command line. Command lines may hold passwords, and
reports are saved with notebooks: other people's processes are named by the program and its script
alone, and secrets are left out everywhere.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TypeVar

import psutil  # type: ignore[import-untyped]  # no types are published with it

from gpumemwidget.backends.protocol import Relation
from gpumemwidget.model.devices import ChildProcess

_T = TypeVar("_T")

#: The link target of the outermost pid namespace on every Linux (PROC_PID_INIT_INO in the kernel's
#: include/linux/proc_ns.h). In any other namespace the driver may count processes differently.
_OUTERMOST_PID_NAMESPACE = "pid:[4026531836]"
#: Files that CUDA opens for a context, and that a program which only queries the driver does not;
#: the second one is WSL's.
_CUDA_CONTEXT_FILES = ("/dev/nvidia-uvm", "/dev/dxg")
#: Exceptions of psutil for a process that has just ended, or that belongs to another user.
_UNREADABLE = (psutil.Error, OSError)


class ProcessTree:
    """The operating system as a ``ProcessSource``.

    Args:
        get_own_pid: returns the pid of the process whose memory is shown; a fork changes it.
    """

    def __init__(self, *, get_own_pid: Callable[[], int] = os.getpid) -> None:
        self._get_own_pid = get_own_pid
        self._forget_all()

    def _forget_all(self) -> None:
        self._lock = threading.Lock()
        self._pid = self._get_own_pid()
        self._children: dict[int, psutil.Process] = {}

    @property
    def own_pid(self) -> int:
        """The pid of this process."""
        return self._get_own_pid()

    def are_pids_certain(self, pids: Collection[int]) -> bool:
        """Return whether pids mean the same processes here and to the driver."""
        if not psutil.LINUX:
            return True
        namespace = _read(lambda: Path(psutil.PROCFS_PATH).joinpath("self/ns/pid").readlink(), None)
        if str(namespace) == _OUTERMOST_PID_NAMESPACE:
            return True
        with self._lock_of_this_process():
            self._update()
            return any(pid in self._children and _has_cuda_context(pid) for pid in pids)

    def list_children(self) -> tuple[ChildProcess, ...]:
        """Return the running processes below this one."""
        with self._lock_of_this_process():
            self._update()
            found = filter(None, map(_read_child, self._children.values()))
            return tuple(sorted(found, key=lambda child: child.pid))

    def describe(self, pids: Collection[int]) -> Mapping[int, tuple[Relation, str | None]]:
        """Return the relation and the name of each pid; see ``ProcessSource``."""
        with self._lock_of_this_process():
            self._update()
            return {pid: self._describe(pid) for pid in pids}

    def _describe(self, pid: int) -> tuple[Relation, str | None]:
        if pid in self._children:
            return "child", _name_child(self._children[pid])
        process = _find_process(pid)
        # A command line may hold the secrets of others: only children are shown with arguments.
        name = None if process is None else name_process(*_read_command(process))
        return ("own" if pid == self._pid else "other"), name

    def _lock_of_this_process(self) -> threading.Lock:
        """Return the lock; a forked child starts anew, as its copy of the lock may be held."""
        if self._get_own_pid() != self._pid:
            self._forget_all()
        return self._lock

    def _update(self) -> None:
        """Find new children, and remove ended ones."""
        for pid, process in list(self._children.items()):
            if not process.is_running():  # also if another process has this pid by now
                del self._children[pid]
        own = _find_process(self._pid)
        if own is None:
            return
        adopted = [child for child in self._children.values() if self._is_adopted(child)]
        for root in (own, *adopted):
            for process in _read(partial(root.children, recursive=True), []):
                if process.pid != self._pid:
                    self._children.setdefault(process.pid, process)

    def _is_adopted(self, child: psutil.Process) -> bool:
        return _read(child.ppid, 0) not in (self._pid, *self._children)


def _read(ask: Callable[[], _T], unknown: _T) -> _T:
    try:
        return ask()
    except _UNREADABLE:
        return unknown


def _find_process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except (*_UNREADABLE, OverflowError):
        return None


def _read_child(process: psutil.Process) -> ChildProcess | None:
    """Return a running child; ``None`` for one that has ended or is a zombie, without memory."""
    if _read(process.status, "") == psutil.STATUS_ZOMBIE or not process.is_running():
        return None
    memory = _read(process.memory_info, None)
    return ChildProcess(
        pid=process.pid,
        parent_pid=_read(process.ppid, 0),
        name=_name_child(process) or f"process {process.pid}",
        resident_bytes=None if memory is None else memory.rss,
    )


def _read_command(process: psutil.Process) -> tuple[list[str], str]:
    """Return a process's command line, and its main thread's name."""
    return _read(process.cmdline, []), _read(process.name, "")


def _name_child(process: psutil.Process) -> str | None:
    command, thread_name = _read_command(process)
    parent = _find_process(_read(process.ppid, 0)) if command else None
    is_forked = parent is not None and _read(parent.cmdline, []) == command
    return name_process(command, thread_name, with_arguments=not is_forked, is_forked=is_forked)


def _has_cuda_context(pid: int) -> bool:
    """Return whether a process has one of CUDA's files open; psutil lists regular files only."""
    links: list[Path] = _read(
        lambda: list(Path(psutil.PROCFS_PATH).joinpath(str(pid), "fd").iterdir()), []
    )
    return any(str(_read(link.readlink, None)) in _CUDA_CONTEXT_FILES for link in links)


# -- Names ----------------------------------------------------------------------------------------

#: Maximum length of a name, in characters.
_MAX_LENGTH = 60
_PYTHON = re.compile(r"(python|pypy)[0-9.]*(\.exe)?", re.IGNORECASE)
#: Python's options that are followed by a value.
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
_SECRET = re.compile(r"token|passw|passphrase|secret|key|credential|auth|://[^/]*@", re.IGNORECASE)
#: The name that PyTorch gives the main thread of a data loader's worker.
_DATA_WORKER = "pt_data_worker"


def name_process(
    command: Sequence[str],
    thread_name: str = "",
    *,
    with_arguments: bool = False,
    is_forked: bool = False,
) -> str | None:
    """Return a process's name in some 60 characters: ``python train.py --lr 0.1``.

    Args:
        command: the process's command line.
        thread_name: the main thread's name, which PyTorch's workers set.
        with_arguments: name the arguments behind the script too.
        is_forked: the process has its parent's command, for it was forked without ``exec``.

    Returns:
        ``None`` where there is nothing to name it by.
    """
    if thread_name == _DATA_WORKER:
        return thread_name
    words = [_clean(word) for word in command]
    if not any(words):
        # A thread of the system's kernel, or a process that shows no more.
        return _shorten(_clean(thread_name)) or None
    if len(words) == 1 and " " in words[0].strip():
        # The program has set its own title.
        return _shorten(_leave_out_secrets(words[0]))
    program = _strip_folders(words[0])
    if _PYTHON.fullmatch(program):
        started, arguments = _split_python(words[1:])
    else:
        started, arguments = [program], words[1:]
    shown = _leave_out_secrets(" ".join(arguments)) if with_arguments else ""
    suffix = " (forked)" if is_forked else ""
    name = _shorten(" ".join([*started, shown]), _MAX_LENGTH - len(suffix))
    return f"{name}{suffix}" if name else None


def _split_python(words: list[str]) -> tuple[list[str], list[str]]:
    """Return what Python runs (a script, ``-m`` and a module, ``-c``), and what stands behind."""
    place = 0
    while words[place : place + 1] and words[place].startswith("-"):
        if words[place] == "-c":
            # The code counts as an argument: the user knows what they typed, and of others' code
            # nothing is shown.
            return ["python", "-c"], words[place + 1 :]
        if words[place] == "-m":
            return ["python", *words[place : place + 2]], words[place + 2 :]
        place += 2 if words[place] in _WITH_VALUE else 1
    return ["python", *map(_strip_folders, words[place : place + 1])], words[place + 1 :]


def _leave_out_secrets(text: str) -> str:
    """Return the words up to the first that may be, or announce, a secret."""
    words = text.split()
    place = next((place for place, word in enumerate(words) if _SECRET.search(word)), None)
    return " ".join(words if place is None else [*words[:place], "…"])


def _strip_folders(path: str) -> str:
    name = PureWindowsPath(path).name if "\\" in path else PurePosixPath(path).name
    return name or path


def _clean(word: str) -> str:
    """Return a word with blanks for line breaks and other unprintable characters."""
    return "".join(character if character.isprintable() else " " for character in word)


def _shorten(text: str, longest: int = _MAX_LENGTH) -> str:
    text = " ".join(text.split())
    return text if len(text) <= longest else text[: longest - 1].rstrip() + "…"
