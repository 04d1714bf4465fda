"""What stands at a recording's position beside the counters: devices, processes, limits."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from gpumemwidget.backends.base import Relation
from gpumemwidget.devices import ChildProcess, Limit, PinnedUse, ProcessUse
from gpumemwidget.records import DeviceUse

if TYPE_CHECKING:
    from gpumemwidget.backends.recording import Event
    from gpumemwidget.backends.replay import Playback

__all__ = ["ReplayProcesses", "Standing", "State"]


@dataclass(frozen=True, slots=True)
class State:
    """What the events up to a position tell; each by its device, where it was read at all."""

    uses: Mapping[str, DeviceUse] = field(default_factory=dict)
    processes: Mapping[str, tuple[ProcessUse, ...] | None] = field(default_factory=dict)
    failures: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    children: tuple[ChildProcess, ...] = ()
    pinned: PinnedUse | None = None
    limits: tuple[Limit, ...] = ()


class Standing:
    """Follows a playback.

    Args:
        playback: where it stands.
    """

    def __init__(self, playback: Playback) -> None:
        self._playback = playback
        self._lock = threading.Lock()
        self._state = State()
        self._at = -1

    def follow(self) -> State:
        """What stands now."""
        with self._lock:
            position = self._playback.position
            n_events = self._playback.n_events
            # Nothing of a turn stands in the next one: that begins from the first event again.
            self._at = max(self._at, position - position % n_events - 1)
            while self._at < position:
                self._at += 1
                begins = self._at % n_events == 0
                state = State() if begins else self._state
                self._state = _go_on(state, self._playback.get_event(self._at))
            return self._state


def _go_on(state: State, event: Event) -> State:
    """What stands after an event."""
    change = event.change
    return State(
        uses={**state.uses, **{use.device: use for use in event.uses}},
        processes={**state.processes, **dict(change.processes)},
        failures={**state.failures, **dict(change.failures)},
        children=state.children if change.children is None else change.children,
        pinned=state.pinned if change.pinned is None else change.pinned,
        limits=state.limits if change.limits is None else change.limits,
    )


class ReplayProcesses:
    """A recording's processes as a ``ProcessSource``.

    Args:
        playback: where it stands.
    """

    def __init__(self, playback: Playback) -> None:
        self._standing = Standing(playback)

    @property
    def own_pid(self) -> int:
        """The recorded process's number; 0 where the driver did not list it."""
        listed = self._standing.follow().processes.values()
        uses = (use for each in listed for use in each or ())
        return next((use.pid for use in uses if use.relation == "own"), 0)

    @property
    def are_numbers_certain(self) -> bool:
        """Whether the recorded process was among those that the driver listed."""
        return self.own_pid != 0

    def list_children(self) -> tuple[ChildProcess, ...]:
        """The children at this position."""
        return tuple(replace(child, devices=()) for child in self._standing.follow().children)

    def describe(
        self, pids: Collection[int], *, are_ours: bool | None
    ) -> Mapping[int, tuple[Relation, str | None]]:
        """What was told of them when it was recorded."""
        listed = () if are_ours is False else self._standing.follow().processes.values()
        told: dict[int, tuple[Relation, str | None]] = {
            use.pid: (use.relation, use.name) for each in listed for use in each or ()
        }
        return {pid: told.get(pid, ("other", None)) for pid in pids}
