"""Report a second model beside the first: a name was reassigned, and its old value lives on.

Something else holds it, or it is in a reference cycle. Modules and optimizers on GPUs are followed.
"""

from __future__ import annotations

import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpumemwidget.errors import forgets_frames
from gpumemwidget.model.cells import CellRecord
from gpumemwidget.model.devices import HOST
from gpumemwidget.model.leaks import Rebinding
from gpumemwidget.model.ownership import Fix, FixKind
from gpumemwidget.ownership.graph.objects import (
    is_a,
    is_one_of,
    paused_collector,
    read_attribute,
    read_attributes,
)
from gpumemwidget.ownership.graph.torch_reader import TorchReader, find_torch
from gpumemwidget.ownership.graph.walk import Graph
from gpumemwidget.ownership.holdings import ELSEWHERE, Holdings, join_marks, take_holdings
from gpumemwidget.ownership.labels import spell_steps
from gpumemwidget.ownership.paths import Paths, Root, Steps, find_fix
from gpumemwidget.recording.monitor import Callbacks

if TYPE_CHECKING:
    from gpumemwidget.ownership.shell import Shell
    from gpumemwidget.recording.running_cell import RunningCell
    from gpumemwidget.session.session import Session


#: An assignment at the top level: ``model, optimizer``, ``model: Net``, and its value.
_ASSIGNMENT = re.compile(r"^([^\s#=(][^#\n=(]*)=(?!=)([^;\n]*)", re.MULTILINE)


@dataclass(frozen=True, slots=True, eq=False)
class OldValue:
    """A module or an optimizer that a name was bound to before a cell."""

    name: str
    ref: weakref.ref[Any]
    line: int  #: the cell's line that binds the name anew, from 1


class RebindWatch:
    """Finds models and optimizers whose old values take memory beside the new ones on a GPU.

    Args:
        session: what records the cells.
        min_share: share of a device's memory from which an old value is reported. Nobody runs out
            of memory for less, and small models are kept beside their successors in most cells.
        search_s: seconds that the search for what holds it may take at a cell's end.

    Attributes:
        found: called with each, on the thread that runs the cells, at the cell's end.
    """

    def __init__(self, session: Session, *, min_share: float = 0.05, search_s: float = 0.5) -> None:
        self.found: Callbacks[Rebinding] = Callbacks(session.report_failure)
        self._session = session
        self._min_share = min_share
        self._search_s = search_s
        self._old: list[OldValue] = []
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
        # Readings list the host last, so the first one shows whether there is a GPU.
        has_gpu = bool(cell.before) and cell.before[0].device != HOST
        self._old = note_values(self._session.shell.user_ns, cell.source) if has_gpu else []

    def _end_cell(self, record: CellRecord) -> None:
        noted, self._old = self._old, []
        if not noted or record.status != "ok":
            return
        namespace, torch = self._session.shell.user_ns, find_torch()
        kept = [old for old in noted if _is_beside_new(old, namespace)]
        if kept and torch is not None:
            self._report_largest(TorchReader(torch), kept)

    def _report_largest(self, reader: TorchReader, kept: Sequence[OldValue]) -> None:
        """Report the old value that takes the most of a device."""
        sizes: Counter[tuple[str, OldValue]] = Counter()
        for old in kept:
            for (device, _), n_bytes in read_storages(reader, old.ref()).items():
                sizes[device, old] += n_bytes
        infos = self._session.hardware.list_all_devices()
        totals = {info.device: info.total_bytes for info in infos}
        for (device, old), n_bytes in sizes.most_common(1):
            if n_bytes >= (totals.get(device) or float("inf")) * self._min_share:
                holders = find_holders(self._session.shell, old, budget_s=self._search_s)
                if holders:
                    self.found.call(Rebinding(old.name, device, n_bytes, holders, old.line))


def note_values(namespace: Mapping[str, object], source: str) -> list[OldValue]:
    """Return the modules and optimizers of the names that a cell seems to assign.

    No code of the user's runs, and nothing is held. The cell is not parsed: it takes long, and
    most cells assign nothing of the kind.
    """
    reader = None
    noted: dict[str, OldValue] = {}
    for match in _ASSIGNMENT.finditer(source):
        # A name that is no attribute, and of which none is meant: ``model``, not ``model.fc``.
        for name in re.findall(r"(?<![\w.])[^\W\d]\w*(?![\w.\[])", match[1]):
            value = namespace.get(name)
            before = f"{source[: match.start()]}\n{match[2]}"
            # What the cell reads before is needed to make the new value, or is another one.
            if value is None or re.search(rf"(?<![\w.]){re.escape(name)}\b", before):
                continue
            if reader is None:
                torch = find_torch()
                if torch is None:
                    return []
                reader = TorchReader(torch)
            if is_one_of(type(value), reader.module_type, reader.optimizer_type):
                line = source.count("\n", 0, match.start()) + 1
                noted[name] = OldValue(name, weakref.ref(value), line)
    return list(noted.values())


def _is_beside_new(old: OldValue, namespace: Mapping[str, object]) -> bool:
    """Return whether a value lives while its name is bound to another one of its class."""
    value, now = old.ref(), namespace.get(old.name)
    return value is not None and now is not value and type(now) is type(value)


def read_storages(reader: TorchReader, value: object) -> dict[tuple[str, int], int]:
    """Return the bytes of a module's or an optimizer's storages on GPUs, by device and address.

    Gradients count, and an optimizer's states; what it optimizes is the model's.
    """
    storages = {}
    with reader.quiet():
        for tensor in _list_tensors(reader, value):
            parts = reader.read_tensor(tensor)
            held = [parts.storage, *parts.inner_storages]
            if parts.grad is not None:
                held.append(reader.read_tensor(parts.grad).storage)
            for storage in held:
                info = None if storage is None else reader.read_storage(storage)
                if info is not None and info.device != HOST:
                    storages[info.device, info.address] = info.freed_bytes
    return storages


def _list_tensors(reader: TorchReader, value: object) -> Iterator[object]:
    """Yield the parameters and buffers of a module, or the states of an optimizer."""
    pending = [value]
    met: set[int] = set()
    while pending:
        target = pending.pop()
        if id(target) in met:
            continue
        met.add(id(target))
        if is_a(target, dict):
            pending += dict.values(target)
        elif is_a(target, reader.tensor_type):
            yield target
        elif is_a(target, reader.module_type):
            attributes = read_attributes(target) or {}
            tables = "_parameters", "_buffers", "_modules"
            pending += [dict.get(attributes, name) for name in tables]
        elif is_a(target, reader.optimizer_type):
            pending.append(read_attribute(target, "state"))


@forgets_frames
def find_holders(shell: Shell, old: OldValue, *, budget_s: float) -> tuple[tuple[str, Fix], ...]:
    """Return what holds the old value of a name, each with what makes it let go.

    Returns:
        The paths to the value, or what holds its memory alone; or the reference cycle that it is
        in. ``()`` where nothing is to be reported: it is kept on purpose, something unknown holds
        it, or time ran out.
    """

    def enter_old(graph: Graph) -> list[Root]:
        # A cycle is met from the value down; from its tensors up it takes a search for each level.
        graph.add_root(old.ref())
        graph.walk()
        return []

    with paused_collector():
        holdings = take_holdings(shell, budget_s=budget_s, depth="holders", enter_more=enter_old)
        if holdings is None or not holdings.graph.is_complete:
            return ()
        graph = holdings.graph
        place, new = graph.find(old.ref()), graph.find(shell.user_ns.get(old.name))
        if place is None or new is None:
            return ()
        storages = read_storages(graph.reader, old.ref())
        infos = graph.storages.items()
        memory = [at for at, info in infos if (info.device, info.address) in storages]
        marks = join_marks(holdings.marks[held] for held in (place, *memory))
        if not marks:  # Nothing leads to it: it waits for the garbage collector.
            return ((_name_cycle(holdings, place, old.name), Fix(FixKind.COLLECT)),)
        if marks & ELSEWHERE:
            return ()
        found = []
        for row in holdings.rows.values():
            if not row.mark & marks:
                continue
            roots = [Root(start, row.name, row.root) for start in row.places]
            # There are none if the row has the object's memory alone.
            steps = Paths(graph, roots).list_steps(place)
            # A holder of the new value too, as a trainer of two models is, has both on purpose.
            if row.mark & holdings.marks[new] or (row.root == "name" and _is_kept(steps)):
                return ()
            found.append((spell_steps(steps) or row.name, find_fix(row.root, roots[0].steps)))
        return tuple(found)


def _name_cycle(holdings: Holdings, start: int, name: str) -> str:
    """Return the shortest way from an object back to itself: ``model.owner.model``."""
    paths = Paths(holdings.graph, [Root(start, name, "name")])
    ends = [place for place, edges in enumerate(holdings.graph.edges) if start in edges]
    ways = [paths.name_part(place, start) for place in ends if paths.find_root(place) is not None]
    return min(map(spell_steps, ways), key=len, default=name)


def _is_kept(steps: Steps) -> bool:
    """Return whether a value is kept on purpose: by a variable, or in a list or table of such."""
    ends = [step.text for step in (*steps[1:2], *steps[-1:])]
    return len(steps) == 1 or any(text.startswith("[") for text in ends)
