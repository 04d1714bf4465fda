"""Carries out a release, step by step, and measures each.

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
from gpumemwidget.errors import BadInputError, ReleaseError
from gpumemwidget.owners.base import Shell
from gpumemwidget.owners.caches import clear_caches
from gpumemwidget.owners.cycles import cut_cycles
from gpumemwidget.owners.grads import clear_gradients
from gpumemwidget.owners.moves import carry_out
from gpumemwidget.owners.naming import describe_error, describe_references
from gpumemwidget.owners.plan import Draft, draw_up
from gpumemwidget.owners.sorting import DROP, GRADS, MOVE, UNBIND
from gpumemwidget.owners.watch import StorageWatch
from gpumemwidget.owners.whereabouts import whereabouts
from gpumemwidget.records import HOST, Reading, ReleasePlan, ReleaseReport, ReleaseStep
from gpumemwidget.units import format_bytes

__all__ = ["apply_release"]

#: What was freed may fall short of the plan by this much before the report goes after it: other
#: threads and the interpreter allocate meanwhile.
TOLERANCE_BYTES = 1024**2


def apply_release(plan: ReleasePlan, shell: Shell, hardware: Hardware) -> ReleaseReport:
    """Carry out a plan, as it is true now, and measure each step.

    The notebook may have changed since the plan was made (a click waits for the end of a cell): it
    is drawn up anew, and what is done is what the same names mean now. The report's ``plan`` is
    that one, and a note says so where it differs.

    Args:
        plan: what ``plan_release`` gave.
        shell: the running IPython.
        hardware: measures each step and empties the caches.

    Returns:
        What was done and freed. Where it stopped and why is in it too, and not raised: a step that
        failed, or why nothing was begun (a name is gone, host memory is short).
    """
    before = hardware.read()
    watch = StorageWatch()
    try:
        return _Release(plan, shell, hardware, watch).run(before)
    finally:
        watch.close()


@dataclass(slots=True)
class _Prepared:
    """What the steps after the move need: no objects, only how to find them."""

    plan: ReleasePlan
    user_names: tuple[str, ...]
    ids: frozenset[int]
    out_rows: tuple[str, ...]
    moved: str | None
    #: Tensors that hold themselves; weak.
    cycles: list[weakref.ref[Any]] = field(default_factory=list)
    #: Leaves whose gradients go; weak.
    grad_owners: list[weakref.ref[Any]] = field(default_factory=list)
    #: Why the move failed, in one line; or why it was not even begun.
    failure: str | None = None
    is_begun: bool = True


class _Release:
    def __init__(
        self, plan: ReleasePlan, shell: Shell, hardware: Hardware, watch: StorageWatch
    ) -> None:
        self._asked = plan
        self._shell = shell
        self._hardware = hardware
        self._watch = watch
        self._steps: list[ReleaseStep] = []
        #: What goes with each step, by the step's name.
        self._planned: dict[str, tuple[tuple[str, int], ...]] = {}
        #: What goes and is no memory of malloc's: PyTorch has a cache of pinned memory.
        self._pinned_bytes = 0

    def run(self, before: tuple[Reading, ...]) -> ReleaseReport:
        started_s = time.perf_counter()
        prepared = self._prepare()
        self._note_move(prepared, before, time.perf_counter() - started_s)
        plan = prepared.plan
        acts: dict[str, Callable[[], str | None]] = {
            UNBIND: lambda: self._unbind(prepared),
            GRADS: lambda: clear_gradients(prepared.grad_owners),
            DROP: lambda: self._drop(prepared),
            "clear caches": lambda: clear_caches(
                self._hardware, cublas=plan.cublas, compile_caches=plan.compile_caches
            ),
            "gc.collect": lambda: _collect(prepared.cycles),
            "empty_cache": self._empty_cache,
        }
        if not plan.grads:
            del acts[GRADS]
        if not plan.costs:
            del acts["clear caches"]
        for name, act in acts.items():
            self._take_step(name, act)
        after = self._hardware.read()
        failures = [
            f"{each.name}: {each.detail}" for each in self._steps if each.status == "failed"
        ]
        stopped = prepared.failure if not prepared.is_begun else failures[0] if failures else None
        freed = _subtract(before, after, "allocated_bytes")
        remains: Sequence[str] = ()
        if stopped is None:
            remains = self._watch.list_remains(
                self._shell, tolerance_bytes=TOLERANCE_BYTES
            ) or _compare(plan.frees_bytes, freed, pinned_bytes=self._pinned_bytes)
        return ReleaseReport(
            plan=plan,
            steps=tuple(self._steps),
            before=before,
            after=after,
            allocated_freed_bytes=freed,
            reserved_freed_bytes=_subtract(before, after, "reserved_bytes"),
            remains=(*plan.remains, *remains),
            stopped=stopped,
            notes=_list_notes(self._asked, plan),
        )

    # -- the steps ---------------------------------------------------------------------------------

    def _prepare(self) -> _Prepared:
        """Draw up the plan anew and move; when this returns, nothing of the draft is left."""
        asked = self._asked
        failed = _Prepared(plan=asked, user_names=(), ids=frozenset(), out_rows=(), moved=None)
        try:
            draft = draw_up(
                self._shell,
                self._hardware,
                asked.names,
                keep=asked.keep,
                out=asked.out,
                exceptions=asked.exceptions,
                cublas=asked.cublas,
                compile_caches=asked.compile_caches,
                grads=asked.grads,
            )
        except BadInputError as exc:
            return replace(failed, failure=str(exc), is_begun=False)
        if draft.plan.refusal is not None:
            return replace(failed, plan=draft.plan, failure=draft.plan.refusal, is_begun=False)
        if draft.account is not None:
            self._watch.add(draft.account, draft.dying)
            infos = [draft.account.graph.storages[place] for place in draft.dying]
            self._pinned_bytes = sum(info.n_bytes for info in infos if info.is_pinned)
            moved = [move.place for group in draft.moves for move in group]
            self._watch.add(draft.account, moved)
        prepared = _Prepared(
            plan=draft.plan,
            user_names=() if asked.keep else draft.user_names,
            ids=draft.ids,
            out_rows=draft.out_rows,
            moved=None,
            cycles=draft.cycles,
            grad_owners=draft.grad_owners,
        )
        self._planned = draft.planned
        try:
            prepared.moved = self._move(draft)
        except (Exception, KeyboardInterrupt) as exc:  # noqa: BLE001 - told in the report
            prepared.failure = describe_error(exc)
        return prepared

    def _move(self, draft: Draft) -> str | None:
        """Move what hangs together as one; what was moved before a failure stays moved."""
        account = draft.account
        if account is None or not draft.moves:
            return None
        n_tensors = 0
        for unit in draft.units:
            moves = [move for number in unit for move in draft.moves[number]]
            try:
                made = carry_out(account, moves)
            except (Exception, KeyboardInterrupt) as exc:  # noqa: BLE001 - told in the report
                told = [draft.plan.moves[number] for number in unit]
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
        n_bytes = sum(told.n_bytes for told in draft.plan.moves)
        return f"{_count(n_tensors, 'tensor')}, {format_bytes(n_bytes)}"

    def _note_move(
        self, prepared: _Prepared, before: tuple[Reading, ...], duration_s: float
    ) -> None:
        after = self._hardware.read()
        step = ReleaseStep(
            name=MOVE,
            detail=prepared.failure or prepared.moved or "nothing to move",
            status="failed" if prepared.failure else "done" if prepared.moved else "skipped",
        )
        if not prepared.is_begun:
            step = replace(step, detail="not reached", status="not reached")
        elif step.status != "skipped":
            step = replace(
                step,
                allocated_freed_bytes=_subtract(before, after, "allocated_bytes"),
                reserved_freed_bytes=_subtract(before, after, "reserved_bytes"),
                duration_s=duration_s,
                planned_bytes=self._planned.get(MOVE, ()),
            )
        self._steps.append(step)

    def _unbind(self, prepared: _Prepared) -> str | None:
        if not prepared.user_names:
            return None
        done: list[str] = []
        for name in prepared.user_names:
            try:
                self._shell.user_ns[name] = None
            except (Exception, KeyboardInterrupt) as exc:  # noqa: BLE001 - told in the report
                before = f" ({', '.join(done)} set to None before it)" if done else ""
                message = f"{name}: {describe_error(exc)}{before}"
                raise ReleaseError(message) from None
            done.append(name)
        return ", ".join(done)

    def _drop(self, prepared: _Prepared) -> str | None:
        shell, plan = self._shell, prepared.plan
        dropped = list(shell.drop_ids(prepared.ids)) if prepared.ids else []
        if plan.out or prepared.out_rows:
            dropped += shell.drop_out(None if plan.out else prepared.out_rows)
        if plan.exceptions:
            dropped += shell.drop_exceptions()
        return describe_references(dropped) or None

    def _empty_cache(self) -> str:
        self._hardware.empty_cache()
        return "cached memory given back"

    def _take_step(self, name: str, act: Callable[[], str | None]) -> None:
        if any(step.status in {"failed", "not reached"} for step in self._steps):
            self._steps.append(ReleaseStep(name=name, detail="not reached", status="not reached"))
            return
        detail, failed = None, False
        before: tuple[Reading, ...] = ()
        started_s = time.perf_counter()
        try:
            before = self._hardware.read()
            detail = act()
        except (Exception, KeyboardInterrupt) as exc:  # noqa: BLE001 - told in the report
            detail, failed = describe_error(exc), True
        duration_s = time.perf_counter() - started_s
        step = ReleaseStep(name=name, detail="nothing to do", status="skipped")
        if detail is not None:
            after = self._hardware.read()
            step = ReleaseStep(
                name=name,
                detail=detail,
                status="failed" if failed else "done",
                allocated_freed_bytes=_subtract(before, after, "allocated_bytes"),
                reserved_freed_bytes=_subtract(before, after, "reserved_bytes"),
                duration_s=duration_s,
                planned_bytes=self._planned.get(name, ()),
            )
        self._steps.append(step)


# -- words and sums ----------------------------------------------------------------------------


def _collect(cycles: Sequence[weakref.ref[Any]]) -> str:
    n_cut = cut_cycles(cycles)
    found = f"{gc.collect()} objects"
    if not n_cut:
        return found
    return f"{found}; gradients cut off whose graphs held {_count(n_cut, 'tensor')}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _subtract(
    before: Sequence[Reading], after: Sequence[Reading], counter: str
) -> tuple[tuple[str, int], ...]:
    """The fall of a counter, for each device where both ends are known."""
    ends = {reading.device: getattr(reading, counter) for reading in after}
    return tuple(
        (reading.device, start - end)
        for reading in before
        if (start := getattr(reading, counter)) is not None
        and (end := ends.get(reading.device)) is not None
    )


def _compare(
    planned: Sequence[tuple[str, int]], measured: Sequence[tuple[str, int]], *, pinned_bytes: int
) -> list[str]:
    """A sentence for each device whose counter fell by less than was planned."""
    fell = dict(measured)
    counted = {
        device: n_bytes - (pinned_bytes if device == HOST else 0) for device, n_bytes in planned
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


def _list_notes(asked: ReleasePlan, done: ReleasePlan) -> tuple[str, ...]:
    notes = []
    if (asked.frees_bytes, asked.moves, asked.drops) != (done.frees_bytes, done.moves, done.drops):
        notes.append("The notebook changed after the plan was shown; what the names mean now went")
    if done.exceptions:
        notes.append("The last exception is dropped: %debug has nothing to look at")
    return tuple(notes)
