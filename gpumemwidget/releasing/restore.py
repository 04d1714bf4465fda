"""Bring back to their devices the storages that a release moved to the CPU.

Whoever has such a storage when it is brought back gets the device's memory, in place as on the way
out: the tensors stay the same objects, tied and viewed as they are then.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.errors import BadInputError, forgets_frames
from gpumemwidget.model.devices import HOST
from gpumemwidget.model.ownership import DeviceBytes
from gpumemwidget.model.releases import ReleaseMove, RestorePlan, RestoreReport, StepResult
from gpumemwidget.model.requests import check_names
from gpumemwidget.ownership.graph.torch_reader import round_up
from gpumemwidget.ownership.holdings import Account, Row, take_account
from gpumemwidget.ownership.labels import find_kind_name
from gpumemwidget.ownership.moves import Move, find_move, find_outside, list_owned
from gpumemwidget.ownership.partition import join_overlapping, keep_parts_together
from gpumemwidget.ownership.shell import Shell
from gpumemwidget.releasing.move import carry_out, describe_error, whereabouts
from gpumemwidget.releasing.refusals import check_bound, find_capture, find_user
from gpumemwidget.releasing.watch import StorageWatch
from gpumemwidget.units import format_bytes

_BUDGET_S = 10.0
_TOLERANCE_BYTES = 1024**2


@dataclass(slots=True)
class _Draft:
    """A plan with the objects behind it. Let go of it once it is carried out."""

    account: Account | None
    moves: list[Move] = field(default_factory=list)
    remains: list[str] = field(default_factory=list)
    told: tuple[ReleaseMove, ...] = ()


@forgets_frames
def plan_restore(shell: Shell, hardware: Hardware, names: Sequence[str]) -> RestorePlan:
    """Return what restoring these rows would do; nothing is changed.

    Args:
        shell: the running IPython.
        hardware: where the devices' memory is asked for.
        names: variables, or rows such as ``"Out[7]"``.

    Raises:
        UnknownNameError: there is no such row.
        BadInputError: nothing was named, or something that is no variable.
    """
    return _draw_up(shell, hardware, names)[1]


@forgets_frames
def execute_restore(shell: Shell, hardware: Hardware, names: Sequence[str]) -> RestoreReport:
    """Bring back to its devices what a release moved to the CPU: all of it, or nothing.

    The plan is drawn up and carried out from one walk; it is the report's ``plan``.

    Args:
        shell: the running IPython.
        hardware: measures, and gives back what a failed attempt took.
        names: variables, or rows such as ``"Out[7]"``.

    Returns:
        What was done; where it stopped, why, and then everything is as it was. Whoever called for
        it within a cell shows the report and ends the cell where it ``is_interrupted``.

    Raises:
        UnknownNameError: there is no such row; nothing was changed.
        BadInputError: nothing was named, or something that is no variable.
        KeyboardInterrupt: a Ctrl-C came before anything was changed.
    """
    before = hardware.end_span()
    started_s = time.perf_counter()
    watch = StorageWatch()
    try:
        draft, plan = _draw_up(shell, hardware, names)
        stopped = plan.refusal
        result = StepResult()
        remains: tuple[str, ...] = ()
        is_interrupted = False
        if stopped is None:
            result, stopped, is_interrupted = _bring_back(draft, watch)
            if stopped is not None:
                # The copies that were made before it failed are gone; so is what was cached of it.
                draft.moves.clear()
                hardware.empty_cache()
        del draft
        after = hardware.end_span()
        if stopped is None:
            try:
                remains = tuple(watch.list_remains(shell, tolerance_bytes=_TOLERANCE_BYTES))
            except KeyboardInterrupt:
                is_interrupted = True
        return RestoreReport(
            plan=plan,
            result=result,
            before=before,
            after=after,
            duration_s=time.perf_counter() - started_s,
            stopped=stopped,
            remains=remains,
            is_interrupted=is_interrupted,
        )
    finally:
        watch.close()


def _bring_back(draft: _Draft, watch: StorageWatch) -> tuple[StepResult, str | None, bool]:
    """Move; return what was done, why it stopped, and whether a Ctrl-C came."""
    account = draft.account
    if account is None:
        return StepResult(), "torch is not imported: there is nothing to restore", False
    watch.add(account, [move.place for move in draft.moves])
    try:
        carry_out(account, draft.moves).clear()
    except (Exception, KeyboardInterrupt) as exc:  # noqa: BLE001 - told in the report
        is_interrupted = isinstance(exc, KeyboardInterrupt)
        return StepResult(), f"{describe_error(exc)}; everything is where it was", is_interrupted
    is_interrupted = False
    pending = [account.graph.objects[move.place] for move in draft.moves]
    while pending:
        try:
            while pending:
                whereabouts.forget(pending[-1])
                pending.pop()
        except KeyboardInterrupt:
            # All of it is back: what is remembered of it has to go as well.
            is_interrupted = True
    n_tensors = sum(len(move.tensors) for move in draft.moves)
    n_bytes = sum(account.graph.storages[move.place].n_bytes for move in draft.moves)
    return StepResult(n_tensors=n_tensors, n_bytes=n_bytes), None, is_interrupted


# -- the plan --------------------------------------------------------------------------------------


def _draw_up(shell: Shell, hardware: Hardware, names: Sequence[str]) -> tuple[_Draft, RestorePlan]:
    names = check_names(names)
    if not names:
        raise BadInputError("nothing to restore: name what was moved, as in %memrestore model opt")
    rows = {reference.row: reference.root for reference in shell.list_references()}
    check_bound(shell, [name for name in names if name not in rows], rows=rows)
    refusal = find_capture()
    draft = _Draft(account=None)
    needs: dict[str, int] = {}
    if refusal is None:
        draft.account = take_account(shell, budget_s=_BUDGET_S)
    if draft.account is not None:
        _find_moves(draft, draft.account, names)
        for move in draft.moves:
            device = HOST if move.device == "cpu" else move.device
            n_bytes = draft.account.graph.storages[move.place].n_bytes
            needs[device] = needs.get(device, 0) + round_up(n_bytes, device)
        refusal = find_user(shell, draft.account, names)
    if refusal is None and not draft.moves:
        why = f"{names[0]} holds nothing that a release moved to the CPU and that is still there"
        refusal = f"nothing to restore: {draft.remains[0] if draft.remains else why}"
        draft.remains.clear()
    available = _read_available(hardware, needs)
    plan = RestorePlan(
        names=names,
        moves=draft.told,
        needs_bytes=DeviceBytes(
            tuple(sorted(needs.items(), key=lambda item: (-item[1], item[0]))),
            is_at_least=draft.account is not None and not draft.account.graph.is_complete,
        ),
        available_bytes=tuple(sorted(available.items())),
        refusal=refusal or _find_shortage(needs, available),
        remains=tuple(draft.remains),
    )
    return draft, plan


def _find_moves(draft: _Draft, account: Account, names: Sequence[str]) -> None:
    graph = account.graph
    rows = [account.rows[name] for name in names if name in account.rows]
    reached = _list_reached(account, rows)
    targets = {
        place: device
        for place, _ in reached
        if (device := whereabouts.find(graph.objects[place])) is not None
    }
    owned = list_owned(account, rows, keep=True)
    with graph.reader.quiet():
        outside = find_outside(account, list(targets))
        moves = {place: find_move(account, place, dropped=0, outside=outside) for place in targets}
    for place, move in moves.items():
        move.device = "cpu" if targets[place] == HOST else targets[place]
    chosen = 0
    for row in rows:
        chosen |= row.mark
    units = join_overlapping([account.marks[place] & chosen for place in targets])
    keep_parts_together(account, [move for place, move in moves.items() if owned.get(place)], units)
    told: dict[tuple[str, str], list[Move]] = {}
    stays: dict[tuple[str, str], list[int]] = {}
    for place, row in reached:
        if place not in moves:
            if graph.storages[place].device == HOST and place in owned and targets:
                why = "it was not moved there by a release, or not since it was last restored"
                stays.setdefault((row.name, why), []).append(place)
            continue
        obstacle = moves[place].obstacle
        if obstacle is None:
            draft.moves.append(moves[place])
            told.setdefault((row.name, targets[place]), []).append(moves[place])
        else:
            stays.setdefault((row.name, obstacle), []).append(place)
    draft.told = tuple(
        ReleaseMove(
            path=name,
            kind=find_kind_name(graph, account.rows[name].places[0]),
            device=device,
            n_bytes=sum(graph.storages[move.place].n_bytes for move in moves_of),
            reason="",
        )
        for (name, device), moves_of in told.items()
    )
    draft.remains = [
        f"{format_bytes(sum(graph.storages[place].n_bytes for place in places))} of {name} "
        f"stays on the CPU: {why}"
        for (name, why), places in stays.items()
    ]


def _list_reached(account: Account, rows: Sequence[Row]) -> list[tuple[int, Row]]:
    """Return the storages that the rows reach, each under the first row, in their order."""
    met: set[int] = set()
    reached = []
    for row in rows:
        for place in account.list_storages(row.mark):
            if place not in met:
                met.add(place)
                reached.append((place, row))
    return reached


def _read_available(hardware: Hardware, needs: Iterable[str]) -> dict[str, int]:
    """Return the room on each device: free, or cached and unused by this process."""
    available: dict[str, int] = {}
    wanted = set(needs)
    for report in hardware.read_devices():
        device, reading = report.info.device, report.reading
        if device not in wanted:
            continue
        if device == HOST:
            free = hardware.available_host_bytes()
        else:
            free = None if report.use is None else report.use.free_bytes
            if free is not None and reading is not None:
                free += (reading.reserved_bytes or 0) - (reading.allocated_bytes or 0)
        if free is not None:
            available[device] = free
    return available


def _find_shortage(needs: dict[str, int], available: dict[str, int]) -> str | None:
    for device, n_bytes in sorted(needs.items()):
        if device in available and n_bytes > available[device]:
            return (
                f"{device} has room for {format_bytes(available[device])} and "
                f"{format_bytes(n_bytes)} are needed: release something there first; "
                "nothing was changed"
            )
    return None
