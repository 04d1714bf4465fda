"""Who owns what is allocated: for each device lines that add up to the allocator's own figure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpumemwidget.errors import BadInputError
from gpumemwidget.records import (
    HOST,
    DeviceAccount,
    Holding,
    MemoryAccount,
)
from gpumemwidget.report.document import Block, Cell, Column, Document, Note, Table, Tone
from gpumemwidget.report.holdings import describe_shape
from gpumemwidget.report.html import render_html
from gpumemwidget.report.output import Report
from gpumemwidget.report.pieces import bytes_cell, share_cell
from gpumemwidget.report.rows import UNKNOWN, Group, check_rows, list_groups
from gpumemwidget.report.text import render_text
from gpumemwidget.report.tree import ITSELF, Line, Node, list_lines
from gpumemwidget.report.words import count_kind, join_words, rank_device
from gpumemwidget.units import format_bytes, format_duration

__all__ = ["MOST", "report_account"]

#: So many parts of one thing are listed unless all are asked for.
MOST = 20

#: How far a row that was asked for is opened: it, its parts and theirs.
_LEVELS_OF_NAMES = 3

#: Names that are listed of those that share a row's memory.
_MOST_ROWS = 3

_OWNER = Column("owner", "code", fold=24)
_BYTES = (Column("bytes"), Column("share"))
_FREES = Column("frees")
_WHAT = Column("what", "words", last="wrap")
_COLUMNS = (_OWNER, *_BYTES, _FREES, _WHAT)
_COLUMNS_OF_NAMES = (Column("owner", "code", fold=36), *_BYTES, _WHAT)


def report_account(
    account: MemoryAccount,
    names: Sequence[str] = (),
    *,
    device: str | None = None,
    depth: int | None = 0,
    most: int | None = MOST,
) -> Report:
    """What is allocated on each device, by who owns it; the lines add up to all of it.

    Args:
        account: the account.
        names: rows to open; all others are one line then.
        device: the one device to show.
        depth: how many levels are shown, the rows' own being the first; 0 for 1, and for 3 where
            ``names`` are given; ``None`` for all.
        most: how many parts of one thing are listed; a line tells of the rest. ``None`` for all.

    Raises:
        BadInputError: the account has no such device.
        UnknownNameError: a name is not a row of the account.
    """
    check_rows(account, names)
    devices = _choose_devices(account, device)
    if depth == 0:
        depth = _LEVELS_OF_NAMES if names else 1
    holdings = {holding.name: holding for holding in account.holdings}
    blocks: list[Block] = []
    for each in devices:
        groups = list_groups(each)
        chosen = [group for group in groups if not names or group.name in names]
        if names and not chosen:
            continue
        drawing = _Drawing(each, holdings, has_frees=not names)
        others = [group for group in groups if names and group.name not in names]
        blocks.extend(drawing.draw(chosen, others, levels=depth, most=most))
    if not account.devices:
        blocks.append(Note("No device was found."))
    if names:
        blocks.extend(_tell_of_names(account, names, devices))
    elif any(holding.frees_bytes != holding.held_bytes for holding in account.holdings):
        blocks.append(
            Note("frees: what goes if this alone is released; what is shared stays until all go.")
        )
    if not account.is_complete:
        blocks.append(
            Note(
                f"There was too much to look at in {format_duration(account.duration_s)}: some of "
                "what stands here without a name has one, and less may be freed than is said.",
                tone="warn",
            )
        )
    blocks.extend(Note(note, tone="warn") for note in account.notes)
    document = Document(tuple(blocks))
    return Report(text=render_text(document), html=render_html(document))


def _choose_devices(account: MemoryAccount, device: str | None) -> list[DeviceAccount]:
    devices = sorted(account.devices, key=lambda each: rank_device(each.device))
    if device is None:
        return devices
    known = [each.device for each in devices]
    if device not in known:
        raise BadInputError(f"no device {device!r} here: choose from {', '.join(known) or 'none'}")
    return [each for each in devices if each.device == device]


@dataclass(slots=True)
class _Drawing:
    """Draws the table of one device."""

    account: DeviceAccount
    holdings: dict[str, Holding]
    has_frees: bool

    @property
    def total_bytes(self) -> int:
        """What all is a share of."""
        return max(self.account.allocated_bytes or 0, self.sum_bytes)

    @property
    def sum_bytes(self) -> int:
        return sum(owned.n_bytes for owned in self.account.owned)

    def draw(
        self,
        groups: Sequence[Group],
        others: Sequence[Group],
        *,
        levels: int | None,
        most: int | None,
    ) -> list[Block]:
        device, allocated = self.account.device, self.account.allocated_bytes
        shown, rest = _cut_groups(groups, most)
        rows = [self._list_rows(group, levels, most) for group in shown]
        if rest:
            n_bytes = sum(group.n_bytes for group in rest)
            # What is unknown stays the last.
            rows.insert(-1, (self._draw_rest(f"… {len(rest)} more", n_bytes),))
        if others:
            n_bytes = sum(group.n_bytes for group in others)
            rows.append((self._draw_rest("everything else", n_bytes),))
        rows.append(tuple(self._draw_sums()))
        blocks: list[Block] = [
            Table(
                caption=f"{device}: {_describe_total(self.account)}",
                columns=_COLUMNS if self.has_frees else _COLUMNS_OF_NAMES,
                groups=tuple(rows),
                last_is_shared=False,
                caption_is_seen=True,
            )
        ]
        if allocated is None:
            blocks.append(
                Note(f"What is allocated on {device} can't be read; this is what was found.")
            )
        elif allocated != self.sum_bytes:
            blocks.append(Note(_describe_difference(self.account, self.sum_bytes), tone="warn"))
        return blocks

    def _list_rows(
        self, group: Group, levels: int | None, most: int | None
    ) -> tuple[tuple[Cell, ...], ...]:
        if _find_words(group):
            # They are said beside it.
            levels = 1
        root = Node(group.name, group.entries, 0)
        lines = list_lines([root], levels=levels, most=most)
        return tuple(self._draw_line(line, group) for line in lines)

    def _draw_line(self, line: Line, group: Group) -> tuple[Cell, ...]:
        node = line.node
        if node is None:
            return self._draw_rest(f"… {line.n_more} more", line.more_bytes, level=line.level)
        is_row = line.level == 0
        is_path = node.label != ITSELF and (group.is_path or not is_row)
        tone: Tone = "bad" if is_row and group.name == UNKNOWN and node.n_bytes else "plain"
        if not is_path and tone == "plain":
            tone = "muted"
        owner = Cell(node.label.removeprefix(": "), tone=tone, level=line.level)
        what = Cell(self._describe(node, group, above=line.above))
        return self._draw_row(owner, node.n_bytes, what, row=group.name if is_row else None)

    def _draw_rest(self, words: str, n_bytes: int, *, level: int = 0) -> tuple[Cell, ...]:
        return self._draw_row(Cell(words, tone="muted", level=level), n_bytes, Cell(""))

    def _draw_sums(self) -> Iterable[tuple[Cell, ...]]:
        allocated = self.account.allocated_bytes
        if allocated is not None and allocated > self.sum_bytes:
            yield self._draw_rest("not accounted for", allocated - self.sum_bytes)
        name = "together" if allocated is None or allocated < self.sum_bytes else "allocated"
        yield self._draw_row(Cell(name, tone="strong"), self.total_bytes, Cell(""))

    def _draw_row(
        self, owner: Cell, n_bytes: int, what: Cell, *, row: str | None = None
    ) -> tuple[Cell, ...]:
        numbers = (bytes_cell(n_bytes), share_cell(n_bytes, self.total_bytes))
        if not self.has_frees:
            return (owner, *numbers, what)
        holding = self.holdings.get(row) if row is not None else None
        frees = Cell("")
        if holding is not None:
            frees = bytes_cell(dict(holding.frees_bytes).get(self.account.device, 0))
        return (owner, *numbers, frees, what)

    def _describe(self, node: Node, group: Group, *, above: Node | None) -> str:
        """What a line is; a part says only what its whole does not say already."""
        parts = []
        is_row = above is None
        if node.n_alike:
            each = "" if node.each_bytes is None else f", {_bind(node.each_bytes)} each"
            parts.append(f"{node.n_alike} alike{each}")
        if is_row:
            parts.extend((group.remark, _find_words(group)))
        holding = self.holdings.get(group.name) if is_row and group.is_holding else None
        if holding is not None and holding.shape is not None and len(node.entries) == 1:
            parts.append(describe_shape(holding))
        elif above is None or node.kinds.keys() != above.kinds.keys():
            kinds = _describe_kinds(node)
            parts.append("" if kinds == group.name else kinds)
        others = [name for name in node.rows if name != group.name]
        if others and (above is None or node.rows.keys() != above.rows.keys()):
            parts.append(f"shared with {_join_some(others)}")
        elif above is not None and not others and len(above.rows) > 1:
            parts.append("not shared")
        is_new = above is None or False in above.held_elsewhere
        if is_new and group.is_holding and True in node.held_elsewhere:
            parts.append("also held elsewhere")
        if len(node.places) == 1 and (above is None or len(above.places) > 1):
            parts.extend(f"from {place}" for place in node.places)
        return "; ".join(part for part in parts if part)


def _cut_groups(
    groups: Sequence[Group], most: int | None
) -> tuple[Sequence[Group], Sequence[Group]]:
    """The rows to show, and those that are one line; what is unknown is always shown."""
    if most is None or len(groups) <= most + 2:
        return groups, ()
    return [*groups[:most], groups[-1]], groups[most:-1]


def _describe_total(account: DeviceAccount) -> str:
    detail = " (malloc)" if account.device == HOST else ""
    if account.allocated_bytes is None:
        return "what was found"
    return f"{format_bytes(account.allocated_bytes)} allocated{detail}"


def _describe_difference(account: DeviceAccount, sum_bytes: int) -> str:
    allocated = account.allocated_bytes or 0
    if allocated > sum_bytes:
        return (
            f"{format_bytes(allocated - sum_bytes)} on {account.device} are allocated, and nothing "
            "was found that they belong to."
        )
    return (
        f"{format_bytes(sum_bytes - allocated)} more was found on {account.device} than the "
        "allocator counts: something was freed or counted twice meanwhile."
    )


def _find_words(group: Group) -> str:
    """What is said of all that has no name, where it is one thing."""
    words = {"".join(steps) for steps, _ in group.entries} if not group.is_path else set()
    return words.pop() if len(words) == 1 else ""


def _describe_kinds(node: Node) -> str:
    kinds = node.kinds.items()
    if len(kinds) == 1:
        number = len(node.entries)
        return count_kind(next(iter(node.kinds)), None if number == node.n_alike else number)
    return ", ".join(f"{count_kind(kind)} {_bind(n_bytes)}" for kind, n_bytes in kinds)


def _bind(n_bytes: int) -> str:
    """An amount that no line end parts from its unit."""
    return format_bytes(n_bytes).replace(" ", "\xa0")


def _join_some(names: Sequence[str]) -> str:
    if len(names) <= _MOST_ROWS + 1:
        return join_words(names)
    return join_words([*names[:_MOST_ROWS], f"{len(names) - _MOST_ROWS} more"])


def _tell_of_names(
    account: MemoryAccount, names: Sequence[str], devices: Sequence[DeviceAccount]
) -> list[Note]:
    """What each name frees, and what it holds that is listed under another."""
    notes = []
    holdings = {holding.name: holding for holding in account.holdings}
    for name in dict.fromkeys(names):
        holding = holdings.get(name)
        if holding is not None:
            frees = _join_amounts(dict(holding.frees_bytes), devices)
            notes.append(Note(f"{name} released alone frees {frees or 'nothing'}.", tone="plain"))
        sums: dict[str, dict[str, int]] = {}
        for each in devices:
            for owned in each.owned:
                if name in owned.rows[1:] and owned.rows[0] not in names:
                    amounts = sums.setdefault(owned.rows[0], {})
                    amounts[each.device] = amounts.get(each.device, 0) + owned.n_bytes
        notes.extend(
            Note(f"{name} also holds {_join_amounts(amounts, devices)}, listed under {row}.")
            for row, amounts in sums.items()
        )
    return notes


def _join_amounts(amounts: Mapping[str, int], devices: Sequence[DeviceAccount]) -> str:
    known = [(each.device, amounts.get(each.device)) for each in devices]
    return join_words([f"{format_bytes(n)} on {device}" for device, n in known if n])
