"""The user's peak counters, kept as they would be without us.

A cell's exact peak needs the allocator's high-water marks reset at the cell's start. That wipes out
marks which the user may still ask for, so they are remembered here and laid over what PyTorch's
Python functions read. All of these functions (``memory_stats``, ``memory_stats_as_nested_dict``,
``max_memory_allocated``, ``memory_summary``, …, in ``torch.cuda`` and ``torch.accelerator``) look
one of a few bindings up in ``torch._C`` when they are called. Only these bindings are replaced:
code that imported a function before us is covered too.

The user's own resets pass through here as well: they clear what is remembered, and what the marks
said until then still counts for the running cell.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["NestedStats", "PeakOverlay", "find_extension"]

#: What ``torch.cuda.memory_stats_as_nested_dict()`` gives: ``{"allocated_bytes": {"all":
#: {"current": …, "peak": …, "allocated": …, "freed": …}, …}, "num_ooms": …}``.
NestedStats = dict[Any, Any]

#: Peaks alone, nested as the statistics are: ``{"allocated_bytes": {"all": 1024, …}, …}``. Keys may
#: be other than strings: private pools are keyed by their id, a pair of integers.
Peaks = dict[Any, Any]

#: The bindings of a kind of device, and those of whichever is the accelerator.
_READERS = ("_{kind}_memoryStats", "_accelerator_getDeviceStats")
_PEAK_RESETS = ("_{kind}_resetPeakMemoryStats", "_accelerator_resetPeakStats")
_TOTAL_RESETS = ("_{kind}_resetAccumulatedMemoryStats", "_accelerator_resetAccumulatedStats")

#: What PyTorch calls the devices of an extension that has given them no name.
_NO_EXTENSION = "privateuseone"

_COUNTERS = ("num_alloc_retries", "num_ooms")


def find_extension(bindings: Any) -> str | None:
    """What an extension of PyTorch has called its devices; ``None`` where none has brought any.

    Args:
        bindings: ``torch._C``.
    """
    find = getattr(bindings, "_get_privateuse1_backend_name", None)
    name = _NO_EXTENSION if find is None else str(find())
    return None if name == _NO_EXTENSION else name


class _Marks:
    """What is remembered of one device."""

    __slots__ = ("at_least", "counters", "floor", "folded", "seen", "wiped")

    def __init__(self) -> None:
        #: Peaks that our resets wiped out since the user's last reset: the user's view.
        self.wiped: Peaks = {}
        #: Peaks of the running span that other resets wiped out: the span's view.
        self.folded: Peaks = {}
        #: The last raw statistics: lower bounds on the peaks until the next reset.
        self.seen: NestedStats = {}
        #: Those from just before the span's reset: their current values are such bounds too, until
        #: there is something better.
        self.floor: NestedStats = {}
        #: Counts that the user's ``reset_accumulated_memory_stats`` wiped out.
        self.counters: dict[str, int] = dict.fromkeys(_COUNTERS, 0)
        #: True once somebody reset the peaks, within the span, in a way that we did not see.
        self.at_least = False

    def take_in(self, stats: NestedStats) -> None:
        """Check raw statistics against what was seen before, and remember them.

        A raw peak only rises until it is reset. One below what it was known to be tells of a reset
        behind our back: what it was known to be is then all that is left of the earlier marks, and
        the user's view starts anew, as it would have without us.
        """
        if _has_fallen(stats, self.seen):
            self.at_least = True
            _lift(self.folded, self.seen)
            self.wiped = {}
        elif self.floor and _is_below_current(stats, self.floor):
            # The user's view stays: a thread that freed memory just before our own reset would
            # look the same.
            self.at_least = True
        self.seen = stats
        self.floor = {}

    def before_span(self, stats: NestedStats) -> None:
        """We are about to reset: the span's view starts anew, the user's does not."""
        self.take_in(stats)
        _lift(self.wiped, stats)
        self.folded = {}
        self.seen = {}
        self.floor = stats
        self.at_least = False

    def before_user_reset(self, stats: NestedStats) -> None:
        """The user is about to reset: the span's view does not start anew."""
        self.take_in(stats)
        _lift(self.folded, stats)

    def after_user_reset(self, stats: NestedStats) -> None:
        """The user has reset: their view starts anew."""
        self.wiped = {}
        self.seen = stats
        self.floor = {}


class PeakOverlay:
    """Resets peaks for our spans and hides that from the user.

    Args:
        bindings: ``torch._C``, or anything with the same attributes. Bindings that it lacks (they
            came with later releases) are left out.
        kind: of the devices.
    """

    def __init__(self, bindings: Any, *, kind: str = "cuda") -> None:
        self._bindings = bindings
        self._kind = kind
        self._lock = threading.RLock()
        self._marks: dict[int, _Marks] = {}
        self._originals: dict[str, Callable[..., Any]] = {}
        self._ours: dict[str, Callable[..., Any]] = {}
        # PyTorch has no public seam below its own functions.
        self._read_stats: Callable[[int], NestedStats] = self._list_bindings(_READERS)[0][1]
        self._reset_peaks: Callable[[int], None] = self._list_bindings(_PEAK_RESETS)[0][1]

    def install(self) -> None:
        """Replace the bindings. Does nothing where they are replaced already."""
        with self._lock:
            if self._originals:
                return
            for names, wrap in (
                (_READERS, self._wrap_reader),
                (_PEAK_RESETS, self._wrap_peak_reset),
                (_TOTAL_RESETS, self._wrap_total_reset),
            ):
                for name, original in self._list_bindings(names):
                    ours = wrap(original)
                    ours.__name__ = ours.__qualname__ = name
                    self._originals[name] = original
                    self._ours[name] = ours
                    setattr(self._bindings, name, ours)

    def _list_bindings(self, names: tuple[str, ...]) -> list[tuple[str, Callable[..., Any]]]:
        """Those that there are, with their names."""
        ours = [name.format(kind=self._kind) for name in names]
        if find_extension(self._bindings) not in (None, self._kind):
            # What an extension brings comes before CUDA: the general bindings are its own then.
            ours = [name for name in ours if not name.startswith("_accelerator_")]
        found = ((name, getattr(self._bindings, name, None)) for name in ours)
        return [(name, each) for name, each in found if each is not None]

    def uninstall(self) -> None:
        """Put the bindings back, save those that somebody has replaced since. May be called twice.

        The marks that we wiped out are gone from then on: see ``list_lost_marks``.
        """
        with self._lock:
            for name, original in self._originals.items():
                if getattr(self._bindings, name, None) is self._ours[name]:
                    setattr(self._bindings, name, original)
            self._originals.clear()
            self._ours.clear()
            self._marks.clear()

    def list_lost_marks(self) -> tuple[tuple[int, int], ...]:
        """Device indices, and the allocated peaks that the user would no longer see if we unload.

        The allocator's own marks can't be raised again, so only what still stands there remains.
        """
        lost = []
        with self._lock:
            for device, marks in self._marks.items():
                wiped = marks.wiped.get("allocated_bytes", {}).get("all", 0)
                if wiped > self._read_stats(device)["allocated_bytes"]["all"]["peak"]:
                    lost.append((device, wiped))
        return tuple(lost)

    # -- for the backend ---------------------------------------------------------------------------

    def start_span(self, device: int) -> NestedStats:
        """Reset the device's peaks without the user seeing it; the raw statistics before that."""
        with self._lock:
            marks = self._marks_of(device)
            stats = self._read_stats(device)
            # Remembered before the reset, so that an interrupt in between loses nothing.
            marks.before_span(stats)
            self._reset_peaks(device)
        return self._add_counters(device, stats)

    def read(self, device: int) -> tuple[NestedStats, bool]:
        """Statistics with the span's peaks, and whether these are exact."""
        with self._lock:
            stats = self._read_stats(device)
            marks = self._marks_of(device)
            marks.take_in(stats)
            if marks.folded:
                stats = copy.deepcopy(stats)  # What was seen stays raw.
                _lay_over(stats, marks.folded)
            exact = not marks.at_least
        return self._add_counters(device, stats), exact

    def read_as_user(self, device: int) -> NestedStats:
        """Statistics as the user's own calls give them."""
        with self._lock:
            stats = self._read_stats(device)
            marks = self._marks.get(device)
            if marks is not None:
                _lay_over(stats, marks.wiped)
        return stats

    def _marks_of(self, device: int) -> _Marks:
        marks = self._marks.get(device)
        if marks is None:
            marks = self._marks[device] = _Marks()
        return marks

    def _add_counters(self, device: int, stats: NestedStats) -> NestedStats:
        counters = self._marks[device].counters
        if any(counters.values()):
            stats = {**stats, **{name: stats[name] + counters[name] for name in counters}}
        return stats

    # -- in the place of torch._C's own ------------------------------------------------------------

    def _wrap_reader(self, original: Callable[..., NestedStats]) -> Callable[..., NestedStats]:
        def read(*args: Any) -> NestedStats:
            with self._lock:
                stats = original(*args)
                marks = self._marks.get(_device_of(args))
                if marks is not None:
                    _lay_over(stats, marks.wiped)
                return stats

        return read

    def _wrap_peak_reset(self, original: Callable[..., None]) -> Callable[..., None]:
        def reset(*args: Any) -> None:
            with self._lock:
                device = _device_of(args)
                if device < 0:
                    original(*args)  # It refuses its arguments in its own words.
                    return
                marks = self._marks_of(device)
                marks.before_user_reset(self._read_stats(device))
                original(*args)
                marks.after_user_reset(self._read_stats(device))

        return reset

    def _wrap_total_reset(self, original: Callable[..., None]) -> Callable[..., None]:
        def reset(*args: Any) -> None:
            with self._lock:
                device = _device_of(args)
                if device < 0:
                    original(*args)  # As above.
                    return
                stats = self._read_stats(device)
                original(*args)
                counters = self._marks_of(device).counters
                for name in counters:
                    counters[name] += stats.get(name, 0)

        return reset


def _device_of(args: tuple[Any, ...]) -> int:
    """The device index in a binding's arguments; -1 where the binding will refuse them."""
    return args[0] if args and isinstance(args[0], int) else -1


# Every cell runs these over some 30 statistics, so they are written for speed.


def _has_fallen(stats: NestedStats, seen: NestedStats) -> bool:
    """Whether the peak of any statistic is below what was seen of it.

    Of all pools together only: a reset resets them all. (Private pools come and go with their
    marks, which tells nothing.)
    """
    for key, was in seen.items():
        if type(was) is dict and "all" in was and stats[key]["all"]["peak"] < was["all"]["peak"]:
            return True
    return False


def _is_below_current(stats: NestedStats, before: NestedStats) -> bool:
    """Whether any peak is below what stood when the peaks were reset."""
    for key, was in before.items():
        if type(was) is dict and "all" in was and stats[key]["all"]["peak"] < was["all"]["current"]:
            return True
    return False


def _lift(marks: Peaks, stats: NestedStats) -> None:
    """Lift marks to the peaks in statistics that are higher, in place."""
    for key, now in stats.items():
        if type(now) is dict:
            peak = now.get("peak")
            mark = marks.get(key)
            if peak is None:
                if mark is None:
                    mark = marks[key] = {}
                _lift(mark, now)
            elif mark is None or peak > mark:
                marks[key] = peak


def _lay_over(stats: NestedStats, marks: Peaks) -> None:
    """Lift the peaks in statistics to the marks, in place."""
    for key, mark in marks.items():
        now = stats.get(key)
        if now is None:
            continue
        if type(mark) is dict:
            _lay_over(now, mark)
        elif mark > now["peak"]:
            now["peak"] = mark
