"""Renew locks in a forked child, which has no thread left to release them.

DataLoader workers and ``multiprocessing`` fork at any moment. The sampler's thread does not exist
in the child, and a lock that it held would be held for ever. So each owner of a lock renews it.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class _Survivor(Protocol):
    def reset_after_fork(self) -> None: ...


_survivors: weakref.WeakSet[_Survivor] = weakref.WeakSet()


def survive_fork(owner: _Survivor) -> None:
    """Call ``owner.reset_after_fork()`` in every forked child for as long as ``owner`` lives."""
    _survivors.add(owner)


def _reset_all() -> None:
    for owner in list(_survivors):
        owner.reset_after_fork()


# Python can't undo this registration: with no survivors left it does nothing.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_all)
