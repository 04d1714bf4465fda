"""The owners of what is allocated: a row for each, and below it the tree of its parts.

A person can read ten thousand storages only if they are put together: what lies behind the same
steps is one node, elements that are alike are one node with their count, and a chain of steps
without a fork is one step. The bytes of a node's parts add up to those of the node.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from gpumemwidget.model.devices import HOST, check_device
from gpumemwidget.model.ownership import (
    AccountNote,
    DeviceAccount,
    DeviceBytes,
    MemoryAccount,
    MemoryKind,
    MemorySource,
    Owned,
    Slices,
    Variable,
)
from gpumemwidget.report.render.blocks import (
    AT_LEAST_MARK,
    FEW,
    MOST_ROWS_OF_ALL,
    Block,
    Cell,
    Column,
    Note,
    Table,
    bytes_cell,
    device_bytes_cell,
    explain_lower_bounds,
    make_group,
    number_columns,
    say,
    share_cell,
    sort_devices,
    split_rest,
    warn,
)
from gpumemwidget.report.render.output import Report
from gpumemwidget.report.render.text import LONG_WIDTH, cut_middle
from gpumemwidget.report.render.wording import (
    UNATTRIBUTED,
    bind_bytes,
    count_kind,
    format_device_bytes,
    join_words,
    name_one_kind,
    name_range,
    word_slices,
)
from gpumemwidget.units import format_bytes, format_duration

# -- The tree --------------------------------------------------------------------------------------

#: A storage with the steps that lead to it from its node.
Entry = tuple[tuple[str, ...], Owned]

_NUMBER = re.compile(r"\d+", re.ASCII)


@dataclass
class Node:
    """All storages whose paths begin with the same steps."""

    #: The steps that distinguish it from its siblings, as one text.
    label: str
    entries: Sequence[Entry]
    #: Number of elements that were put together in it; 0 where there is but one.
    n_alike: int = 0
    #: Bytes of each of these elements, if all have as many.
    each_bytes: int | None = None

    @cached_property
    def n_bytes(self) -> int:
        """Bytes of all its storages."""
        return _sum_bytes(self.entries)

    @cached_property
    def kinds(self) -> dict[MemoryKind, int]:
        """Bytes of each kind, the largest first."""
        sums: Counter[MemoryKind] = Counter()
        for _, owned in self.entries:
            sums[owned.kind] += owned.n_bytes
        return dict(sorted(sums.items(), key=lambda item: (-item[1], item[0])))

    @cached_property
    def rows(self) -> dict[str, None]:
        """The rows that hold any of the storages, in the order in which they are met."""
        return dict.fromkeys(row for _, owned in self.entries for row in owned.rows)

    @cached_property
    def places(self) -> dict[str, None]:
        """The lines that allocated the storages, as far as they are known."""
        places = (owned.allocated_at for _, owned in self.entries)
        return dict.fromkeys(place for place in places if place is not None)

    @cached_property
    def slices(self) -> Slices:
        """The storages of which tensors show a small part."""
        found = [owned for _, owned in self.entries if owned.shown_bytes is not None]
        n_bytes = sum(owned.n_bytes for owned in found)
        return Slices(len(found), n_bytes, sum(owned.shown_bytes or 0 for owned in found))

    @property
    def is_held_elsewhere(self) -> bool:
        """True if anything but the rows holds any of the storages."""
        return any(owned.held_elsewhere for _, owned in self.entries)

    @property
    def has_parts(self) -> bool:
        """True if a step leads from here to any of the storages."""
        return any(steps for steps, _ in self.entries)

    def open(self) -> list[Node]:
        """Return the node's parts, the largest first; a list of alike elements is one with them."""
        parts = []
        for part in _split(self):
            inner = [] if part.n_alike else _split(part)
            if len(inner) == 1:
                inner[0].label = part.label + inner[0].label
            parts.append(inner[0] if len(inner) == 1 else part)
        return sorted(parts, key=lambda part: -part.n_bytes)


@dataclass(frozen=True, slots=True)
class Line:
    """A line of an opened tree: a node, or what was left out among the parts of one."""

    level: int
    #: ``None`` for a line of parts that are left out.
    node: Node | None
    #: The node above.
    above: Node | None = None
    #: Number of parts that are left out, and their bytes.
    n_more: int = 0
    more_bytes: int = 0


def list_lines(root: Node, *, levels: int | None, most: int | None) -> Iterator[Line]:
    """Return a node and what is below it, each followed by its parts.

    Args:
        root: the node of the first level.
        levels: how many levels are listed below a part with next to nothing; ``None`` for all.
        most: maximum number of parts of one node, the rest being one line; ``None`` for all.
    """
    # No recursion: a path may have any number of steps.
    pending = [Line(0, root)]
    while pending:
        line = pending.pop()
        yield line
        level = line.level + 1
        if line.node is None or (levels is not None and level >= levels):
            continue
        # A part with less than a hundredth of its row is not opened.
        if levels is not None and line.node.n_bytes < 0.01 * root.n_bytes:
            continue
        parts: Sequence[Node] = line.node.open()
        shown, rest = split_rest(parts, len(parts) if most is None else most)
        if rest:
            n_bytes = sum(part.n_bytes for part in rest)
            pending.append(Line(level, None, line.node, len(rest), n_bytes))
        pending.extend(Line(level, part, line.node) for part in reversed(shown))


def _split(node: Node) -> list[Node]:
    """Return the parts of a node up to the next fork, elements that are alike as one."""
    if not node.has_parts:
        return []
    # Only of a row all paths may go on with the same steps.
    shared, entries = _split_shared(node.entries)
    here = [entry for entry in entries if not entry[0]]
    # A parameter has data of its own besides its gradient.
    parts = [Node(shared or "itself", here)] if here else []
    by_step: dict[str, list[Entry]] = {}
    for steps, owned in entries:
        if steps:
            by_step.setdefault(steps[0], []).append((steps[1:], owned))
    for alike in _group_alike(by_step):
        elements = [by_step[step] for step in alike]
        chain, below = _split_shared([entry for element in elements for entry in element])
        part = Node(shared + name_range(alike) + chain, below)
        if len(alike) > 1:
            sizes = set(map(_sum_bytes, elements))
            part.n_alike, part.each_bytes = len(alike), sizes.pop() if len(sizes) == 1 else None
        parts.append(part)
    return parts


def _split_shared(entries: Sequence[Entry]) -> tuple[str, list[Entry]]:
    """Return the steps with which all paths begin, as one text, and the entries behind them."""
    paths = [steps for steps, _ in entries]
    # The steps that the first and the last in order share are shared by all between.
    first, last = min(paths), max(paths)
    pairs = enumerate(zip(first, last, strict=False))
    n_shared = next((n for n, (one, other) in pairs if one != other), min(len(first), len(last)))
    return "".join(first[:n_shared]), [(steps[n_shared:], owned) for steps, owned in entries]


def _group_alike(by_step: Mapping[str, list[Entry]]) -> Iterable[list[str]]:
    """Return groups of steps that are alike but for numbers, as are the parts behind them.

    Only what is in brackets is: elements of a list, keys such as ``["layers.3.weight"]``. How big
    the parts are makes no difference.
    """
    groups: dict[object, list[str]] = {}
    for step, entries in by_step.items():
        key: object = step
        if step.startswith("["):
            parts = frozenset(
                (*(_NUMBER.sub("0", below) for below in path), owned.kind)
                for path, owned in entries
            )
            key = (_NUMBER.sub("0", step), parts)
        groups.setdefault(key, []).append(step)
    return groups.values()


def _sum_bytes(entries: Iterable[Entry]) -> int:
    return sum(owned.n_bytes for _, owned in entries)


# -- The rows --------------------------------------------------------------------------------------


_TENSOR_KINDS = frozenset(
    {"parameter", "gradient", "optimizer state", "buffer", "saved for backward", "tensor"}
)


class Row(NamedTuple):
    """The subject of a row of the account; several rows may have the same name."""

    name: str
    #: The name is the user's own text, to be typed as it is.
    is_path: bool = False
    #: The name is one of the account's ``variables``.
    is_variable: bool = False
    #: Stands before the kinds.
    remark: str = ""


_UNKNOWN = Row(UNATTRIBUTED)


def list_rows(lines: Iterable[Owned]) -> list[tuple[Row, Node]]:
    """Return the rows, the largest first; the last one is what is unattributed, also if empty."""
    entries: dict[Row, list[Entry]] = {}
    for owned in lines:
        row, steps = _find_row(owned)
        entries.setdefault(row, []).append((steps, owned))
    unknown = Node(UNATTRIBUTED, entries.pop(_UNKNOWN, []))
    rows = [(row, Node(row.name, own)) for row, own in entries.items()]
    return [*sorted(rows, key=lambda pair: -pair[1].n_bytes), (_UNKNOWN, unknown)]


def _find_row(owned: Owned) -> tuple[Row, tuple[str, ...]]:
    """Return the row of a storage, and the steps of its path from there."""
    begin, *rest = owned.steps or ("",)
    if owned.root == "module":
        return Row(begin, is_path=True, remark="an imported module's own"), tuple(rest)
    if owned.root == "thread":
        where = [step.removeprefix(": ") for step in rest[:1]]
        return Row(begin, remark="in a running function"), (*where, *rest[1:])
    if owned.root != "nowhere" and owned.rows:
        row = owned.rows[0]
        steps = tuple(rest) if begin == row else owned.steps
        return Row(row, is_path=True, is_variable=True), steps
    if owned.kind in _TENSOR_KINDS:
        # No variable, module or running function leads to them; a breakdown says the same.
        return Row("no variable"), owned.steps
    name = name_one_kind(owned.kind, owned.device)
    return Row(name), () if owned.steps in ((owned.kind,), (name,)) else owned.steps


# -- The report ------------------------------------------------------------------------------------

#: Maximum number of rows, and of parts of one row, unless all are asked for.
_MAX_PARTS = 20


def word_account_note(note: AccountNote) -> str:
    """Return a sentence on memory of tensors that their allocator does not count."""
    begin = f"{format_bytes(note.n_bytes)} of tensors"
    if note.source is MemorySource.PINNED:
        return f"{begin} are pinned, which malloc does not count"
    if note.source is MemorySource.MAPPED:
        return f"{begin} are in shared memory or a mapped file, which malloc does not count"
    return (
        f"{begin} on {note.device} are not from PyTorch's allocator: another library's, of a "
        "deleted CUDA graph, or freed meanwhile"
    )


def report_account(
    account: MemoryAccount,
    names: Sequence[str] = (),
    *,
    device: str | None = None,
    is_whole: bool = False,
) -> Report:
    """Report what is allocated on each device by owner; the rows add up to all of it.

    The rows ``names`` are opened, and all others become one row. ``is_whole`` shows many more rows
    and parts, down to the last storage.

    Raises:
        BadInputError: the account has no such device.
    """
    devices = sort_devices(account.devices)
    check_device(device, [part.device for part in devices])
    devices = [part for part in devices if device in (None, part.device)]
    levels = None if is_whole else 3 if names else 1
    most = MOST_ROWS_OF_ALL if is_whole else _MAX_PARTS
    variables = {variable.name: variable for variable in account.variables}
    blocks: list[Block] = []
    for part in devices:
        table = _AccountTable(account, part, names, levels, most, variables)
        blocks.extend(table.list_blocks())
    blocks.extend(_list_library_arrays(account, names, device))
    if names:
        blocks.extend(_note_names(account, names, devices, variables))
    elif any(variable.frees_bytes != variable.held_bytes for variable in account.variables):
        words = "frees: what releasing this row alone gives back. Shared memory stays until all "
        blocks.append(Note(f"{words}its owners are released."))
    if account.is_complete:
        blocks.extend(explain_lower_bounds(variable.frees_bytes for variable in account.variables))
    else:
        words = (
            f"There were too many objects to look at in {format_duration(account.duration_s)}: "
            "some memory shown without a variable has one."
        )
        blocks += [*warn(words), Note("at least: the owner may hold more", mark=AT_LEAST_MARK)]
    blocks.extend(warn(*map(word_account_note, account.notes)))
    if not account.has_all_library_arrays:
        words = "Not all containers were looked through for arrays of other libraries than PyTorch."
        blocks.extend(warn(words))
    for library in account.unread_libraries:
        blocks.extend(warn(f"Arrays of {library} are missing here: {library} failed on some."))
    return Report(blocks)


@dataclass(frozen=True, slots=True)
class _AccountTable:
    account: MemoryAccount
    part: DeviceAccount
    names: Sequence[str]
    levels: int | None
    most: int
    variables: Mapping[str, Variable]

    @property
    def total_bytes(self) -> int:
        """Bytes allocated, or the sum of the owners where the allocator's figure can't be read."""
        allocated = self.part.allocated_bytes
        return sum(owned.n_bytes for owned in self.part.owned) if allocated is None else allocated

    def list_blocks(self) -> list[Block]:
        """Return the table, with a row for all but the names, and none if it has none of them."""
        rows = list_rows(self.part.owned)
        # The last row is what is unattributed, and always shown.
        listed, left_out = split_rest(rows[:-1], self.most)
        shown, words = [*listed, rows[-1]], f"… {len(left_out):,} more"
        if self.names:
            shown = [pair for pair in rows if pair[0].name in self.names]
            left_out, words = [pair for pair in rows if pair not in shown], "everything else"
        if not shown:
            return []
        groups = [
            make_group(*(self._list_line(line, row) for line in self._list_lines(row, node)))
            for row, node in shown
        ]
        if left_out:
            n_bytes = sum(node.n_bytes for _, node in left_out)
            more = self._list_cells(Cell(words, tone="muted"), n_bytes)
            groups.insert(len(groups) if self.names else -1, make_group(more))
        device, allocated = self.part.device, self.part.allocated_bytes
        total = Cell("total" if allocated is None else "allocated", tone="strong")
        groups.append(make_group(self._list_cells(total, self.total_bytes)))
        detail = " (malloc)" if device == HOST else ""
        caption = "owners" if allocated is None else f"{format_bytes(allocated)} allocated{detail}"
        columns = (
            Column("owner", "code", fold=36 if self.names else 24),
            *number_columns("bytes", "share"),
            Column("frees", is_optional=True),
            Column("what", "words", last="wrap"),
        )
        most = max(MOST_ROWS_OF_ALL, len(groups))
        table = Table(f"{device}: {caption}", columns, groups, most=most)
        if allocated is None:
            return [table, Note(f"How much is allocated on {device} can't be read.")]
        return [table]

    def _list_lines(self, row: Row, node: Node) -> Iterator[Line]:
        # Words that describe the whole row stand beside it.
        levels = 1 if _find_words(row, node) else self.levels
        return list_lines(node, levels=levels, most=self.most)

    def _list_line(self, line: Line, row: Row) -> list[Cell]:
        node = line.node
        if node is None:
            more = Cell(f"… {line.n_more:,} more", tone="muted", level=line.level)
            return self._list_cells(more, line.more_bytes)
        is_row = line.level == 0
        label = cut_middle(node.label.removeprefix(": "), LONG_WIDTH)
        owner = Cell(label, level=line.level)
        if is_row and row.name == UNATTRIBUTED and node.n_bytes:
            owner = Cell(label, tone="bad")
        elif node.label == "itself" or (is_row and not row.is_path):
            owner = Cell(label, tone="muted", level=line.level)
        variable = self.variables.get(row.name) if is_row else None
        mark = AT_LEAST_MARK if row.is_path and not self.account.is_complete else ""
        what = self._describe(node, row, above=line.above)
        return self._list_cells(owner, node.n_bytes, what, variable=variable, mark=mark)

    def _list_cells(
        self,
        owner: Cell,
        n_bytes: int,
        what: str = "",
        *,
        variable: Variable | None = None,
        mark: str = "",
    ) -> list[Cell]:
        amount = bytes_cell(n_bytes, mark=mark)
        frees = Cell("")
        if variable is not None and not self.names:
            frees = device_bytes_cell(variable.frees_bytes, self.part.device)
        return [owner, amount, share_cell(n_bytes, self.total_bytes), frees, Cell(what)]

    def _describe(self, node: Node, row: Row, *, above: Node | None) -> str:
        """Return what a node is; a part repeats nothing that its whole says."""
        parts = []
        if node.n_alike:
            size = "" if node.each_bytes is None else f", {bind_bytes(node.each_bytes)} each"
            parts.append(f"{node.n_alike} similar{size}")
        if above is None:
            parts.extend((row.remark, _find_words(row, node)))
        parts.append(self._describe_contents(node, row, above))
        if above is None or node.slices != above.slices:
            parts.append(word_slices(node.slices))
        others = [name for name in node.rows if name != row.name]
        if others and (above is None or node.rows.keys() != above.rows.keys()):
            parts.append(f"shared with {join_words(others, FEW)}")
        if above is None and row.is_variable and node.is_held_elsewhere:
            parts.append("also held elsewhere")
        if len(node.places) == 1 and (above is None or len(above.places) > 1):
            parts.extend(f"from {place}" for place in node.places)
        return "; ".join(filter(None, parts))

    def _describe_contents(self, node: Node, row: Row, above: Node | None) -> str:
        """Return the tensor of a row that is one, else the kinds of a node's storages."""
        variable = None
        if above is None and row.is_variable and len(node.entries) == 1:
            variable = self.variables.get(row.name)
        if variable is not None and variable.shape is not None:
            return f"{variable.kind} {variable.dtype or ''}{list(variable.shape)}"
        if above is not None and node.kinds.keys() == above.kinds.keys():
            return ""
        if len(node.kinds) > 1:
            return ", ".join(
                f"{count_kind(kind)} {bind_bytes(n)}" for kind, n in node.kinds.items()
            )
        number = None if len(node.entries) == node.n_alike else len(node.entries)
        kinds = "".join(count_kind(kind, number) for kind in node.kinds)
        return "" if kinds in (row.name, "other", "unknown") else kinds


def _find_words(row: Row, node: Node) -> str:
    """Return the words that describe all of a row without a name, if they are the same."""
    words = {steps for steps, _ in node.entries} if not row.is_path else set()
    return cut_middle("".join(words.pop()), LONG_WIDTH) if len(words) == 1 else ""


def _list_library_arrays(
    account: MemoryAccount, names: Sequence[str], device: str | None
) -> Iterator[Table]:
    """Yield the table of other libraries' arrays, if there are any of these names and device."""
    arrays = [
        array
        for array in account.library_arrays
        if device in (None, array.device) and (not names or array.name in names)
    ]
    if arrays:
        rows = [
            make_group(
                (
                    array.path,
                    bytes_cell(array.n_bytes),
                    array.device,
                    f"{array.library} {array.what}",
                )
            )
            for array in arrays
        ]
        columns = (
            Column("array", "code", fold=36),
            Column("bytes"),
            Column("device", "name"),
            Column("what", "words", last="wrap"),
        )
        total = format_bytes(sum(array.n_bytes for array in arrays))
        least = "" if account.has_all_library_arrays else "at least "
        caption = f"Arrays of other libraries, outside PyTorch: {least}{total}"
        yield Table(caption, columns, rows, most=_MAX_PARTS)


def _note_names(
    account: MemoryAccount,
    names: Sequence[str],
    devices: Sequence[DeviceAccount],
    variables: Mapping[str, Variable],
) -> Iterator[Note]:
    """Yield what releasing each name frees, and what it holds that is listed under another."""
    for name in dict.fromkeys(names):
        if name in variables:
            frees = format_device_bytes(variables[name].frees_bytes) or "nothing"
            yield say(f"Releasing only {name} frees {frees}.")
        sums: dict[str, Counter[str]] = {}
        for owned in (owned for part in devices for owned in part.owned):
            if name in owned.rows[1:] and owned.rows[0] not in names:
                sums.setdefault(owned.rows[0], Counter())[owned.device] += owned.n_bytes
        for row, amounts in sums.items():
            held = DeviceBytes(tuple(amounts.items()), is_at_least=not account.is_complete)
            yield Note(f"{name} also holds {format_device_bytes(held)}, listed under {row}.")
