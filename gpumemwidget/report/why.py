"""Why memory is still held: each path that holds it, and what makes the holder let go."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from gpumemwidget.model.ownership import Cure, DeviceBytes, Explanation, Fix, FixKind, Holder
from gpumemwidget.report.release import describe_joint
from gpumemwidget.report.render.blocks import (
    MOST_ROWS,
    SOME,
    Block,
    Note,
    Run,
    Step,
    Steps,
    Tone,
    make_heading,
    say,
    warn,
)
from gpumemwidget.report.render.output import Report
from gpumemwidget.report.render.wording import (
    count,
    format_device_bytes,
    join_words,
    word_cut,
    word_slices,
)

#: Fixes that ``%memrelease`` makes.
_RELEASES = (FixKind.RELEASE_ROW, FixKind.RELEASE_DISPLAYED, FixKind.RELEASE_EXCEPTIONS)

#: Code to type for each fix; ``{}`` is its path.
_COMMANDS = {
    FixKind.RELEASE_ROW: "%memrelease {}",
    FixKind.RELEASE_EXCEPTIONS: "%memrelease --exceptions",
    FixKind.RELEASE_CUBLAS: "%memrelease --cublas",
    FixKind.RESET_COMPILER: "torch._dynamo.reset()",
    FixKind.DELETE: "del {}",
    FixKind.CLEAR_GRADIENT: "{} = None",
    FixKind.CLEAR_CACHE: "{}.cache_clear()",
    FixKind.CLOSE: "{}.close()",
    FixKind.CLOSE_WIDGETS: "{}.close_all()",
    FixKind.SET_CONTEXT_VARIABLE: "{}.set(None)",
    FixKind.COLLECT: "import gc; gc.collect()",
}
#: Sentences for the fixes that are no single line of code.
_SENTENCES = {
    FixKind.DELETE_CUDA_GRAPH: "delete the graph, or call its reset()",
    FixKind.DELETE_LENDER: "delete the array or file whose memory it shares",
    FixKind.DROP_GRAPH: "call backward(), or drop {0} (keep {0}.detach() or .item())",
    FixKind.END_FUNCTION: "let the function return, or set its variable to None",
    FixKind.END_UNSEEN: (
        "torch.clear_autocast_cache() if an autocast was left open; otherwise it goes with what "
        "holds it in C++, or with the kernel"
    ),
}


def report_explanation(explanation: Explanation) -> Report:
    """Report what holds some memory: its size, its other holders, and a fix for every one."""
    title = make_heading("Memory without a variable")
    if explanation.name:
        kinds = ", ".join(filter(None, dict.fromkeys((explanation.kind, explanation.type_name))))
        title = make_heading(explanation.name, Run(kinds, "muted"), tone="code")
    blocks: list[Block] = [title, say(_word_amounts(explanation))]
    if slices := word_slices(explanation.slices):
        blocks.append(say(f"{slices[0].upper()}{slices[1:]}."))
    holders = [holder for holder in explanation.holders if holder.path != explanation.name]
    if holders:
        blocks.append(Steps(list(map(_describe_holder, holders))))
        if explanation.n_more:
            blocks.append(Note(f"and {count(explanation.n_more, 'more path')}"))
    elif explanation.name and explanation.held_bytes.total_bytes and not explanation.named_bytes:
        blocks.append(say("Nothing else was found that holds it."))
    own = next((h for h in explanation.holders if h.path == explanation.name), None)
    if words := _word_cure(explanation.cure):
        blocks.append(say(f"To free it: {words}"))
    elif explanation.cure is None and own is not None and not holders:
        blocks.append(say(f"To free it: {word_fix(own.fix).text}"))
    else:
        blocks.extend(describe_joint(explanation.joint))
    if explanation.named_bytes:
        names = [f"{name} ({format_device_bytes(held)})" for name, held in explanation.named_bytes]
        is_one = len(names) == 1
        have = "has a name of its own, and stays" if is_one else "have names of their own, and stay"
        blocks.append(say(f"{join_words(names, SOME)} {have}."))
    if not explanation.is_complete:
        words = "There were too many objects to look at in time: there may be more holders."
        blocks.extend(warn(words))
    return Report(blocks)


def _word_cure(cure: Cure | None, quote: str = "") -> str:
    """Return the commands that free the memory, and how much; ``""`` where none do."""
    commands = ", then ".join(f"{quote}{command}{quote}" for command in list_commands(cure))
    return f"{commands} ({format_device_bytes(cure.frees_bytes)})" if cure and commands else ""


def word_part_refusal(explanation: Explanation) -> str:
    """Return why a part of a variable is not released, with what frees it."""
    words = _word_cure(explanation.cure, "`")
    way = f"To free it: {words}" if words else f"%memwhy {explanation.name} names what holds it"
    return (
        f"{explanation.name!r} is a part of a variable, and only whole variables are released. "
        f"{way}. Nothing was changed."
    )


def list_commands(cure: Cure | None) -> list[str]:
    """Return the lines to run, in order; none if they can't be typed, or are too long."""
    fixes = () if cure is None else cure.fixes
    if cure is None or len(fixes) > MOST_ROWS or any(fix.kind in _SENTENCES for fix in fixes):
        return []
    rows = [fix for fix in fixes if fix.kind in _RELEASES]
    parts = [fix for fix in fixes if fix.kind not in _RELEASES]
    names = [fix.path for fix in rows if fix.kind is FixKind.RELEASE_ROW]
    deleted = [fix.path for fix in parts if fix.kind is FixKind.DELETE]
    if parts and len(names) == len(rows):
        deleted, rows = [*deleted, *names], []
    statements = _list_statements(parts, deleted)
    if cure.needs_collection and not rows:
        statements.append(_COMMANDS[FixKind.COLLECT])
    line = "; ".join(statements)
    if not _can_be_run(line) or not all(map(str.isidentifier, names)):
        return []
    words = [word_fix(fix).text.removeprefix("%memrelease ") for fix in rows]
    release = f"%memrelease {' '.join(words)}" if rows else ""
    return [command for command in (line if parts else "", release) if command]


def _list_statements(parts: Sequence[Fix], deleted: Sequence[str]) -> list[str]:
    modules = dict.fromkeys(fix.module for fix in parts if fix.module)
    others = [fix for fix in parts if fix.kind is not FixKind.DELETE]
    return [
        *(f"import {name}" for name in modules),
        *(_COMMANDS[fix.kind].format(fix.path) for fix in others),
        # Last: what comes before may begin at a name that goes.
        *([f"del {', '.join(deleted)}"] if deleted else []),
    ]


def _can_be_run(line: str) -> bool:
    try:
        # Keys and attributes may be anything, and long ones are cut.
        ast.parse(line)
    except (SyntaxError, ValueError):
        return False
    return True


def _word_amounts(explanation: Explanation) -> str:
    held = format_device_bytes(explanation.held_bytes)
    if not explanation.name:
        # More time might find a variable that leads to some of it.
        about = "" if explanation.is_complete else "about "
        return f"It is {about}{held}." if held else "None: all memory is reachable from variables."
    if not held:
        if explanation.cut is not None:
            return f"No tensor memory was found{word_cut(explanation.cut)}."
        return "It holds no tensor memory."
    frees = format_device_bytes(explanation.frees_bytes)
    if explanation.frees_bytes == DeviceBytes(is_at_least=True):
        return f"Reaches {held}."
    if explanation.frees_bytes == explanation.held_bytes:
        return f"Reaches {held}, all of it alone."
    return f"Reaches {held}, {frees or 'none'} of it alone."


def word_fix(fix: Fix) -> Run:
    """Return what a person types, as code, or does, as a sentence."""
    if fix.kind is FixKind.RELEASE_DISPLAYED:
        # Only ``Out[7]`` can be named; ``_`` is another value after each cell.
        is_row = fix.path.startswith("Out[")
        return Run(f"%memrelease {fix.path}" if is_row else "%memrelease --out", "code")
    command = _COMMANDS.get(fix.kind)
    if command is None:
        return Run(_SENTENCES[fix.kind].format(fix.path))
    command = command.format(fix.path)
    if fix.module and "…" not in command:
        command = f"import {fix.module}; {command}"
    return Run(command, "code")


def _describe_holder(holder: Holder) -> Step:
    details = ((Run("fix: "), word_fix(holder.fix)),)
    amounts = format_device_bytes(holder.held_bytes)
    name = holder.path
    if holder.n_variables:
        begin, _, innermost = name.partition(": ")
        variables, frames = count(holder.n_variables, "variable"), count(holder.n_frames, "frame")
        name = f"{begin}: {variables} in {frames}, innermost {innermost}"
    tone: Tone = "plain" if holder.root == "nowhere" else "code"
    return Step(name, f"holds {amounts}" if amounts else "", details, tone)
