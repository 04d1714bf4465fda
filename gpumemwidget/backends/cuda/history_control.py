"""Start, stop and read the allocator's history, and notice when the user does.

There is one history in a process. Whoever starts it sets it for all, and nobody can ask how it is
set. So while that matters, the bindings of ``torch._C`` that set and read the history are wrapped.
A history of the user's is theirs alone: ours ends before theirs begins, and what they read has
nothing of ours in it.
"""

from __future__ import annotations

import bisect
import contextlib
import inspect
import threading
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

from gpumemwidget.backends.cuda.snapshot import (
    CLOCKS_DIFFER_US,
    parse_segments,
    read_large_page_bytes,
    read_now_us,
    read_time,
)
from gpumemwidget.backends.patching import Patch
from gpumemwidget.model.devices import Segment

#: Bindings that ``torch.cuda.memory._record_memory_history`` calls, in its two forms.
_SETTERS = ("_cuda_record_memory_history", "_cuda_record_memory_history_legacy")
#: The binding that ``torch.cuda.memory_snapshot``, ``_snapshot`` and ``_dump_snapshot`` call.
_READER = "_cuda_memorySnapshot"
#: Maximum number of our snapshots in the user's history that are kept from the user's view.
_MOST_SNAPSHOTS = 10_000


class HistoryControl:
    """The allocator's history, and the calls of others that set it.

    Args:
        torch: the imported module ``torch``.
    """

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._patch = Patch()
        self._options: dict[str, bool] | None = None
        #: Idents of threads within a call of ours.
        self._own_threads: set[int] = set()
        #: When our snapshots were taken that are entries of a history of the user's: start and end,
        #: in microseconds.
        self._hidden: deque[tuple[int, int]] = deque(maxlen=_MOST_SNAPSHOTS)
        #: True while a history of ours runs, which nobody has set since.
        self.is_ours = False
        #: Number of times that others have set the history while it was watched.
        self.n_foreign_calls = 0
        #: Called before somebody else sets a history while ours runs: the last moment to read it.
        self.before_handing_over: Callable[[], None] = lambda: None

    def is_on(self) -> bool:
        """Return whether a history runs, ours or the user's."""
        return bool(self._torch._C._cuda_isHistoryEnabled())  # noqa: SLF001 - no public call tells

    def set(self, enabled: str | None, **options: Any) -> None:
        """Call ``torch.cuda.memory._record_memory_history``; the history is ours then, if it is on.

        Raises:
            RuntimeError: CUDA refuses.
        """
        with self._calling():
            self._torch.cuda.memory._record_memory_history(enabled, **options)  # noqa: SLF001 - has no public name
        self.is_ours = enabled is not None

    def begin_sites(self) -> None:
        """Keep the lines of live blocks alone, noticing when others set the history."""
        self.watch()
        self.set("state", context="state", stacks="python", max_entries=1)

    @property
    def is_costly(self) -> bool:
        """True if to read the segments would fetch all events of a history that the user records.

        That takes up to two seconds. Older releases of torch can't leave the events out: see
        ``include_traces`` in
        https://docs.pytorch.org/docs/stable/generated/torch.cuda.memory.memory_snapshot.html
        """
        return not self._find_options() and self.is_on()

    def read_segments(self, touched: Container[int]) -> tuple[Segment, ...]:
        """Return the segments of touched devices, by index; CUDA must be initialised.

        Raises:
            RuntimeError: CUDA refuses, or the allocator is one that keeps no blocks.
        """
        with self._taking_snapshot():
            raw = self._torch.cuda.memory.memory_snapshot(**self._find_options())
        return parse_segments(
            (segment for segment in raw if segment["device"] in touched),
            large_page_bytes=read_large_page_bytes(self._torch),
        )

    def take_snapshot(self) -> Any:
        """Return torch's own snapshot: the segments, and the events of the history."""
        with self._taking_snapshot():
            return self._torch.cuda.memory._snapshot()  # noqa: SLF001 - has no public name

    def _find_options(self) -> dict[str, bool]:
        if self._options is None:
            known = inspect.signature(self._torch.cuda.memory.memory_snapshot).parameters
            self._options = {"include_traces": False} if "include_traces" in known else {}
        return self._options

    @contextlib.contextmanager
    def _taking_snapshot(self) -> Iterator[None]:
        """Take a snapshot within this context, hidden from the user's history: it is an entry."""
        is_others = not self.is_ours and self.is_on()
        if is_others:
            self.watch()
        start_us = read_now_us()
        try:
            with self._calling():
                yield
        finally:
            if is_others:
                self._hidden.append((start_us - CLOCKS_DIFFER_US, read_now_us()))

    def watch(self) -> None:
        """Notice the calls of others from now on. Nothing changes if that was done already."""
        if self._patch.is_applied:
            return
        bindings = self._torch._C  # noqa: SLF001 - PyTorch has no public seam below its own functions
        for name in _SETTERS:
            self._patch.replace(bindings, name, self._wrap_setter)
        self._patch.replace(bindings, _READER, self._wrap_reader)

    def unwatch(self, *, is_final: bool = False) -> None:
        """Put the bindings back, unless snapshots of ours must be hidden in the user's history.

        Args:
            is_final: put them back in any case; the user sees our snapshots from then on.
        """
        if self._hidden and not is_final:
            return
        self._hidden.clear()
        self._patch.undo()

    @contextlib.contextmanager
    def _calling(self) -> Iterator[None]:
        ident = threading.get_ident()
        self._own_threads.add(ident)
        try:
            yield
        finally:
            self._own_threads.discard(ident)

    def _is_calling(self) -> bool:
        return threading.get_ident() in self._own_threads

    def _wrap_setter(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def record(*args: Any, **kwargs: Any) -> Any:
            # Before the call too: it may fail half-way.
            if not self._is_calling():
                if self.is_ours:
                    self.before_handing_over()
                self.is_ours = False
                self.n_foreign_calls += 1
            result = original(*args, **kwargs)
            if not self.is_on():
                # The call has stopped the history and emptied it.
                self._hidden.clear()
            return result

        return record

    def _wrap_reader(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def read(*args: Any, **kwargs: Any) -> Any:
            found = original(*args, **kwargs)
            if not self._is_calling():
                if self.is_ours:
                    _strip_history(found)
                elif self._hidden:
                    for events in found.get("device_traces", ()):
                        self._hide_snapshots(events)
            return found

        return read

    def _hide_snapshots(self, events: list[dict[str, Any]]) -> None:
        """Take our own snapshots out of a device's events, the oldest first."""
        for start_us, end_us in reversed(self._hidden):
            place = bisect.bisect_left(events, start_us, key=read_time)
            while place < len(events) and read_time(events[place]) <= end_us + CLOCKS_DIFFER_US:
                if events[place]["action"] == "snapshot":
                    del events[place]
                    break
                place += 1


def _strip_history(snapshot: Mapping[str, Any]) -> None:
    """Take out of a snapshot what a history has added."""
    for events in snapshot.get("device_traces", ()):
        events.clear()
    for segment in snapshot.get("segments", ()):
        for entry in (segment, *segment["blocks"]):
            if "frames" in entry:
                entry["frames"] = []
