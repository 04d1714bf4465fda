"""A program that is no notebook: its names and its code, its rank, the file it is recorded to."""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from collections.abc import MutableMapping
from pathlib import Path
from types import ModuleType

import psutil  # type: ignore[import-untyped]  # no types are published with it

from gpumemwidget.errors import FileError
from gpumemwidget.ownership.shell import ShellReference
from gpumemwidget.recording.files import find_target
from gpumemwidget.session.oom_watch import EndedRun
from gpumemwidget.tracing.sources import find_block_sources


class ProgramShell:
    """A program as a ``Shell``: its names are the globals of ``__main__``."""

    names_hint = "a variable is a global of the program's main module"

    @property
    def user_ns(self) -> MutableMapping[str, object]:
        """The globals of the program."""
        return vars(sys.modules["__main__"])

    @user_ns.setter
    def user_ns(self, _namespace: MutableMapping[str, object]) -> None:
        raise AttributeError("a program's globals stay")

    def list_user_names(self) -> list[str]:
        """Return the program's own names, but for modules and those with underscores around."""
        return [
            name
            for name, value in dict(self.user_ns).items()
            if type(name) is str
            and not (name.startswith("__") and name.endswith("__"))
            and not issubclass(type(value), ModuleType)
        ]

    def list_references(self) -> list[ShellReference]:
        """Return nothing: Python keeps no displayed value and no exception of a program."""
        return []

    def list_own_objects(self) -> list[object]:
        """Return where a walk through the program's objects has to stop."""
        return [self]

    def read_cell_numbers(self) -> dict[str, int]:
        """Return nothing: a program has no cells."""
        return {}


def describe_program() -> EndedRun:
    """Return the code of the running program."""
    path = getattr(sys.modules["__main__"], "__file__", None) or ""
    try:
        source = Path(path).read_text(encoding="utf-8", errors="replace") if path else ""
    except OSError:
        source = ""
    return EndedRun(source, "", find_block_sources(path, {}))


# -- How it was launched ---------------------------------------------------------------------------

#: How the names of recordings end.
_SUFFIX = ".gpumem.jsonl"


def choose_path(to: str | os.PathLike[str] | None, *, script: str, rank: int | None) -> Path:
    """Return the file that a process records to.

    Args:
        to: a file whose name ends in ``.jsonl``, to which a rank adds its number, or a folder where
            each process has a file of its own; ``None``: a file in the working directory, for a
            rank one in a folder that it shares with the other ranks of its launcher.
        script: the program's file, or ``-m`` and the name of its module.
        rank: its rank, where it has one.

    Raises:
        FileError: ``to`` is no path, or looks like a file that does not end in ``.jsonl``.
    """
    stem = re.sub(r"[^\w.-]+", "-", Path(script.removeprefix("-m ")).stem)[:80].strip("-")
    stem = stem or "python"
    own = f"{'' if rank is None else f'rank{rank}-'}{socket.gethostname()}-{os.getpid()}{_SUFFIX}"
    if to is not None:
        target = find_target(to, example="runs/first.jsonl")
        if target.suffix != ".jsonl":
            # What was not meant as a folder: ``a.txt`` where no such folder is.
            given = os.fspath(to)
            if target.suffix and not target.is_dir() and not given.endswith(os.sep):
                raise FileError(
                    f"{given} is no folder, and a recording's name ends in .jsonl: give it that "
                    f"ending, or write {given}{os.sep} for a new folder"
                )
            return _find_free(target / f"{stem}-{own}")
        if rank is None:
            return target
        # The ranks of a launcher all get the same path, and one that is restarted has its number.
        return _find_free(target.with_name(f"{target.stem}-rank{rank}.jsonl"))
    if rank is None:
        name = f"{stem}-{_stamp(time.time())}-{os.getpid()}{_SUFFIX}"
        return _find_free(find_target(".") / name)
    return _find_free(find_target(f"{stem}-{_stamp(_read_launch_time())}.gpumem") / own)


def _find_free(path: Path) -> Path:
    """Return a path, or one like it if it is taken: in a container a program has one pid always."""
    suffix = _SUFFIX if path.name.endswith(_SUFFIX) else path.suffix
    stem = path.name.removesuffix(suffix)
    number = 1
    while os.path.lexists(path):
        number += 1
        path = path.with_name(f"{stem}-{number}{suffix}")
    return path


def _read_launch_time() -> float:
    """Return when the launcher began: the same for all of its ranks on this host."""
    try:
        began: float = psutil.Process(os.getppid()).create_time()
    except psutil.Error:
        return time.time()
    return began


def read_rank() -> int | None:
    """Return this process's rank, by its launcher or torch.distributed; ``None``: it has none."""
    rank = os.environ.get("RANK", "")
    if rank.isdecimal() and "WORLD_SIZE" in os.environ:
        return int(rank)
    distributed = sys.modules.get("torch.distributed")
    # Some builds of PyTorch have none of its functions.
    if not getattr(distributed, "is_initialized", lambda: False)():
        return None
    own: int = vars(distributed)["get_rank"]()
    return own


def _stamp(seconds: float) -> str:
    return time.strftime("%Y%m%d-%H%M%S", time.localtime(seconds))


def name_program() -> str:
    """Return this program as one would type it: ``python train.py --epochs 3``."""
    arguments = [str(argument) for argument in sys.argv]
    return " ".join(["python", *(arguments if any(arguments[:1]) else ["-"])])[:200]
