"""Read the limits of this process's control groups, as in a container.

In a container the machine's total is not the process's: the kernel kills it at its cgroup's limit.
Groups nest and each has its own limit, so every level counts. Version 1 and version 2 are read, and
a hybrid of both. https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True, slots=True)
class _Level:
    folder: Path
    limit_file: str
    usage_file: str
    #: The line of ``memory.stat`` with the page cache that is given up first, subgroups included.
    cache_key: str


def read_limit_bytes(proc: Path, cgroup: Path) -> int | None:
    """Return the lowest limit of the process's own group and all above it; ``None`` without one."""
    limits = [
        limit_bytes
        for level in _list_levels(proc, cgroup)
        if (limit_bytes := _read_number(level.folder / level.limit_file)) is not None
    ]
    return min(limits, default=None)


def read_headroom_bytes(proc: Path, cgroup: Path) -> int | None:
    """Return how much more fits under the limits now; ``None`` without a limit.

    Page cache that the kernel drops before it kills counts as free, as it does in ``kubectl top``:
    usage less ``inactive_file``.
    """
    rooms = []
    for level in _list_levels(proc, cgroup):
        limit_bytes = _read_number(level.folder / level.limit_file)
        usage_bytes = _read_number(level.folder / level.usage_file)
        if limit_bytes is None or usage_bytes is None:
            continue
        cache_bytes = _read_stat(level.folder / "memory.stat", level.cache_key) or 0
        rooms.append(max(0, limit_bytes - max(0, usage_bytes - cache_bytes)))
    return min(rooms, default=None)


def _list_levels(proc: Path, cgroup: Path) -> Iterator[_Level]:
    """Yield the groups of this process, from its own up to the one that is mounted."""
    for line in _read_text(proc / "self" / "cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, separator, path = rest.partition(":")
        if not separator:
            continue
        if number == "0" and not controllers:
            unified = cgroup / "unified"
            base = unified if unified.is_dir() else cgroup
            files = ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = cgroup / "memory"
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # Without a cgroup namespace a container reads the host's path here, which its own mount
        # does not have; with ".." the group is outside the mount. Both times the mount itself is
        # the innermost group that can be read, and files that aren't there are passed over.
        parts = [part for part in PurePosixPath(path).parts if part != "/"]
        if ".." in parts:
            parts = []
        for depth in range(len(parts), -1, -1):
            yield _Level(base.joinpath(*parts[:depth]), *files)


def _read_text(path: Path) -> str:
    """Return the file's text; ``""`` where it can't be read, as kernels differ in these files."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _read_number(path: Path) -> int | None:
    """Return the file's one number; ``None`` for "max", for rubbish, and without a file."""
    text = _read_text(path).strip()
    return int(text) if text.isascii() and text.isdigit() else None


def _read_stat(path: Path, key: str) -> int | None:
    for line in _read_text(path).splitlines():
        name, _, value = line.partition(" ")
        if name == key and value.isascii() and value.isdigit():
            return int(value)
    return None
