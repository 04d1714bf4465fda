"""Write the files that a user asks for: refused early, and written whole or not at all."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from gpumemwidget.errors import FileError, name_type


def find_target(path: str | os.PathLike[str], *, example: str = "runs/cells.csv") -> Path:
    """Return the file that a path leads to through links; ``~`` is the home folder.

    Raises:
        FileError: it is no path, or leads nowhere.
    """
    if path == "":  # As of a variable of the shell that is not set.
        raise FileError(f"the path is empty: give one such as {example!r}")
    try:
        return Path(path).expanduser().resolve()
    except TypeError:
        raise FileError(
            f"a path can't be of type {name_type(path)}: give text such as {example!r}, or a Path"
        ) from None
    except (OSError, RuntimeError, ValueError) as exc:
        raise FileError(f"{os.fspath(path)!r} leads nowhere ({exc}): give another path") from None


def refuse_target(target: Path, *, force: bool) -> None:
    """Refuse a file that can't be written, or exists already.

    Raises:
        FileError: its folder does not exist, it is no regular file, or it exists and ``force`` is
            not set.
    """
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        if not target.parent.is_dir():
            raise FileError(
                f"the folder {target.parent} does not exist: create it first, or choose another"
            ) from None
        return
    except OSError as exc:
        raise FileError(
            f"can't write {target}: {exc.strerror or exc}; choose another place"
        ) from exc
    if not stat.S_ISREG(mode):
        raise FileError(f"{target} is there and is no file: give a file's name")
    if not force:
        raise FileError(
            f"{target} is there already: choose another name, or overwrite it with --force "
            "(force=True in Python)"
        )


def write_whole(target: Path, content: bytes) -> None:
    """Write a file, or replace it; it appears whole or not at all.

    Raises:
        FileError: the system refuses; nothing was written.
    """
    # In the same folder, as a rename is one step only there; with a short name, as the target's may
    # be as long as names can be.
    draft = target.with_name(f".gpumemwidget-{secrets.token_hex(8)}.tmp")
    try:
        try:
            draft.write_bytes(content)
            if target.exists():
                draft.chmod(stat.S_IMODE(target.stat().st_mode))
            draft.replace(target)
        finally:  # A read-only file system refuses this, too, even if there is no such file.
            draft.unlink(missing_ok=True)
    except OSError as exc:
        raise FileError(
            f"can't write {target}: {exc.strerror or exc}; choose another place"
        ) from exc
