"""What a recording tells of the peaks between any two of its events.

It was recorded with spans of its own, and is played back with others. Still each of its marks
bounds what happened since the event before: one that rose was reached in between, one that stayed
was not passed. Over a span these give a lowest and a highest peak, and where they meet the peak is
exact.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpumemwidget.records import PeakIs, Reading

__all__ = ["Track"]


class _Bounds:
    """What the events that were passed tell of a peak: where it is at least and at most."""

    __slots__ = ("least", "most")

    def __init__(self, current: int | None) -> None:
        self.least = current
        #: ``None`` where nothing bounds it.
        self.most = current

    def widen(self, least: int, most: int | None) -> None:
        self.least = least if self.least is None else max(self.least, least)
        self.most = None if most is None or self.most is None else max(self.most, most)

    @property
    def is_exact(self) -> bool:
        return self.least == self.most


@dataclass(slots=True)
class _Counter:
    """One counter of one device on its way through the events."""

    current: int | None
    #: Where the recorded mark stands; ``None`` where none was recorded.
    mark: int | None
    span: _Bounds
    user: _Bounds
    #: Whether marks are recorded of it at all.
    has_mark: bool

    def pass_event(
        self, current: int | None, peak: int | None, *, starts: bool, peak_is: PeakIs | None
    ) -> None:
        """Take in the next event's reading of it."""
        known = [value for value in (self.current, current) if value is not None]
        if known:
            least = max(known)
            most: int | None = None
            if starts:
                # Nobody recorded the marks that this start wiped. Where the counter stands as it
                # stood, nothing happened.
                most = least if self.current == current else None
            elif peak is not None:
                # A mark that rose was reached just now; one that did not bounds what happened.
                if self.mark is not None and peak > self.mark:
                    least = max(least, peak)
                if peak_is == "exact":
                    most = max(least, peak)
            for bounds in (self.span, self.user):
                bounds.widen(least, most)
        self.current = current
        self.mark = peak
        self.has_mark = self.has_mark or peak is not None

    def jump(self, current: int | None, peak: int | None) -> None:
        """Take in the first reading of the next turn: nothing happens between two turns."""
        for bounds in (self.span, self.user):
            if current is not None:
                bounds.widen(current, current)
        self.current = current
        self.mark = peak

    def get_bounds(self, *, as_user: bool) -> _Bounds:
        """What is known of the peak; nothing where no mark was recorded, and that for certain."""
        if not self.has_mark:
            return _Bounds(None)
        return self.user if as_user else self.span

    def restart_mark(self) -> None:
        self.mark = self.current


class Track:
    """One device's counters on their way through the events.

    Args:
        reading: the device's first; its marks began at 0, or before the recording.
    """

    __slots__ = ("allocated", "first", "last", "reserved", "weakest")

    def __init__(self, reading: Reading) -> None:
        self.first = self.last = reading
        #: What to call a peak that is not exact.
        self.weakest: PeakIs = "sampled" if reading.peak_is == "sampled" else "at least"
        self.allocated = self._begin(reading.allocated_bytes, reading.allocated_peak_bytes)
        self.reserved = self._begin(reading.reserved_bytes, reading.reserved_peak_bytes)

    def _begin(self, current: int | None, peak: int | None) -> _Counter:
        counter = _Counter(current, peak, _Bounds(peak), _Bounds(peak), peak is not None)
        if self.first.peak_is != "exact":
            counter.span.most = counter.user.most = None
        return counter

    def jump(self, reading: Reading) -> None:
        """Take in the first event of the next turn."""
        self.allocated.jump(reading.allocated_bytes, reading.allocated_peak_bytes)
        self.reserved.jump(reading.reserved_bytes, reading.reserved_peak_bytes)
        self.last = reading

    def pass_event(self, reading: Reading, *, starts: bool) -> None:
        """Take in the next event; ``starts`` where its readings follow a reset of the marks."""
        if reading.peak_is == "sampled":
            self.weakest = "sampled"
        for counter, current, peak in (
            (self.allocated, reading.allocated_bytes, reading.allocated_peak_bytes),
            (self.reserved, reading.reserved_bytes, reading.reserved_peak_bytes),
        ):
            counter.pass_event(current, peak, starts=starts, peak_is=reading.peak_is)
        self.last = reading

    def restart_marks(self) -> None:
        """The recorded marks were reset behind the last event."""
        for counter in (self.allocated, self.reserved):
            counter.restart_mark()

    def start_span(self) -> None:
        """Begin a span of the playback's at the last event."""
        for counter in (self.allocated, self.reserved):
            counter.span = _Bounds(counter.current)

    def reset_user(self) -> None:
        """Let the user's peaks begin anew at the last event; the span's go on."""
        for counter in (self.allocated, self.reserved):
            counter.user = _Bounds(counter.current)

    def to_reading(self, n_turns: int, final: Reading | None, *, as_user: bool) -> Reading:
        """The last reading, with the peaks of the playback's span.

        Args:
            n_turns: how often the recording was played to its end.
            final: the device's last reading in a turn.
            as_user: peaks since the recording began instead.
        """
        allocated = self.allocated.get_bounds(as_user=as_user)
        reserved = self.reserved.get_bounds(as_user=as_user)
        is_known = allocated.least is not None or reserved.least is not None
        is_exact = allocated.is_exact and reserved.is_exact
        return replace(
            self.last,
            allocated_peak_bytes=allocated.least,
            reserved_peak_bytes=reserved.least,
            peak_is=None if not is_known else "exact" if is_exact else self.weakest,
            num_alloc_retries=_go_on("num_alloc_retries", self.last, self.first, final, n_turns),
            num_ooms=_go_on("num_ooms", self.last, self.first, final, n_turns),
        )


def _go_on(
    name: str, last: Reading, first: Reading, final: Reading | None, n_turns: int
) -> int | None:
    """A running total, with what each full turn added to it."""
    total: int | None = getattr(last, name)
    begin: int | None = getattr(first, name)
    end: int | None = None if final is None else getattr(final, name)
    if total is None or begin is None or end is None:
        return total
    return total + n_turns * (end - begin)
