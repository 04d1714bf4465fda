"""Memory that grows: what each run or step adds, from which line, who keeps it, and what to do."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gpumemwidget.model.devices import HOST
from gpumemwidget.model.growth import Leak, Rebinding
from gpumemwidget.model.ooms import Remedy
from gpumemwidget.model.ownership import FixKind
from gpumemwidget.report.render.blocks import (
    Block,
    Cell,
    Column,
    Heading,
    Note,
    Option,
    Options,
    Run,
    Table,
)
from gpumemwidget.report.render.html import CARD_CLASS, WARNING_CLASS
from gpumemwidget.report.render.markup import clean
from gpumemwidget.report.render.output import Report
from gpumemwidget.report.render.text import cut, cut_middle
from gpumemwidget.report.render.wording import count, join_words
from gpumemwidget.report.why import word_fix
from gpumemwidget.units import format_bytes, format_change

#: Maximum numbers of columns of a path and of a line.
_MAX_PATH, _MAX_LINE = 72, 80
#: Number of runs or steps from which the rest is not told: nobody makes so many.
_MAX_LEFT = 100_000

_COLUMNS = (
    Column("cell", "name"),
    Column("device", "name"),
    Column("each time"),
    Column("seen"),
    Column("held by", "code", fold=34),
    Column("from line", "words", last="wrap"),
)


def report_leak(leak: Leak, *, name: str = "") -> Report:
    """Report a leak in a sentence, with what cuts it.

    Args:
        leak: what was found.
        name: a class of the HTML by which a page finds the place for its buttons; ``""`` for none.
    """
    evidence = _describe_evidence(leak)
    options = [Option("", text, command) for text, command in list_cuts(leak)]
    blocks: tuple[Block, ...] = (
        Heading((Run(_describe_growth(leak), "warn"),)),
        Note(evidence[0].upper() + evidence[1:], tone="plain"),
        Options("What you can do", tuple(options)),
    )
    return Report(blocks, tuple(filter(None, (CARD_CLASS, WARNING_CLASS, name))))


def report_leaks(leaks: Sequence[Leak], ignored: Sequence[str]) -> Report:
    """Report all leaks that are known, those that add the most first."""
    blocks: list[Block] = []
    if leaks:
        blocks.append(
            Table(
                caption="Memory that grows",
                columns=_COLUMNS,
                groups=tuple((_list_cells(leak),) for leak in leaks),
                caption_is_seen=True,
                stacks=True,
            )
        )
        blocks.append(Note("To ignore a variable: %memleak ignore NAME."))
    else:
        blocks.append(Note("No growing memory was found."))
    if ignored:
        names = ", ".join(map(clean, ignored))
        blocks.append(Note(f"Ignored: {names}. To report one again: %memleak unignore NAME."))
    return Report(tuple(blocks))


def report_rebinding(rebinding: Rebinding) -> Report:
    """Report an old value beside a new one in a sentence."""
    return Report((Note(describe_rebinding(rebinding), tone="warn"),))


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


def describe_rebinding(rebinding: Rebinding) -> str:
    """Return an old value beside a new one in one sentence, with the line to write."""
    names = [clean(name) for name in rebinding.names]
    amount = format_bytes(rebinding.n_bytes)
    subject = join_words([f"`{name}`" for name in names])
    if rebinding.holders:
        paths = [f"`{cut_middle(clean(path), _MAX_PATH)}`" for path, _ in rebinding.holders]
        rows = [clean(fix.path) for _, fix in rebinding.holders if fix.kind is FixKind.RELEASE_ROW]
        words = [word_fix(fix).text for _, fix in rebinding.holders if fix.path not in rows]
        lines = [*([f"del {', '.join(rows)}"] if rows else []), *dict.fromkeys(words)]
        frees = "frees" if len(lines) == 1 else "free"
        return (
            f"{subject} was reassigned, and its old value still takes {amount} of "
            f"{rebinding.device}, held by {join_words(paths)}; "
            f"{join_words([f'`{line}`' for line in lines])} {frees} it."
        )
    were, value = ("was", "its old value") if len(names) == 1 else ("were", "their old values")
    return (
        f"{subject} {were} made while {value} still existed, so the peak held both: "
        f"`del {', '.join(names)}` before line {rebinding.line} would have saved {amount}."
    )


def list_cuts(leak: Leak) -> list[tuple[str, str]]:
    """Return what cuts a leak: each as a sentence, and the line to type (``""`` if there is none).

    What ends the growth comes first, then what frees what is held now.
    """
    if leak.in_graph:
        words = "Keep .item() or .detach() of it instead: the tensor itself holds its graph"
        cuts = [(words, "")]
    elif leak.in_model:
        cuts = [(f"The model keeps what each {leak.unit} adds: keep none of it, or clear it", "")]
    else:
        cuts = [("Keep less of it, or clear it before it grows", "")]
    release = find_release(leak)
    if release is not None and release.kind == "out":
        return [
            ("End the cell's last line with a semicolon: then its value is not kept", ""),
            ("Drop the displayed values (Out)", "%memrelease --out"),
        ]
    if release is not None:
        cuts.append((f"Release {leak.row}, with all that it holds", f"%memrelease {leak.row}"))
    cuts.append(
        ("If this is meant to grow, ignore it", f"%memleak ignore {leak.row or leak.holder}")
    )
    return cuts


def name_memory(device: str) -> str:
    """Return ``host memory`` for the host, and a GPU's own name."""
    return "host memory" if device == HOST else device


def find_release(leak: Leak) -> Remedy | None:
    """Return the release that frees what is held now; ``None`` where that would free more.

    A list may be released; a trainer that has one among much else may not.
    """
    if leak.holder.startswith("Out["):
        return Remedy("out", None, "about")
    is_all = re.fullmatch(rf"{re.escape(leak.row)}(\[.*|'s graph)?", leak.holder) is not None
    if not leak.row.isidentifier() or not is_all or leak.in_model:
        return None
    return Remedy("names", None, "about", names=(leak.row,))


def _describe_growth(leak: Leak) -> str:
    where = name_memory(leak.device)
    if leak.unit == "run":
        amount = format_change(leak.each_bytes)
        return f"{where}: {amount} in each of the last {leak.n_seen} runs of this cell"
    amount = format_bytes(leak.each_bytes)
    return f"{where} grows {amount} a step since step {leak.since}, for {leak.n_seen} steps"


def _describe_evidence(leak: Leak) -> str:
    text = f"{_describe_tensors(leak)}{_describe_line(leak)}, held by {_name(leak)}."
    if leak.n_left is not None and leak.n_left < _MAX_LEFT:
        text += f" Memory runs out in about {count(leak.n_left, leak.unit)}."
    return text


def _describe_tensors(leak: Leak) -> str:
    """Return ``one float32[64, 1000] a run``."""
    if leak.n_storages == 1:
        return f"one {leak.tensor or 'tensor'} a {leak.unit}"
    largest = f", the largest {leak.tensor}" if leak.tensor else ""
    return f"{count(leak.n_storages, 'tensor')} a {leak.unit}{largest}"


def _describe_line(leak: Leak) -> str:
    line = leak.line
    if line is None:
        return ""
    of = "" if line.source == leak.cell else f" of {line.source}"
    text = f" ({cut(clean(line.text), _MAX_LINE)})" if line.text else ""
    return f", from line {line.number}{of}{text}"


def _name(leak: Leak) -> str:
    return cut_middle(clean(leak.holder), _MAX_PATH)


def _list_cells(leak: Leak) -> tuple[Cell, ...]:
    line = "" if leak.line is None else f"{leak.line.number} of {leak.line.source}"
    return (
        Cell(leak.cell),
        Cell(leak.device),
        Cell(mark_leak(leak)),
        Cell(count(leak.n_seen, leak.unit)),
        Cell(_name(leak)),
        Cell(line),
    )
