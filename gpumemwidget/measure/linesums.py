"""Adds up what was read at the lines of a cell: what each added, gave back and holds.

Readings tell of changes, not of blocks. So what a line gave back is taken from the line whose rise
was as big, the latest first; where there is none, from its own, then from the lines that rose last
if together they hold as much, else from what stood before. So each line holds something at each
moment, and with what stood before it is what was in use.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

__all__ = ["LineSum", "LineSums", "Moment"]

#: Stretches of the timeline; each keeps its lowest, its highest and its last moment.
_N_STRETCHES = 512
#: Sizes of rises that are remembered, of which one may be what a line gives back.
_N_SIZES = 4096
#: What a gap leaves of the weights by which it was shared out.
_DECAY = 0.5


@dataclass(slots=True)
class LineSum:
    """One line's changes, in bytes."""

    added_bytes: int = 0
    returned_bytes: int = 0
    #: Readings that were higher than the one before.
    n_rises: int = 0
    held_bytes: int = 0
    highest_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Moment:
    """What stood at one reading."""

    time_ns: int
    in_use_bytes: int
    #: What each line held of it, as far as it held anything.
    held_bytes: dict[int, int]


@dataclass(slots=True)
class _Stretch:
    """Some moments on end, by their lowest, their highest and their last."""

    lowest: Moment
    highest: Moment
    last: Moment


@dataclass(slots=True)
class LineSums:
    """The sums over all readings so far.

    Args:
        start_ns: when the first of them was taken.
        start_bytes: what stood then.
    """

    start_ns: int
    start_bytes: int
    lines: dict[int, LineSum] = field(default_factory=dict)
    #: How many changes there were.
    n_changes: int = 0
    #: What is left of what stood before.
    before_bytes: int = 0
    peak: Moment = field(init=False)
    now_bytes: int = field(init=False)
    _last_ns: int = field(init=False)
    _stretches: list[_Stretch] = field(default_factory=list)
    _n_in_stretch: int = 0
    _n_per_stretch: int = 1
    #: By size, how many rises of it each line has had that nothing was taken from, the latest last.
    _rises: dict[int, dict[int, int]] = field(default_factory=dict)
    #: The lines in the order of their latest rises.
    _latest: dict[int, None] = field(default_factory=dict)
    #: By line, what it added and gave back in its latest readings: a gap is shared out by it.
    _recent_added: dict[int, float] = field(default_factory=dict)
    _recent_returned: dict[int, float] = field(default_factory=dict)
    _was_shared: bool = False

    def __post_init__(self) -> None:
        self.before_bytes = self.now_bytes = self.start_bytes
        self._last_ns = self.start_ns
        self.peak = Moment(self.start_ns, self.start_bytes, {})

    def take(self, times: array[int], lines: array[int], values: array[int], n: int) -> None:
        """Take in the first ``n`` readings.

        Args:
            times: in nanoseconds.
            lines: the line that had run until then, or ``-1 - line`` where others may have run too.
            values: the bytes in use.
            n: how many.
        """
        for index in range(n):
            line, value = lines[index], values[index]
            change = value - self.now_bytes
            if change == 0:
                continue
            self.now_bytes = value
            self.n_changes += 1
            if line >= 0:
                self._note_recent(line, change)
                self._change(line, change)
            else:
                self._share(-1 - line, change)
            self._last_ns = times[index]
            self._note_moment(times[index], value)

    def list_moments(self) -> list[Moment]:
        """The timeline from the start on: each stretch's lowest, highest and last moment."""
        moments = [Moment(self.start_ns, self.start_bytes, {})]
        for stretch in self._stretches:
            kept = {each.time_ns: each for each in (stretch.lowest, stretch.highest, stretch.last)}
            moments += sorted(kept.values(), key=lambda each: each.time_ns)
        if moments[-1].time_ns < self._last_ns:
            moments.append(Moment(self._last_ns, self.now_bytes, self.copy_held()))
        return moments

    def copy_held(self) -> dict[int, int]:
        """What each line holds now, as far as it holds anything."""
        return {line: each.held_bytes for line, each in self.lines.items() if each.held_bytes}

    def rename(self, numbers: Mapping[int, int]) -> LineSums:
        """The same sums by other lines, of which several may become one.

        Args:
            numbers: for each line what it is called from now on.
        """
        renamed = replace(self, lines={}, _stretches=[])
        for line, each in self.lines.items():
            into = renamed.lines.setdefault(numbers[line], LineSum())
            into.added_bytes += each.added_bytes
            into.returned_bytes += each.returned_bytes
            into.n_rises += each.n_rises
            into.held_bytes += each.held_bytes
            # At least: when each was highest, is not known any more.
            into.highest_bytes = max(into.highest_bytes, each.highest_bytes, into.held_bytes)

        def rename_moment(moment: Moment) -> Moment:
            held: dict[int, int] = {}
            for line, n_bytes in moment.held_bytes.items():
                held[numbers[line]] = held.get(numbers[line], 0) + n_bytes
            return Moment(moment.time_ns, moment.in_use_bytes, held)

        renamed.before_bytes, renamed.now_bytes = self.before_bytes, self.now_bytes
        renamed._last_ns = self._last_ns  # noqa: SLF001 - of the same class
        renamed.peak = rename_moment(self.peak)
        renamed._stretches = [  # noqa: SLF001 - as above
            _Stretch(*map(rename_moment, (each.lowest, each.highest, each.last)))
            for each in self._stretches
        ]
        return renamed

    # -- One change --------------------------------------------------------------------------------

    def _change(self, line: int, change: int) -> None:
        each = self.lines.get(line)
        if each is None:
            each = self.lines[line] = LineSum()
        if change > 0:
            each.added_bytes += change
            each.n_rises += 1
            each.held_bytes += change
            each.highest_bytes = max(each.highest_bytes, each.held_bytes)
            self._note_rise(line, change)
        else:
            each.returned_bytes -= change
            self._take_back(each, -change)

    def _note_rise(self, line: int, n_bytes: int) -> None:
        self._latest.pop(line, None)
        self._latest[line] = None
        of_size = self._rises.pop(n_bytes, {})
        of_size[line] = of_size.pop(line, 0) + 1
        self._rises[n_bytes] = of_size
        if len(self._rises) > _N_SIZES:
            del self._rises[next(iter(self._rises))]

    def _take_back(self, own: LineSum, n_bytes: int) -> None:
        of_size = self._rises.get(n_bytes, {})
        for line in reversed(of_size):
            if self.lines[line].held_bytes >= n_bytes:
                self.lines[line].held_bytes -= n_bytes
                of_size[line] -= 1
                if not of_size[line]:
                    del of_size[line]
                return
        n_bytes = _take(own, n_bytes)
        others = [self.lines[line] for line in reversed(self._latest)] if n_bytes else []
        if sum(each.held_bytes for each in others) < n_bytes:
            taken = min(n_bytes, self.before_bytes)
            self.before_bytes -= taken
            n_bytes -= taken
        for each in others:
            n_bytes = _take(each, n_bytes)

    # -- Gaps --------------------------------------------------------------------------------------

    def _note_recent(self, line: int, change: int) -> None:
        if self._was_shared:
            # What was read before the last gap counts for less from here on.
            self._was_shared = False
            for weights in (self._recent_added, self._recent_returned):
                for each, weight in list(weights.items()):
                    weights[each] = weight * _DECAY
                    if weight < 1:
                        del weights[each]
        recent = self._recent_added if change > 0 else self._recent_returned
        recent[line] = recent.get(line, 0.0) + abs(change)

    def _share(self, line: int, change: int) -> None:
        """Share a gap's change out as its lines' changes were where they were read."""
        recent = self._recent_added if change > 0 else self._recent_returned
        whole = sum(recent.values())
        rest = change
        if whole:
            for each, weight in sorted(recent.items(), key=lambda item: item[1]):
                part = int(change * (weight / whole))
                if part:
                    rest -= part
                    self._change(each, part)
                line = each
        if rest:
            self._change(line, rest)
        self._was_shared = True

    # -- The timeline ------------------------------------------------------------------------------

    def _note_moment(self, time_ns: int, value: int) -> None:
        is_first = self._n_in_stretch == 0
        self._n_in_stretch = (self._n_in_stretch + 1) % self._n_per_stretch
        is_last = self._n_in_stretch == 0
        is_peak = value > self.peak.in_use_bytes
        if is_first:
            if len(self._stretches) == _N_STRETCHES:
                self._merge()
            moment = Moment(time_ns, value, self.copy_held())
            self._stretches.append(_Stretch(moment, moment, moment))
        else:
            stretch = self._stretches[-1]
            is_higher = value > stretch.highest.in_use_bytes
            is_lower = value < stretch.lowest.in_use_bytes
            if not (is_higher or is_lower or is_last):
                return
            stretch.last = moment = Moment(time_ns, value, self.copy_held())
            if is_higher:
                stretch.highest = moment
            elif is_lower:
                stretch.lowest = moment
        if is_peak:
            self.peak = moment

    def _merge(self) -> None:
        """Make one stretch of each two."""
        pairs = zip(self._stretches[::2], self._stretches[1::2], strict=True)
        self._stretches = [
            _Stretch(
                min(first.lowest, second.lowest, key=lambda each: each.in_use_bytes),
                max(first.highest, second.highest, key=lambda each: each.in_use_bytes),
                second.last,
            )
            for first, second in pairs
        ]
        self._n_per_stretch *= 2
        # The one that has just begun is as long as these.
        self._n_in_stretch = 1


def _take(each: LineSum, n_bytes: int) -> int:
    """Take from what a line holds; what is left to be taken elsewhere."""
    taken = min(n_bytes, each.held_bytes)
    each.held_bytes -= taken
    return n_bytes - taken
