"""The owners of what is allocated, each as a tree of its parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpumemwidget.model.devices import HOST, check_device
from gpumemwidget.model.ownership import (
    AccountNote,
    DeviceAccount,
    DeviceBytes,
    MemoryAccount,
    MemorySource,
    Variable,
)
from gpumemwidget.report.account_tree import ITSELF, Line, Node, Row, list_lines, list_rows
from gpumemwidget.report.render.blocks import (
    FEW,
    MOST_ROWS_OF_ALL,
    Block,
    Cell,
    Column,
    Note,
    Table,
    Tone,
)
from gpumemwidget.report.render.cells import (
    AT_LEAST_MARK,
    bytes_cell,
    device_bytes_cell,
    explain_lower_bounds,
    share_cell,
    sort_devices,
)
from gpumemwidget.report.render.output import Report
from gpumemwidget.report.render.text import LONG_WIDTH, cut_middle
from gpumemwidget.report.render.wording import (
    UNATTRIBUTED,
    bind_bytes,
    count_kind,
    format_device_bytes,
    join_words,
    word_slices,
)
from gpumemwidget.units import format_bytes, format_duration

#: Maximum number of rows, and of parts of one row, unless all are asked for.
_MAX_PARTS = 20
#: Number of levels that are shown of a row which was asked for.
_LEVELS_OF_NAMES = 3

_FREES_NOTE = Note(
    "frees: memory freed by releasing only this row; shared memory stays until every owner is "
    "released."
)


def word_account_note(note: AccountNote) -> str:
    """Return a sentence on memory of tensors that their allocator does not count."""
    amount = format_bytes(note.n_bytes)
    if note.source is MemorySource.PINNED:
        return (
            f"{amount} of tensors are pinned: torch's own allocator for these has them, and "
            "malloc's figure leaves them out"
        )
    if note.source is MemorySource.MAPPED:
        return (
            f"{amount} of tensors are in shared memory or a mapped file, and malloc's figure "
            "leaves them out"
        )
    return (
        f"{amount} of tensors on {note.device} are no memory of torch's allocator: another "
        "library's, a CUDA graph's that it has taken back, or freed meanwhile"
    )


_BYTES = (Column("bytes"), Column("share"))
_WHAT = Column("what", "words", last="wrap")
_COLUMNS = (Column("owner", "code", fold=24), *_BYTES, Column("frees"), _WHAT)
_ARRAY_COLUMNS = (
    Column("array", "code", fold=36),
    Column("bytes"),
    Column("device", "name"),
    _WHAT,
)
_COLUMNS_OF_NAMES = (Column("owner", "code", fold=36), *_BYTES, _WHAT)


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
    variables = {variable.name: variable for variable in account.variables}
    levels = None if is_whole else _LEVELS_OF_NAMES if names else 1
    blocks: list[Block] = []
    for part in devices:
        table = _AccountTable(
            account=part,
            variables=variables,
            has_frees=not names,
            is_complete=account.is_complete,
            levels=levels,
            most=MOST_ROWS_OF_ALL if is_whole else _MAX_PARTS,
        )
        blocks.extend(table.list_blocks(names))
    blocks.extend(_list_library_arrays(account, names, device))
    if names:
        blocks.extend(_note_names(account, names, devices))
    elif any(variable.frees_bytes != variable.held_bytes for variable in account.variables):
        blocks.append(_FREES_NOTE)
    if account.is_complete:
        blocks.extend(explain_lower_bounds(variable.frees_bytes for variable in account.variables))
    else:
        words = (
            f"There were too many objects to look at in {format_duration(account.duration_s)}: "
            "some memory shown without a variable has one."
        )
        blocks.append(Note(words, tone="warn"))
        blocks.append(Note("at least: the owner may hold more", mark=AT_LEAST_MARK))
    blocks.extend(Note(word_account_note(note), tone="warn") for note in account.notes)
    return Report(tuple(blocks))


@dataclass(frozen=True, slots=True)
class _AccountTable:
    """The table of one device."""

    account: DeviceAccount
    variables: dict[str, Variable]
    has_frees: bool
    #: The search met everything: if not, the bytes of a path are a lower bound.
    is_complete: bool
    levels: int | None
    most: int

    @property
    def total_bytes(self) -> int:
        """Bytes allocated, or the sum of the owners where the allocator's figure can't be read."""
        allocated = self.account.allocated_bytes
        return (
            sum(owned.n_bytes for owned in self.account.owned) if allocated is None else allocated
        )

    def list_blocks(self, names: Sequence[str]) -> list[Block]:
        """Return the table, with a row for all but these names, and none if it has none of them."""
        rows = list_rows(self.account.owned)
        shown = [pair for pair in rows if not names or pair[0].name in names]
        if not shown:
            return []
        left_out, words = [pair for pair in rows if pair not in shown], "everything else"
        if not names and len(rows) > self.most + 2:
            # The last row is what is unattributed, and always shown.
            shown, left_out = [*rows[: self.most], rows[-1]], rows[self.most : -1]
            words = f"… {len(left_out):,} more"
        groups = [
            tuple(self._list_line(line, row) for line in self._list_lines(row, node))
            for row, node in shown
        ]
        if left_out:
            n_bytes = sum(node.n_bytes for _, node in left_out)
            groups.insert(
                len(groups) if names else -1,
                (self._list_cells(Cell(words, tone="muted"), n_bytes),),
            )
        device, allocated = self.account.device, self.account.allocated_bytes
        name = "total" if allocated is None else "allocated"
        groups.append((self._list_cells(Cell(name, tone="strong"), self.total_bytes),))
        detail = " (malloc)" if device == HOST else ""
        total = "owners" if allocated is None else f"{format_bytes(allocated)} allocated{detail}"
        table = Table(
            caption=f"{device}: {total}",
            columns=_COLUMNS if self.has_frees else _COLUMNS_OF_NAMES,
            groups=tuple(groups),
            most=max(MOST_ROWS_OF_ALL, len(groups)),
        )
        if allocated is None:
            return [table, Note(f"How much is allocated on {device} can't be read.")]
        return [table]

    def _list_lines(self, row: Row, node: Node) -> Iterator[Line]:
        # Words that describe the whole row stand beside it.
        levels = 1 if _find_words(row, node) else self.levels
        return list_lines(node, levels=levels, most=self.most)

    def _list_line(self, line: Line, row: Row) -> tuple[Cell, ...]:
        node = line.node
        if node is None:
            cell = Cell(f"… {line.n_more:,} more", tone="muted", level=line.level)
            return self._list_cells(cell, line.more_bytes)
        is_row = line.level == 0
        tone: Tone = "plain"
        if node.label == ITSELF or (is_row and not row.is_path):
            is_unknown = row.name == UNATTRIBUTED and node.n_bytes
            tone = "bad" if is_row and is_unknown else "muted"
        return self._list_cells(
            Cell(
                cut_middle(node.label.removeprefix(": "), LONG_WIDTH), tone=tone, level=line.level
            ),
            node.n_bytes,
            self._describe(node, row, above=line.above),
            variable=self.variables.get(row.name) if is_row else None,
            mark=AT_LEAST_MARK if row.is_path and not self.is_complete else "",
        )

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
        return "; ".join(part for part in parts if part)

    def _describe_contents(self, node: Node, row: Row, above: Node | None) -> str:
        """Return the tensor of a row that is one, else the kinds of a node's storages."""
        variable = None
        if above is None and row.is_variable and len(node.entries) == 1:
            variable = self.variables.get(row.name)
        if variable is not None and variable.shape is not None:
            shape = "×".join(map(str, variable.shape)) or "scalar"
            return f"{variable.kind} {shape} {variable.dtype or ''}".rstrip()
        if above is not None and node.kinds.keys() == above.kinds.keys():
            return ""
        kinds = _describe_kinds(node)
        return "" if kinds in (row.name, "other", "unknown") else kinds


def _find_words(row: Row, node: Node) -> str:
    """Return the words that describe all of a row without a name, if they begin alike."""
    words = {steps for steps, _ in node.entries} if not row.is_path else set()
    if len(words) == 1:
        return cut_middle("".join(words.pop()), LONG_WIDTH)
    if len({steps[:1] for steps in words}) != 1 or any(len(steps) != 2 for steps in words):
        return ""
    (begin, _), *_ = words
    ends = sorted(end.removeprefix(": ") for _, end in words)
    return f"{begin}: {join_words(ends, FEW)}"


def _describe_kinds(node: Node) -> str:
    if len(node.kinds) == 1:
        number = len(node.entries)
        return count_kind(next(iter(node.kinds)), None if number == node.n_alike else number)
    return ", ".join(f"{count_kind(kind)} {bind_bytes(n)}" for kind, n in node.kinds.items())


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
        rows = tuple(
            (
                (
                    Cell(array.path),
                    bytes_cell(array.n_bytes),
                    Cell(array.device),
                    Cell(f"{array.library} {array.what}"),
                ),
            )
            for array in arrays
        )
        total = format_bytes(sum(array.n_bytes for array in arrays))
        caption = f"Arrays of other libraries, outside PyTorch: {total}"
        yield Table(caption, _ARRAY_COLUMNS, rows, most=_MAX_PARTS)


def _note_names(
    account: MemoryAccount, names: Sequence[str], devices: Sequence[DeviceAccount]
) -> list[Note]:
    """Return what releasing each name frees, and what it holds that is listed under another."""
    notes = []
    variables = {variable.name: variable for variable in account.variables}
    for name in dict.fromkeys(names):
        if name in variables:
            frees = format_device_bytes(variables[name].frees_bytes) or "nothing"
            notes.append(Note(f"Releasing only {name} frees {frees}.", tone="plain"))
        sums: dict[str, Counter[str]] = {}
        for owned in (owned for part in devices for owned in part.owned):
            if name in owned.rows[1:] and owned.rows[0] not in names:
                sums.setdefault(owned.rows[0], Counter())[owned.device] += owned.n_bytes
        for row, amounts in sums.items():
            held = DeviceBytes(tuple(amounts.items()), is_at_least=not account.is_complete)
            text = format_device_bytes(held)
            notes.append(Note(f"{name} also holds {text}, listed under {row}."))
    return notes
