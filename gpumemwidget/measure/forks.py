"""A forked child gets our locks as they stood, with no thread left to let go of them.

DataLoader workers and ``multiprocessing`` fork in the middle of anything. In the child the sampler
does not exist, and a lock that it held at that moment would be held for ever. So whoever owns a
lock renews it in the child.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

__all__ = ["survive_fork"]


class _Survivor(Protocol):
    def reset_after_fork(self) -> None: ...


_survivors: weakref.WeakSet[_Survivor] = weakref.WeakSet()


def survive_fork(owner: _Survivor) -> None:
    """Call ``owner.reset_after_fork()`` in every forked child for as long as ``owner`` lives."""
    _survivors.add(owner)


def _reset_all() -> None:
    for owner in list(_survivors):
        owner.reset_after_fork()


# Python has no way to take this back: with nobody left in the set it does nothing.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_all)
