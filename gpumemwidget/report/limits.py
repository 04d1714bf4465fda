"""What PyTorch may reserve of each GPU, and what a limit means for what is reserved already."""

from __future__ import annotations

from collections.abc import Sequence

from gpumemwidget.devices import Limit
from gpumemwidget.records import Reading
from gpumemwidget.report.bridgewords import name_library
from gpumemwidget.report.document import (
    Block,
    Cell,
    Column,
    Document,
    Note,
    Option,
    Options,
    Table,
)
from gpumemwidget.report.html import render_html
from gpumemwidget.report.output import Report
from gpumemwidget.report.pieces import bytes_cell, explain_marks, peak_cell
from gpumemwidget.report.text import render_text
from gpumemwidget.report.words import join_words, rank_device
from gpumemwidget.units import format_bytes

__all__ = ["report_limits", "report_reset"]

_COLUMNS = (
    Column("device", "name"),
    Column("limit"),
    Column("of"),
    Column("reserved"),
    Column("left"),
)
_RESET_COLUMNS = (
    Column("device", "name"),
    Column("allocated, peak was"),
    Column("reserved, peak was"),
)


def report_limits(limits: Sequence[Limit], notes: Sequence[str] = ()) -> Report:
    """The limits as a table; below it what one means that is under what is reserved.

    Args:
        limits: of each GPU, those without one too.
        notes: sentences on what could not be set or read.
    """
    ordered = sorted(limits, key=lambda limit: rank_device(limit.device))
    blocks: list[Block] = []
    if ordered:
        blocks.append(
            Table(
                caption="What PyTorch may reserve in this process",
                columns=_COLUMNS,
                groups=tuple((_list_row(limit),) for limit in ordered),
            )
        )
    else:
        blocks.append(Note("There is no GPU that PyTorch could limit."))
    for limit in ordered:
        blocks.extend(_explain(limit))
    blocks.extend(Note(note, tone="warn") for note in notes)
    document = Document(tuple(blocks))
    return Report(text=render_text(document), html=render_html(document))


def report_reset(devices: Sequence[str], before: Sequence[Reading]) -> Report:
    """On which devices the peaks begin anew, and what they were.

    Args:
        devices: where it was done.
        before: readings with the peaks that the user's own calls told.
    """
    was = {reading.device: reading for reading in before}
    blocks: list[Block] = []
    if devices:
        rows = []
        for device in sorted(devices, key=rank_device):
            reading = was.get(device) or Reading(device, None, None)
            rows.append(
                (
                    Cell(device),
                    peak_cell(reading.allocated_peak_bytes, reading.peak_is),
                    peak_cell(reading.reserved_peak_bytes, reading.peak_is),
                )
            )
        blocks.append(
            Table(
                caption="PyTorch's peaks, which begin anew",
                columns=_RESET_COLUMNS,
                groups=tuple((row,) for row in rows),
                caption_is_seen=True,
            )
        )
        blocks.extend(explain_marks(blocks))
        # It is the one call that torch.mps leaves to torch.accelerator.
        names = [name_library(each).replace("torch.mps", "torch.accelerator") for each in devices]
        calls = join_words([f"{each}.reset_peak_memory_stats()" for each in dict.fromkeys(names)])
        blocks.append(Note(f"As {calls}; the cells' own peaks stay."))
    else:
        blocks.append(Note("No GPU is in use yet, so there are no peaks to begin anew."))
    document = Document(tuple(blocks))
    return Report(text=render_text(document), html=render_html(document))


def _list_row(limit: Limit) -> tuple[Cell, ...]:
    name = Cell(limit.device)
    amount = bytes_cell(limit.limit_bytes)
    if limit.is_waiting:
        share = "" if limit.share is None else f"{100 * limit.share:.10g} %"
        return (
            name,
            Cell(share) if share else amount,
            Cell("not in use yet: set as soon as it is", tone="muted", spans_rest=True),
        )
    is_told = limit.total_bytes is not None or limit.reserved_bytes is None
    if limit.limit_bytes is None and is_told:
        amount = Cell("none", tone="muted")
    if limit.reserved_bytes is None:
        return (
            name,
            amount,
            *((bytes_cell(limit.total_bytes),) if limit.total_bytes is not None else ()),
            Cell("not in use yet", tone="muted", spans_rest=True),
        )
    top = limit.total_bytes if limit.limit_bytes is None else limit.limit_bytes
    left = None if top is None else max(top - limit.reserved_bytes, 0)
    is_tight = limit.limit_bytes is not None and limit.reserved_bytes > limit.limit_bytes
    return (
        name,
        amount,
        bytes_cell(limit.total_bytes),
        bytes_cell(limit.reserved_bytes),
        Cell(format_bytes(left), tone="bad") if is_tight else bytes_cell(left),
    )


def _explain(limit: Limit) -> list[Block]:
    """What happens where more is reserved than the limit leaves; nothing of any other."""
    cap, reserved = limit.limit_bytes, limit.reserved_bytes
    if limit.is_waiting or cap is None or reserved is None or reserved <= cap:
        return []
    sentences = [
        f"{limit.device} has {format_bytes(reserved)} reserved already, "
        f"{format_bytes(reserved - cap)} more than its limit: what is allocated stays, and "
        f"{_say_cache(limit)}"
    ]
    released = limit.releasable_bytes
    options = []
    if released is None:
        sentences.append("any other request is an out-of-memory error.")
    elif reserved - released > cap:
        sentences.append(
            "any other request is an out-of-memory error until at least "
            f"{format_bytes(reserved - released - cap)} of tensors are released: "
            f"{_say_given(released)}"
        )
    else:
        sentences.append(
            f"for anything else PyTorch first gives back the {format_bytes(released)} that it "
            f"caches whole, and beyond the {format_bytes(cap - reserved + released)} that there is "
            "room for then a request is an out-of-memory error."
        )
    if released:
        options.append(
            Option(
                format_bytes(released),
                "give back now what is cached and whole",
                "torch.cuda.empty_cache()",
            )
        )
    options.append(Option("", "see who holds the rest", f"%memvars --device {limit.device}"))
    options.append(Option("", "take the limit away", f"%memlimit off --device {limit.device}"))
    return [
        Note(" ".join(sentences), tone="warn"),
        Options(f"What can be done on {limit.device}", tuple(options)),
    ]


def _say_cache(limit: Limit) -> str:
    largest = limit.largest_free_block_bytes
    if largest is None:
        return "what fits into the cache can still be had;"
    if largest == 0:
        return "nothing is cached that could be used again;"
    block = format_bytes(largest)
    return f"what fits into the cache (its largest block: {block}) can still be had;"


def _say_given(released: int) -> str:
    if released == 0:
        return "empty_cache() has nothing to give back."
    return f"the {format_bytes(released)} that empty_cache() gives back are not enough."
