"""Bring back to their devices the storages that a release moved to the CPU.

Whoever has such a storage when it is brought back gets the device's memory, in place as on the way
out: the tensors stay the same objects, tied and viewed as they are then.
"""

from __future__ import annotations

from collections.abc import Sequence

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
from gpumemwidget.ownership.holdings import Account, add_up, take_account
from gpumemwidget.ownership.partition import Move, describe_move, find_moves, list_owned
from gpumemwidget.ownership.shell import Shell
from gpumemwidget.releasing.plan import RELEASE_BUDGET_S, check_bound, find_capture, find_user
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
    needs: list[tuple[str, int]] = []
    if account is not None:
        moves, shown, stays = _find_moves(account, names)
        infos = account.graph.storages
        needs = [(m.device, round_up(infos[m.place].n_bytes, m.device)) for m in moves]
        refusal = find_user(shell, account, names)
    if refusal is None and not shown:
        refusal = Stop(StopKind.IMMOVABLE if stays else StopKind.NOT_ON_HOST, name=names[0])
    plan = RestorePlan(
        names=names,
        moves=shown,
        needs_bytes=DeviceBytes(
            add_up(needs),
            is_at_least=account is not None and not account.graph.is_complete,
        ),
        refusal=refusal,
        stays=stays,
    )
    return plan, account, moves


def _find_moves(
    account: Account, names: Sequence[str]
) -> tuple[list[Move], tuple[ReleaseMove, ...], tuple[ReleaseStay, ...]]:
    """Return the moves, what a person sees of them, and what can't be brought back."""
    graph = account.graph
    rows = [account.rows[name] for name in names if name in account.rows]
    # Each storage belongs to the first row that reaches it.
    reached: dict[int, str] = {}
    for row in rows:
        for place in account.list_storages(row.mark):
            reached.setdefault(place, row.name)
    devices = {
        place: device
        for place in reached
        if (device := original_devices.find(graph.objects[place])) is not None
    }
    owned = list_owned(account, rows, keep=True)
    found, _ = find_moves(account, rows, list(devices), owned)
    for place, device in devices.items():
        found[place].device = device
    moves: dict[tuple[str, str], list[Move]] = {}
    stays: dict[tuple[str, Reason], list[int]] = {}
    for place, name in reached.items():
        move = found.get(place)
        if move is not None and move.obstacle is None:
            moves.setdefault((name, move.device), []).append(move)
        elif move is not None and move.obstacle is not None:
            stays.setdefault((name, move.obstacle), []).append(place)
        elif devices and place in owned and graph.storages[place].device == HOST:
            stays.setdefault((name, Reason(ReasonKind.NOT_MOVED)), []).append(place)
    return (
        [move for group in moves.values() for move in group],
        tuple(describe_move(account, *key, group) for key, group in moves.items()),
        tuple(
            ReleaseStay(name, HOST, account.sum_places(places, rounded=False), reason)
            for (name, reason), places in stays.items()
        ),
    )
