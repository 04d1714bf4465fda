"""What holds memory, and its release or restore: the plan, what it did, each path and its fix."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from gpumemwidget.model.devices import HOST, rank_device
from gpumemwidget.model.ownership import (
    Cure,
    DeviceBytes,
    Explanation,
    Fix,
    FixKind,
    Holder,
    JointRelease,
)
from gpumemwidget.model.releases import (
    UNCOUNTED,
    Reason,
    ReasonKind,
    ReleaseMove,
    ReleasePlan,
    ReleaseReport,
    ReleaseStay,
    ReleaseStep,
    ReleaseStepKind,
    Remnant,
    RestorePlan,
    RestoreReport,
    StepResult,
    Stop,
    StopKind,
)
from gpumemwidget.ownership.shell import LAST_EXCEPTION
from gpumemwidget.report.render.blocks import (
    MOST_ROWS,
    SOME,
    Block,
    Fold,
    Note,
    Run,
    Step,
    Steps,
    Tone,
    bound_items,
    make_heading,
    say,
    sort_devices,
    warn,
)
from gpumemwidget.report.render.output import Report
from gpumemwidget.report.render.wording import (
    count,
    format_device_bytes,
    join_words,
    name_reserved,
    word_cut,
    word_reading,
    word_slices,
)
from gpumemwidget.units import format_bytes, format_change

#: Names of rows that are no variables, so that nothing is set to ``None``.
_ROW_NAME = re.compile(rf"Out\[.*\]|_{{1,3}}|{LAST_EXCEPTION}", re.DOTALL)

_NOTHING = DeviceBytes()

_REASONS = {
    ReasonKind.LENT: "it is lent by NumPy or another library (CuPy, JAX), until nothing there uses "
    "it; on a GPU PyTorch does not count it",
    ReasonKind.MAPPED: "it is shared memory (a DataLoader's worker) or a mapped file: it is "
    "unmapped, and malloc does not count it",
    ReasonKind.PINNED: "it is pinned: PyTorch keeps it for its next use, and malloc does not count "
    "it",
    ReasonKind.KEPT: "kept",
    ReasonKind.ON_HOST: "it is on the host already",
    ReasonKind.NOT_A_PART: "it is reached through a computation, a function or a key, "
    "not as a part",
    ReasonKind.NOT_MOVED: "no release has moved it there since it was last restored",
    ReasonKind.UNSEEN: "C++ code holds it (a traced module, DDP), or a computation that no "
    "name leads to",
    ReasonKind.SAVED: "a computation saved it for backward; run backward() or drop its output",
    ReasonKind.COMPUTED: "it is part of a computation (it has a grad_fn); keep x.detach() instead",
    ReasonKind.STORAGE_HELD: "its storage is held itself (x.untyped_storage()); drop that first",
    ReasonKind.IMMOVABLE: "PyTorch can't move a tensor of this kind in place",
}


def report_plan(plan: ReleasePlan) -> Report:
    """Report what a release would do, step by step; a refusal comes first."""
    blocks = _begin("Release", plan.request.names, _name_state(plan), plan.refusal)
    blocks.append(Steps(list(_list_steps(plan))))
    collects = plan.collects_bytes
    named = ((device, n - collects.on(device)) for device, n in plan.frees_bytes.by_device)
    amounts = format_device_bytes(replace(plan.frees_bytes, by_device=tuple(named)))
    words = f"{'Would' if plan.refusal else 'Will'} free {amounts or 'nothing'}"
    words += " of PyTorch's" * bool(plan.caches and not amounts)
    if collects.total_bytes:
        words += f"; gc.collect() frees {format_device_bytes(collects)} more, held by no variable"
    blocks.append(say(f"{words}."))
    needs_bytes = plan.host_needed_bytes
    if needs_bytes.total_bytes:
        needed = format_bytes(needs_bytes.total_bytes, is_at_least=needs_bytes.is_at_least)
        available = format_bytes(plan.host_available_bytes)
        blocks.append(say(f"Needs {needed} of host memory; {available} available."))
    blocks.extend(warn(*describe_stays(plan.stays, is_done=False)))
    if not plan.caches:
        blocks.extend(warn(*_describe_empty(plan)))
    blocks.extend(describe_joint(plan.joint))
    return Report(blocks)


def _name_state(plan: ReleasePlan | RestorePlan) -> Run:
    return Run("refused", "bad") if plan.refusal else Run("plan, nothing is changed yet", "muted")


def _begin(verb: str, names: Sequence[str], state: Run, stop: Stop | None) -> list[Block]:
    title = make_heading(f"{verb} {join_words(names)}".rstrip(), state)
    return [title, *([Note(word_stop(stop), tone="bad")] if stop else [])]


def word_stop(stop: Stop) -> str:
    """Return why a release or a restore may not begin, or was not done to its end."""
    at = "" if stop.step is None else f' at "{stop.step.value}"'
    # A restore, which has no steps, is undone.
    rest = " Everything is where it was." if stop.step is None else ""
    ends = stop.error.endswith((".", "!", "?"))
    after = "before the first step" if stop.step is None else f'after "{stop.step.value}"'
    needs_bytes = stop.needs_bytes or _NOTHING
    needed = format_bytes(needs_bytes.total_bytes, is_at_least=needs_bytes.is_at_least)
    return {
        StopKind.CAPTURE: "A CUDA graph is being captured, and freeing or copying memory would "
        "break it: release after the capture. Nothing was changed.",
        StopKind.THREAD: f"Thread {stop.thread!r} is in {stop.function}(), line {stop.line}, which "
        "uses this memory: wait until it ends. Nothing was changed.",
        StopKind.HOST_MEMORY: f"The move to the CPU needs {needed} of host memory, and "
        f"{format_bytes(stop.available_bytes)} is available: release fewer names, or release what "
        "else holds them too. Nothing was changed.",
        StopKind.NOT_ON_HOST: f"Nothing to restore: {stop.name} holds nothing that a release moved "
        "to the CPU and that is still there.",
        StopKind.IMMOVABLE: "Nothing can be moved back.",
        StopKind.FAILED: f"Failed{at}: {stop.error}{'' if ends else '.'}{rest}",
        StopKind.INTERRUPTED: f"Interrupted{at}.{rest}",
        StopKind.INTERRUPTED_BETWEEN: f"Interrupted {after}.",
    }[stop.kind]


def _word_reason(reason: Reason) -> str:
    """Return why memory stays or is moved, as the end of a sentence."""
    if reason.kind is ReasonKind.SHARED:
        holders = [name + _hint_at_flag(name) for name in reason.holders]
        holders += [f"{reason.n_more} more"] if reason.n_more else []
        return f"{join_words(holders)} also {'uses' if len(holders) == 1 else 'use'} it"
    words = _REASONS[reason.kind]
    if reason.kind is ReasonKind.IMMOVABLE and not reason.is_of_another:
        words += "; use .to()"
    return f"what belongs to it can't be moved: {words}" if reason.is_of_another else words


def _hint_at_flag(row: str) -> str:
    """Return the flag that drops a row of IPython's; ``""`` for a variable."""
    if row == LAST_EXCEPTION:
        return " (--exceptions drops it)"
    return " (--out drops it)" if _ROW_NAME.fullmatch(row) else ""


def describe_stays(stays: Sequence[ReleaseStay], *, is_done: bool) -> list[str]:
    """Return a sentence on each part that a release leaves where it is."""
    sentences: list[str] = []
    for stay in stays:
        held = stay.held_bytes
        amount = format_bytes(held.total_bytes, is_at_least=held.is_at_least)
        verb = " was not freed" if is_done else " will not be freed"
        # Of what no allocator counts neither can be said.
        verb = "" if stay.reason.kind in UNCOUNTED else verb
        words = _word_reason(stay.reason)
        sentences.append(f"{amount} of {stay.name} on {stay.device}{verb}: {words}")
    return sentences


def word_remnant(remnant: Remnant) -> str:
    """Return a sentence on memory that was to be freed and is still counted."""
    amount = format_bytes(remnant.n_bytes)
    if not remnant.holders:
        return f"{amount} more was meant to go and is held elsewhere"
    holders = join_words(remnant.holders)
    return f"{amount} on {remnant.device} was meant to go and is still held by {holders}"


def describe_joint(joint: JointRelease | None, *, done: Sequence[str] = ()) -> list[Block]:
    """Return the command that frees what names share with others, with what that frees."""
    if joint is None:
        return []
    names = [name for name in joint.names if name not in done]
    command = spell_release(names) if len(names) <= MOST_ROWS else ""
    amounts = format_device_bytes(joint.frees_bytes)
    return [say(f"To free it: {command} ({amounts})")] if command else []


def spell_release(names: Sequence[str]) -> str:
    """Return the line to type for a release of rows; ``""`` if there are none.

    Also ``""`` where a name is no identifier (``globals()["a b"] = …``), as no magic takes it.
    """
    if not all(name.isidentifier() or _ROW_NAME.fullmatch(name) for name in names):
        return ""
    words = " ".join(f'"{name}"' if " " in name else name for name in names)
    return f"%memrelease {words}" if names else ""


def _list_steps(plan: ReleasePlan) -> Iterator[Step]:
    """Yield the steps of a release in their order, without those that have nothing to do."""
    if moves := _list_moves(plan.moves):
        yield Step("Move to CPU", details=moves)
    names = [name for name in plan.request.names if not _ROW_NAME.fullmatch(name)]
    if names and plan.request.keep:
        yield Step("Keep", f"{join_words(names)} will name the copies on the CPU")
    elif names:
        yield Step("Set to None", ", ".join(bound_items(names, str)))
    if drops := describe_references(plan.drops):
        yield Step("Drop IPython's references", drops)
    if plan.request.cublas:
        yield Step("Free cuBLAS workspaces", "the next matrix product makes its own anew")
    yield Step("gc.collect()")
    yield Step("empty_cache()")
    if plan.request.libraries:
        caches = [
            f"{format_bytes(n_bytes)} of {name} on {device}, and what the names leave there"
            for name, device, n_bytes in plan.caches
        ]
        yield Step("Empty the caches of other libraries", join_words(caches))


def _describe_empty(plan: ReleasePlan) -> list[str]:
    names = plan.empty_names
    cut = "" if plan.cut is None else word_cut(plan.cut)
    return [f"No tensor memory was found in {join_words(names)}{cut}"] if names else []


def _list_moves(moves: Sequence[ReleaseMove]) -> tuple[str, ...]:
    words = [
        f"{move.path} ({move.kind}, {format_bytes(move.n_bytes)} on {move.device})"
        + (f": {_word_reason(move.reason)}" if move.reason else "")
        for move in moves
    ]
    return bound_items(words, str, SOME)


def report_release(report: ReleaseReport) -> Report:
    """Report what a release did: the totals beside the plan, each step, what remains and why."""
    plan, is_whole = report.plan, report.stopped is None
    freed = _drop_noise(report.allocated_freed_bytes, plan.frees_bytes)
    given = [cache for step in report.steps for cache in step.result.given]
    state = Run(f"done, {_word_freed(freed, given, plan)} freed")
    state = state if is_whole else Run("stopped", "bad")
    blocks = _begin("Release", plan.request.names, state, report.stopped)
    planned = plan.frees_bytes
    for reading in sort_devices(report.after):
        if n_bytes := planned.on(reading.device):
            amount = format_bytes(n_bytes, is_at_least=planned.is_at_least)
            blocks.append(say(f"{reading.device}: planned {amount}. {word_reading(reading)}"))
    blocks.extend(say(_word_given(*cache)) for cache in given)
    if emptied := _word_emptied(report.steps):
        blocks.append(say(f"empty_cache() gave back {emptied}."))
    taken = [_describe_step(step) for step in report.steps if step.status != "skipped"]
    details = [Steps(taken)] if taken else []
    # What failed is seen at once.
    blocks.extend([Fold((Run("Details"),), details)] if is_whole and details else details)
    blocks.extend(warn(*describe_stays(plan.stays, is_done=True)))
    if not plan.caches and (plan.cut is None or not any(n_bytes > 0 for n_bytes in freed.values())):
        blocks.extend(warn(*_describe_empty(plan)))
    blocks.extend(warn(*map(word_remnant, report.remains)))
    if is_whole:
        blocks.extend(describe_joint(plan.joint, done=plan.request.names))
        if plan.request.exceptions:
            blocks.append(Note("The last exception is dropped: %debug has nothing to look at."))
        if report.is_interrupted:
            blocks.append(Note("Interrupted: what still holds the rest may not have been found."))
    return Report(blocks)


def _word_freed(
    freed: Mapping[str, int], given: Sequence[tuple[str, str, int | None]], plan: ReleasePlan
) -> str:
    """Return the bytes that were freed; those of other libraries where PyTorch freed none."""
    given_bytes = sum(n_bytes or 0 for *_, n_bytes in given)
    if given_bytes > 0 and not plan.frees_bytes.total_bytes:
        return f"{format_bytes(given_bytes)} outside PyTorch"
    return format_device_bytes(DeviceBytes(tuple(freed.items()))) or "nothing"


def _word_emptied(steps: Sequence[ReleaseStep]) -> str:
    """Return what GPUs were given back by emptying PyTorch's cache; ``""`` if that is little."""
    # The details have less than 1 MiB, too.
    given = [
        (device, n_bytes)
        for step in steps
        if step.kind is ReleaseStepKind.EMPTY_CACHE
        for device, n_bytes in step.reserved_freed_bytes
        if device != HOST and n_bytes >= 1024**2
    ]
    return format_device_bytes(DeviceBytes(tuple(given)))


def _word_given(library: str, device: str, n_bytes: int | None) -> str:
    if n_bytes is None:
        return f"{library} has emptied its cache on {device}; how much that freed is unknown."
    freed = format_bytes(max(n_bytes, 0))
    return f"{library} gave back {freed} on {device}, by the driver's figure for this process."


def report_restore_plan(plan: RestorePlan) -> Report:
    """Report what would be brought back from the CPU; a refusal comes first."""
    blocks = _begin("Restore", plan.names, _name_state(plan), plan.refusal)
    if plan.moves:
        blocks.append(Steps([Step("Move back", details=_list_moves(plan.moves))]))
    if needs := format_device_bytes(plan.needs_bytes):
        blocks.append(say(f"Needs {needs}."))
    blocks.extend(warn(*_describe_left_on_cpu(plan.stays)))
    return Report(blocks)


def report_restore(report: RestoreReport) -> Report:
    """Report what was brought back, with what each device held before and holds now."""
    plan = report.plan
    moved = describe_result(ReleaseStepKind.MOVE, report.result)
    state = Run("stopped", "bad") if report.stopped else Run(f"done, {moved} brought back")
    blocks = _begin("Restore", plan.names, state, report.stopped)
    if report.stopped is None:
        blocks.append(Steps([Step("Move back", details=_list_moves(plan.moves))]))
        before = {reading.device: reading.allocated_bytes for reading in report.before}
        for reading in sort_devices(report.after):
            now = format_bytes(reading.allocated_bytes)
            was = format_bytes(before.get(reading.device))
            blocks.append(say(f"{reading.device}: {now} allocated, {was} before."))
    blocks.extend(warn(*_describe_left_on_cpu(plan.stays), *map(word_remnant, report.remains)))
    return Report(blocks)


def _describe_left_on_cpu(stays: Sequence[ReleaseStay]) -> list[str]:
    return [
        f"{format_bytes(stay.held_bytes.total_bytes)} of {stay.name} stays on the CPU: "
        f"{_word_reason(stay.reason)}"
        for stay in stays
    ]


def describe_references(references: Iterable[str]) -> str:
    """Return the references that a person has seen, ``"Out[3], Out[5]"``, else all; or ``""``.

    One displayed value is held under up to a dozen names, most of them IPython's own affair.
    """
    paths = list(dict.fromkeys(references))
    known = [path for path in paths if path.startswith(("Out[", "sys."))] or paths
    return ", ".join(bound_items(known, str, SOME))


def describe_result(kind: ReleaseStepKind, result: StepResult) -> str:
    """Return what a step did, in a few words: ``2 tensors, 479.00 MiB``."""
    n_tensors = count(result.n_tensors, "tensor")
    words = {
        ReleaseStepKind.MOVE: f"{n_tensors}, {format_bytes(result.n_bytes)}",
        ReleaseStepKind.UNBIND: ", ".join(bound_items(result.names, str)),
        ReleaseStepKind.DROP_REFERENCES: describe_references(result.references),
        ReleaseStepKind.FREE_WORKSPACES: result.refusal or "freed",
        ReleaseStepKind.COLLECT: count(result.n_objects, "object"),
        ReleaseStepKind.EMPTY_CACHE: "",
        ReleaseStepKind.EMPTY_LIBRARIES: join_words([name for name, *_ in result.given]),
    }
    if kind is ReleaseStepKind.COLLECT and result.n_tensors:
        return f"{words[kind]}; {n_tensors} freed from cycles"
    return words[kind]


def _describe_step(step: ReleaseStep) -> Step:
    """Return what a step did, with the change of each device's memory."""
    words = describe_result(step.kind, step.result)
    if step.status != "done":
        words = f"failed: {step.result.error}" if step.status == "failed" else step.status
    allocated = _drop_noise(step.allocated_freed_bytes)
    reserved = _drop_noise(step.reserved_freed_bytes)
    details = []
    for device in sorted(allocated.keys() | reserved.keys(), key=rank_device):
        counters = (("allocated", allocated), (name_reserved(device), reserved))
        changes = [(freed[device], name) for name, freed in counters if device in freed]
        if any(n_bytes for n_bytes, _ in changes):
            words_of = [f"{format_change(-n_bytes)} {name}" for n_bytes, name in changes]
            details.append(f"{device}: {', '.join(words_of)}")
    tone: Tone = "bad" if step.status == "failed" else "plain"
    return Step(step.kind.value, words, bound_items(details, str), tone)


def _drop_noise(
    freed: Iterable[tuple[str, int]], planned: DeviceBytes = _NOTHING
) -> dict[str, int]:
    """Return what was freed on each device, small changes being 0 where nothing was planned."""
    # Smaller changes are due to the measuring itself, unless some were planned.
    return {
        device: 0 if abs(n_bytes) < 1024 and not planned.on(device) else n_bytes
        for device, n_bytes in freed
    }


# -- Why memory is still held ----------------------------------------------------------------------


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
