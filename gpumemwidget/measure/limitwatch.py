"""Has the devices read while a limit waits for one: it is set with the first reading after that.

From PyTorch 2.11 on this is for nothing: CUDA itself calls for the limit, before the device is in
use. Before, the limit would wait for the end of the cell that uses it first.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpumemwidget.measure.cells import RunningCell
from gpumemwidget.measure.monitor import Monitor
from gpumemwidget.records import CellRecord, Sample

__all__ = ["LimitWatch"]


class LimitWatch:
    """Samples the cells as long as a limit waits.

    Args:
        monitor: of the session.
    """

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self._is_listening = False

    def check(self) -> None:
        """A limit was set, or may have been."""
        is_waiting = any(limit.is_waiting for limit in self._monitor.hardware.read_limits())
        if is_waiting and not self._is_listening:
            self._monitor.add_listener(self)
        elif self._is_listening and not is_waiting:
            self._monitor.remove_listener(self)
            self._monitor.unwant_samples(self)
        self._is_listening = is_waiting

    def on_cell_started(self, cell: RunningCell) -> None:  # noqa: ARG002 - the listeners' signature
        """The cell may be the one that uses the device first."""
        self._monitor.want_samples(self)

    def on_cell_ended(self, record: CellRecord) -> None:  # noqa: ARG002 - as above
        """Between cells nothing uses a device."""
        self._monitor.unwant_samples(self)
        self.check()

    def on_samples(self, samples: Sequence[Sample]) -> None:
        """Nothing: that they were read is all."""
