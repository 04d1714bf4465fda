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
    """Viewers by their names. Whoever owns this locks it.

    Args:
        speak_when_idle: whether viewers speak up all the time, or only after each cell.

    Attributes:
        said: what each has said last.
    """

    def __init__(self, *, speak_when_idle: bool) -> None:
        self._speak_when_idle = speak_when_idle
        self.said: dict[str, _T] = {}
        #: The moment by which each has to speak again, those that spoke last at the end.
        self._due_s: dict[str, float] = {}

    def hear(self, name: str, said: _T, now_s: float) -> None:
        """Note that a viewer is there."""
        self.said[name] = said
        self._due_s.pop(name, None)
        self._due_s[name] = now_s + _LOST_AFTER_S if self._speak_when_idle else math.inf
        while len(self._due_s) > _MAX_VIEWERS:
            silent = next(iter(self._due_s))
            del self._due_s[silent]
            self.said.pop(silent, None)

    def wait_anew(self, now_s: float) -> None:
        """Give each viewer its time to speak: a cell has ended, from when on each can be heard."""
        choose = max if self._speak_when_idle else min
        self._due_s = {
            name: choose(due_s, now_s + _LOST_AFTER_S)
            for name, due_s in self._due_s.items()
            if name in self.said
        }

    def drop_lost(self, now_s: float) -> None:
        """Forget those that should have spoken; no cell runs."""
        self.said = {name: said for name, said in self.said.items() if now_s <= self._due_s[name]}
