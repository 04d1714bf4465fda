"""The history of simulated allocators, in the dictionaries in which torch gives its own."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gpumemwidget.records import Frame

__all__ = ["SimulatedHistory"]

#: Frames of the simulation's own are no part of a stack.
_OWN_FILES = frozenset(
    str(Path(__file__).with_name(name))
    for name in ("allocator.py", "caching.py", "expandable.py", "simhistory.py")
)


class SimulatedHistory:
    """What happened on one or several devices, and which line allocated each live block.

    Not safe to use from several threads: its allocator's lock is held meanwhile.

    Args:
        n_devices: how many devices there are.
        clock_ns: nanoseconds since the epoch.
    """

    def __init__(self, n_devices: int, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._clock_ns = clock_ns
        self._rings: list[deque[dict[str, Any]]] = [deque() for _ in range(n_devices)]
        self._enabled: str | None = None
        self._context: str | None = None
        #: By device and address.
        self._live: dict[tuple[int, int], list[dict[str, Any]]] = {}
        #: Each frame once, as torch has it too.
        self._frames: dict[Frame, dict[str, Any]] = {}
        #: What is running, instead of Python's own stack.
        self._stack: tuple[Frame, ...] | None = None

    @property
    def is_on(self) -> bool:
        """Whether it is written, events or only lines."""
        return self._enabled is not None

    def set(
        self, enabled: str | None, context: str | None, max_entries: int, *, clear: bool
    ) -> None:
        """As ``torch.cuda.memory._record_memory_history``: what is there stays, if it is on."""
        self._enabled, self._context = enabled, context
        kept = sys.maxsize if max_entries > sys.maxsize else max_entries
        self._rings = [
            deque(() if enabled is None or clear else ring, maxlen=kept) for ring in self._rings
        ]

    @contextlib.contextmanager
    def at(self, stack: tuple[Frame, ...] | None) -> Iterator[None]:
        """Say that these frames are running; ``None``: those that are."""
        self._stack = stack
        try:
            yield
        finally:
            self._stack = None

    def note(self, index: int, action: str, address: int, n_bytes: int) -> None:
        """Write an event down, as far as it is switched on."""
        if self._enabled is None:
            self._live.pop((index, address), None)
            return
        is_alloc = action == "alloc"
        is_free = action in ("free_requested", "free_completed")
        wanted = (
            ("all",) if is_free else ("state", "alloc", "all") if is_alloc else ("alloc", "all")
        )
        # Torch gives a free that has no lines of its own those of its block's allocation.
        stack = self._live.get((index, address), [])
        if self._context in wanted:
            stack = self._take_stack()
        if is_alloc:
            self._live[index, address] = stack
        elif action == "free_completed":
            self._live.pop((index, address), None)
        if self._enabled == "all":
            self._rings[index].append(
                {
                    "action": action,
                    ("device_free" if action == "oom" else "addr"): address,
                    "size": n_bytes,
                    "stream": 0,
                    "time_us": self._clock_ns() // 1000,
                    **({} if action == "snapshot" else {"frames": stack}),
                }
            )

    def get_stack(self, index: int, address: int) -> Sequence[dict[str, Any]]:
        """The lines that allocated a live block; none where they were not kept."""
        return self._live.get((index, address), [])

    def list_events(self) -> list[list[dict[str, Any]]]:
        """Each device's events, the oldest first."""
        return [list(ring) for ring in self._rings]

    def _take_stack(self) -> list[dict[str, Any]]:
        stack = self._stack
        if stack is None:
            found = []
            frame: Any = sys._getframe(1)  # noqa: SLF001 - inspect's public way reads all sources
            while frame is not None:
                code = frame.f_code
                if code.co_filename not in _OWN_FILES:
                    found.append(Frame(code.co_filename, frame.f_lineno, code.co_name))
                frame = frame.f_back
            stack = tuple(found)
        return [self._frames.setdefault(each, _to_raw(each)) for each in stack]


def _to_raw(frame: Frame) -> dict[str, Any]:
    return {"name": frame.function, "filename": frame.filename, "line": frame.line}
