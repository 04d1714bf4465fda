"""Memory that grows: what each run or step adds, from which line, who keeps it, and what to do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from gpumemwidget.model.devices import HOST
from gpumemwidget.model.leaks import (
    Leak,
    LeakHolder,
    Rebinding,
    UnexplainedGrowth,
)
from gpumemwidget.model.ooms import Remedy, RemedyKind
from gpumemwidget.model.ownership import FixKind
from gpumemwidget.report.release import spell_release, word_fix
from gpumemwidget.report.render.blocks import (
    FEW,
    MOST_ROWS,
    Block,
    Column,
    Note,
    Option,
    Options,
    Table,
    bound_items,
    make_group,
    make_heading,
    name_columns,
    number_columns,
    warn,
)
from gpumemwidget.report.render.html import CARD_CLASS, WARNING_CLASS
from gpumemwidget.report.render.markup import clean
from gpumemwidget.report.render.output import Report
from gpumemwidget.report.render.text import SHORT_WIDTH, cut, cut_middle
from gpumemwidget.report.render.wording import count, join_words, name_memory
from gpumemwidget.units import format_bytes, format_change


def report_leak(leak: Leak, *, name: str = "", released: Sequence[str] = ()) -> Report:
    """Report a leak in a sentence, with what cuts it.

    Args:
        leak: what was found.
        name: a class of the HTML by which a page finds the place for its buttons; ``""`` for none.
        released: the variables that held it and no longer do, if all of it is released.
    """
    evidence = _describe_evidence(replace(leak, n_left=None) if released else leak)
    evidence = evidence[0].upper() + evidence[1:]
    if released:
        verb = "holds" if len(released) == 1 else "hold"
        evidence = f"{join_words(released)} no longer {verb} it. It was: {evidence}"
    options = [Option("", text, command) for text, command in list_cuts(leak)]
    blocks: list[Block] = [
        make_heading(_describe_growth(leak), tone="muted" if released else "warn"),
        Note(evidence, tone="muted" if released else "plain"),
        Options("What you can do", options),
    ]
    return Report(blocks, tuple(filter(None, (CARD_CLASS, WARNING_CLASS, name))))


def report_leaks(
    leaks: Sequence[Leak], unexplained: Sequence[UnexplainedGrowth], ignored: Sequence[str]
) -> Report:
    """Report all leaks that are known, those that add the most first, and what no tensor is in."""
    words = (
        "No growing memory was found. Loops without an optimizer are followed on GPUs only; "
        "%memvars shows what is held."
    )
    blocks: list[Block] = [] if unexplained else [Note(words)]
    if leaks:
        columns = (
            *name_columns("cell", "device"),
            *number_columns("each time", "seen"),
            Column("held by", "code", fold=34),
            Column("from line", "words", last="wrap"),
        )
        groups = [make_group(_list_cells(leak)) for leak in leaks]
        blocks = [
            Table("Memory that grows", columns, groups, stacks=True),
            Note("To ignore a variable: %memleak ignore NAME."),
        ]
    if unexplained:
        columns = (
            *name_columns("cell", "device"),
            *number_columns("each time", "seen"),
            Column("what it may be", "words", last="wrap"),
        )
        groups = [make_group(_list_unexplained_cells(growth)) for growth in unexplained]
        blocks.append(Table("Growth without tensors", columns, groups, stacks=True))
    if ignored:
        names = ", ".join(bound_items(list(map(clean, ignored)), str))
        blocks.append(Note(f"Ignored: {names}. To report one again: %memleak unignore NAME."))
    return Report(blocks)


def report_rebinding(rebinding: Rebinding) -> Report:
    """Report an old value beside a new one in one sentence, with the line to write."""
    begin = (
        f"`{clean(rebinding.name)}` was reassigned, and its old value still takes "
        f"{format_bytes(rebinding.n_bytes)} of {rebinding.device}"
    )
    holders = rebinding.holders
    paths = join_words([f"`{cut_middle(clean(path), SHORT_WIDTH)}`" for path, _ in holders])
    if any(fix.kind is FixKind.COLLECT for _, fix in holders):
        words = (
            f"{begin} in a reference cycle ({paths}): `gc.collect()` frees it; before line "
            f"{rebinding.line} it would keep old values from piling up."
        )
    else:
        rows = [fix.path for _, fix in holders if fix.kind is FixKind.RELEASE_ROW]
        others = [word_fix(fix).text for _, fix in holders if fix.path not in rows]
        lines = [*([f"del {', '.join(map(clean, rows))}"] if rows else []), *dict.fromkeys(others)]
        frees = "frees" if len(lines) == 1 else "free"
        commands = join_words([f"`{line}`" for line in lines])
        # A line of very many names is not typed.
        way = f"; {commands} {frees} it" if len(rows) <= MOST_ROWS else ""
        words = f"{begin}, held by {paths}{way}."
    return Report(warn(words))


def describe_leak(leak: Leak) -> str:
    """Return a leak in one sentence or two."""
    return f"{_describe_growth(leak)}: {_describe_evidence(leak)}"


def mark_leak(leak: Leak) -> str:
    """Return how much is added: ``+1.90 MiB a step``."""
    return f"{format_change(leak.each_bytes)} a {leak.unit}"


def note_running_leak(leak: Leak) -> str:
    """Return what a line above the plot says while the cell runs."""
    line = "" if leak.line is None else f", from line {leak.line.number}"
    amount = format_bytes(leak.each_bytes)
    return f"{name_memory(leak.device)} grows {amount} a step since step {leak.since}{line}"


def list_cuts(leak: Leak) -> list[tuple[str, str]]:
    """Return what cuts a leak: each as a sentence, and the line to type (``""`` if there is none).

    What ends the growth comes first, then what frees what is held now: ``find_release``.
    """
    cuts = list(dict.fromkeys(_find_cut(leak, holder) for holder in leak.holders))[:2]
    release = find_release(leak)
    if release is not None and release.kind is RemedyKind.OUT:
        return [
            ("End the cell's last line with a semicolon: then its value is not kept", ""),
            ("Drop the displayed values (Out)", word_release(release)),
        ]
    if release is not None:
        hold = "it holds" if len(release.names) == 1 else "they hold"
        words = f"Release {join_words(release.names)}, with all that {hold}"
        cuts.append((words, word_release(release)))
    rows = list(dict.fromkeys(holder.row for holder in leak.holders))
    names = rows if all(row.isidentifier() for row in rows) else [leak.holders[0].stem]
    cuts.append(("If this is meant to grow, ignore it", f"%memleak ignore {' '.join(names)}"))
    return cuts


def _find_cut(leak: Leak, holder: LeakHolder) -> tuple[str, str]:
    """Return what ends the growth of one holder, and the line to type."""
    if holder.path.startswith("ipywidgets."):
        words = "Close each widget once it is done with: .close(). To close all, the dashboard too"
        return words, "import ipywidgets; ipywidgets.Widget.close_all()"
    if holder.in_graph:
        return "Keep .item() or .detach() of it, not the tensor: it keeps its whole graph", ""
    if holder.container:
        begin = f"import {holder.module}; " if holder.module else ""
        words = f"{clean(holder.container)} keeps what each {leak.unit} adds: don't store it, or"
        return f"{words} clear it", f"{begin}{holder.container}.clear()"
    if holder.slice_bytes is not None:
        own, whole = format_bytes(holder.slice_bytes), format_bytes(holder.storage_bytes)
        return f"These are slices of {whole} storages: .clone() of a slice keeps {own}", ""
    if holder.in_model:
        owner = clean(holder.row) or "The model"
        return f"{owner} keeps what each {leak.unit} adds: don't store it, or clear it", ""
    return "Keep less of it, or clear it before it grows", ""


def find_release(leak: Leak) -> Remedy | None:
    """Return the release that frees what is held now; ``None`` where that would free more.

    A list may be released; a trainer that has one among much else may not.
    """
    if all(holder.path.startswith("Out[") for holder in leak.holders):
        return Remedy(RemedyKind.OUT, None, "about")
    for holder in leak.holders:
        is_all = re.fullmatch(rf"{re.escape(holder.row)}(\[.*|'s graph)?", holder.path) is not None
        if not holder.row.isidentifier() or not is_all or holder.in_model:
            return None
    names = tuple(dict.fromkeys(holder.row for holder in leak.holders))
    return Remedy(RemedyKind.NAMES, None, "about", names=names)


def word_release(release: Remedy) -> str:
    """Return the line to type for a release of a leak's."""
    return "%memrelease --out" if release.kind is RemedyKind.OUT else spell_release(release.names)


def _describe_growth(leak: Leak) -> str:
    where = name_memory(leak.device)
    if leak.unit == "run":
        amount = format_change(leak.each_bytes)
        return f"{where}: {amount} in each of the last {leak.n_seen} runs of this cell"
    amount = format_bytes(leak.each_bytes)
    return f"{where} grows {amount} a step since step {leak.since}, for {leak.n_seen} steps"


def _describe_evidence(leak: Leak) -> str:
    held = _describe_holders(leak.holders)
    text = f"{_describe_tensors(leak)}{_describe_line(leak)}, held by {held}."
    # Nobody makes more runs or steps.
    if leak.n_left is not None and leak.n_left < 100_000:
        text += f" Memory runs out in about {count(leak.n_left, leak.unit)}."
    return text


def _describe_tensors(leak: Leak) -> str:
    """Return ``one float32[64, 1000] a run``."""
    tensor = max(leak.holders, key=lambda holder: holder.storage_bytes).tensor
    n_storages = sum(holder.n_storages for holder in leak.holders)
    if n_storages == 1:
        return f"one {tensor or 'tensor'} a {leak.unit}"
    largest = f", the largest {tensor}" if tensor else ""
    return f"{count(n_storages, 'tensor')} a {leak.unit}{largest}"


def _describe_holders(holders: Sequence[LeakHolder], *, with_bytes: bool = True) -> str:
    """Return ``a[…] (4.00 MiB) and b[…] (2.00 MiB)``; of one holder the path alone."""
    with_bytes = with_bytes and len(holders) > 1
    shown = holders if len(holders) <= FEW else holders[:1]
    words = [
        _name(holder) + (f" ({format_bytes(holder.each_bytes)})" if with_bytes else "")
        for holder in shown
    ]
    n_others = len(holders) - len(shown)
    return join_words([*words, f"{n_others} like it"] if n_others else words)


def _describe_line(leak: Leak) -> str:
    line = leak.line
    if line is None:
        return ""
    of = "" if line.source == leak.cell else f" of {line.source}"
    text = f" ({cut(clean(line.text), SHORT_WIDTH)})" if line.text else ""
    return f", from line {line.number}{of}{text}"


def _name(holder: LeakHolder) -> str:
    # What is within a widget that a library keeps says less than that it keeps the widget.
    is_long = len(holder.path) > SHORT_WIDTH and not holder.row and " " not in holder.stem
    return cut_middle(clean(holder.stem if is_long else holder.path), SHORT_WIDTH)


def _list_cells(leak: Leak) -> tuple[str, ...]:
    return (
        leak.cell,
        leak.device,
        mark_leak(leak),
        count(leak.n_seen, leak.unit),
        _describe_holders(leak.holders, with_bytes=False),
        "" if leak.line is None else f"{leak.line.source}, line {leak.line.number}",
    )


def _list_unexplained_cells(growth: UnexplainedGrowth) -> tuple[str, ...]:
    device, words = growth.device, "What PyTorch's allocator has handed out, and no tensor is in"
    if growth.is_outside:
        device = f"{device} outside PyTorch"
        words = "Another library's memory: %memvars lists the arrays of CuPy and JAX"
    elif device == HOST:
        words = "Arrays of NumPy, Python's objects or a library's: malloc counts them"
    amount = f"{format_change(growth.each_bytes)} a run"
    return growth.cell, device, amount, count(growth.n_runs, "run"), words


# -- Checks that have failed -----------------------------------------------------------------------


def describe_growth(
    device: str,
    growth_bytes: int,
    limit_bytes: int,
    *,
    n_steps: int,
    n_warmups: int,
    leak: Leak | None,
    holders: Sequence[tuple[str, int]],
) -> str:
    """Return growth beyond a limit, line by line.

    Args:
        device: the device.
        growth_bytes: by how much more is in use than before.
        limit_bytes: the growth that is allowed.
        n_steps: number of steps that have added it; 0 where no steps were seen.
        n_warmups: number of steps before these, which do not count.
        leak: what gains a tensor in each step; ``None`` where nothing is found.
        holders: the largest holders on the device now, biggest first, each with its bytes.
    """
    lines = [
        f"{name_memory(device)} grew by {format_bytes(growth_bytes)}, and the limit is "
        f"{format_bytes(limit_bytes)}."
    ]
    if leak is not None:
        lines.append(describe_leak(leak))
        # Advice that needs a magic is of no use in a test.
        lines += [f"{text}." for text, command in list_cuts(leak) if not command]
        return "\n".join(lines)
    if n_steps:
        each_bytes = growth_bytes // n_steps
        since = f" since step {n_warmups}" if n_warmups else ""
        lines.append(
            f"It grew {format_bytes(each_bytes)} a step{since}, for {count(n_steps, 'step')}."
        )
        if sum(n_bytes for _, n_bytes in holders) < growth_bytes:
            lines.append(
                "No variable holds it at the end of the block: with the loop itself in the block, "
                "and not in a function that has returned, the holder is named."
            )
    return "\n".join([*lines, *_list_holders("Held there now", holders)])


def describe_peak(
    device: str,
    peak_bytes: int,
    limit_bytes: int,
    holders: Sequence[tuple[str, int]],
    *,
    is_predicted: bool,
) -> str:
    """Return a test's peak beyond its limit, line by line.

    The holders are the largest at a predicted peak, or those that are left after the test.
    """
    begin = "the test would allocate" if is_predicted else "the test allocated"
    end = " (predicted, as there is no GPU here)" if is_predicted else ""
    words = "In use at the peak" if is_predicted else "Held there after the test"
    return "\n".join(
        [
            f"{begin} {format_bytes(peak_bytes)} at once on {name_memory(device)}, and the limit "
            f"is {format_bytes(limit_bytes)}{end}.",
            *_list_holders(words, holders),
        ]
    )


def _list_holders(words: str, holders: Sequence[tuple[str, int]]) -> list[str]:
    listed = [
        f"{format_bytes(n_bytes)} {cut_middle(clean(name), SHORT_WIDTH)}"
        for name, n_bytes in holders
    ]
    return [f"{words}: {', '.join(listed)}."] if listed else []
