"""The card of an out-of-memory error: the request, who has the memory, and the remedies.

The card stands below a person's own traceback, so it is short: one line on what happened, one bar,
the biggest owners, and what to do about it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpumemwidget.model.devices import HOST
from gpumemwidget.model.ooms import OomCard, OomEvent, Remedy, RemedyKind
from gpumemwidget.model.ownership import Owned
from gpumemwidget.model.releases import ReleaseReport
from gpumemwidget.report.charts.device import DeviceBar
from gpumemwidget.report.prediction import describe_remedy
from gpumemwidget.report.release import describe_stays, spell_release, word_remnant, word_stop
from gpumemwidget.report.render.blocks import (
    FEW,
    SOME,
    Block,
    Cell,
    Column,
    Heading,
    Note,
    Option,
    Options,
    Run,
    Table,
    bound_items,
    bytes_cell,
    make_group,
    make_heading,
    number_columns,
    share_cell,
)
from gpumemwidget.report.render.html import CARD_CLASS
from gpumemwidget.report.render.markup import clean
from gpumemwidget.report.render.output import Report
from gpumemwidget.report.render.text import LONG_WIDTH, SHORT_WIDTH, cut, cut_middle
from gpumemwidget.report.render.wording import (
    count,
    join_words,
    name_device,
    name_library,
    name_memory,
    name_one_kind,
    name_process,
    name_reserved,
    word_reading,
)
from gpumemwidget.units import format_bytes

#: For remedies that name nothing: what the first line calls it, what to do, and the line to type
#: (``""`` if there is none, or if it depends on the error).
_REMEDIES: dict[RemedyKind, tuple[str, str, str]] = {
    RemedyKind.LAST_EXCEPTION: (
        "Releasing the last exception",
        "Release the last exception, with all that its frames hold",
        "%memrelease --exceptions",
    ),
    RemedyKind.OUT: (
        "Dropping the displayed values",
        "Drop the displayed values (Out)",
        "%memrelease --out",
    ),
    RemedyKind.GRADIENTS: (
        "Setting the gradients to None",
        "Set the gradients to None before this: optimizer.zero_grad()",
        "",
    ),
    RemedyKind.CACHED_BLOCKS: ("Emptying PyTorch's cache", "Empty PyTorch's cache", ""),
    RemedyKind.LIBRARY_CACHES: (
        "Emptying the caches of other libraries",
        "Empty the caches of other libraries, such as CuPy",
        "%memrelease --libraries",
    ),
    RemedyKind.EXPANDABLE_SEGMENTS: (
        "Letting segments grow",
        "Let segments grow, so that free memory does not lie in pieces: restart the kernel and "
        "set this before torch is imported",
        "%env PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    ),
    RemedyKind.LIMIT: ("A higher limit", "Take away or raise the limit of this process", ""),
    RemedyKind.OTHER_PROCESSES: (
        "Ending other processes",
        "End other processes that take memory",
        "",
    ),
    RemedyKind.SMALLER_BATCH: (
        "A smaller batch",
        "Halve the batch: half of what activations took",
        "",
    ),
    RemedyKind.NO_GRAD: (
        "Using torch.no_grad()",
        "Use torch.no_grad(): this cell never calls backward()",
        "",
    ),
    RemedyKind.CHECKPOINTING: (
        "Checkpointing",
        "Recompute activations in backward (torch.utils.checkpoint) instead of keeping them",
        "",
    ),
}


def report_oom(card: OomCard, *, name: str = "") -> Report:
    """Report why a cell ran out of memory, with the remedies, the largest first."""
    event = card.event
    blocks: list[Block] = [
        make_heading(judge_shortage(event, card.ways)),
        Heading(tuple(map(Run, _describe_request(event)))),
    ]
    if place := _describe_place(card):
        blocks.append(Heading(place))
    if card.breakdown is None:
        blocks.append(Note("How full the device was is unknown."))
    else:
        title = f"{name_memory(event.device)}, as of the error"
        blocks.append(DeviceBar(card.breakdown, title))
        if event.is_fragmented:
            largest = format_bytes(event.largest_free_block_bytes)
            words = f"Reserved memory is fragmented: its largest free block is {largest}."
            blocks.append(Note(words))
        if asleep_bytes := card.breakdown.asleep_bytes:
            words = f"At least {format_bytes(asleep_bytes)} of the reserved memory is asleep"
            blocks.append(Note(f"{words}, as with vLLM: releasing it frees nothing."))
    if card.owners:
        blocks.append(_tabulate_owners(card))
    ways = [_describe_way(way, event) for way in card.listed_ways]
    if name:  # In a notebook, where the session can be saved.
        words = "Save the session as one page, to show or to attach"
        ways.append(Option("", words, "%memsave oom.html"))
    if ways:
        blocks.append(Options("What you can do", ways))
    if card.predicted:
        options = list(map(describe_remedy, card.predicted))
        blocks.append(Options("Ways to need less, each predicted alone", options))
    if card.n_caught:
        errors = count(card.n_caught, "out-of-memory error")
        blocks.append(Note(f"The cell's own code caught {errors} before this one."))
    blocks.extend(Note(note if note.endswith(".") else f"{note}.") for note in card.notes)
    return Report(blocks, (CARD_CLASS, name) if name else (CARD_CLASS,))


def _describe_request(event: OomEvent) -> Iterator[str]:
    yield f"Out of memory on {name_device(event.device)}"
    if event.requested_bytes is not None:
        yield f"{format_bytes(event.requested_bytes)} requested"
    else:
        yield "the error does not say how much was requested"
    room = event.room_bytes
    if _is_hopeless(event):
        # How full the device was does not matter.
        yield f"{format_bytes(event.device_total_bytes)} in total"
    elif room != event.device_free_bytes:
        yield f"{format_bytes(room)} left below the limit of {format_bytes(event.limit_bytes)}"
    elif room is not None:
        yield f"{format_bytes(room)} {'available' if event.device == HOST else 'free'}"


def _is_hopeless(event: OomEvent) -> bool:
    asked, total = event.requested_bytes, event.device_total_bytes
    return asked is not None and total is not None and 0 < total < asked


def judge_shortage(event: OomEvent, ways: Sequence[Remedy]) -> str:
    """Return the card's first line: how much was missing, and what would be enough."""
    if _is_hopeless(event):
        whole = "all memory of the host" if event.device == HOST else "the whole device"
        return f"This request is larger than {whole}: ask for less at a time."
    missing = find_missing(event)
    if missing is None:
        return f"Not enough memory on {name_device(event.device)} for this request."
    short = f"You are about {format_bytes(missing)} short."
    for words, degrees in (("would", ("exact", "at least")), ("may", ("about", "at most"))):
        for way in ways:
            is_enough = way.gives_bytes is not None and way.gives_bytes >= missing
            if is_enough and way.gives_is in degrees:
                cost = ", but lose training state" if way.loses_training_state else ""
                act = f"Releasing {clean(join_words(way.names, FEW))}"
                act = act if way.kind is RemedyKind.NAMES else _REMEDIES[way.kind][0]
                return f"{short} {act} {words} be enough{cost}."
    return f"{short} Nothing listed here frees enough by itself."


def find_missing(event: OomEvent) -> int | None:
    """Return how many bytes the request was short of; ``None`` if that is unknown."""
    room, asked = event.room_bytes, event.requested_bytes
    if asked is None or room is None or not 0 <= room < asked:
        return None
    return asked - room


def _describe_place(card: OomCard) -> tuple[Run, ...]:
    runs = []
    if card.place is not None:
        runs.append(Run(card.place, "strong"))
    if text := cut(clean(card.text).strip(), LONG_WIDTH):
        runs.append(Run(text, "code"))
    if card.function:
        runs.append(Run(f"in {cut_middle(clean(card.function), SHORT_WIDTH)}", "muted"))
    return tuple(runs)


def _tabulate_owners(card: OomCard) -> Table:
    owners = sorted(card.owners, key=lambda owned: -owned.n_bytes)[:SOME]
    whole = card.event.allocated_bytes
    named = sum(owned.n_bytes for owned in owners)
    if whole is None or whole < named:
        whole = max(card.owned_bytes or 0, named)
    # Owners with less than a thousandth get no row, unless there are no others.
    owners = [owned for owned in owners if 1000 * owned.n_bytes >= whole] or owners
    parts = [(*_name_owner(owned), owned.n_bytes) for owned in owners]
    if rest := whole - sum(owned.n_bytes for owned in owners):
        parts.append((Cell("everything else", tone="muted"), "", rest))
    rows = [(name, kind, bytes_cell(n), share_cell(n, whole)) for name, kind, n in parts]
    # The figure of the bar above: the owners are of a moment later, and may be a little more.
    amount = format_bytes(card.event.allocated_bytes or whole)
    caption = f"Biggest owners of the {amount} allocated, as of the error"
    columns = (
        Column("owner", "code", fold=36),
        Column("kind", "words"),
        *number_columns("bytes", "share"),
    )
    return Table(caption, columns, [make_group(*rows)])


def _name_owner(owned: Owned) -> tuple[Cell, str]:
    path, kind = (
        cut_middle(clean(owned.owner), SHORT_WIDTH),
        name_one_kind(owned.kind, owned.device),
    )
    if owned.root != "nowhere":
        return Cell(path), kind
    # Without a path that could be typed, the line that allocated the memory says most.
    place = f", from {owned.allocated_at}" if owned.allocated_at else ""
    return Cell(f"{path}{place}", tone="muted"), kind


def _describe_way(way: Remedy, event: OomEvent) -> Option:
    text, command = word_remedy(way, event)
    loss = " (loses training state)" if way.loses_training_state else ""
    return Option(_word_amount(way), text + loss, command)


def _word_amount(way: Remedy) -> str:
    if way.gives_bytes is None:
        return ""
    kind = "" if way.gives_is == "exact" else f"{way.gives_is} "
    return f"{kind}{format_bytes(way.gives_bytes)}"


def word_remedy(way: Remedy, event: OomEvent) -> tuple[str, str]:
    """Return what to do, and the line to type for it (``""`` if it is no single line)."""
    if way.kind is RemedyKind.NAMES:
        together = " together" if len(way.names) > 1 else ""
        words = f"Release {join_words(way.names, FEW)}{together}, not mentioned in this cell"
        return words, spell_release(way.names)
    _, text, command = _REMEDIES[way.kind]
    if way.kind is RemedyKind.CACHED_BLOCKS:
        command = f"{name_library(event.device)}.empty_cache()"
    elif way.kind is RemedyKind.LIMIT:
        command = f"%memlimit off --device {event.device}"
    elif way.kind is RemedyKind.OTHER_PROCESSES:
        command = "!ps aux --sort=-rss | head" if event.device == HOST else "!nvidia-smi"
        others = [use for use in event.state.processes or () if use.relation != "own"]
        if others:
            others.sort(key=lambda use: -(use.n_bytes or 0))
            names = bound_items(list(map(name_process, others)), str, FEW)
            text = f"End what else is on the device: {', '.join(names)}"
    return text, command


# -- After a remedy was used -----------------------------------------------------------------------


def describe_released(way: Remedy, report: ReleaseReport, device: str) -> tuple[str, ...]:
    """Return what a release on the card did in one line, then sentences on what remains."""
    stays = describe_stays(report.plan.stays, is_done=True)
    remains = (*stays, *map(word_remnant, report.remains))
    if report.stopped is not None:
        return (word_stop(report.stopped), *remains)
    promised = _word_amount(way)
    if not promised:
        plan = report.plan.frees_bytes
        promised = format_bytes(plan.on(device), is_at_least=plan.is_at_least)
    freed = dict(report.allocated_freed_bytes).get(device)
    after = next((reading for reading in report.after if reading.device == device), None)
    line = f"Freed {format_bytes(freed)} on {device} (predicted: {promised})."
    if after is not None and after.allocated_bytes is not None:
        line += f" {word_reading(after)}"
    return (line, *remains)


def judge_now(event: OomEvent) -> tuple[bool, str]:
    """Return whether there is enough room now that something was released, and a sentence on it."""
    room, asked = event.room_bytes, event.requested_bytes
    if room is None or asked is None:
        return False, "How much is available now is unknown."
    # The cache is free for the next request.
    room += (event.unallocated_bytes or 0) if event.device != HOST else 0
    if room < asked:
        return False, f"You are still about {format_bytes(asked - room)} short."
    return True, (
        f"There is room now: the cell requested {format_bytes(asked)}, and about "
        f"{format_bytes(room)} is available."
    )


def describe_cached(before: OomEvent, now: OomEvent) -> str:
    """Return what emptying the cache did to the reserved memory."""
    if before.reserved_bytes is None or now.reserved_bytes is None:
        return f"Emptied the cache of {now.device}; how much that gave back can't be read."
    given = before.reserved_bytes - now.reserved_bytes
    return (
        f"Gave back {format_bytes(given)} on {now.device}. "
        f"Now {format_bytes(now.reserved_bytes)} {name_reserved(now.device)}."
    )
