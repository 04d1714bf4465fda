"""Carry out a release step by step, with a measurement of every step; and bring back what it moved.

Always in this order: move to the CPU what somebody keeps, set the names to ``None``, drop what
IPython holds, free cuBLAS's workspaces where that was asked for, collect, empty the allocator's
cache, and those of other libraries where that was asked for. Emptying them before the names are
rebound would give nothing back. A step that fails ends it: what was not yet released is unchanged.

Nothing here may hold what it is to free: the objects live in targets inside one function, and the
rest goes by names and ids.

Whoever has a storage that a release moved when it is brought back gets the device's memory, in
place as on the way out: the tensors stay the same objects, tied and viewed as they are then.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.errors import BackendError, BadInputError, forgets_frames
from gpumemwidget.model.devices import HOST, BytesByDevice, Reading
from gpumemwidget.model.ownership import DeviceBytes
from gpumemwidget.model.releases import (
    Reason,
    ReasonKind,
    ReleaseMove,
    ReleasePlan,
    ReleaseReport,
    ReleaseRequest,
    ReleaseStay,
    ReleaseStep,
    ReleaseStepKind,
    Remnant,
    RestorePlan,
    RestoreReport,
    StepResult,
    Stop,
    StopKind,
    check_names,
)
from gpumemwidget.ownership.graph.objects import read_attributes
from gpumemwidget.ownership.graph.torch_reader import find_torch, round_up
from gpumemwidget.ownership.holdings import Holdings, add_up, take_holdings
from gpumemwidget.ownership.partition import Move, describe_move, find_moves, list_owned
from gpumemwidget.ownership.shell import Shell
from gpumemwidget.releasing.plan import (
    RELEASE_BUDGET_S,
    ReleaseTargets,
    check_bound,
    draw_up,
    find_capture,
    find_references,
    find_user,
)
from gpumemwidget.releasing.storages import (
    WatchedStorage,
    carry_out,
    describe_error,
    list_left,
    list_remains,
    original_devices,
    watch_storages,
)


@forgets_frames
def execute_release(shell: Shell, hardware: Hardware, request: ReleaseRequest) -> ReleaseReport:
    """Release what is asked for, and measure each step.

    The plan is drawn up and carried out from one walk, so it is true when the first step is taken
    also if the notebook has changed since a plan was shown. It is the report's ``plan``.

    Returns:
        What was done and freed. If it stopped, the report says where and why instead of raising:
        a step that failed, a Ctrl-C, or why nothing was begun (host memory is short). A caller
        within a cell shows the report, and ends the cell if it ``is_interrupted``.

    Raises:
        UnknownNameError: there is no such row; nothing was changed.
        BadInputError: a name is not of the user's memory; nothing was changed.
        KeyboardInterrupt: a Ctrl-C came before anything was changed.
    """
    # Not read(), which the sampler calls: it leaves out malloc's figure where counting is slow.
    before = hardware.read_exact()
    return _Release(request, shell, hardware).run(before)


class _Release:
    def __init__(self, request: ReleaseRequest, shell: Shell, hardware: Hardware) -> None:
        self._request = request
        self._shell = shell
        self._hardware = hardware
        self._watched: list[WatchedStorage] = []
        #: For each entry of the plan's ``stays``.
        self._staying: list[list[WatchedStorage]] = []
        self._steps: list[ReleaseStep] = []
        #: The devices' readings after the last step.
        self._last: tuple[Reading, ...] = ()
        #: The part of the step that is being done, to name where it fails.
        self._at = ""
        #: True once a Ctrl-C came after the first change: no further step is taken then.
        self._is_interrupted = False
        #: True if a Ctrl-C came within the step that failed.
        self._is_cut_short = False

    def run(self, before: tuple[Reading, ...]) -> ReleaseReport:
        # Before the plan, which takes memory of the host itself.
        self._last = before
        targets, plan = draw_up(self._shell, self._hardware, self._request)
        acts = self._list_acts(targets, plan)
        if plan.refusal is None:
            partition = targets.partition
            if partition is not None:
                self._watched = watch_storages(partition.holdings, partition.list_going())
                stays = partition.stays.values()
                self._staying = [watch_storages(partition.holdings, places) for places in stays]
            del partition
            try:
                for kind, act in acts.items():
                    if self._is_interrupted or self._find_failure() is not None:
                        break
                    self._take_step(kind, act)
            except KeyboardInterrupt:
                # Between two steps.
                self._is_interrupted = True
        targets.let_go()
        taken = {step.kind for step in self._steps}
        self._steps += [ReleaseStep(kind, "not reached") for kind in acts if kind not in taken]
        after = self._measure()
        stopped = plan.refusal or self._find_stop()
        remains: list[Remnant] = []
        if stopped is None:
            try:
                remains = list_remains(self._shell, self._watched)
            except KeyboardInterrupt:
                self._is_interrupted = True
        return ReleaseReport(
            plan=replace(plan, stays=list_left(plan.stays, self._staying))
            if self._staying
            else plan,
            steps=tuple(self._steps),
            before=before,
            after=after,
            allocated_freed_bytes=_subtract(before, after, "allocated_bytes"),
            reserved_freed_bytes=_subtract(before, after, "reserved_bytes"),
            remains=tuple(remains),
            stopped=stopped,
            is_interrupted=self._is_interrupted,
        )

    def _list_acts(
        self, targets: ReleaseTargets, plan: ReleasePlan
    ) -> dict[ReleaseStepKind, Callable[[], StepResult]]:
        request, kinds = plan.request, ReleaseStepKind
        names = () if request.keep else targets.user_names
        acts: dict[ReleaseStepKind, Callable[[], StepResult]] = {
            kinds.MOVE: lambda: self._move(targets, plan),
            kinds.UNBIND: lambda: self._unbind(names),
            kinds.DROP_REFERENCES: lambda: self._drop(targets, request),
            kinds.FREE_WORKSPACES: self._free_workspaces,
            kinds.COLLECT: lambda: StepResult(
                n_tensors=_cut_cycles(targets.cycles), n_objects=gc.collect()
            ),
            kinds.EMPTY_CACHE: self._empty_cache,
            kinds.EMPTY_LIBRARIES: self._empty_libraries,
        }
        if not request.cublas:
            del acts[kinds.FREE_WORKSPACES]
        if not request.libraries:
            del acts[kinds.EMPTY_LIBRARIES]
        return acts

    def _measure(self) -> tuple[Reading, ...]:
        """Read the devices; a Ctrl-C meanwhile ends the release before its next step."""
        while True:
            try:
                return self._hardware.read_exact()
            except KeyboardInterrupt:
                self._is_interrupted = True

    def _find_failure(self) -> ReleaseStep | None:
        return next((step for step in self._steps if step.status == "failed"), None)

    def _find_stop(self) -> Stop | None:
        """Return why the release stopped; ``None`` if all steps were taken."""
        failed = self._find_failure()
        if failed is not None:
            kind = StopKind.INTERRUPTED if self._is_cut_short else StopKind.FAILED
            return Stop(kind, step=failed.kind, error=failed.result.error)
        done = [step.kind for step in self._steps if step.status != "not reached"]
        if len(done) < len(self._steps):
            return Stop(StopKind.INTERRUPTED_BETWEEN, step=done[-1] if done else None)
        return None

    # -- the steps ---------------------------------------------------------------------------------

    def _move(self, targets: ReleaseTargets, plan: ReleasePlan) -> StepResult:
        """Move what hangs together as one; what was moved before a failure stays moved."""
        n_tensors, partition = 0, targets.partition
        try:
            for path, moves in () if partition is None else partition.units:
                assert partition is not None
                graph = partition.holdings.graph
                self._at = f"{path}: "
                made = carry_out(partition.holdings, moves)
                devices = [graph.storages[move.place].device for move in moves]
                original_devices.note(graph.reader.torch, made, devices)
                n_tensors += sum(len(move.tensors) for move in moves)
        finally:
            # Nothing may hold what the next steps are to free.
            targets.let_go()
        return StepResult(n_tensors=n_tensors, n_bytes=sum(move.n_bytes for move in plan.moves))

    def _unbind(self, names: Sequence[str]) -> StepResult:
        for name in names:
            self._at = f"{name}: "
            self._shell.user_ns[name] = None
        return StepResult(names=tuple(names))

    def _drop(self, targets: ReleaseTargets, request: ReleaseRequest) -> StepResult:
        references = find_references(self._shell, request, targets)
        for reference in references:
            reference.drop()
        return StepResult(references=tuple(reference.path for reference in references))

    def _free_workspaces(self) -> StepResult:
        try:
            return StepResult(is_freed=self._hardware.release_workspaces())
        except BackendError as exc:
            # Workspaces in use stay; what else was asked for can be released all the same.
            return StepResult(refusal=str(exc))

    def _empty_cache(self) -> StepResult:
        self._hardware.empty_cache()
        return StepResult()

    def _empty_libraries(self) -> StepResult:
        given, refusals = self._hardware.empty_libraries()
        return StepResult(given=given, error="; ".join(refusals))

    def _take_step(self, kind: ReleaseStepKind, act: Callable[[], StepResult]) -> None:
        self._at = ""
        try:
            result = act()
        except (Exception, KeyboardInterrupt) as exc:  # noqa: BLE001 - in the report
            self._is_cut_short = isinstance(exc, KeyboardInterrupt)
            self._is_interrupted |= self._is_cut_short
            result = StepResult(error=self._at + describe_error(exc))
        is_always_taken = kind in (ReleaseStepKind.COLLECT, ReleaseStepKind.EMPTY_CACHE)
        if result == StepResult() and not is_always_taken:
            self._steps.append(ReleaseStep(kind, "skipped"))
            return
        before, self._last = self._last, self._measure()
        self._steps.append(
            ReleaseStep(
                kind,
                "failed" if result.error else "done",
                result,
                allocated_freed_bytes=_subtract(before, self._last, "allocated_bytes"),
                reserved_freed_bytes=_subtract(before, self._last, "reserved_bytes"),
            )
        )


def _cut_cycles(tensors: Sequence[weakref.ref[Any]]) -> int:
    """Take gradients and attributes from these tensors; return how many there were."""
    torch: Any = find_torch()
    owners = [owner for reference in tensors if (owner := reference()) is not None]
    for owner in owners:
        # A class of the user's may have a ``grad`` of its own.
        torch._C.TensorBase.grad.__set__(owner, None)  # noqa: SLF001 - see above
        dict.clear(read_attributes(owner) or {})
    return len(owners)


def _subtract(before: Sequence[Reading], after: Sequence[Reading], counter: str) -> BytesByDevice:
    """Return the fall of a counter, for each device where both ends are known."""
    ends = {reading.device: getattr(reading, counter) for reading in after}
    return tuple(
        (reading.device, start - end)
        for reading in before
        if (start := getattr(reading, counter)) is not None
        and (end := ends.get(reading.device)) is not None
    )


# -- The way back ----------------------------------------------------------------------------------


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
    plan, holdings, moves = _draw_up(shell, names)
    stopped, is_interrupted = plan.refusal, False
    result = StepResult()
    remains: tuple[Remnant, ...] = ()
    watched: list[WatchedStorage] = []
    if stopped is None and holdings is not None:
        watched = watch_storages(holdings, [move.place for move in moves])
        n_tensors = sum(len(move.tensors) for move in moves)
        result = StepResult(n_tensors=n_tensors, n_bytes=sum(move.n_bytes for move in plan.moves))
        try:
            carry_out(holdings, moves)
        except (Exception, KeyboardInterrupt) as exc:  # noqa: BLE001 - in the report
            is_interrupted = isinstance(exc, KeyboardInterrupt)
            kind = StopKind.INTERRUPTED if is_interrupted else StopKind.FAILED
            stopped = Stop(kind, error=describe_error(exc))
        if stopped is not None:
            result = StepResult()
            # The copies that were made before it failed are gone; so is what was cached of it.
            hardware.empty_cache()
    del holdings, moves
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


def _draw_up(shell: Shell, names: Sequence[str]) -> tuple[RestorePlan, Holdings | None, list[Move]]:
    """Return the plan, and the walk and the moves that carry it out."""
    names = check_names(names)
    if not names:
        raise BadInputError("nothing to restore: name what was moved, as in %memrestore model opt")
    rows = {reference.row: reference.root for reference in shell.list_references()}
    check_bound(shell, [name for name in names if name not in rows], rows=rows)
    refusal = find_capture()
    holdings = take_holdings(shell, budget_s=RELEASE_BUDGET_S) if refusal is None else None
    moves: list[Move] = []
    shown: tuple[ReleaseMove, ...] = ()
    stays: tuple[ReleaseStay, ...] = ()
    needs: list[tuple[str, int]] = []
    if holdings is not None:
        moves, shown, stays = _find_moves(holdings, names)
        infos = holdings.graph.storages
        needs = [(m.device, round_up(infos[m.place].n_bytes, m.device)) for m in moves]
        refusal = find_user(shell, holdings, names)
    if refusal is None and not shown:
        refusal = Stop(StopKind.IMMOVABLE if stays else StopKind.NOT_ON_HOST, name=names[0])
    plan = RestorePlan(
        names=names,
        moves=shown,
        needs_bytes=DeviceBytes(
            add_up(needs),
            is_at_least=holdings is not None and not holdings.graph.is_complete,
        ),
        refusal=refusal,
        stays=stays,
    )
    return plan, holdings, moves


def _find_moves(
    holdings: Holdings, names: Sequence[str]
) -> tuple[list[Move], tuple[ReleaseMove, ...], tuple[ReleaseStay, ...]]:
    """Return the moves, what a person sees of them, and what can't be brought back."""
    graph = holdings.graph
    rows = [holdings.rows[name] for name in names if name in holdings.rows]
    # Each storage belongs to the first row that reaches it.
    reached: dict[int, str] = {}
    for row in rows:
        for place in holdings.list_storages(row.mark):
            reached.setdefault(place, row.name)
    devices = {
        place: device
        for place in reached
        if (device := original_devices.find(graph.objects[place])) is not None
    }
    owned = list_owned(holdings, rows, keep=True)
    found, _ = find_moves(holdings, rows, list(devices), owned)
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
        tuple(describe_move(holdings, *key, group) for key, group in moves.items()),
        tuple(
            ReleaseStay(name, HOST, holdings.sum_places(places, rounded=False), reason)
            for (name, reason), places in stays.items()
        ),
    )
