"""Keep what was predicted for cells, until they run."""

from __future__ import annotations

from gpumemwidget.model.devices import BytesByDevice
from gpumemwidget.model.predictions import PredictedRemedy


class Expectations:
    """The predicted peaks of cells, and what would need less, by the cells' text."""

    def __init__(self) -> None:
        self._peaks: dict[str, dict[str, int]] = {}
        self._remedies: dict[str, tuple[PredictedRemedy, ...]] = {}

    def add(
        self,
        source: str,
        device: str,
        peak_bytes: int,
        remedies: tuple[PredictedRemedy, ...] = (),
    ) -> None:
        """Keep the most that a cell is expected to have allocated on a device."""
        key = strip_magics(source)
        peaks = {**self._peaks.pop(key, {}), device: peak_bytes}
        self._peaks[key] = peaks
        self._remedies[key] = remedies or self._remedies.get(key, ())
        if len(self._peaks) > 64:
            oldest = next(iter(self._peaks))
            del self._peaks[oldest], self._remedies[oldest]

    def find(self, source: str) -> BytesByDevice:
        """Return the expected peak of a cell on each device, in bytes."""
        return tuple(self._peaks.get(strip_magics(source), {}).items()) if self._peaks else ()

    def find_remedies(self, source: str) -> tuple[PredictedRemedy, ...]:
        """Return what was predicted to need less than a cell does, the best first."""
        return self._remedies.get(strip_magics(source), ()) if self._remedies else ()


def strip_magics(source: str) -> str:
    """Return a cell without ``%%memfit`` and ``%%memtrace`` above it, and without blank lines."""
    lines = source.strip().splitlines()
    while lines and lines[0].split(maxsplit=1)[:1] in (["%%memfit"], ["%%memtrace"]):
        lines = "\n".join(lines[1:]).strip().splitlines()
    return "\n".join(line.rstrip() for line in lines)
