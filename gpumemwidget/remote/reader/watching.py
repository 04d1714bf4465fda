"""Hold the processes that a session watches, for its dashboard and its reports."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from gpumemwidget.errors import BadInputError
from gpumemwidget.recording.monitor import Callbacks
from gpumemwidget.remote.reader.collector import Collector, Source
from gpumemwidget.remote.reader.gpus import find_skews, share_gpus
from gpumemwidget.report.processes import (
    WATCHING_BEGINS,
    report_none_watched,
    report_processes,
    report_spans,
)

if TYPE_CHECKING:
    from gpumemwidget.model.processes import ProcessState
    from gpumemwidget.report.render.output import Report
    from gpumemwidget.session.session import Session

#: Maximum number of seconds to wait for what the processes of engines have now, and then for what
#: the sources have.
_ENGINES_S, _FRESH_S = 1.5, 2.0


class Processes:
    """The processes that a session watches: ``session.attach(Processes)`` is the one of a session.

    Attributes:
        collector: has the processes; it reads on its thread from the first source on.
        changed: called when a source was added or taken away, with ``None``.
        gathered: called on the collector's thread when it has read the sources, with ``None``.

    Args:
        session: shows failures.
    """

    def __init__(self, session: Session) -> None:
        self.changed: Callbacks[None] = Callbacks(session.report_failure)
        self.gathered: Callbacks[None] = Callbacks(session.report_failure)
        self.collector = Collector(session.report_failure, on_read=lambda: self.gathered.call(None))

    @property
    def sources(self) -> tuple[Source, ...]:
        """The sources, in the order in which they were added."""
        return self.collector.sources

    def add(self, source: Source) -> Watch:
        """Watch the processes of a source from now on, until the result is closed."""
        self.collector.add(source)
        self.collector.start()
        self.collector.read_soon()
        self.changed.call(None)
        return Watch(self, source)

    def remove(self, source: Source) -> None:
        """Watch the processes of a source no more, and forget them."""
        if source in self.sources:
            self.collector.remove(source)
            self.changed.call(None)

    def report(self) -> Report:
        """Return the report of all processes, as they are now; without a source, how to begin."""
        if not self.sources:
            return report_none_watched()
        states = self.list_states()
        return report_processes(
            states,
            share_gpus(states),
            find_skews(states),
            unread=self.list_unread(),
            n_older=self.collector.n_older,
        )

    def report_spans(self) -> Report:
        """Return the report of the spans of each process."""
        return report_spans(self.list_states())

    def list_unread(self) -> tuple[str, ...]:
        """Return why some files can't be read, one sentence a file."""
        failures = [failure for source in self.sources for failure in source.failures]
        # A folder may be watched twice.
        return tuple(dict.fromkeys(map(str, failures)))

    def list_states(self) -> tuple[ProcessState, ...]:
        """Return the processes, with what has come until now.

        Of a source that does not answer they are as they were heard last.
        """
        if not self.sources:
            raise BadInputError(f"no other process is watched: {WATCHING_BEGINS}")
        deadline_s = time.monotonic() + _ENGINES_S
        for source in self.sources:
            # Engines pass on what they have twice a second; a file has it at once.
            if (wait := getattr(source, "wait_for_all", None)) is not None:
                wait(max(0.0, deadline_s - time.monotonic()))
        self.collector.wait_for_read(_FRESH_S)
        return self.collector.processes

    def close(self) -> None:
        """Watch nothing any more. May be called twice."""
        self.collector.close()


class Watch:
    """A source that is watched, until ``close``."""

    def __init__(self, processes: Processes, source: Source) -> None:
        self._processes = processes
        self._source = source

    def close(self) -> None:
        """Watch it no more, and forget its processes. May be called twice."""
        self._processes.remove(self._source)

    def __repr__(self) -> str:
        is_open = self._source in self._processes.sources
        return f"<{'watching' if is_open else 'no longer watching'} {self._source.name}>"
