"""Replace functions of other modules by ours, and put them back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Patch:
    """Functions of other modules that were replaced, and are put back together."""

    def __init__(self) -> None:
        #: The owner, the name, the owner's own function (``None``: it has its class's), ours.
        self._replaced: list[tuple[Any, str, Callable[..., Any] | None, Callable[..., Any]]] = []

    @property
    def is_applied(self) -> bool:
        """True if any function is replaced."""
        return bool(self._replaced)

    def replace(
        self, owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        """Replace a function by what ``wrap`` makes of it; nothing is done where there is none.

        Args:
            owner: the module, or the object that replaces it.
            name: the function's name there, which the replacement gets too.
            wrap: takes the original function and returns its replacement.
        """
        original = getattr(owner, name, None)
        if original is not None:
            ours = wrap(original)
            ours.__name__ = ours.__qualname__ = name
            ours.__doc__ = original.__doc__
            own = original if name in vars(owner) else None
            setattr(owner, name, ours)
            self._replaced.append((owner, name, own, ours))

    def undo(self) -> None:
        """Put the originals back, save where somebody has replaced our function since.

        There ours stays beneath theirs. May be called twice.
        """
        for owner, name, own, ours in self._replaced:
            if getattr(owner, name, None) is not ours:
                continue
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)
        self._replaced.clear()
