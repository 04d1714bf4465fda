"""Read the limits of this process's control groups, as in a container.

In a container the machine's total is not the process's: the kernel kills it at its cgroup's limit.
Groups nest and each has its own limit, so every level counts. Version 1 and version 2 are read, and
a hybrid of both. https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

#: Limits from here on stand for none: version 1 has no word for that.
_NO_LIMIT_BYTES = 1 << 62


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
