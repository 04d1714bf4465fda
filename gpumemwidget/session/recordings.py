"""Keep what ``%%memtrace`` recorded of cells, so that predictions of these cells learn from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpumemwidget.prediction.workspaces.learning import RequestHistory, learn, read_requests
from gpumemwidget.prediction.workspaces.planner import MeasuredWorkspaces
from gpumemwidget.recording.expectations import strip_magics

if TYPE_CHECKING:
    from gpumemwidget.model.traces import AllocatorTrace
    from gpumemwidget.prediction.forecast import Target
    from gpumemwidget.prediction.operations import DryRun
    from gpumemwidget.session.session import Session

#: Maximum number of histories that are kept, the newest ones.
_MAX_HISTORIES = 8
#: Maximum number of events of a history that is kept, some 40,000 operators: 2 MiB.
_MAX_EVENTS = 300_000


class Recordings:
    """The recorded cells of a session, and what operators were seen to need.

    Attributes:
        measured: what operators allocate inside, learned from recordings.

    Args:
        session: the session, which attaches this.
    """

    def __init__(self, session: Session) -> None:  # noqa: ARG002 - as all that is attached
        self.measured = MeasuredWorkspaces()
        #: By the cell's text and the device.
        self._histories: dict[tuple[str, str], RequestHistory] = {}

    def add(self, cell: str, traces: Sequence[AllocatorTrace]) -> None:
        """Keep the histories of a cell that has run to its end, if they are whole.

        Args:
            cell: the cell, as it was typed.
            traces: the histories of the devices.
        """
        for trace in traces:
            if trace.is_whole and not trace.ends_early and len(trace.events) <= _MAX_EVENTS:
                key = (strip_magics(cell), trace.device)
                self._histories.pop(key, None)
                self._histories[key] = read_requests(trace.events)
        while len(self._histories) > _MAX_HISTORIES:
            del self._histories[next(iter(self._histories))]

    def learn(self, cell: str, target: Target, run: DryRun) -> None:
        """Learn from the recording of a cell on a device, if there is one.

        Args:
            cell: the cell, as it was typed.
            target: the device; one that is not here was not recorded.
            run: the cell, carried out dry.
        """
        history = self._histories.get((strip_magics(cell), target.device.name))
        if history is not None:
            learn(run.operations[: run.step_ends[0]], history, target.facts, self.measured)

    def close(self) -> None:
        """Forget the recordings."""
        self._histories.clear()
