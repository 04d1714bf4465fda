"""Sentences on a check that has failed: how much more there was, and who holds it."""

from __future__ import annotations

from collections.abc import Sequence

from gpumemwidget.model.leaks import CheckedHolder, GrowthOverLimit, PeakOverLimit
from gpumemwidget.report.leaks import describe_leak, list_cuts, name_memory
from gpumemwidget.report.render.markup import clean
from gpumemwidget.report.render.text import cut_middle
from gpumemwidget.report.render.wording import count
from gpumemwidget.units import format_bytes

#: Maximum number of columns of a holder's path.
_MAX_PATH = 72


def describe_growth(growth: GrowthOverLimit) -> str:
    """Return the growth, the limit and the holders, a line each."""
    where = name_memory(growth.device)
    lines = [
        f"{where} grew by {format_bytes(growth.growth_bytes)}, and the limit is "
        f"{format_bytes(growth.limit_bytes)}."
    ]
    if growth.leak is not None:
        lines.append(describe_leak(growth.leak))
        # Advice that needs a magic is of no use in a test.
        lines += [f"{text}." for text, command in list_cuts(growth.leak) if not command]
        return "\n".join(lines)
    if growth.n_steps:
        each_bytes = growth.growth_bytes // growth.n_steps
        since = f" since step {growth.n_warmups}" if growth.n_warmups else ""
        steps = count(growth.n_steps, "step")
        lines.append(f"It grew {format_bytes(each_bytes)} a step{since}, for {steps}.")
        if sum(holder.n_bytes for holder in growth.holders) < growth.growth_bytes:
            lines.append(
                "No variable holds it at the end of the block: with the loop itself in the block, "
                "and not in a function that has returned, the holder is named."
            )
    return "\n".join([*lines, *_list_holders("Held there now", growth.holders)])


def describe_peak(peak: PeakOverLimit) -> str:
    """Return the peak, the limit and the holders, a line each."""
    begin = "the test would allocate" if peak.is_predicted else "the test allocated"
    end = " (predicted, as there is no GPU here)" if peak.is_predicted else ""
    holders = "In use at the peak" if peak.is_predicted else "Held there after the test"
    return "\n".join(
        [
            f"{begin} {format_bytes(peak.peak_bytes)} at once on {name_memory(peak.device)}, and "
            f"the limit is {format_bytes(peak.limit_bytes)}{end}.",
            *_list_holders(holders, peak.holders),
        ]
    )


def _list_holders(words: str, holders: Sequence[CheckedHolder]) -> list[str]:
    if not holders:
        return []
    told = (f"{format_bytes(each.n_bytes)} {_shorten(each.name)}" for each in holders)
    return [f"{words}: {', '.join(told)}."]


def _shorten(name: str) -> str:
    return cut_middle(clean(name), _MAX_PATH)
