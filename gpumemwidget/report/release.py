"""A release before it happens, and after."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from gpumemwidget.owners.base import LAST_EXCEPTION
from gpumemwidget.owners.naming import describe_references
from gpumemwidget.records import (
    Reading,
    ReleaseMove,
    ReleasePlan,
    ReleaseReport,
    ReleaseStep,
    RestorePlan,
    RestoreReport,
)
from gpumemwidget.report.document import (
    Block,
    Cell,
    Column,
    Document,
    Heading,
    Note,
    Run,
    Step,
    Steps,
    Table,
    Tone,
)
from gpumemwidget.report.html import render_html
from gpumemwidget.report.output import Report
from gpumemwidget.report.pieces import bytes_cell
from gpumemwidget.report.text import render_text
from gpumemwidget.report.words import join_words, name_counters, rank_device
from gpumemwidget.units import format_bytes

__all__ = [
    "N_MOVES_SHOWN",
    "report_plan",
    "report_release",
    "report_restore",
    "report_restore_plan",
]

#: An optimizer alone can be hundreds of tensors.
N_MOVES_SHOWN = 12

#: Rows that are no variables, so that there is nothing to be set to ``None``.
_ROW_NAME = re.compile(rf"Out\[.*\]|_{{1,3}}|{LAST_EXCEPTION}", re.DOTALL)

#: A table of six columns has no room for more in a terminal.
_SHORT_NAMES = {
    "drop IPython's references": "drop IPython's own",
    "set gradients to None": "gradients to None",
}

_STEP_COLUMNS = (
    Column("step", "name"),
    Column("device", "words"),
    Column("planned"),
    Column("allocated"),
    Column("reserved"),
    Column("what was done", "words", last="wrap"),
)
_RESTORE_COLUMNS = (
    Column("device", "name"),
    Column("planned"),
    Column("allocated before"),
    Column("now"),
)
_TOTAL_COLUMNS = (
    Column("device", "name"),
    Column("memory", "name"),
    Column("planned"),
    Column("freed"),
    Column("before"),
    Column("now"),
)


def report_plan(plan: ReleasePlan) -> Report:
    """What a release would do, step by step; if it may not be done, that comes first."""
    title = Run(f"Release {join_words(plan.names)}".rstrip(), "strong")
    if plan.refusal:
        blocks: list[Block] = [Heading((title, Run("refused", "bad")))]
        blocks.append(Note(plan.refusal, tone="bad"))
    else:
        blocks = [Heading((title, Run("plan, nothing is changed yet", "muted")))]
    blocks.append(Steps(_list_steps(plan)))
    verb = "Would" if plan.refusal else "Will"
    amounts = _join_amounts(plan.frees_bytes) or "nothing"
    blocks.append(Note(f"{verb} free {amounts}.", tone="plain"))
    if plan.host_needed_bytes:
        needed = format_bytes(plan.host_needed_bytes)
        available = format_bytes(plan.host_available_bytes)
        blocks.append(Note(f"Needs {needed} of host memory; {available} available.", tone="plain"))
    blocks.extend(Note(sentence, tone="warn") for sentence in plan.remains)
    document = Document(tuple(blocks))
    return Report(text=render_text(document), html=render_html(document))


def _list_steps(plan: ReleasePlan) -> tuple[Step, ...]:
    """The release sequence, always in its order."""
    names = [name for name in plan.names if not _ROW_NAME.fullmatch(name)]
    moves = _list_moves(plan.moves)
    if not names:
        rebinding = "no name to set"
    elif plan.keep:
        rebinding = f"{', '.join(names)}: not done, for the copies on the CPU keep the names"
    else:
        rebinding = ", ".join(names)
    return (
        Step("move to CPU", "" if moves else "nothing that anybody would keep", tuple(moves)),
        Step("set to None", rebinding),
        *([Step("set gradients to None", _count_gradients(plan.n_grads))] if plan.grads else []),
        Step("drop IPython's references", describe_references(plan.drops) or "it holds none"),
        *([Step("clear caches", "", plan.costs)] if plan.costs else []),
        Step("gc.collect()"),
        Step("empty_cache()"),
    )


def _count_gradients(number: int) -> str:
    if not number:
        return "no variable leads to one"
    return "that of one tensor" if number == 1 else f"those of {number} tensors"


def _list_moves(moves: Sequence[ReleaseMove]) -> list[str]:
    shown = [_describe_move(move) for move in moves[:N_MOVES_SHOWN]]
    if len(moves) > len(shown):
        shown.append(f"and {len(moves) - len(shown)} more")
    return shown


def _describe_move(move: ReleaseMove) -> str:
    size = f"{move.kind}, {format_bytes(move.n_bytes)} on {move.device}"
    return f"{move.path} ({size}): {move.reason}" if move.reason else f"{move.path} ({size})"


def _join_amounts(frees_bytes: Iterable[tuple[str, int]]) -> str:
    """``1.40 GiB on cuda:0 and 12.00 MiB on host``, without devices on which nothing was freed."""
    return join_words(
        [f"{format_bytes(n_bytes)} on {device}" for device, n_bytes in frees_bytes if n_bytes > 0]
    )


def report_release(report: ReleaseReport) -> Report:
    """What a release did: the totals beside the plan, each step, and what remains and why."""
    title = Run(f"Release {join_words(report.plan.names)}".rstrip(), "strong")
    if report.stopped:
        blocks: list[Block] = [Heading((title, Run("stopped", "bad")))]
        blocks.append(Note(report.stopped, tone="bad"))
    else:
        freed = _join_amounts(report.allocated_freed_bytes) or "nothing"
        blocks = [Heading((title, Run(f"done, {freed} freed")))]
    totals = _list_totals(report)
    if totals:
        blocks.append(
            Table(
                caption="Freed on each device",
                columns=_TOTAL_COLUMNS,
                groups=totals,
                n_shared=1,
                caption_is_seen=True,
            )
        )
    blocks.append(
        Table(
            caption="Freed by each step",
            columns=_STEP_COLUMNS,
            groups=tuple(_list_step_rows(step) for step in report.steps),
            n_shared=1,
            caption_is_seen=True,
        )
    )
    if _has_risen(report):
        blocks.append(Note("Less than zero freed: so much more is in use there than before."))
    blocks.extend(Note(sentence, tone="warn") for sentence in report.remains)
    blocks.extend(Note(sentence) for sentence in report.notes)
    document = Document(tuple(blocks))
    return Report(text=render_text(document), html=render_html(document))


def report_restore_plan(plan: RestorePlan) -> Report:
    """What would be brought back from the CPU; if it may not be done, that comes first."""
    title = Run(f"Restore {join_words(plan.names)}".rstrip(), "strong")
    if plan.refusal:
        blocks: list[Block] = [Heading((title, Run("refused", "bad")))]
        blocks.append(Note(plan.refusal, tone="bad"))
    else:
        blocks = [Heading((title, Run("plan, nothing is changed yet", "muted")))]
    if plan.moves:
        blocks.append(Steps((_step_back(plan),)))
    available = dict(plan.available_bytes)
    for device, n_bytes in plan.needs_bytes:
        room = format_bytes(available[device]) if device in available else "an unknown amount"
        blocks.append(
            Note(f"Needs {format_bytes(n_bytes)} on {device}; {room} available.", tone="plain")
        )
    blocks.extend(Note(sentence, tone="warn") for sentence in plan.remains)
    document = Document(tuple(blocks))
    return Report(text=render_text(document), html=render_html(document))


def report_restore(report: RestoreReport) -> Report:
    """What was brought back: what each device held before and holds now."""
    plan = report.plan
    title = Run(f"Restore {join_words(plan.names)}".rstrip(), "strong")
    if report.stopped:
        blocks: list[Block] = [Heading((title, Run("stopped", "bad")))]
        blocks.append(Note(report.stopped, tone="bad"))
    else:
        blocks = [Heading((title, Run(f"done, {report.detail} brought back")))]
        blocks.append(Steps((_step_back(plan),)))
        blocks.append(
            Table(
                caption="On each device",
                columns=_RESTORE_COLUMNS,
                groups=tuple(
                    (_describe_restored(device, plan, report),)
                    for device in sorted(
                        {reading.device for reading in report.after}, key=rank_device
                    )
                ),
                n_shared=1,
                caption_is_seen=True,
            )
        )
    blocks.extend(Note(sentence, tone="warn") for sentence in (*plan.remains, *report.remains))
    document = Document(tuple(blocks))
    return Report(text=render_text(document), html=render_html(document))


def _step_back(plan: RestorePlan) -> Step:
    return Step("move to where it was", "", tuple(_list_moves(plan.moves)))


def _describe_restored(device: str, plan: RestorePlan, report: RestoreReport) -> tuple[Cell, ...]:
    needs = dict(plan.needs_bytes)

    def find(readings: Sequence[Reading]) -> int | None:
        return next((each.allocated_bytes for each in readings if each.device == device), None)

    return (
        Cell(device),
        bytes_cell(needs[device]) if device in needs else Cell(""),
        bytes_cell(find(report.before)),
        bytes_cell(find(report.after)),
    )


def _list_totals(report: ReleaseReport) -> tuple[tuple[tuple[Cell, ...], ...], ...]:
    planned = dict(report.plan.frees_bytes)
    allocated = dict(report.allocated_freed_bytes)
    reserved = dict(report.reserved_freed_bytes)
    before = {reading.device: reading for reading in report.before}
    after = {reading.device: reading for reading in report.after}
    devices = planned.keys() | allocated.keys() | reserved.keys()

    def list_rows(device: str) -> tuple[tuple[Cell, ...], ...]:
        names = name_counters(device)
        start, end = before.get(device), after.get(device)
        return (
            (
                Cell(device),
                Cell(names.allocated, detail=names.allocated_detail),
                bytes_cell(planned[device]) if device in planned else Cell(""),
                bytes_cell(allocated.get(device)),
                bytes_cell(start.allocated_bytes if start else None),
                bytes_cell(end.allocated_bytes if end else None),
            ),
            (
                Cell(names.reserved),
                Cell(""),
                bytes_cell(reserved.get(device)),
                bytes_cell(start.reserved_bytes if start else None),
                bytes_cell(end.reserved_bytes if end else None),
            ),
        )

    return tuple(list_rows(device) for device in sorted(devices, key=rank_device))


def _list_step_rows(step: ReleaseStep) -> tuple[tuple[Cell, ...], ...]:
    allocated, reserved = dict(step.allocated_freed_bytes), dict(step.reserved_freed_bytes)
    planned = dict(step.planned_bytes)
    devices = sorted(
        (
            device
            for device in allocated.keys() | reserved.keys() | planned.keys()
            if allocated.get(device) or reserved.get(device) or planned.get(device)
        ),
        key=rank_device,
    )
    tones: dict[str, Tone] = {"failed": "bad", "done": "plain"}
    tone = tones.get(step.status, "muted")
    detail = step.detail
    if step.status != "done":
        detail = f"{step.status}: {detail}" if detail else step.status
    name = Cell(_SHORT_NAMES.get(step.name, step.name), tone=tone)
    what = Cell(detail, tone=tone)
    if not devices:
        return ((name, Cell(""), Cell(""), Cell(""), Cell(""), what),)
    rows = [
        (
            Cell(device),
            bytes_cell(planned[device]) if device in planned else Cell(""),
            bytes_cell(allocated.get(device)),
            bytes_cell(reserved.get(device)),
        )
        for device in devices
    ]
    return ((name, *rows[0], what), *rows[1:])


def _has_risen(report: ReleaseReport) -> bool:
    falls = [report.allocated_freed_bytes, report.reserved_freed_bytes]
    for step in report.steps:
        falls += [step.allocated_freed_bytes, step.reserved_freed_bytes]
    return any(n_bytes < 0 for fall in falls for _, n_bytes in fall)
