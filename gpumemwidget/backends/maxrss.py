"""Keeps ``resource.getrusage`` telling the user the truth while we reset the kernel's peak.

An exact peak for a cell takes a reset of the process's resident high-water mark, and the same mark
is what ``getrusage`` returns as ``ru_maxrss``. So the marks that were wiped are remembered, and
``resource.getrusage`` is overlaid by a function that returns the highest. It goes when the last
one who resets is closed.
"""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Callable

__all__ = ["hold", "let_go", "read_wiped_kib", "remember"]

_GetRusage = Callable[[int], resource.struct_rusage]

#: The place of ``ru_maxrss`` in ``struct_rusage``.
_MAXRSS = 2

_lock = threading.Lock()
_n_holders = 0
_layer: tuple[_GetRusage, _GetRusage] | None = None
#: The highest mark that was wiped, in KiB as Linux counts ``ru_maxrss``, and whose it was: a forked
#: child begins with marks of its own.
_wiped: tuple[int, int] = (0, 0)


def hold() -> None:
    """Lay the function over ``resource.getrusage``, unless it is there already.

    Each call needs one of ``let_go``.
    """
    global _n_holders, _layer  # noqa: PLW0603 - there is one resource.getrusage in the process
    with _lock:
        _n_holders += 1
        if _layer is None:
            original = resource.getrusage
            ours = _overlay(original)
            resource.getrusage = ours
            _layer = (original, ours)


def let_go() -> None:
    """Take the function away when nobody holds it any more.

    If somebody has wrapped it in the meantime it stays beneath theirs, where it does no harm.
    """
    global _n_holders, _layer  # noqa: PLW0603 - see hold
    with _lock:
        _n_holders -= 1
        if _n_holders == 0 and _layer is not None:
            original, ours = _layer
            if resource.getrusage is ours:
                resource.getrusage = original
            _layer = None


def remember(mark_kib: int) -> None:
    """Note a high-water mark, in KiB, that is about to be wiped."""
    global _wiped  # noqa: PLW0603 - the marks are the process's
    pid = os.getpid()
    # No lock: this stands at the start of every cell, and a fork may leave a lock held for ever.
    if pid != _wiped[0] or mark_kib > _wiped[1]:
        _wiped = (pid, mark_kib)


def read_wiped_kib() -> int:
    """The highest mark of this process that was wiped, in KiB; 0 where none was."""
    pid, mark_kib = _wiped
    return mark_kib if pid == os.getpid() else 0


def _overlay(original: _GetRusage) -> _GetRusage:
    def getrusage(who: int, /) -> resource.struct_rusage:
        usage = original(who)
        mark_kib = read_wiped_kib()
        # A thread's ru_maxrss is the whole process's too; only the children's is another.
        if who == resource.RUSAGE_CHILDREN or mark_kib <= usage.ru_maxrss:
            return usage
        values = list(usage)
        values[_MAXRSS] = mark_kib
        return resource.struct_rusage(values)

    getrusage.__doc__ = original.__doc__
    getrusage.__module__ = original.__module__
    getrusage.__qualname__ = original.__qualname__
    return getrusage
