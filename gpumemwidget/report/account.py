"""The owners of what is allocated, each as a tree of its parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpumemwidget.model.devices import HOST, check_device, rank_device
from gpumemwidget.model.ownership import (
    AccountNote,
    DeviceAccount,
    DeviceBytes,
    MemoryAccount,
    Variable,
)
from gpumemwidget.report.account_tree import (
    ITSELF,
    Group,
    Line,
    Node,
    check_rows,
    list_groups,
    list_lines,
)
from gpumemwidget.report.render.blocks import Block, Cell, Column, Note, Table, Tone
from gpumemwidget.report.render.cells import (
    AT_LEAST_MARK,
    bytes_cell,
    device_bytes_cell,
    explain_lower_bounds,
    share_cell,
)
from gpumemwidget.report.render.output import Report
from gpumemwidget.report.render.wording import (
    UNATTRIBUTED,
    bind_bytes,
    count_kind,
    format_device_bytes,
    join_words,
    list_some,
)
from gpumemwidget.units import format_bytes, format_duration

#: Maximum number of rows, and of parts of one row, unless all are asked for.
MAX_PARTS = 20
#: Number of levels that are shown of a row which was asked for.
_LEVELS_OF_NAMES = 3
#: Maximum number of names that are listed of those that share a row's memory.
_MAX_SHARERS = 3

_FREES_NOTE = Note(
    "frees: memory freed by releasing only this row; shared memory stays until every owner is "
    "released."
)


def word_account_note(note: AccountNote) -> str:
    """Return a sentence on memory of tensors that their allocator does not count."""
    amount = format_bytes(note.n_bytes)
    if note.is_pinned:
        return (
            f"{amount} of tensors are pinned: torch's own allocator for these has them, and "
            "malloc's figure leaves them out"
        )
    return (
        f"{amount} of tensors on {note.device} are no memory of torch's allocator: another "
        "library's, a CUDA graph's that it has taken back, or freed meanwhile"
    )


def _describe_shape(variable: Variable) -> str:
    """Return ``tensor 1024×1024 float32``, or ``module`` if there is no shape."""
    words = [variable.kind]
    if variable.shape is not None:
        words.append("×".join(map(str, variable.shape)) or "scalar")
    if variable.dtype is not None:
        words.append(variable.dtype.removeprefix("torch."))
    return " ".join(words)


_BYTES = (Column("bytes"), Column("share"))
_WHAT = Column("what", "words", last="wrap")
_COLUMNS = (Column("owner", "code", fold=24), *_BYTES, Column("frees"), _WHAT)
_COLUMNS_OF_NAMES = (Column("owner", "code", fold=36), *_BYTES, _WHAT)


def report_account(
    account: MemoryAccount,
    names: Sequence[str] = (),
    *,
    device: str | None = None,
    depth: int | None = 0,
    most: int | None = MAX_PARTS,
) -> Report:
    """Report what is allocated on each device by owner; the rows add up to all of it.

    Args:
        account: the owners.
        names: rows to open; all others become one row.
        device: the one device to show; ``None`` for all.
        depth: how many levels are shown, the rows' own being the first; 0 for 1, and for 3 if
            ``names`` are given; ``None`` for all.
        most: maximum number of parts of one row, the rest being one line; ``None`` for all.

    Raises:
        BadInputError: the account has no such device.
        UnknownNameError: a name is not a row of the account.
    """
    check_rows(account, names)
    devices = _choose_devices(account, device)
    if depth == 0:
        depth = _LEVELS_OF_NAMES if names else 1
    variables = {variable.name: variable for variable in account.variables}
    blocks: list[Block] = []
    for each in devices:
        groups = list_groups(each)
        chosen = [group for group in groups if not names or group.name in names]
        others = [group for group in groups if group not in chosen]
        if chosen:
            table = _AccountTable(each, variables, not names, account.is_complete, depth, most)
            blocks.extend(table.list_blocks(chosen, others))
    if not account.devices:
        blocks.append(Note("No device was found."))
    if names:
        blocks.extend(_tell_of_names(account, names, devices))
    elif any(variable.frees_bytes != variable.held_bytes for variable in account.variables):
        blocks.append(_FREES_NOTE)
    if account.is_complete:
        blocks.extend(explain_lower_bounds(each.frees_bytes for each in account.variables))
    else:
        words = (
            f"There were too many objects to look at in {format_duration(account.duration_s)}: "
            "some memory shown without a variable has one."
        )
        blocks.append(Note(words, tone="warn"))
        blocks.append(Note("at least: the owner may hold more", mark=AT_LEAST_MARK))
    blocks.extend(Note(word_account_note(note), tone="warn") for note in account.notes)
    return Report(tuple(blocks))


def _choose_devices(account: MemoryAccount, device: str | None) -> list[DeviceAccount]:
    devices = sorted(account.devices, key=lambda each: rank_device(each.device))
    check_device(device, [each.device for each in devices])
    return [each for each in devices if device in (None, each.device)]


@dataclass(frozen=True, slots=True)
class _AccountTable:
    """The table of one device."""

    account: DeviceAccount
    variables: dict[str, Variable]
    has_frees: bool
    #: The search met everything: if not, the bytes of a path are a lower bound.
    is_complete: bool
    levels: int | None
    max_parts: int | None

    @property
    def sum_bytes(self) -> int:
        """Bytes of all owners."""
        return sum(owned.n_bytes for owned in self.account.owned)

    @property
    def total_bytes(self) -> int:
        """Bytes that shares are a part of."""
        return max(self.account.allocated_bytes or 0, self.sum_bytes)

    def list_blocks(self, groups: Sequence[Group], others: Sequence[Group]) -> list[Block]:
        device, allocated = self.account.device, self.account.allocated_bytes
        shown, rest = groups, groups[:0]
        if self.max_parts is not None and len(groups) > self.max_parts + 2:
            # The last group is what is unattributed, and always shown.
            shown = [*groups[: self.max_parts], groups[-1]]
            rest = groups[self.max_parts : -1]
        rows = [self._list_rows(group) for group in shown]
        if rest:
            n_bytes = sum(group.n_bytes for group in rest)
            rows.insert(-1, (self._list_rest(f"… {len(rest)} more", n_bytes),))
        if others:
            n_bytes = sum(group.n_bytes for group in others)
            rows.append((self._list_rest("everything else", n_bytes),))
        missing = (allocated or 0) - self.sum_bytes
        sums = [self._list_rest("not accounted for", missing, tone="warn")] if missing > 0 else []
        name = "total" if allocated is None or missing < 0 else "allocated"
        rows.append((*sums, self._list_cells(Cell(name, tone="strong"), self.total_bytes)))
        detail = " (malloc)" if device == HOST else ""
        total = "owners" if allocated is None else f"{format_bytes(allocated)} allocated{detail}"
        table = Table(
            caption=f"{device}: {total}",
            columns=_COLUMNS if self.has_frees else _COLUMNS_OF_NAMES,
            groups=tuple(rows),
            caption_is_seen=True,
        )
        if allocated is None:
            return [table, Note(f"How much is allocated on {device} can't be read.")]
        if missing >= 0:
            return [table]
        words = (
            f"The owners found on {device} have {format_bytes(-missing)} more than the allocator "
            "counts: memory was freed meanwhile, or counted twice."
        )
        return [table, Note(words, tone="warn")]

    def _list_rows(self, group: Group) -> tuple[tuple[Cell, ...], ...]:
        # Words that describe the whole row stand beside it.
        levels = 1 if _find_words(group) else self.levels
        root = Node(group.name, group.entries, 0)
        lines = list_lines(root, levels=levels, most=self.max_parts)
        return tuple(self._list_line(line, group) for line in lines)

    def _list_line(self, line: Line, group: Group) -> tuple[Cell, ...]:
        node = line.node
        if node is None:
            return self._list_rest(f"… {line.n_more} more", line.more_bytes, level=line.level)
        is_row = line.level == 0
        tone: Tone = "plain"
        if node.label == ITSELF or (is_row and not group.is_path):
            is_unknown = group.name == UNATTRIBUTED and node.n_bytes
            tone = "bad" if is_row and is_unknown else "muted"
        variable = self.variables.get(group.name) if is_row else None
        return self._list_cells(
            Cell(node.label.removeprefix(": "), tone=tone, level=line.level),
            node.n_bytes,
            self._describe(node, group, above=line.above),
            variable=variable,
            mark=AT_LEAST_MARK if group.is_path and not self.is_complete else "",
        )

    def _list_rest(
        self, words: str, n_bytes: int, *, level: int = 0, tone: Tone = "muted"
    ) -> tuple[Cell, ...]:
        return self._list_cells(Cell(words, tone=tone, level=level), n_bytes)

    def _list_cells(
        self,
        owner: Cell,
        n_bytes: int,
        what: str = "",
        *,
        variable: Variable | None = None,
        mark: str = "",
    ) -> tuple[Cell, ...]:
        numbers = (bytes_cell(n_bytes, mark=mark), share_cell(n_bytes, self.total_bytes))
        if not self.has_frees:
            return (owner, *numbers, Cell(what))
        frees = Cell("")
        if variable is not None:
            frees = device_bytes_cell(variable.frees_bytes, self.account.device)
        return (owner, *numbers, frees, Cell(what))

    def _describe(self, node: Node, group: Group, *, above: Node | None) -> str:
        """Return what a node is; a part repeats nothing that its whole says."""
        parts = []
        is_row = above is None
        if node.n_alike:
            size = "" if node.each_bytes is None else f", {bind_bytes(node.each_bytes)} each"
            parts.append(f"{node.n_alike} similar{size}")
        if is_row:
            parts.extend((group.remark, _find_words(group)))
        variable = self.variables.get(group.name) if is_row and group.is_variable else None
        if variable is not None and variable.shape is not None and len(node.entries) == 1:
            parts.append(_describe_shape(variable))
        elif above is None or node.kinds.keys() != above.kinds.keys():
            kinds = _describe_kinds(node)
            parts.append("" if kinds in (group.name, "other", "unknown") else kinds)
        others = [name for name in node.rows if name != group.name]
        if others and (above is None or node.rows.keys() != above.rows.keys()):
            parts.append(f"shared with {join_words(list_some(others, _MAX_SHARERS))}")
        if is_row and group.is_variable and node.is_held_elsewhere:
            parts.append("also held elsewhere")
        if len(node.places) == 1 and (above is None or len(above.places) > 1):
            parts.extend(f"from {place}" for place in node.places)
        return "; ".join(part for part in parts if part)


def _find_words(group: Group) -> str:
    """Return the words that describe all of a row without a name, if they are the same."""
    words = {"".join(steps) for steps, _ in group.entries} if not group.is_path else set()
    return words.pop() if len(words) == 1 else ""


def _describe_kinds(node: Node) -> str:
    if len(node.kinds) == 1:
        number = len(node.entries)
        return count_kind(next(iter(node.kinds)), None if number == node.n_alike else number)
    return ", ".join(f"{count_kind(kind)} {bind_bytes(n)}" for kind, n in node.kinds.items())


def _tell_of_names(
    account: MemoryAccount, names: Sequence[str], devices: Sequence[DeviceAccount]
) -> list[Note]:
    """Return what releasing each name frees, and what it holds that is listed under another."""
    notes = []
    variables = {variable.name: variable for variable in account.variables}
    for name in dict.fromkeys(names):
        variable = variables.get(name)
        if variable is not None:
            frees = _format_shown(variable.frees_bytes, devices) or "nothing"
            notes.append(Note(f"Releasing only {name} frees {frees}.", tone="plain"))
        sums: dict[str, dict[str, int]] = {}
        for each in devices:
            for owned in each.owned:
                if name in owned.rows[1:] and owned.rows[0] not in names:
                    amounts = sums.setdefault(owned.rows[0], {})
                    amounts[each.device] = amounts.get(each.device, 0) + owned.n_bytes
        for row, amounts in sums.items():
            held = DeviceBytes(tuple(amounts.items()), is_at_least=not account.is_complete)
            text = _format_shown(held, devices)
            notes.append(Note(f"{name} also holds {text}, listed under {row}."))
    return notes


def _format_shown(amounts: DeviceBytes, devices: Sequence[DeviceAccount]) -> str:
    """Return the amounts on the devices that are shown, in their order."""
    shown = tuple((each.device, amounts.on(each.device)) for each in devices)
    return format_device_bytes(replace(amounts, by_device=shown))
