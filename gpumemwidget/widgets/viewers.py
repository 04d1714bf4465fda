"""Know who looks: the dashboard's views, and the pages that have JupyterLab's panel.

A notebook that is closed cuts its line to the kernel before it can say a word, so whoever falls
silent is gone. ipykernel 6 hears nothing until a cell has ended, other releases may: silence while
a cell runs does not count.
"""

from __future__ import annotations

import math
from typing import Generic, TypeVar

_T = TypeVar("_T")

#: Seconds of silence after which a viewer that could be heard is gone: views speak up every 10, and
#: pages after each cell.
_LOST_AFTER_S = 25.0
#: Maximum number of viewers that are remembered, those that spoke last.
_MAX_VIEWERS = 200


class Viewers(Generic[_T]):
    """Viewers by their names, each with what it has said last. Whoever owns this locks it.

    Args:
        speak_when_idle: whether viewers speak up all the time, or only after each cell.
    """

    def __init__(self, *, speak_when_idle: bool) -> None:
        self._speak_when_idle = speak_when_idle
        #: What each has said last, and the moment by which it has to speak again.
        self._known: dict[str, tuple[_T, float]] = {}

    def __len__(self) -> int:
        """Return the number of viewers."""
        return len(self._known)

    def __contains__(self, name: str) -> bool:
        """Return whether a viewer is known."""
        return name in self._known

    def list_said(self) -> list[_T]:
        """Return what each viewer has said last."""
        return [said for said, _ in self._known.values()]

    def hear(self, name: str, said: _T, now_s: float) -> None:
        """Note that a viewer is there."""
        self._known.pop(name, None)
        due_s = now_s + _LOST_AFTER_S if self._speak_when_idle else math.inf
        self._known[name] = (said, due_s)
        while len(self._known) > _MAX_VIEWERS:
            del self._known[next(iter(self._known))]

    def lose(self, name: str) -> None:
        """Forget a viewer, if it is known."""
        self._known.pop(name, None)

    def wait_anew(self, now_s: float) -> None:
        """Give each viewer its time to speak: a cell has ended, from when on each can be heard."""
        choose = max if self._speak_when_idle else min
        until_s = now_s + _LOST_AFTER_S
        self._known = {
            name: (said, choose(due_s, until_s)) for name, (said, due_s) in self._known.items()
        }

    def drop_lost(self, now_s: float) -> None:
        """Forget those that should have spoken; no cell runs."""
        self._known = {name: known for name, known in self._known.items() if now_s <= known[1]}

    def clear(self) -> None:
        """Forget all."""
        self._known.clear()
