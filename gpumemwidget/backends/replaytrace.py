"""Plays the allocator's events of a recording: a trace that begins and ends anywhere in it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gpumemwidget.backends.histfile import join_events
from gpumemwidget.traces import AllocatorTrace, TraceEvents

if TYPE_CHECKING:
    from gpumemwidget.backends.replay import Playback

__all__ = ["ReplayTracer"]

_HAS_NO_EVENTS = (
    "this recording holds no history of the allocator: record one with "
    "`python -m gpumemwidget.backends.record --trace`"
)


class ReplayTracer:
    """The trace that runs over a playback.

    Args:
        playback: where it stands.
        clock_ns: nanoseconds since the epoch: the played events happen now.
    """

    def __init__(self, playback: Playback, *, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._playback = playback
        self._clock_ns = clock_ns
        events = playback.recording.events
        self._has_events = any(event.traced for event in events)
        #: Whether there is an allocator that could be traced.
        self.has_gpu = any(info.device.startswith("cuda:") for info in playback.recording.devices)
        self._start: tuple[int, int, int] | None = None

    @property
    def is_tracing(self) -> bool:
        """Whether a trace was started and not ended."""
        return self._start is not None

    def start(self, *, n_events: int) -> tuple[str, ...]:
        """Begin a trace here; why there is none, where the recording holds none."""
        self._start = None
        if not self.has_gpu:
            return ()
        if not self._has_events:
            return (_HAS_NO_EVENTS,)
        self._start = (self._playback.position, self._clock_ns() // 1000, n_events)
        return ()

    def end(self, touched: Sequence[str]) -> tuple[AllocatorTrace, ...]:
        """End the trace here: one for each of these devices."""
        if self._start is None:
            return ()
        (first, start_us, n_events), self._start = self._start, None
        playback = self._playback
        last = playback.position
        start_s = playback.get_time_s(first)
        parts: dict[str, list[tuple[TraceEvents, int]]] = {device: [] for device in touched}
        # What was lost of many turns that nobody looked at is no more than a ring would lose.
        is_near = last - first <= 2 * playback.n_events
        is_whole = is_near and playback.recording.is_whole
        for position in range(first + 1 if is_near else last - playback.n_events, last + 1):
            event = playback.get_event(position)
            if position % playback.n_events == 0:
                is_whole = is_whole and event.segments == playback.get_event(position - 1).segments
            # Its times count from the recording's beginning.
            since_us = round((playback.get_time_s(position) - event.time_s - start_s) * 1e6)
            for device, events in event.traced:
                if device in parts:
                    parts[device].append((events, start_us + since_us))
        stood, stands = playback.get_event(first).segments, playback.get_event(last).segments
        is_whole = is_whole and stood is not None
        at_most = max(1, n_events // max(1, len(touched)))
        traces = []
        for device, found in parts.items():
            events = join_events(found, at_most=at_most)
            n_found = sum(len(part) for part, _ in found)
            traces.append(
                AllocatorTrace(
                    device=device,
                    before=tuple(each for each in stood or () if each.device == device),
                    events=events,
                    after=tuple(each for each in stands or () if each.device == device),
                    start_us=start_us,
                    end_us=start_us + round((playback.get_time_s(last) - start_s) * 1e6),
                    rules=playback.recording.rules,
                    is_whole=is_whole and len(events) == n_found,
                )
            )
        return tuple(traces)
