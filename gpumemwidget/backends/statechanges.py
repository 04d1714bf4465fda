"""What changes on whole devices from one event of a recording to the next.

Most of it stands for minutes, and a recording is small enough to keep beside tests: so what is as
it was is not written again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from gpumemwidget.devices import ChildProcess, DeviceState, Limit, PinnedUse, ProcessUse

__all__ = ["Change", "Seen"]


@dataclass(frozen=True, slots=True)
class Change:
    """What is otherwise than at the event before; what is not there is as it was."""

    #: Who is on a device; ``None`` where the driver does not tell.
    processes: tuple[tuple[str, tuple[ProcessUse, ...] | None], ...] = ()
    #: Why something of a device can't be read.
    failures: tuple[tuple[str, tuple[str, ...]], ...] = ()
    #: The processes below the recorded one.
    children: tuple[ChildProcess, ...] | None = None
    #: Pinned host memory; PyTorch begins to count it and never ends.
    pinned: PinnedUse | None = None
    #: The devices' limits, without what is reserved, which the readings tell.
    limits: tuple[Limit, ...] | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """What stood on the devices at an event."""

    processes: dict[str, tuple[ProcessUse, ...] | None] = field(default_factory=dict)
    failures: dict[str, tuple[str, ...]] = field(default_factory=dict)
    children: tuple[ChildProcess, ...] = ()
    pinned: PinnedUse | None = None
    limits: tuple[Limit, ...] = ()

    @classmethod
    def of(
        cls,
        states: Sequence[DeviceState],
        children: Sequence[ChildProcess],
        limits: Sequence[Limit],
    ) -> Seen:
        """What there is to be written down of these."""
        return cls(
            processes={each.info.device: each.processes for each in states},
            failures={each.info.device: each.notes for each in states},
            # What each takes of the devices stands with these.
            children=tuple(replace(child, devices=()) for child in children),
            pinned=next((each.pinned for each in states if each.pinned is not None), None),
            limits=tuple(
                Limit(
                    each.device,
                    each.limit_bytes,
                    each.total_bytes,
                    None,
                    is_waiting=each.is_waiting,
                    share=each.share,
                )
                for each in limits
            ),
        )

    def compare(self, before: Seen) -> Change:
        """What is otherwise than it was."""
        return Change(
            processes=tuple(
                (device, uses)
                for device, uses in self.processes.items()
                if uses != before.processes.get(device)
            ),
            failures=tuple(
                (device, sentences)
                for device, sentences in self.failures.items()
                if sentences != before.failures.get(device, ())
            ),
            children=None if self.children == before.children else self.children,
            pinned=None if self.pinned == before.pinned else self.pinned,
            limits=None if self.limits == before.limits else self.limits,
        )
