"""Limit how many autograd nodes have a Python object because they were looked at.

To look at a node makes a Python object for it, and since torch 2.10 that object stays as long as
the node. When a chain of such nodes goes, each one's end is called from within that of the one
before it: at some 45,000 in a row (torch 2.13, a stack of 8 MiB) the process crashes, which a chain
never seen from Python would survive. ``total_loss += loss`` makes such chains.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import compress

from gpumemwidget.ownership.graph.objects import collect_living

#: Maximum number of autograd nodes with a Python object because of us: a fifth of what an ordinary
#: stack bears; the graph of one step of a large model has some 5,000.
MOST_NODES = 10_000


#: The ids of the autograd nodes that have a Python object because of us, in this process; some may
#: be gone: they are looked up anew when there are many.
_node_ids: set[int] = set()

#: The ids of tensors and nodes that were asked for their nodes.
_read_ids: set[int] = set()

#: The ids of the classes of all these: other objects get the ids of nodes that are gone.
_class_ids: set[int] = set()


class AutogradNodeLimit:
    """Decides which tensors and autograd nodes may be asked for their nodes, for one walk.

    Args:
        is_needed: ``False`` before torch 2.10, where a node's object goes when nobody uses it.
    """

    def __init__(self, *, is_needed: bool) -> None:
        self._is_needed = is_needed
        self._is_counted = False
        self._is_closed = False
        #: True once a tensor or node was not asked.
        self.is_spent = False

    def close(self) -> None:
        """Allow no node at all: their graphs may change while they are read."""
        self._is_closed = True

    def has_room(self) -> bool:
        """Return whether a node may be looked at for the first time.

        Once many were, the ids of those that are gone are dropped, in one pass over all objects.
        """
        if self._is_needed and len(_node_ids) >= MOST_NODES and not self._is_counted:
            self._is_counted = True
            living: set[int] = set()
            collect_living(_select_ids, living.update)
            _node_ids.intersection_update(living)
            _read_ids.intersection_update(living)
        return not self._is_needed or len(_node_ids) < MOST_NODES

    def may_ask(self, target: object) -> bool:
        """Return whether a tensor or node may be asked for its nodes."""
        # Where a graph was read before, only nodes that were added since get a new object.
        may = not self._is_closed and (
            self.has_room() or (id(target) in _read_ids and len(_node_ids) < 2 * MOST_NODES)
        )
        self.is_spent = self.is_spent or not may
        return may

    def note(self, target: object, nodes: Sequence[object]) -> None:
        """Remember what was asked, and the nodes that it named."""
        if self._is_needed:
            _read_ids.add(id(target))
            _node_ids.update(map(id, nodes))
            _class_ids.update(map(id, map(type, (target, *nodes))))


def _select_ids(living: list[object]) -> Iterator[int]:
    """Return the ids of objects whose classes were met, at the speed of C."""
    is_met = map(_class_ids.__contains__, map(id, map(type, living)))
    return compress(map(id, living), is_met)
