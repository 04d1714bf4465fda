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


#: All autograd nodes that have a Python object because of a walk of this process are among these,
#: by id; some may be gone. Looked up anew when there are many.
_made: set[int] = set()

#: Nodes that were read, by id: to read them again makes no new objects.
_read: set[int] = set()


class AutogradNodeLimit:
    """Decides which autograd nodes one walk may read.

    Args:
        reader: tells whether this torch keeps the Python objects of nodes at all.
        kind_finder: tells nodes from other objects.
    """

    def __init__(self, reader: TorchReader, kind_finder: KindFinder) -> None:
        self._is_needed = reader.cpp_holds_node
        self._kind_finder = kind_finder
        self._living: set[int] | None = None
        #: True once a node was refused.
        self.is_spent = False
        self._is_closed = False

    def close(self) -> None:
        """Allow no node at all: their graphs may change while they are read."""
        self._is_closed = True

    def may_read(self, node: object) -> bool:
        """Return whether a node's neighbours may be asked for."""
        if self._is_closed:
            self.is_spent = True
            return False
        if not self._is_needed or (self._living is None and len(_made) < MOST_NODES):
            return True
        if self._living is None:
            self._living = set(map(id, self._kind_finder.list_living(Kind.NODE)))
            _made.clear()
            _made.update(self._living)
            _read.intersection_update(self._living)
        if id(node) in _read or len(self._living) < MOST_NODES:
            return True
        self.is_spent = True
        return False

    def note(self, node: object, following: Collection[object]) -> None:
        """Remember that a node was read, and the objects that this may have made."""
        if self._is_needed:
            _read.add(id(node))
            _made.add(id(node))
            _made.update(map(id, following))
        if self._living is not None:
            self._living.update(map(id, following))
