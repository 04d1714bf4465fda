"""Bring back to their devices the storages that a release moved to the CPU.

Whoever has such a storage when it is brought back gets the device's memory, in place as on the way
out: the tensors stay the same objects, tied and viewed as they are then.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.errors import BadInputError, forgets_frames
from gpumemwidget.model.devices import HOST
from gpumemwidget.model.ownership import DeviceBytes
from gpumemwidget.model.releases import (
    Reason,
    ReasonKind,
    ReleaseMove,
    ReleaseStay,
    Remnant,
    RestorePlan,
    RestoreReport,
    StepResult,
    Stop,
    StopKind,
    check_names,
)
from gpumemwidget.ownership.graph.torch_reader import round_up
from gpumemwidget.ownership.holdings import Account, Row, join_marks, take_account
from gpumemwidget.ownership.labels import find_kind_name
from gpumemwidget.ownership.moves import Move, find_inner, find_move, list_owned
from gpumemwidget.ownership.partition import join_overlapping, keep_parts_together
from gpumemwidget.ownership.shell import Shell
from gpumemwidget.releasing.plan import RELEASE_BUDGET_S
from gpumemwidget.releasing.refusals import check_bound, find_capture, find_user
from gpumemwidget.releasing.storages import (
    WatchedStorage,
    carry_out,
    describe_error,
    list_remains,
    original_devices,
    watch_storages,
)


@forgets_frames
def plan_restore(shell: Shell, names: Sequence[str]) -> RestorePlan:
    """Return what restoring these rows would do; nothing is changed.

    Raises:
        UnknownNameError: there is no such row.
        BadInputError: nothing was named, or something that is no variable.
    """
    return _draw_up(shell, names)[0]


@forgets_frames
def execute_restore(shell: Shell, hardware: Hardware, names: Sequence[str]) -> RestoreReport:
    """Bring back to its devices what a release moved to the CPU: all of it, or nothing.

    The plan is drawn up and carried out from one walk; it is the report's ``plan``.

    Returns:
        What was done; where it stopped, why, and then everything is as it was. Whoever called for
        it within a cell shows the report and ends the cell where it ``is_interrupted``.

    Raises:
        UnknownNameError: there is no such row; nothing was changed.
        BadInputError: nothing was named, or something that is no variable.
        KeyboardInterrupt: a Ctrl-C came before anything was changed.
    """
    before = hardware.read_exact()
    plan, account, moves = _draw_up(shell, names)
    stopped, is_interrupted = plan.refusal, False
    result = StepResult()
    remains: tuple[Remnant, ...] = ()
    watched: list[WatchedStorage] = []
    if stopped is None and account is not None:
        watched = watch_storages(account, [move.place for move in moves])
        n_tensors = sum(len(move.tensors) for move in moves)
        result = StepResult(n_tensors=n_tensors, n_bytes=sum(move.n_bytes for move in plan.moves))
        try:
            carry_out(account, moves)
        except (Exception, KeyboardInterrupt) as exc:  # noqa: BLE001 - in the report
            is_interrupted = isinstance(exc, KeyboardInterrupt)
            kind = StopKind.INTERRUPTED if is_interrupted else StopKind.FAILED
            stopped = Stop(kind, error=describe_error(exc))
        if stopped is not None:
            result = StepResult()
            # The copies that were made before it failed are gone; so is what was cached of it.
            hardware.empty_cache()
    del account, moves
    after = hardware.read_exact()
    if stopped is None:
        try:
            remains = tuple(list_remains(shell, watched))
        except KeyboardInterrupt:
            is_interrupted = True
    return RestoreReport(
        plan=plan,
        result=result,
        before=before,
        after=after,
        stopped=stopped,
        remains=remains,
        is_interrupted=is_interrupted,
    )


# -- The plan --------------------------------------------------------------------------------------


def _draw_up(shell: Shell, names: Sequence[str]) -> tuple[RestorePlan, Account | None, list[Move]]:
    """Return the plan, and the walk and the moves that carry it out."""
    names = check_names(names)
    if not names:
        raise BadInputError("nothing to restore: name what was moved, as in %memrestore model opt")
    rows = {reference.row: reference.root for reference in shell.list_references()}
    check_bound(shell, [name for name in names if name not in rows], rows=rows)
    refusal = find_capture()
    account = take_account(shell, budget_s=RELEASE_BUDGET_S) if refusal is None else None
    moves: list[Move] = []
    shown: tuple[ReleaseMove, ...] = ()
    stays: tuple[ReleaseStay, ...] = ()
    needs: dict[str, int] = {}
    if account is not None:
        moves, shown, stays = _find_moves(account, names)
        for move in moves:
            device = HOST if move.device == "cpu" else move.device
            n_bytes = account.graph.storages[move.place].n_bytes
            needs[device] = needs.get(device, 0) + round_up(n_bytes, device)
        refusal = find_user(shell, account, names)
    if refusal is None and not moves:
        refusal = Stop(StopKind.IMMOVABLE if stays else StopKind.NOT_ON_HOST, name=names[0])
    plan = RestorePlan(
        names=names,
        moves=shown,
        needs_bytes=DeviceBytes(
            tuple(sorted(needs.items(), key=lambda item: (-item[1], item[0]))),
            is_at_least=account is not None and not account.graph.is_complete,
        ),
        refusal=refusal,
        stays=stays,
    )
    return plan, account, moves


def _find_stays(
    reached: Mapping[int, Row], found: Mapping[int, Move], on_host: Collection[int]
) -> dict[tuple[str, Reason], list[int]]:
    """Return the storages that can't be brought back, by row and reason."""
    stays: dict[tuple[str, Reason], list[int]] = {}
    for place, row in reached.items():
        left = Reason(ReasonKind.NOT_MOVED) if place in on_host else None
        reason = found[place].obstacle if place in found else left
        if reason is not None:
            stays.setdefault((row.name, reason), []).append(place)
    return stays


def _describe_move(account: Account, name: str, device: str, places: Sequence[int]) -> ReleaseMove:
    return ReleaseMove(
        path=name,
        kind=find_kind_name(account.graph, account.rows[name].places[0]),
        device=device,
        n_bytes=sum(account.graph.storages[place].n_bytes for place in places),
        reason=None,
    )


def _find_moves(
    account: Account, names: Sequence[str]
) -> tuple[list[Move], tuple[ReleaseMove, ...], tuple[ReleaseStay, ...]]:
    """Return the moves, what a person sees of them, and what can't be brought back."""
    graph, storages = account.graph, account.graph.storages
    rows = [account.rows[name] for name in names if name in account.rows]
    # Each storage belongs to the first row that reaches it.
    reached: dict[int, Row] = {}
    for row in rows:
        for place in account.list_storages(row.mark):
            reached.setdefault(place, row)
    targets = {
        place: device
        for place in reached
        if (device := original_devices.find(graph.objects[place])) is not None
    }
    owned = list_owned(account, rows, keep=True)
    with graph.reader.quiet():
        inner = find_inner(graph)
        found = {place: find_move(account, place, dropped=0, inner=inner) for place in targets}
    for place, move in found.items():
        move.device = "cpu" if targets[place] == HOST else targets[place]
    chosen = join_marks(row.mark for row in rows)
    units = join_overlapping([account.marks[place] & chosen for place in targets])
    keep_parts_together(account, [move for place, move in found.items() if owned.get(place)], units)
    moves = [found[place] for place in reached if place in found and not found[place].obstacle]
    by_row: dict[tuple[str, str], list[int]] = {}
    for move in moves:
        by_row.setdefault((reached[move.place].name, targets[move.place]), []).append(move.place)
    on_host = {place for place in owned if targets and storages[place].device == HOST}
    return (
        moves,
        tuple(
            _describe_move(account, name, device, places)
            for (name, device), places in by_row.items()
        ),
        tuple(
            ReleaseStay(name, HOST, account.sum_places(places, rounded=False), reason)
            for (name, reason), places in _find_stays(reached, found, on_host).items()
        ),
    )
