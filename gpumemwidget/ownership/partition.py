"""Divide the memory that rows reach into what a release frees, what it moves, and what stays.

What somebody keeps can't be dropped, but its device memory can still go: each tensor on the storage
gets other memory through ``tensor.data``, and stays the same object.

Only what a row owns may be moved, not all that it reaches. A released model goes to the CPU
although its optimizer holds the parameters too. But a released list of losses must not take the
model along, which its autograd graphs reach; nor a released optimizer the parameters that it
trains; nor a released trainer the model that has a name of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

from gpumemwidget.model.devices import HOST
from gpumemwidget.model.ownership import DeviceBytes, JointRelease, MemorySource
from gpumemwidget.model.releases import Reason, ReasonKind, ReleaseMove, ReleaseStay
from gpumemwidget.ownership.graph.kinds import Kind
from gpumemwidget.ownership.graph.objects import is_a, is_one_of, read_attribute
from gpumemwidget.ownership.graph.walk import Graph
from gpumemwidget.ownership.holdings import ELSEWHERE, Holdings, Row, join_marks
from gpumemwidget.ownership.labels import UNNAMED, find_kind_name

#: Why the release of memory that is not the allocator's own may not show in the device's count.
_SOURCE_REASONS = {
    MemorySource.LENT: Reason(ReasonKind.LENT),
    MemorySource.MAPPED: Reason(ReasonKind.MAPPED),
    MemorySource.PINNED: Reason(ReasonKind.PINNED),
}

#: A row's name, a device and the reason.
Group = tuple[str, str, Reason]


class ReleasePartition:
    """The storages that the chosen rows reach, divided: freed, moved, staying."""

    def __init__(
        self,
        holdings: Holdings,
        names: Sequence[str],
        *,
        keep: bool = False,
        out: bool = False,
        exceptions: bool = False,
    ) -> None:
        self.holdings = holdings
        self._keep = keep
        self._rows = [holdings.rows[name] for name in names if name in holdings.rows]
        #: Marks of what is dropped.
        self.dropped = 0 if keep else holdings.find_marks(row.name for row in self._rows)
        for row in holdings.rows.values() if out or exceptions else ():
            if (row.root == "out" and out) or (row.root == "exception" and exceptions):
                self.dropped |= row.mark
        chosen = self.dropped | join_marks(row.mark for row in self._rows)
        #: By the marks that their storages carry: what goes with what is dropped, and what others
        #: hold too.
        self._dying: list[int] = []
        self._held: list[int] = []
        for carried in holdings.groups.find(chosen):
            (self._held if carried & ~self.dropped else self._dying).append(carried)

    @property
    def dying(self) -> list[int]:
        """The storages that go with what is dropped."""
        return self.holdings.groups.list_places(self._dying)

    @property
    def moved(self) -> dict[Group, list[Move]]:
        """The moves, in the groups that are shown."""
        return self._sorted[0]

    @property
    def units(self) -> list[tuple[str, list[Move]]]:
        """The moves that are made together, all or none, each with its first row."""
        moved, _, units = self._sorted
        holdings = self.holdings
        by_unit: dict[int, tuple[str, list[Move]]] = {}
        for (name, _, _), moves in moved.items():
            mark = holdings.rows[name].mark | holdings.marks[moves[0].place]
            unit = next((unit for unit in units if unit & mark), 0)
            by_unit.setdefault(unit, (name, []))[1].extend(moves)
        return list(by_unit.values())

    def list_moved(self) -> list[int]:
        """Return the storages that are moved."""
        return [move.place for moves in self.moved.values() for move in moves]

    def list_going(self) -> list[int]:
        """Return the storages that a release frees: what is collected goes, too."""
        return [*self.dying, *self.holdings.list_rubbish(), *self.list_moved()]

    @property
    def stays(self) -> dict[Group, list[int]]:
        """The storages that stay, in the groups that are shown."""
        stays: dict[Group, list[int]] = {}
        for (name, device, why), places in self._sorted[1].items():
            for place in places:
                named = why
                if UNNAMED in why.holders:
                    words = [word for word, held in self.holdings.modules.items() if place in held]
                    holders = [*(holder for holder in why.holders if holder != UNNAMED), *words]
                    named = replace(why, holders=tuple(holders)) if words else why
                stays.setdefault((name, device, named), []).append(place)
        return stays

    @property
    def can_move(self) -> bool:
        """True if others hold memory that is not on the host, which could be moved there."""
        return self.holdings.groups.has_other_than(HOST, self._held)

    def sum_dying(self) -> DeviceBytes:
        """Return the bytes that go with what is dropped, without what is moved."""
        return self.holdings.sum_groups(self._dying, rounded=True, dropped=self.dropped)

    @cached_property
    def frees_bytes(self) -> DeviceBytes:
        """The bytes that will be freed: what dies and what is moved away."""
        if not self.can_move:
            return self.sum_dying()
        going = [*self.dying, *self.list_moved()]
        return self.holdings.sum_places(going, dropped=self.dropped)

    def find_joint(self) -> JointRelease | None:
        """Return what to release together, if the rows alone free next to nothing of their memory.

        A variable that is bound to a part of what they hold is none of it, and what it holds stays:
        a trainer's model has a name of its own.

        Returns:
            ``None`` where they free enough by themselves, or keep copies; and where the rest would
            still be held by something that is no row, or by too many.
        """
        holdings, rows = self.holdings, self._rows
        marks = join_marks(row.mark for row in rows)
        total = holdings.sum_held(marks).total_bytes
        # A tenth of what they hold is not next to nothing.
        if self._keep or not total or self.frees_bytes.total_bytes * 10 > total:
            return None
        starts = {place for row in rows for place in row.places}
        groups = holdings.groups.find(marks)
        # What leads to all of it is no part.
        partial = join_marks(
            row.mark
            for row in holdings.rows.values()
            if holdings.marks[row.places[0]] & marks
            and starts.isdisjoint(row.places)
            and any(not carried & row.mark for carried in groups)
        )
        own = [carried for carried in groups if not carried & partial]
        own_bytes = holdings.sum_groups(own, rounded=False).total_bytes
        others = holdings.name_holders(join_marks(own) & ~marks & ~ELSEWHERE)
        if not 0 < len(others) <= 8:
            return None
        joint = tuple(dict.fromkeys([*(row.name for row in rows), *others]))
        freed = ReleasePartition(holdings, joint).frees_bytes
        # Memory that only the others own is freed too, and must not be counted.
        alone = ReleasePartition(holdings, others).frees_bytes
        if 2 * (freed.total_bytes - alone.total_bytes) < own_bytes:
            return None
        return JointRelease(joint, freed)

    def describe_moves(self) -> tuple[ReleaseMove, ...]:
        """Return the moves as they are shown, in the order of ``moved``."""
        return tuple(
            describe_move(self.holdings, name, device, group, reason)
            for (name, device, reason), group in self.moved.items()
        )

    def list_stays(self) -> tuple[ReleaseStay, ...]:
        """Return the groups that stay, each with its bytes."""
        holdings = self.holdings
        return tuple(
            ReleaseStay(
                name,
                device,
                holdings.sum_places(places, rounded=False),
                why,
            )
            for (name, device, why), places in self.stays.items()
        )

    @cached_property
    def _sorted(self) -> tuple[dict[Group, list[Move]], dict[Group, list[int]], list[int]]:
        """Sort the storages that others hold too into moves, storages that stay, and joint rows.

        What the chosen names own is moved. What a displayed value or an exception shares is not:
        to drop ``Out[3]`` is no wish to take the model that it shows off the device.
        """
        holdings = self.holdings
        order = {row.name: number for number, row in enumerate(self._rows)}
        find_row = cache(self._find_row)
        kept = [
            (place, row)
            for place in holdings.groups.list_places(self._held)
            if (row := find_row(holdings.marks[place])) is not None
        ]
        # In the order of the names, whichever was met first.
        kept.sort(key=lambda pair: order[pair[1].name])
        moves, units = self._find_moves([place for place, _ in kept])
        moved: dict[Group, list[Move]] = {}
        stays: dict[Group, list[int]] = {}
        for place, row in kept:
            move = moves.get(place)
            group = row.name, holdings.graph.storages[place].device, self._explain(place, row, move)
            if move is not None and move.obstacle is None:
                moved.setdefault(group, []).append(move)
            else:
                stays.setdefault(group, []).append(place)
        for place in self.dying:
            info = holdings.graph.storages[place]
            source = _SOURCE_REASONS.get(info.source)
            dying_row = find_row(holdings.marks[place])
            if source is not None and dying_row is not None:
                stays.setdefault((dying_row.name, info.device, source), []).append(place)
        return moved, stays, units

    def _find_moves(self, held: Sequence[int]) -> tuple[dict[int, Move], list[int]]:
        """Return the moves off the devices, by their storages, and the rows that move together."""
        holdings = self.holdings
        storages = holdings.graph.storages
        left_out = {"exception"} if self._keep else {"exception", "out"}
        names = [row for row in self._rows if row.root not in left_out]
        owned: dict[int, bool] = {}
        if any(storages[place].device != HOST for place in held):
            owned = list_owned(holdings, names, keep=self._keep)
        movable = [
            place
            for place in held
            if place in owned
            and storages[place].device != HOST
            and storages[place].source is MemorySource.OWN
        ]
        return find_moves(holdings, names, movable, owned, dropped=self.dropped)

    def _explain(self, place: int, row: Row, move: Move | None) -> Reason:
        """Return why a storage that others hold too is moved, or why it stays."""
        holdings = self.holdings
        info = holdings.graph.storages[place]
        if move is not None and move.obstacle is not None:
            return move.obstacle
        if move is not None and self._keep:
            return Reason(ReasonKind.KEPT)
        if move is None and info.source in _SOURCE_REASONS:
            return _SOURCE_REASONS[info.source]
        if move is None and self._keep and info.device == HOST:
            return Reason(ReasonKind.ON_HOST)
        if move is None and self._keep and row.root != "exception":
            return Reason(ReasonKind.NOT_A_PART)
        return find_sharing(holdings, holdings.marks[place] & ~self.dropped)

    def _find_row(self, marks: int) -> Row | None:
        return next((row for row in self._rows if row.mark & marks), None)


def describe_move(
    holdings: Holdings, name: str, device: str, moves: Sequence[Move], reason: Reason | None = None
) -> ReleaseMove:
    """Return the moves of one row's memory from or to a device, as they are shown together."""
    return ReleaseMove(
        path=name,
        kind=find_kind_name(holdings.graph, holdings.rows[name].places[0]),
        device=device,
        n_bytes=sum(holdings.graph.storages[move.place].n_bytes for move in moves),
        reason=reason,
    )


def find_sharing(holdings: Holdings, marks: int) -> Reason:
    """Return who else holds memory that carries these marks."""
    names = holdings.name_holders(marks & ~ELSEWHERE)
    n_named = len(names) if len(names) <= 4 else 3
    holders = list(names[:n_named])
    if marks & ELSEWHERE or not holders:
        holders.append(UNNAMED)
    return Reason(ReasonKind.SHARED, tuple(holders), n_more=len(names) - n_named)


# -- What the rows own, and how it moves -----------------------------------------------------------


def list_owned(holdings: Holdings, rows: Sequence[Row], *, keep: bool) -> dict[int, bool]:
    """Return the storages that these rows own, and whether each is part of a module or optimizer.

    * A module owns its parameters, buffers and their gradients, whoever else names them: half a
      module on another device is broken.
    * An optimizer owns its state, and of the parameters those that no other row has.
    * Anything else owns what it refers to, save what another name is bound to.
    * Nobody owns through an autograd graph, a function or an exception.

    Where the rows stay, on the CPU (``keep``), what is in them belongs to them though another name
    is bound to it, or they would be torn in two.
    """
    graph = holdings.graph
    starts = {row.places[0] for row in rows}
    foreign: set[int] = set()
    if not keep:
        foreign = {row.places[0] for row in holdings.rows.values() if row.root == "name"} - starts
    chosen = join_marks(row.mark for row in rows)
    owned: dict[int, bool] = {}
    met = dict.fromkeys(starts, False)
    pending = deque(starts)
    while pending:
        place = pending.popleft()
        if graph.kinds[place] is Kind.STORAGE:
            owned[place] = met[place]
            continue
        is_joint = met[place] or is_one_of(
            type(graph.objects[place]), graph.reader.module_type, graph.reader.optimizer_type
        )
        for target, is_part in _list_parts(holdings, place, chosen):
            # Once met by a lesser way, it is followed again where it turns out to be a part.
            is_new = target not in met or (is_joint and not met[target])
            if is_new and (is_part or target in met or target not in foreign):
                met[target] = is_joint
                pending.append(target)
    return {place: is_joint for place, is_joint in owned.items() if place in graph.storages}


def _list_parts(holdings: Holdings, place: int, chosen: int) -> Iterator[tuple[int, bool]]:
    """Yield what an object owns, and whether as an inseparable part."""
    graph = holdings.graph
    kind, target = graph.kinds[place], graph.objects[place]
    cls, reader = type(target), graph.reader
    # These compute with memory, or have seen it, and do not own it.
    is_code = kind in {Kind.NODE, Kind.FUNCTION, Kind.FRAME, Kind.CLASS}
    if is_code or is_one_of(cls, BaseException):
        return
    if kind is Kind.TENSOR:
        for part in graph.edges[place]:
            # A tensor's storage and gradient, and its own Python attributes.
            yield part, graph.kinds[part] in {Kind.TENSOR, Kind.STORAGE}
        return
    if is_one_of(cls, reader.optimizer_type):
        state = read_attribute(target, "state")
        # The keys are the parameters.
        values = list(dict.values(state)) if is_a(state, dict) else []
        yield from ((part, True) for part in _find_all(graph, values))
        for part in graph.find_tensors([read_attribute(target, "param_groups")]):
            if not holdings.marks[part] & ~(chosen | ELSEWHERE):
                yield part, True
        return
    if is_one_of(cls, reader.module_type):
        for name in ("_parameters", "_buffers", "_modules"):
            table = read_attribute(target, name)
            if is_a(table, dict):
                yield from ((part, True) for part in _find_all(graph, dict.values(table)))
    for part in graph.edges[place]:
        yield part, False


def _find_all(graph: Graph, targets: Iterable[object]) -> list[int]:
    return [place for place in map(graph.find, list(targets)) if place is not None]


@dataclass(slots=True)
class Move:
    """One storage and the tensors that are to live on without it."""

    #: The storage's place in the holdings' graph.
    place: int
    tensors: list[Any]
    device: str = HOST  #: the new one
    #: Why it can't be moved; ``None`` where it can.
    obstacle: Reason | None = None


def find_moves(
    holdings: Holdings,
    rows: Sequence[Row],
    places: Sequence[int],
    owned: Mapping[int, bool],
    *,
    dropped: int = 0,
) -> tuple[dict[int, Move], list[int]]:
    """Return how storages would be moved to the host, or why not; nothing is changed.

    A tensor that nothing but the ``dropped`` marks holds stays as it is and goes with them. If one
    part of a module or an optimizer can't be moved, none of its parts is.

    Args:
        holdings: the walk.
        rows: the rows that are released or restored.
        places: the storages.
        owned: what ``list_owned`` found for the rows.
        dropped: the marks of what is dropped.

    Returns:
        The moves by storage, and for storages that are moved together or not at all the marks of
        the rows that reach them.
    """
    with holdings.graph.reader.quiet():
        inner = _find_inner(holdings.graph) if places else set()
        moves = {place: _find_move(holdings, place, dropped, inner) for place in places}
    chosen = join_marks(row.mark for row in rows)
    units = join_overlapping([holdings.marks[place] & chosen for place in moves])
    for unit in units:
        parts = [
            move
            for place, move in moves.items()
            if owned.get(place) and holdings.marks[place] & unit
        ]
        why = next((move.obstacle for move in parts if move.obstacle), None)
        if why is not None:
            for move in parts:
                move.obstacle = move.obstacle or replace(why, is_of_another=True)
    return moves, units


def join_overlapping(marks: Sequence[int]) -> list[int]:
    """Return the sets of rows that are connected by shared memory, as marks."""
    units: list[int] = []
    for mark in dict.fromkeys(marks):
        unit, apart = mark, []
        for other in units:
            if other & mark:
                unit |= other
            else:
                apart.append(other)
        units = [*apart, unit]
    return units


def _find_move(holdings: Holdings, place: int, dropped: int, inner: Container[int]) -> Move:
    graph = holdings.graph
    kept = [held for held in graph.tensors_on.get(place, ()) if holdings.marks[held] & ~dropped]
    move = Move(place, [graph.objects[held] for held in kept])
    obstacle = _find_holder_in_the_way(holdings, place, kept, dropped, inner)
    n_users = graph.reader.count_storage_users(graph.objects[place])
    if obstacle is None and n_users - 1 - graph.cpp_refs[place]:
        obstacle = ReasonKind.UNSEEN
    for tensor in move.tensors:
        obstacle = obstacle or _find_obstacle(holdings, tensor)
    move.obstacle = Reason(obstacle) if obstacle else None
    return move


def _find_holder_in_the_way(
    holdings: Holdings, place: int, kept: Sequence[int], dropped: int, inner: Container[int]
) -> ReasonKind | None:
    """Return why the holders of a storage's tensors do not let them move; ``None`` if they do."""
    graph = holdings.graph
    rows = [row for row in holdings.rows.values() if row.places[0] == place]
    if graph.python_refs[place] or any(not row.frees_marks & dropped for row in rows):
        return ReasonKind.STORAGE_HELD
    for held in kept:
        if any(holdings.marks[node] & ~dropped for node in graph.saved_by.get(held, ())):
            return ReasonKind.SAVED
        if held in inner:
            return ReasonKind.IMMOVABLE
        if _count_unseen(graph, held, place) > 0:
            return ReasonKind.UNSEEN
    return None


def _find_inner(graph: Graph) -> set[int]:
    """Return the tensors inside of those with ``__torch_dispatch__``."""
    reader = graph.reader
    inner: set[int] = set()
    if not reader.has_met_dispatched:
        return inner
    pending = [
        place
        for place, kind in enumerate(graph.kinds)
        if kind is Kind.TENSOR and reader.is_dispatched(type(graph.objects[place]))
    ]
    while pending:
        for part in graph.edges[pending.pop()]:
            is_tensor = graph.kinds[part] is Kind.TENSOR
            is_container = type(graph.objects[part]) in {dict, list, tuple}
            if part not in inner and (is_tensor or is_container):
                inner.add(part)
                pending.append(part)
    return inner


def _find_obstacle(holdings: Holdings, tensor: Any) -> ReasonKind | None:
    reader = holdings.graph.reader
    if reader.is_dispatched(type(tensor)):
        return ReasonKind.IMMOVABLE
    parts = reader.read_tensor(tensor)
    if parts.storage is None or not reader.is_plain(tensor):
        return ReasonKind.IMMOVABLE
    if parts.is_computed:
        return ReasonKind.COMPUTED
    torch = reader.torch
    # Torch knows its own kinds of devices there, and none that an extension brings.
    can_take = getattr(torch, "_has_compatible_shallow_copy_type", None)
    if can_take is not None and not can_take(tensor, torch.empty(0, device="cpu")):
        return ReasonKind.IMMOVABLE
    return None


def _count_unseen(graph: Graph, tensor_place: int, place: int) -> int:
    """Return how many C++ references to a tensor nothing known accounts for."""
    tensor = graph.objects[tensor_place]
    unseen = graph.reader.count_tensor_users(tensor) - 1 - graph.cpp_refs[tensor_place]
    if unseen > 0:
        # Some views (a conjugate's) refer to their base twice.
        views = (graph.objects[one] for one in graph.tensors_on[place])
        found = [graph.reader.read_tensor(view).tensors for view in views]
        unseen -= sum(other is tensor for parts in found for other in parts)
    return unseen
