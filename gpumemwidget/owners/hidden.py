"""Objects that hold others and that the collector does not know: NumPy's arrays, saved tensors.

A column of a data frame may hold tensors, and gradient checkpointing keeps what it will need in
``SavedTensor`` objects. Such holders are looked for among the parts of small objects.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
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
        self._ids = frozenset(map(id, self.classes))

    def is_array(self, cls: type) -> bool:
        """Whether it is an array's class."""
        return self._array is not None and is_one_of(cls, self._array)

    def are_among(self, targets: Sequence[object]) -> bool:
        """Whether a small object's parts include any."""
        return 0 < len(targets) <= _MOST_PARTS and self.are_any(targets)

    def are_any(self, targets: Sequence[object]) -> bool:
        """Whether any of these is one."""
        # By the ids of classes, at the speed of C: this is asked for every object of a walk.
        return not self._ids.isdisjoint(map(id, map(type, targets)))

    def list_held(self, target: Any) -> list[object]:
        """What one of them holds: an array's objects, a saved tensor and the hook to unpack it."""
        if type(target) is self._saved:
            held = (target.data, getattr(target, "unpack_hook", None))
            return [each for each in held if each is not None]
        if not self._array.dtype.__get__(target).hasobject:
            return []
        return list(self._array.flat.__get__(target))
