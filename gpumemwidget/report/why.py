"""Why some memory is still there: each path that holds it, and how to cut it."""

from __future__ import annotations

from collections.abc import Iterable

from gpumemwidget.records import Explanation, Holder
from gpumemwidget.report.document import Block, Document, Heading, Note, Run, Step, Steps, Tone
from gpumemwidget.report.html import render_html
from gpumemwidget.report.output import Report
from gpumemwidget.report.text import render_text
from gpumemwidget.report.words import join_words
from gpumemwidget.units import format_bytes

__all__ = ["report_explanation"]

#: What ``Explanation.name`` is where it was asked what no name reaches.
_NO_NAME = "no name"

#: What a way to cut it begins or ends with where it is to be typed; others are sentences.
_COMMANDS = ("%", "del ", "import ")
_COMMANDS_END = (" = None", ".close()", ".cache_clear()", ".set(None)")


def report_explanation(explanation: Explanation) -> Report:
    """What it is, what it holds, who else holds that, and what a person does about each."""
    is_unnamed = explanation.name == _NO_NAME
    blocks: list[Block] = [Heading(_list_title(explanation, is_unnamed=is_unnamed))]
    holders = [each for each in explanation.holders if each.path != explanation.name]
    amounts = _tell_amounts(explanation, is_unnamed=is_unnamed, is_alone=not holders)
    blocks.append(Note(amounts, tone="plain"))
    if holders:
        blocks.append(Steps(tuple(_describe_holder(holder) for holder in holders)))
        if explanation.n_more:
            paths = "path" if explanation.n_more == 1 else "paths"
            blocks.append(Note(f"and {explanation.n_more} more {paths}"))
    elif explanation.held_bytes:
        blocks.append(Note(_tell_alone(explanation, is_unnamed=is_unnamed), tone="plain"))
    own = next((each for each in explanation.holders if each.path == explanation.name), None)
    if own is not None and own.cut:
        words = "To cut this one" if holders else "To release it"
        blocks.append(Note(f"{words}: {own.cut}", tone="plain"))
    if not explanation.is_complete:
        blocks.append(
            Note(
                "There was too much to look at all of it: it holds at least this, and there may "
                "be more that holds it.",
                tone="warn",
            )
        )
    document = Document(tuple(blocks))
    return Report(text=render_text(document), html=render_html(document))


def _list_title(explanation: Explanation, *, is_unnamed: bool) -> tuple[Run, ...]:
    if is_unnamed:
        return (Run("What no name reaches", "strong"),)
    kind = explanation.kind
    if explanation.type_name and explanation.type_name != kind:
        kind = f"{kind}, {explanation.type_name}" if kind else explanation.type_name
    return (Run(explanation.name, "code"), Run(kind, "muted"))


def _tell_amounts(explanation: Explanation, *, is_unnamed: bool, is_alone: bool) -> str:
    at_least = "" if explanation.is_complete else "at least "
    held = _join_amounts(explanation.held_bytes)
    if is_unnamed:
        return f"It is {at_least}{held}." if held else "Nothing: a name leads to all there is."
    if not held:
        return "It holds no tensor memory."
    if is_alone and not explanation.frees_bytes:
        # A part of something: what goes with it was not asked.
        return f"It holds {at_least}{held}."
    frees = _join_amounts(explanation.frees_bytes)
    if explanation.frees_bytes == explanation.held_bytes:
        frees = "all of it"
    return f"It holds {at_least}{held}; released alone it frees {frees or 'nothing'}."


def _tell_alone(explanation: Explanation, *, is_unnamed: bool) -> str:
    if is_unnamed:
        return "Nothing was found that holds it."
    if not explanation.is_complete:
        return "Nothing else was found that holds it."
    return "Nothing else holds it."


def _describe_holder(holder: Holder) -> Step:
    details: tuple[tuple[Run, ...], ...] = ()
    if holder.cut:
        is_code = holder.cut.startswith(_COMMANDS) or holder.cut.endswith(_COMMANDS_END)
        details = ((Run("to cut it: "), Run(holder.cut, "code" if is_code else "plain")),)
    amounts = _join_amounts(holder.held_bytes)
    tone: Tone = "plain" if holder.root == "nowhere" else "code"
    return Step(holder.path, f"holds {amounts}" if amounts else "", details, tone)


def _join_amounts(amounts: Iterable[tuple[str, int]]) -> str:
    return join_words([f"{format_bytes(n_bytes)} on {device}" for device, n_bytes in amounts])
