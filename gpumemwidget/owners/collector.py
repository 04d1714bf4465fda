"""What the garbage collector is asked beside the walk, and how it is kept still meanwhile."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

__all__ = ["list_referrers", "paused_collector"]


def list_referrers(targets: Sequence[object]) -> list[object]:
    """All that the collector knows to refer to any of these: one pass over all of the process."""
    found = gc.get_referrers(*targets)
    # Python 3.13 shows the tuple of the call's own arguments, which only this list holds now.
    counts = list(map(sys.getrefcount, found))
    alone = next(map(sys.getrefcount, [object()]))
    return [
        each
        for each, count in zip(found, counts, strict=True)
        if count > alone or type(each) is not tuple
    ]


@contextmanager
def paused_collector() -> Iterator[None]:
    """Within it thousands of new lists don't set the collector off, again and again on all."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
