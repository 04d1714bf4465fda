"""Carry out a release, step by step, and measure each.

Always in this order: move to the CPU what somebody keeps, set the names to ``None``, and gradients
where that was asked for, drop what IPython holds, clear torch's own caches where that was asked
for, collect, empty the allocator's.
Emptying it before the names are rebound would give nothing back. A step that fails ends it: what
was not yet released is unchanged.

Nothing here may hold what it is to free: the objects live in a draft inside one function, and the
rest goes by names and ids.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.errors import ReleaseError, forgets_frames
from gpumemwidget.model.devices import HOST, BytesByDevice, Reading
from gpumemwidget.model.ownership import DeviceBytes
from gpumemwidget.model.releases import (
    ReleasePlan,
    ReleaseReport,
    ReleaseStep,
    ReleaseStepKind,
    StepResult,
)
from gpumemwidget.model.requests import ReleaseRequest
from gpumemwidget.ownership.shell import Shell
from gpumemwidget.releasing.caches import clear_caches
from gpumemwidget.releasing.gradients import clear_gradients, cut_cycles
from gpumemwidget.releasing.move import carry_out, describe_error, whereabouts
from gpumemwidget.releasing.plan import Draft, draw_up
from gpumemwidget.releasing.watch import StorageWatch
from gpumemwidget.units import format_bytes

#: Shortfall from the plan that is not looked into (bytes): other threads and the interpreter
#: allocate meanwhile.
TOLERANCE_BYTES = 1024**2

_NOTHING = StepResult()
#: Steps that do their work whatever there is to be done.
_ALWAYS_TAKEN = (ReleaseStepKind.COLLECT, ReleaseStepKind.EMPTY_CACHE)


@forgets_frames
def execute_release(shell: Shell, hardware: Hardware, request: ReleaseRequest) -> ReleaseReport:
    """Release what is asked for, and measure each step.

    The plan is drawn up and carried out from one walk, so it is true when the first step is taken
    also if the notebook has changed since a plan was shown. It is the report's ``plan``.

    Args:
        shell: the running IPython.
        hardware: measures each step and empties the caches.
        request: what to release.

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
    before = hardware.end_span()
    watch = StorageWatch()
    try:
        return _Release(request, shell, hardware, watch).run(before)
    finally:
        watch.close()


@dataclass(slots=True)
class _Prepared:
    """The needs of the steps after the move: no objects, only how to find them."""

    plan: ReleasePlan
    user_names: tuple[str, ...] = ()
    ids: frozenset[int] = frozenset()
    out_rows: tuple[str, ...] = ()
    moved: StepResult = _NOTHING
    #: Tensors that hold themselves; weak.
    cycles: list[weakref.ref[Any]] = field(default_factory=list)
    #: Leaves whose gradients go; weak.
    grad_owners: list[weakref.ref[Any]] = field(default_factory=list)
    #: Why the move failed, in one line; or why it was not even begun.
    failure: str | None = None
    is_begun: bool = True


class _Release:
    def __init__(
        self, request: ReleaseRequest, shell: Shell, hardware: Hardware, watch: StorageWatch
    ) -> None:
        self._request = request
        self._shell = shell
        self._hardware = hardware
        self._watch = watch
        self._steps: list[ReleaseStep] = []
        #: The planned bytes of each step.
        self._planned: dict[ReleaseStepKind, DeviceBytes] = {}
        #: Pinned bytes that are freed: PyTorch has a cache of pinned memory, and malloc none.
        self._pinned_bytes = 0
        #: True once a Ctrl-C came after the first change: no further step is taken then.
        self._is_interrupted = False

    def run(self, before: tuple[Reading, ...]) -> ReleaseReport:
        started_s = time.perf_counter()
        prepared = self._prepare()
        plan, request = prepared.plan, prepared.plan.request
        acts: dict[ReleaseStepKind, Callable[[], StepResult]] = {
            ReleaseStepKind.UNBIND: lambda: self._unbind(prepared),
            ReleaseStepKind.CLEAR_GRADIENTS: lambda: StepResult(
                n_tensors=clear_gradients(prepared.grad_owners)
            ),
            ReleaseStepKind.DROP_REFERENCES: lambda: self._drop(prepared),
            ReleaseStepKind.CLEAR_CACHES: lambda: StepResult(
                notes=clear_caches(
                    self._hardware, cublas=request.cublas, compile_caches=request.compile_caches
                )
            ),
            ReleaseStepKind.COLLECT: lambda: StepResult(
                n_tensors=cut_cycles(prepared.cycles), n_objects=gc.collect()
            ),
            ReleaseStepKind.EMPTY_CACHE: self._empty_cache,
        }
        if not request.grads:
            del acts[ReleaseStepKind.CLEAR_GRADIENTS]
        if not plan.costs:
            del acts[ReleaseStepKind.CLEAR_CACHES]
        try:
            self._note_move(prepared, before, started_s)
            for kind, act in acts.items():
                self._take_step(kind, act)
        except KeyboardInterrupt:
            # Between two steps.
            self._is_interrupted = True
        taken = {step.kind for step in self._steps}
        left = [kind for kind in (ReleaseStepKind.MOVE, *acts) if kind not in taken]
        self._steps.extend(ReleaseStep(kind, "not reached") for kind in left)
        after = self._measure()
        stopped = prepared.failure if not prepared.is_begun else self._find_stop()
        freed = _subtract(before, after, "allocated_bytes")
        remains: Sequence[str] = ()
        notes: tuple[str, ...] = ()
        if request.exceptions:
            notes = ("The last exception is dropped: %debug has nothing to look at",)
        if stopped is None:
            try:
                remains = self._watch.list_remains(
                    self._shell, tolerance_bytes=TOLERANCE_BYTES
                ) or _compare(plan.frees_bytes, freed, pinned_bytes=self._pinned_bytes)
            except KeyboardInterrupt:
                self._is_interrupted = True
                notes += ("Interrupted before it was found out what still holds the rest",)
        return ReleaseReport(
            plan=plan,
            steps=tuple(self._steps),
            before=before,
            after=after,
            allocated_freed_bytes=freed,
            reserved_freed_bytes=_subtract(before, after, "reserved_bytes"),
            remains=(*plan.remains, *remains),
            stopped=stopped,
            notes=notes,
            is_interrupted=self._is_interrupted,
        )

    def _measure(self) -> tuple[Reading, ...]:
        """Read the devices; a Ctrl-C meanwhile ends the release before its next step."""
        while True:
            try:
                return self._hardware.end_span()
            except KeyboardInterrupt:
                self._is_interrupted = True

    def _find_stop(self) -> str | None:
        """Why the release stopped, in one line; ``None`` where all steps were taken."""
        for step in self._steps:
            if step.status == "failed":
                return f"{step.kind.value}: {step.result.error}"
        done = [step.kind.value for step in self._steps if step.status != "not reached"]
        if len(done) < len(self._steps):
            return f"interrupted after {done[-1]}" if done else "interrupted"
        return None

    # -- the steps ---------------------------------------------------------------------------------

    def _prepare(self) -> _Prepared:
        """Draw up the plan and move; when this returns, nothing of the draft is left."""
        draft, plan = draw_up(self._shell, self._hardware, self._request)
        if plan.refusal is not None:
            return _Prepared(plan=plan, failure=plan.refusal, is_begun=False)
        if draft.account is not None:
            self._watch.add(draft.account, draft.dying)
            infos = [draft.account.graph.storages[place] for place in draft.dying]
            self._pinned_bytes = sum(info.n_bytes for info in infos if info.is_pinned)
            moved = [move.place for group in draft.moves for move in group]
            self._watch.add(draft.account, moved)
        prepared = _Prepared(
            plan=plan,
            user_names=() if plan.request.keep else draft.user_names,
            ids=draft.ids,
            out_rows=draft.out_rows,
            cycles=draft.cycles,
            grad_owners=draft.grad_owners,
        )
        self._planned = draft.planned
        try:
            prepared.moved = self._move(draft, plan)
        except (Exception, KeyboardInterrupt) as exc:  # noqa: BLE001 - told in the report
            self._note_interrupt(exc)
            prepared.failure = describe_error(exc)
        return prepared

    def _move(self, draft: Draft, plan: ReleasePlan) -> StepResult:
        """Move what hangs together as one; what was moved before a failure stays moved."""
        account = draft.account
        if account is None or not draft.moves:
            return _NOTHING
        n_tensors = 0
        for unit in draft.units:
            moves = [move for number in unit for move in draft.moves[number]]
            try:
                made = carry_out(account, moves)
            except (Exception, KeyboardInterrupt) as exc:  # noqa: BLE001 - told in the report
                self._note_interrupt(exc)
                told = [plan.moves[number] for number in unit]
                failed = next(
                    path.path
                    for path, number in zip(told, unit, strict=True)
                    if any(move.is_failed for move in draft.moves[number]) or path is told[-1]
                )
                message = f"{failed}: {describe_error(exc)}"
                raise ReleaseError(message) from None
            n_tensors += sum(len(move.tensors) for move in moves)
            infos = [account.graph.storages[move.place] for move in moves]
            whereabouts.note(account.graph.reader.storage_type, made, infos)
            made.clear()
        n_bytes = sum(told.n_bytes for told in plan.moves)
        return StepResult(n_tensors=n_tensors, n_bytes=n_bytes)

    def _note_move(
        self, prepared: _Prepared, before: tuple[Reading, ...], started_s: float
    ) -> None:
        kind = ReleaseStepKind.MOVE
        if not prepared.is_begun:
            self._steps.append(ReleaseStep(kind, "not reached"))
        else:
            result = replace(prepared.moved, error=prepared.failure or "")
            self._note_step(kind, result, before, started_s)

    def _unbind(self, prepared: _Prepared) -> StepResult:
        done: list[str] = []
        for name in prepared.user_names:
            try:
                self._shell.user_ns[name] = None
            except (Exception, KeyboardInterrupt) as exc:  # noqa: BLE001 - told in the report
                self._note_interrupt(exc)
                before = f" ({', '.join(done)} set to None before it)" if done else ""
                message = f"{name}: {describe_error(exc)}{before}"
                raise ReleaseError(message) from None
            done.append(name)
        return StepResult(names=tuple(done))

    def _drop(self, prepared: _Prepared) -> StepResult:
        shell, request = self._shell, prepared.plan.request
        dropped = list(shell.drop_ids(prepared.ids)) if prepared.ids else []
        if request.out or prepared.out_rows:
            dropped += shell.drop_out(None if request.out else prepared.out_rows)
        if request.exceptions:
            dropped += shell.drop_exceptions()
        return StepResult(references=tuple(dropped))

    def _empty_cache(self) -> StepResult:
        self._hardware.empty_cache()
        return _NOTHING

    def _note_interrupt(self, exc: BaseException) -> None:
        if isinstance(exc, KeyboardInterrupt):
            self._is_interrupted = True

    def _take_step(self, kind: ReleaseStepKind, act: Callable[[], StepResult]) -> None:
        if self._is_interrupted or any(
            step.status in {"failed", "not reached"} for step in self._steps
        ):
            self._steps.append(ReleaseStep(kind, "not reached"))
            return
        before: tuple[Reading, ...] = ()
        started_s = time.perf_counter()
        try:
            before = self._hardware.end_span()
            result = act()
        except (Exception, KeyboardInterrupt) as exc:  # noqa: BLE001 - told in the report
            self._note_interrupt(exc)
            result = StepResult(error=describe_error(exc))
        self._note_step(kind, result, before, started_s)

    def _note_step(
        self,
        kind: ReleaseStepKind,
        result: StepResult,
        before: tuple[Reading, ...],
        started_s: float,
    ) -> None:
        """Note a step that was begun, with the memory that it freed."""
        duration_s = time.perf_counter() - started_s
        if result == _NOTHING and kind not in _ALWAYS_TAKEN:
            self._steps.append(ReleaseStep(kind, "skipped"))
            return
        after = self._measure()
        self._steps.append(
            ReleaseStep(
                kind,
                "failed" if result.error else "done",
                result,
                allocated_freed_bytes=_subtract(before, after, "allocated_bytes"),
                reserved_freed_bytes=_subtract(before, after, "reserved_bytes"),
                duration_s=duration_s,
                planned_bytes=self._planned.get(kind, DeviceBytes()),
            )
        )


def _subtract(before: Sequence[Reading], after: Sequence[Reading], counter: str) -> BytesByDevice:
    """The fall of a counter, for each device where both ends are known."""
    ends = {reading.device: getattr(reading, counter) for reading in after}
    return tuple(
        (reading.device, start - end)
        for reading in before
        if (start := getattr(reading, counter)) is not None
        and (end := ends.get(reading.device)) is not None
    )


def _compare(
    planned: DeviceBytes, measured: Sequence[tuple[str, int]], *, pinned_bytes: int
) -> list[str]:
    """A sentence for each device whose counter fell by less than was planned."""
    fell = dict(measured)
    counted = {
        device: n_bytes - (pinned_bytes if device == HOST else 0)
        for device, n_bytes in planned.by_device
    }
    sentences = []
    if pinned_bytes > TOLERANCE_BYTES:
        sentences.append(
            f"{format_bytes(pinned_bytes)} of it is pinned memory: PyTorch keeps that for its next "
            "use, and the host's counters do not show it"
        )
    return sentences + [
        f"All that was planned went, yet {device} fell by {format_bytes(fell[device])} instead of "
        f"{format_bytes(n_bytes)}: something else allocated meanwhile"
        for device, n_bytes in counted.items()
        if device in fell and n_bytes - fell[device] > TOLERANCE_BYTES
    ]
