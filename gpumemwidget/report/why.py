"""Why memory is still held: each path that holds it, and what makes the holder let go."""

from __future__ import annotations

from gpumemwidget.model.ownership import Explanation, Fix, FixKind, Holder
from gpumemwidget.report.release import describe_joint
from gpumemwidget.report.render.blocks import Block, Heading, Note, Run, Step, Steps, Tone
from gpumemwidget.report.render.output import Report
from gpumemwidget.report.render.wording import count, format_device_bytes, word_cut

#: Code to type for each fix; ``{}`` is its path.
_COMMANDS = {
    FixKind.RELEASE_ROW: "%memrelease {}",
    FixKind.RELEASE_EXCEPTIONS: "%memrelease --exceptions",
    FixKind.RELEASE_CUBLAS: "%memrelease --cublas",
    FixKind.RESET_COMPILER: "torch._dynamo.reset()",
    FixKind.DELETE: "del {}",
    FixKind.CLEAR_GRADIENT: "{} = None",
    FixKind.CLEAR_CACHE: "{}.cache_clear()",
    FixKind.CLOSE_GENERATOR: "{}.close()",
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
    """Report what holds some memory: its size, its other holders, and a fix for each."""
    blocks: list[Block] = [Heading(_list_title(explanation))]
    holders = [each for each in explanation.holders if each.path != explanation.name]
    blocks.append(Note(_tell_amounts(explanation, is_alone=not holders), tone="plain"))
    if holders:
        blocks.append(Steps(tuple(_describe_holder(holder) for holder in holders)))
        if explanation.n_more:
            blocks.append(Note(f"and {count(explanation.n_more, 'more path')}"))
    elif explanation.held_bytes.total_bytes:
        blocks.append(Note("Nothing else was found that holds it.", tone="plain"))
    own = next((each for each in explanation.holders if each.path == explanation.name), None)
    joint = describe_joint(explanation.joint)
    if joint:
        blocks.extend(joint)
    elif own is not None:
        blocks.append(Note(f"To release it: {word_fix(own.fix).text}", tone="plain"))
    if not explanation.is_complete:
        words = "There were too many objects to look at in time: there may be more holders."
        blocks.append(Note(words, tone="warn"))
    return Report(tuple(blocks))


def _list_title(explanation: Explanation) -> tuple[Run, ...]:
    if not explanation.name:
        return (Run("Memory without a variable", "strong"),)
    kinds = dict.fromkeys((explanation.kind, explanation.type_name))
    return (Run(explanation.name, "code"), Run(", ".join(filter(None, kinds)), "muted"))


def _tell_amounts(explanation: Explanation, *, is_alone: bool) -> str:
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
    if explanation.frees_bytes == explanation.held_bytes:
        return f"Holds {held}. Releasing it frees all of that."
    if is_alone and not explanation.frees_bytes.total_bytes:
        # Memory that a running function or a module has alone is no row that could be released.
        return f"Holds {held}."
    return f"Holds {held}. Releasing only this frees {frees or 'nothing: it is shared'}."


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
    tone: Tone = "plain" if holder.root == "nowhere" else "code"
    return Step(holder.path, f"holds {amounts}" if amounts else "", details, tone)
