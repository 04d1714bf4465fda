"""An engine's processes that are watched without a thread: a test reads them when it looks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpumemwidget.model.processes import ProcessState, SpanRecord
from gpumemwidget.remote.reader.collector import Collector
from tests.remote.programs import wait_for


def find_peak(span: SpanRecord) -> tuple[str | None, int | None]:
    """Return what the peak of a span is, and its bytes, on the one GPU."""
    (gpu,) = [device for device in span.devices if device.device == "cuda:0"]
    return gpu.peak_is, gpu.allocated.peak_bytes


class Watching:
    """A source, and what is known of its processes; ``failures``: of reading it."""

    def __init__(self, source: Any) -> None:
        self.source = source
        self.failures: list[tuple[str, Exception]] = []
        self._collector = Collector(lambda what, exc: self.failures.append((what, exc)))
        self._collector.add(source)

    @property
    def keys(self) -> dict[str, str]:
        """The source's keys of the processes, by their ids."""
        entries = self._collector._entries.values()
        return {entry.log.info.id: entry.key for entry in entries if entry.log.info is not None}

    def look(self) -> list[ProcessState]:
        """Read the source, and return the processes."""
        self._collector.read()
        return list(self._collector.processes)

    def wait(self, is_so: Callable[[list[ProcessState]], object]) -> list[ProcessState]:
        """Return the processes as soon as something is so of them."""
        states: list[ProcessState] = []

        def is_so_now() -> object:
            states[:] = self.look()
            assert not self.failures
            return is_so(states)

        wait_for(is_so_now)
        return states

    def wait_for_spans(
        self, name: str, n_spans: int = 1, *, on: int | None = None
    ) -> list[SpanRecord]:
        """Return the records of a name, of all processes or one number, when they are so many."""

        def find(states: list[ProcessState]) -> list[SpanRecord]:
            found = [state for state in states if on in (None, state.info.number)]
            return [span for state in found for span in state.spans if span.name == name]

        return find(self.wait(lambda states: sum(s.n_spans for s in find(states)) >= n_spans))

    def close(self) -> None:
        """Watch no more. May be called twice."""
        self._collector.close()
