"""Reset the allocator's peaks for our spans, and keep the user's view of them as it was.

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
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from gpumemwidget.backends.hooks import Patch
from gpumemwidget.model.devices import PeakIs

#: The result of ``torch.cuda.memory_stats_as_nested_dict()``: ``{"allocated_bytes": {"all":
#: {"current": …, "peak": …, "allocated": …, "freed": …}, …}, "num_ooms": …}``.
NestedStats = dict[Any, Any]

#: Peaks alone, nested as the statistics are: ``{"allocated_bytes": {"all": 1024, …}, …}``. Keys may
#: be other than strings: private pools are keyed by their id, a pair of integers.
Peaks = dict[Any, Any]


def find_extension(bindings: Any) -> str | None:
    """Return the name that an extension gave its devices; ``None`` where there is no extension."""
    find = getattr(bindings, "_get_privateuse1_backend_name", None)
    # PyTorch's own name for the devices of an extension that has given them none.
    unnamed = "privateuseone"
    name = unnamed if find is None else str(find())
    return None if name == unnamed else name


class _Marks:
    """The peaks of one device that resets have wiped out."""

    def __init__(self) -> None:
        #: Peaks that our resets wiped out since the user's last reset: the user's view.
        self.user_peaks: Peaks = {}
        #: Peaks of the running span that other resets wiped out: the span's view.
        self.span_peaks: Peaks = {}
        #: The raw statistics at the start of the last span, whose peaks ``user_peaks`` includes.
        self.wiped_stats: NestedStats = {}
        #: The last raw statistics, which are lower bounds of the peaks until the next reset.
        self.last_stats: NestedStats = {}
        #: True if somebody reset the peaks within the span without our seeing it.
        self.at_least = False

    def update(self, stats: NestedStats) -> None:
        """Check raw statistics against those that were seen before, and remember them.

        A raw peak only rises until it is reset. A peak below its last known value means a reset
        that we did not see: the known value is then all that is left of the earlier marks, and the
        user's view starts anew, as it would have without us.
        """
        if _is_below(stats, self.last_stats):
            self.at_least = True
            _raise_marks(self.span_peaks, self.last_stats)
            self.user_peaks, self.wiped_stats = {}, {}
        self.last_stats = stats

    def prepare_span(self, stats: NestedStats) -> None:
        """Prepare for our own reset: the span's view starts anew, the user's does not."""
        self.update(stats)
        if stats != self.wiped_stats:
            _raise_marks(self.user_peaks, stats)
            self.wiped_stats = stats
        self.span_peaks = {}
        self.last_stats = {}
        self.at_least = False

    def prepare_user_reset(self, stats: NestedStats) -> None:
        """Prepare for the user's reset: the span's view does not start anew."""
        self.update(stats)
        _raise_marks(self.span_peaks, stats)

    def finish_user_reset(self, stats: NestedStats) -> None:
        """Start the user's view anew after their reset."""
        self.user_peaks, self.wiped_stats = {}, {}
        self.last_stats = stats


class PeakOverlay:
    """Resets of the peaks for our spans, hidden from the user until ``uninstall``.

    Args:
        bindings: ``torch._C``, or anything with the same attributes. Bindings that it lacks (they
            came with later releases) are left out.
        kind: the devices' kind.
    """

    def __init__(self, bindings: Any, *, kind: str = "cuda") -> None:
        self._lock = threading.RLock()
        self._marks: defaultdict[int, _Marks] = defaultdict(_Marks)
        self._patch = Patch()
        # PyTorch has no public seam below its own functions. The general bindings are an
        # extension's where there is one: its devices come before CUDA.
        n_names = 2 if find_extension(bindings) in (None, kind) else 1
        readers = [f"_{kind}_memoryStats", "_accelerator_getDeviceStats"][:n_names]
        resets = [f"_{kind}_resetPeakMemoryStats", "_accelerator_resetPeakStats"][:n_names]
        self._read_stats: Callable[[int], NestedStats] = _find_binding(bindings, readers)
        self._reset_peaks: Callable[[int], None] = _find_binding(bindings, resets)
        for name in readers:
            self._patch.replace(bindings, name, self._wrap_reader)
        for name in resets:
            self._patch.replace(bindings, name, self._wrap_peak_reset)

    def uninstall(self) -> None:
        """Put the bindings back, save those that somebody has replaced since. May be called twice.

        The marks that we wiped out are gone from then on: see ``list_lost_marks``.
        """
        with self._lock:
            self._patch.undo()
            self._marks.clear()

    # -- for the backend ---------------------------------------------------------------------------

    def start_span(self, device: int) -> NestedStats:
        """Reset a device's peaks unseen by the user, and return the raw statistics from before."""
        with self._lock:
            marks = self._marks[device]
            stats = self._read_stats(device)
            # Remembered before the reset, so that an interrupt in between loses nothing.
            marks.prepare_span(stats)
            self._reset_peaks(device)
        return stats

    def read(self, device: int) -> tuple[NestedStats, PeakIs]:
        """Return statistics with the span's peaks, and what these are."""
        with self._lock:
            stats = self._read_stats(device)
            marks = self._marks[device]
            marks.update(stats)
            if marks.span_peaks:
                stats = copy.deepcopy(stats)
                _raise_peaks(stats, marks.span_peaks)
            peak_is: PeakIs = "at least" if marks.at_least else "exact"
        return stats, peak_is

    def read_as_user(self, device: int) -> NestedStats:
        """Return statistics as the user's own calls give them."""
        with self._lock:
            stats = self._read_stats(device)
            marks = self._marks.get(device)
            if marks is not None:
                _raise_peaks(stats, marks.user_peaks)
        return stats

    # -- instead of torch._C's own -----------------------------------------------------------------

    def _wrap_reader(self, original: Callable[..., NestedStats]) -> Callable[..., NestedStats]:
        def read(*args: Any) -> NestedStats:
            with self._lock:
                stats = original(*args)
                marks = self._marks.get(_device_of(args))
                if marks is not None:
                    _raise_peaks(stats, marks.user_peaks)
                return stats

        return read

    def _wrap_peak_reset(self, original: Callable[..., None]) -> Callable[..., None]:
        def reset(*args: Any) -> None:
            with self._lock:
                device = _device_of(args)
                if device < 0:
                    original(*args)  # The binding refuses its arguments in its own words.
                    return
                marks = self._marks[device]
                marks.prepare_user_reset(self._read_stats(device))
                original(*args)
                marks.finish_user_reset(self._read_stats(device))

        return reset


def _find_binding(bindings: Any, names: list[str]) -> Any:
    return next(call for name in names if (call := getattr(bindings, name, None)) is not None)


def _device_of(args: tuple[Any, ...]) -> int:
    """Return the device index in a binding's arguments; -1 where the binding refuses them."""
    return args[0] if args and isinstance(args[0], int) else -1


# The functions below run over some 30 statistics in every cell, and are written for speed.


def _is_below(stats: NestedStats, seen: NestedStats) -> bool:
    """Return whether the peak of any statistic is below the one that was seen before.

    Only figures of all pools together count, as a reset resets them all; private pools come and go
    with their marks.
    """
    for key, was in seen.items():
        if type(was) is dict and "all" in was and stats[key]["all"]["peak"] < was["all"]["peak"]:
            return True
    return False


def _raise_marks(marks: Peaks, stats: NestedStats) -> None:
    """Raise marks, in place, to the peaks in statistics that are higher."""
    for key, now in stats.items():
        if type(now) is dict:
            peak = now.get("peak")
            mark = marks.get(key)
            if peak is None:
                if mark is None:
                    mark = marks[key] = {}
                _raise_marks(mark, now)
            elif mark is None or peak > mark:
                marks[key] = peak


def _raise_peaks(stats: NestedStats, marks: Peaks) -> None:
    """Raise the peaks in statistics, in place, to the marks."""
    for key, mark in marks.items():
        now = stats.get(key)
        if now is None:
            continue
        if type(mark) is dict:
            _raise_peaks(now, mark)
        elif mark > now["peak"]:
            now["peak"] = mark
