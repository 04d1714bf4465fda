"""Report how far long work has got, to a listener that shows it to the user.

A loop reports where it looks at the clock anyway, or every few thousand steps. Without a listener a
report costs the look-up of a context variable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum, auto
from itertools import chain, islice
from typing import TypeVar

_T = TypeVar("_T")

#: Number of items of a loop between two reports: a few milliseconds of the fastest loops.
_ITEMS_PER_REPORT = 1 << 14


class Stage(Enum):
    """The kind of work, and the unit of its progress."""

    #: Objects that a walk has visited, once for each reference; their number is not known.
    WALK_OBJECTS = auto()
    FIND_HOLDERS = auto()  #: tensors without a name, whose holders are searched
    DESCRIBE_ROWS = auto()  #: rows of an account, each with what its release would free
    MOVE_BYTES = auto()  #: bytes of storages that were moved to another device
    READ_BYTES = auto()  #: bytes of a file that were read
    REPLAY_EVENTS = auto()  #: events of an allocator that were replayed
    PLACE_EVENTS = auto()  #: events of an allocator that were attributed to lines
    #: Operators of a step that were carried out without computing; their number is not known.
    CALL_OPERATORS = auto()


@dataclass(frozen=True, slots=True)
class Progress:
    """A report of how far a stage has got, in its unit."""

    stage: Stage
    done: int
    total: int | None  #: ``None`` if not known


_listener: ContextVar[Callable[[Progress], None] | None] = ContextVar("listener", default=None)


def report_progress(stage: Stage, done: int, total: int | None = None) -> None:
    """Report to the listener how far a stage has got.

    An exception of the listener goes through, so that a listener may interrupt the work.
    """
    listener = _listener.get()
    if listener is not None:
        listener(Progress(stage, done, total))


def follow(items: Iterable[_T], stage: Stage, total: int) -> Iterator[_T]:
    """Iterate over ``total`` items at C's speed, and report progress every few thousand items."""
    iterator = iter(items)
    if _listener.get() is None:
        return iterator

    def cut() -> Iterator[Iterator[_T]]:
        for done in range(0, total, _ITEMS_PER_REPORT):
            report_progress(stage, done, total)
            yield islice(iterator, _ITEMS_PER_REPORT)

    return chain.from_iterable(cut())


def listen(listener: Callable[[Progress], None]) -> _Listening:
    """Call ``listener`` with all progress within the ``with`` block, on this thread.

    A listener of an outer block is called too, and first. An exception of a listener ends the work.
    Work that the block schedules for later runs in a copy of its context, and is not listened to.
    """
    return _Listening(listener)


class _Listening:
    """The block of ``listen``: each cell's end enters one, and ``@contextmanager`` is slower."""

    __slots__ = ("_is_open", "_outer", "_take", "_token")

    def __init__(self, take: Callable[[Progress], None]) -> None:
        self._take = take

    def __enter__(self) -> None:
        self._outer = _listener.get()
        self._is_open = True
        self._token = _listener.set(self._report)

    def __exit__(self, *_: object) -> None:
        self._is_open = False
        _listener.reset(self._token)

    def _report(self, progress: Progress) -> None:
        if self._is_open:
            if self._outer is not None:
                self._outer(progress)
            self._take(progress)
