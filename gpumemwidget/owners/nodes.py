"""Keeps a walk through autograd graphs from becoming a danger to them.

To look at an autograd node makes a Python object for it, and since torch 2.10 that object stays as
long as the node. When a chain of such nodes goes, each one's end is called from within that of the
one before it: at some 45,000 in a row (torch 2.13, a stack of 8 MiB) the process crashes, which
a chain never seen from Python would survive. ``total_loss += loss`` makes such chains. So there is
a limit on how many nodes of the process have a Python object because of us.
"""

from __future__ import annotations

from collections.abc import Iterable

from gpumemwidget.owners.kinds import Kind, KindFinder
from gpumemwidget.owners.storages import TorchReader

__all__ = ["MOST_NODES", "NodeAllowance"]

#: A fifth of what an ordinary stack bears; the graph of one step of a large model has some 5,000.
MOST_NODES = 10_000

#: Nodes that were read before, by id: to read them again makes no new objects.
_read_before: set[int] = set()


class NodeAllowance:
    """Decides which nodes one walk may read.

    Args:
        reader: tells whether this torch keeps the Python objects of nodes at all.
        kind_finder: tells nodes from other objects.
    """

    def __init__(self, reader: TorchReader, kind_finder: KindFinder) -> None:
        self._is_needed = reader.cpp_holds_node
        self._kind_finder = kind_finder
        self._living: set[int] | None = None
        #: Whether a node was refused.
        self.is_spent = False

    def may_read(self, node: object) -> bool:
        """Whether a node's neighbours may be asked for."""
        if not self._is_needed:
            return True
        if self._living is None:
            self._living = set(map(id, self._kind_finder.list_living(Kind.NODE)))
            _read_before.intersection_update(self._living)
        if id(node) in _read_before or len(self._living) < MOST_NODES:
            return True
        self.is_spent = True
        return False

    def note(self, node: object, following: Iterable[object]) -> None:
        """Remember that a node was read, and the objects that this made."""
        if self._living is not None:
            _read_before.add(id(node))
            self._living.update(map(id, following))
