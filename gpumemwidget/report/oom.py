"""The card of an OOM: what was asked for and where, who has the memory, and the ways out.

It stands below a person's own traceback, so it is short: one line on what happened, one bar, the
biggest owners, and what to do about it.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpumemwidget.records import HOST, Owned, ReleaseReport
from gpumemwidget.report.division import divide_device
from gpumemwidget.report.document import (
    Block,
    Cell,
    Column,
    Document,
    Heading,
    Note,
    Option,
    Options,
    Run,
    Table,
)
from gpumemwidget.report.escape import clean
from gpumemwidget.report.html import render_html
from gpumemwidget.report.output import Report
from gpumemwidget.report.pieces import bytes_cell, share_cell
from gpumemwidget.report.text import cut, cut_middle, render_text
from gpumemwidget.report.theme import CARD_CLASS
from gpumemwidget.report.words import name_counters
from gpumemwidget.traces import OomCard, OomEvent, WayOut
from gpumemwidget.units import format_bytes

__all__ = ["describe_cached", "describe_released", "report_oom", "sort_ways"]

#: The account tells them all.
_MOST_OWNERS = 10
#: One part in so many is the least that has a row.
_LEAST_SHARE = 1000
#: A longer path loses its middle: the card is read at a glance.
_WIDEST_PATH = 72
_WIDEST_LINE = 160

_COLUMNS = (
    Column("owner", "code", fold=36),
    Column("kind", "words"),
    Column("bytes"),
    Column("share"),
)


def report_oom(card: OomCard, *, name: str = "") -> Report:
    """Why a cell ran out of memory, and the ways out, biggest first.

    Args:
        card: what is known of it.
        name: a class of its own for the HTML, by which a page finds this card among others.
    """
    event = card.event
    blocks: list[Block] = [Heading(_describe_request(event))]
    place = _describe_place(card)
    if place:
        blocks.append(Heading(place))
    bar, trouble = divide_device(event, card.kinds)
    if bar is not None:
        blocks.append(bar)
    else:
        blocks.append(Note(_describe_known(event)))
    if card.owners:
        blocks.append(_tabulate_owners(card))
    if card.ways:
        ways = [_describe_way(way) for way in sort_ways(card.ways)]
        blocks.append(Options(_name_ways(event), tuple(ways)))
    if trouble:
        blocks.append(Note(trouble))
    if card.n_caught:
        blocks.append(Note(_describe_caught(card.n_caught)))
    blocks.extend(Note(note if note.endswith(".") else f"{note}.") for note in card.notes)
    classes = (CARD_CLASS, name) if name else (CARD_CLASS,)
    document = Document(tuple(blocks), classes)
    return Report(text=render_text(document), html=render_html(document))


def sort_ways(ways: Sequence[WayOut]) -> list[WayOut]:
    """The ways that give most first; those of which that is not known last, in their order."""
    return sorted(ways, key=lambda way: (way.gives_bytes is None, -(way.gives_bytes or 0)))


def _describe_request(event: OomEvent) -> tuple[Run, ...]:
    where = "the host" if event.device == HOST else event.device
    runs = [Run(f"Out of memory on {where}", "strong")]
    if event.requested_bytes is not None:
        runs.append(Run(f"{format_bytes(event.requested_bytes)} asked for", "strong"))
    else:
        runs.append(Run("the error does not say how much was asked for"))
    if _is_hopeless(event):
        # Then it does not matter how full it was.
        runs.append(Run(f"there are {format_bytes(event.device_total_bytes)} in all"))
        return tuple(runs)
    room = event.room_bytes
    if room != event.device_free_bytes:
        limit = format_bytes(event.limit_bytes)
        what = " of addresses" if event.device == HOST else ""
        runs.append(Run(f"{format_bytes(room)}{what} left below the limit of {limit}"))
    elif room is not None:
        words = "available" if event.device == HOST else "free"
        runs.append(Run(f"{format_bytes(room)} {words}"))
    return tuple(runs)


def _is_hopeless(event: OomEvent) -> bool:
    """Whether more was asked for than the device has."""
    asked, total = event.requested_bytes, event.device_total_bytes
    return asked is not None and total is not None and 0 < total < asked


def _name_ways(event: OomEvent) -> str:
    """What stands above the ways out: how much would do."""
    if _is_hopeless(event):
        return "Ways out: none gives that much"
    room, asked = event.room_bytes, event.requested_bytes
    if asked is None or room is None or not 0 <= room < asked:
        return "Ways out"
    return f"Ways out: about {format_bytes(asked - room)} more would do"


def _describe_place(card: OomCard) -> tuple[Run, ...]:
    runs = []
    text = cut(clean(card.text).strip(), _WIDEST_LINE)
    if card.place is not None:
        runs.append(Run(card.place, "strong"))
    if text:
        runs.append(Run(text, "code"))
    if card.function:
        runs.append(Run(f"in {cut_middle(clean(card.function), _WIDEST_PATH)}", "muted"))
    return tuple(runs)


def _describe_known(event: OomEvent) -> str:
    """What stood, where there is no whole that it could be a part of."""
    names = name_counters(event.device)
    known = [
        f"{format_bytes(n_bytes)} {name}"
        for name, n_bytes in (
            (names.allocated, event.allocated_bytes),
            (names.reserved, event.reserved_bytes),
        )
        if n_bytes is not None
    ]
    if not known:
        return "How full it was is not known."
    return f"{', '.join(known)}; how big the device is, is not known."


def _tabulate_owners(card: OomCard) -> Table:
    owners = sorted(card.owners, key=lambda owned: -owned.n_bytes)[:_MOST_OWNERS]
    whole = card.event.allocated_bytes
    named = sum(owned.n_bytes for owned in owners)
    if whole is None or whole < named:
        whole = max(card.owned_bytes or 0, named)
    # A row of next to nothing helps nobody, unless there is nothing else.
    owners = [each for each in owners if _LEAST_SHARE * each.n_bytes >= whole] or owners
    shown = sum(owned.n_bytes for owned in owners)
    rows = [
        (
            _name_owner(owned),
            Cell(owned.kind),
            bytes_cell(owned.n_bytes),
            share_cell(owned.n_bytes, whole),
        )
        for owned in owners
    ]
    if whole > shown:
        rest = whole - shown
        rows.append(
            (
                Cell("everything else", tone="muted"),
                Cell(""),
                bytes_cell(rest),
                share_cell(rest, whole),
            )
        )
    return Table(
        caption=f"Biggest owners of the {format_bytes(whole)} allocated",
        columns=_COLUMNS,
        groups=(tuple(rows),),
        last_is_shared=False,
        caption_is_seen=True,
    )


def _name_owner(owned: Owned) -> Cell:
    path = cut_middle(clean(owned.owner), _WIDEST_PATH)
    if owned.root != "nowhere":
        return Cell(path)
    # No path to be typed; where it was allocated says most then.
    place = f", from {owned.allocated_at}" if owned.allocated_at else ""
    return Cell(f"{path}{place}", tone="muted")


def _describe_way(way: WayOut) -> Option:
    text = way.text[:1].upper() + way.text[1:]
    if way.gives_bytes is None:
        return Option("", text, way.command or "")
    kind = "" if way.gives_is == "exact" else f"{way.gives_is} "
    return Option(f"{kind}{format_bytes(way.gives_bytes)}", text, way.command or "")


def _describe_caught(number: int) -> str:
    times = "once" if number == 1 else f"{number} times"
    return f"The cell had run out of memory {times} before; its own code caught that."


# -- What a way out came to ------------------------------------------------------------------------


def describe_released(
    way: WayOut, report: ReleaseReport, device: str
) -> tuple[str, tuple[str, ...]]:
    """What a release on the card did: one line, and sentences on what was not as promised.

    Args:
        way: as it stands on the card.
        report: of the release.
        device: the card's.
    """
    if report.stopped is not None:
        return f"Stopped: {report.stopped}", report.remains
    promised = _describe_way(way).amount
    if not promised:
        promised = format_bytes(dict(report.plan.frees_bytes).get(device, 0))
    freed = dict(report.allocated_freed_bytes).get(device)
    names = name_counters(device)
    after = next((each for each in report.after if each.device == device), None)
    line = f"Freed {format_bytes(freed)} on {device}, where {promised} were promised."
    if after is not None and after.allocated_bytes is not None:
        line += f" Now {format_bytes(after.allocated_bytes)} {names.allocated}"
        line += f", {format_bytes(after.reserved_bytes)} {names.reserved}."
    return line, report.remains


def describe_cached(device: str, before_bytes: int | None, after_bytes: int | None) -> str:
    """What giving back the cached blocks did to what is reserved."""
    name = name_counters(device).reserved
    if before_bytes is None or after_bytes is None:
        return f"Cached blocks were given back; what is {name} on {device} can't be read."
    return (
        f"Gave back {format_bytes(before_bytes - after_bytes)} on {device}. "
        f"Now {format_bytes(after_bytes)} {name}."
    )
