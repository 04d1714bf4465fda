"""The one switch of the allocator's history, which the user may turn as well.

There is one history in a process. Whoever switches it on sets it for all, and nobody can ask how it
is set. So while it matters, the bindings of ``torch._C`` that set it are watched, and what somebody
else has set since is theirs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

__all__ = ["HistorySwitch"]

#: What ``torch.cuda.memory._record_memory_history`` calls, in its two forms.
_BINDINGS = ("_cuda_record_memory_history", "_cuda_record_memory_history_legacy")


class HistorySwitch:
    """Sets the history, and sees who else does.

    Args:
        torch: the imported module ``torch``.
    """

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._originals: dict[str, Callable[..., Any]] = {}
        self._ours: dict[str, Callable[..., Any]] = {}
        self._setting_thread = -1
        #: Whether a history runs that we have started, and nobody has set since.
        self.is_ours = False
        #: How often others have set it while it was watched.
        self.n_foreign_calls = 0

    @property
    def can_tell(self) -> bool:
        """Whether this torch tells if a history runs."""
        return hasattr(self._torch._C, "_cuda_isHistoryEnabled")  # noqa: SLF001 - no public call tells

    def is_on(self) -> bool:
        """Whether a history runs, whoever's it is."""
        return bool(self._torch._C._cuda_isHistoryEnabled())  # noqa: SLF001 - as above

    def set(self, enabled: str | None, **options: Any) -> None:
        """``torch.cuda.memory._record_memory_history``; from then on it is ours, if it is on.

        Raises:
            RuntimeError: CUDA refuses.
        """
        self._setting_thread = threading.get_ident()
        try:
            self._torch.cuda.memory._record_memory_history(enabled, **options)  # noqa: SLF001 - has no public name
        finally:
            self._setting_thread = -1
        self.is_ours = enabled is not None

    def watch(self) -> None:
        """See others' calls from now on. Does nothing where they are seen already."""
        if self._originals:
            return
        bindings = self._torch._C  # noqa: SLF001 - PyTorch has no public seam below its own functions
        for name in _BINDINGS:
            original = getattr(bindings, name, None)
            if original is not None:
                ours = self._wrap(original)
                ours.__name__ = ours.__qualname__ = name
                self._originals[name] = original
                self._ours[name] = ours
                setattr(bindings, name, ours)

    def unwatch(self) -> None:
        """Put the bindings back, save those that somebody has replaced since."""
        bindings = self._torch._C  # noqa: SLF001 - as above
        for name, original in self._originals.items():
            if getattr(bindings, name, None) is self._ours[name]:
                setattr(bindings, name, original)
        self._originals.clear()
        self._ours.clear()

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def record(*args: Any, **kwargs: Any) -> Any:
            # Before the call too: it may fail half-way.
            if threading.get_ident() != self._setting_thread:
                self.is_ours = False
                self.n_foreign_calls += 1
            return original(*args, **kwargs)

        return record
