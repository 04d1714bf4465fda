"""Objects that hold others and that the collector does not know: NumPy's arrays, saved tensors.

A column of a data frame may hold tensors, and gradient checkpointing keeps what it will need in
``SavedTensor`` objects. What ``x.max(0)``, ``x.topk(5)`` and their like return is a tuple that C
has made, and does not tell the collector of either. Such holders are looked for among the parts of
small objects.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from gpumemwidget.owners.kinds import is_one_of

__all__ = ["HiddenHolders"]

#: In a container of more than that nobody keeps such objects one by one.
_MOST_PARTS = 64


class HiddenHolders:
    """Finds such objects, and what they hold; NumPy is not imported for it.

    Args:
        torch: torch itself.
    """

    def __init__(self, torch: Any) -> None:
        numpy = sys.modules.get("numpy")
        self._array: Any = None if numpy is None else vars(numpy).get("ndarray")
        self._saved: Any = getattr(torch._C._autograd, "SavedTensor", None)  # noqa: SLF001
        #: The classes of such objects; subclasses of the array are among them too.
        self.classes = tuple(each for each in (self._array, self._saved) if each is not None)
        #: The classes of such results, each by itself: they have no base but ``tuple``.
        self.results = _list_results(torch)
        self._result_ids = frozenset(map(id, self.results))
        self._ids = self._result_ids.union(map(id, self.classes))

    def is_array(self, cls: type) -> bool:
        """Whether it is an array's class, or a result's: the parts have numbers."""
        is_array = self._array is not None and is_one_of(cls, self._array)
        return is_array or self.is_result(cls)

    def is_result(self, cls: type) -> bool:
        """Whether it is the class of several tensors that an operation returns."""
        return id(cls) in self._result_ids

    def are_among(self, targets: Sequence[object]) -> bool:
        """Whether a small object's parts include any."""
        return 0 < len(targets) <= _MOST_PARTS and self.are_any(targets)

    def are_within(self, lots: Iterable[Sequence[object]]) -> bool:
        """Whether any of many small objects' parts include any."""
        small = [each for each in lots if len(each) <= _MOST_PARTS]
        return self.are_any(chain.from_iterable(small))

    def are_any(self, targets: Iterable[object]) -> bool:
        """Whether any of these is one."""
        # By the ids of classes, at the speed of C: this is asked for every object of a walk.
        return not self._ids.isdisjoint(map(id, map(type, targets)))

    def list_held(self, target: Any) -> list[object]:
        """What one of them holds: a tuple's or an array's parts, a saved tensor and its hook."""
        if self.is_result(type(target)):
            return list(tuple.__iter__(target))
        if type(target) is self._saved:
            held = (target.data, getattr(target, "unpack_hook", None))
            return [each for each in held if each is not None]
        if not self._array.dtype.__get__(target).hasobject:
            return []
        return list(self._array.flat.__get__(target))


def _list_results(torch: Any) -> tuple[type, ...]:
    """The classes in ``torch.return_types``."""
    found = vars(getattr(torch, "return_types", object)).values()
    return tuple(each for each in found if is_one_of(type(each), type) and is_one_of(each, tuple))
