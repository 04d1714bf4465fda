"""Follow the names that cells bind anew, and tell of old values beside new ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from gpumemwidget.growth.rebinds import (
    MIN_SHARE,
    OldValue,
    find_holders,
    find_overlap,
    note_values,
    read_storages,
    sum_device,
)
from gpumemwidget.growth.statements import Statement, find_replacement, parse_statements
from gpumemwidget.model.cells import CellDevice, CellRecord
from gpumemwidget.model.devices import HOST
from gpumemwidget.model.growth import Rebinding
from gpumemwidget.ownership.graph.objects import is_a
from gpumemwidget.ownership.graph.torch_reader import TorchReader, find_torch
from gpumemwidget.recording.monitor import Callbacks

if TYPE_CHECKING:
    from gpumemwidget.recording.cells import RunningCell
    from gpumemwidget.session.session import Session

#: Seconds that the search for what holds an old value may take at a cell's end.
_SEARCH_S = 0.5


class RebindWatch:
    """Finds names whose old values stood, or still stand, beside the new ones on a GPU.

    Attributes:
        found: called with each, on the thread that runs the cells, at the cell's end.

    Args:
        session: the session, which attaches this.
        min_share: share of a device's memory from which an old value is told of.
        search_s: seconds that the search for what holds an old value may take at a cell's end.
    """

    def __init__(
        self, session: Session, *, min_share: float = MIN_SHARE, search_s: float = _SEARCH_S
    ) -> None:
        self.found: Callbacks[Rebinding] = Callbacks(session.report_failure)
        self._session = session
        self._min_share = min_share
        self._search_s = search_s
        self._source = ""
        self._old: list[OldValue] = []
        #: The least that is told of each device, in bytes.
        self._least: dict[str, float] = {}
        self._remove: list[Callable[[], None]] = []

    def open(self) -> None:
        """Begin to follow cells."""
        monitor = self._session.monitor
        self._remove = [
            monitor.cell_started.add(self._start_cell),
            monitor.cell_ended.add(self._end_cell),
        ]

    def close(self) -> None:
        """End. May be called twice."""
        for remove in self._remove:
            remove()
        self._old = []

    def _start_cell(self, cell: RunningCell) -> None:
        self._old = []
        self._source = cell.source
        torch = find_torch()
        if torch is not None and any(
            each.allocated_bytes and each.device != HOST for each in cell.before
        ):
            self._old = note_values(self._session.shell.user_ns, cell.source, torch)

    def _end_cell(self, record: CellRecord) -> None:
        old, self._old = self._old, []
        torch = find_torch()
        if record.status != "ok" or torch is None:
            return
        old = [each for each in old if self._is_bound_anew(each)]
        devices = [each for each in record.devices if self._is_told(each.device, old)]
        statements = parse_statements(self._source) if devices else []
        if statements:
            reader = TorchReader(torch)
            self._tell_of_kept(reader, old, statements)
            for device in devices:
                self._tell_of_peak(reader, device, old, statements)

    def _is_bound_anew(self, old: OldValue) -> bool:
        now = self._session.shell.user_ns.get(old.name)
        return now is None or now is not old.ref()

    def _is_told(self, device: str, old: list[OldValue]) -> bool:
        """Return whether old values have so much of a device that it may be worth telling."""
        n_bytes = sum(sum_device(each.storages, device) for each in old)
        return n_bytes > 0 and n_bytes >= self._find_least(device)

    def _find_least(self, device: str) -> float:
        if device not in self._least:
            for info in self._session.hardware.list_all_devices():
                total_bytes = info.total_bytes or float("inf")
                self._least[info.device] = total_bytes * self._min_share
        return self._least.get(device, float("inf"))

    def _tell_of_kept(
        self, reader: TorchReader, old: list[OldValue], statements: list[Statement]
    ) -> None:
        """Tell of the largest old module or optimizer that lives on beside one of its class."""
        namespace = self._session.shell.user_ns
        kept: list[tuple[int, str, OldValue]] = []
        for each in old:
            value = each.ref()
            is_alike = value is not None and type(value) is type(namespace.get(each.name))
            if is_alike and not is_a(value, reader.tensor_type):
                storages = read_storages(reader, value, with_grads=True)
                devices = {device for device, _ in storages}
                kept += [(sum_device(storages, device), device, each) for device in devices]
        # Nothing of the user's may stay in a variable: it would count as a holder.
        value = None
        n_bytes, device, largest = max(kept, key=lambda each: each[0], default=(0, "", None))
        if (
            largest is None
            or n_bytes < self._find_least(device)
            or find_replacement(statements, largest.name, namespace) is None
        ):
            return
        holders = find_holders(
            self._session.shell, largest.name, largest.ref, budget_s=self._search_s
        )
        if holders:
            self.found.call(Rebinding((largest.name,), device, n_bytes, tuple(holders)))

    def _tell_of_peak(
        self,
        reader: TorchReader,
        record: CellDevice,
        old: list[OldValue],
        statements: list[Statement],
    ) -> None:
        """Tell of old values that went only after the new ones were made, in the cell's peak."""
        if any(each.ref() is None and each.is_shared for each in old):
            return  # Something else held it: to delete the name alone would have saved nothing.
        namespace = self._session.shell.user_ns
        gone = {each.name: each.storages if each.ref() is None else {} for each in old}
        new = {
            name: read_storages(reader, namespace.get(name), with_grads=False)
            for name in gone
            # An optimizer's states come with its first step, not with the assignment.
            if not is_a(namespace.get(name), reader.optimizer_type)
        }
        found = find_overlap(statements, gone, new, record, namespace)
        is_exact = record.peak_is == "exact"
        if found is not None and is_exact and found.n_bytes >= self._find_least(record.device):
            self.found.call(found)
