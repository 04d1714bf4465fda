"""Limit how many autograd nodes a walk gives a Python object, which could crash the process.

To look at an autograd node makes a Python object for it, and since torch 2.10 that object stays as
long as the node. When a chain of such nodes goes, each one's end is called from within that of the
one before it: at some 45,000 in a row (torch 2.13, a stack of 8 MiB) the process crashes, which
a chain never seen from Python would survive. ``total_loss += loss`` makes such chains. So there is
a limit on how many nodes of the process have a Python object because of us.
"""

from __future__ import annotations

from collections.abc import Collection

from gpumemwidget.ownership.graph.kinds import Kind, KindFinder
from gpumemwidget.ownership.graph.torch_reader import TorchReader

#: A fifth of what an ordinary stack bears; the graph of one step of a large model has some 5,000.
MOST_NODES = 10_000

#: The ids of the autograd nodes that have a Python object because of a walk of this process; some
#: may be gone: they are looked up anew when there are many.
_made: set[int] = set()

#: The ids of nodes that were read: to read them again makes no new objects.
_read: set[int] = set()


class AutogradNodeLimit:
    """Decides which autograd nodes one walk may read."""

    def __init__(self, reader: TorchReader, kind_finder: KindFinder) -> None:
        self._is_needed = reader.cpp_holds_node
        self._kind_finder = kind_finder
        self._is_counted = False
        self._is_closed = False
        #: True once a node was refused.
        self.is_spent = False

    def close(self) -> None:
        """Allow no node at all: their graphs may change while they are read."""
        self._is_closed = True

    def may_read(self, node: object) -> bool:
        """Return whether a node's neighbours may be asked for."""
        may = not self._is_closed and (not self._is_needed or self._has_room_for(node))
        self.is_spent = self.is_spent or not may
        return may

    def _has_room_for(self, node: object) -> bool:
        if len(_made) >= MOST_NODES and not self._is_counted:
            self._is_counted = True
            living = set(map(id, self._kind_finder.list_living(Kind.NODE)))
            _made.intersection_update(living)
            _read.intersection_update(living)
        return len(_made) < MOST_NODES or id(node) in _read

    def note(self, node: object, following: Collection[object]) -> None:
        """Remember that a node was read, and the objects that this may have made."""
        if self._is_needed:
            _read.add(id(node))
            _made.add(id(node))
            _made.update(map(id, following))
