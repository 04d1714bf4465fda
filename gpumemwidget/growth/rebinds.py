"""Find names that were bound anew while their old values took memory beside the new ones.

An old value lives on because something else holds it, or it went only once the new one was made, so
that the peak held both.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from gpumemwidget.errors import forgets_frames
from gpumemwidget.growth.statements import Statement, find_replacement
from gpumemwidget.model.cells import CellDevice
from gpumemwidget.model.devices import HOST
from gpumemwidget.model.growth import Rebinding
from gpumemwidget.model.ownership import Fix
from gpumemwidget.ownership.graph.objects import (
    is_a,
    is_one_of,
    paused_collector,
    read_attribute,
    read_attributes,
)
from gpumemwidget.ownership.graph.torch_reader import TorchReader
from gpumemwidget.ownership.holdings import ELSEWHERE, Account, Row, join_marks, take_account
from gpumemwidget.ownership.labels import spell_steps
from gpumemwidget.ownership.paths import Paths, Root, Steps, find_fix
from gpumemwidget.ownership.shell import Shell

#: Share of a device's memory from which an old value is told of. Nobody runs out of memory for
#: less, and batches and small models stand beside their successors in most cells.
MIN_SHARE = 0.05
#: Share of what could be saved by which the figures of a cell may differ from those of its old and
#: new values: room for a batch, or for the workspaces of libraries.
_TOLERANCE = 0.1
#: Maximum number of variables to delete at once: nobody writes more into one line.
_MAX_HOLDERS = 6

#: The text before the first ``=`` of a line, however deep it is indented: ``model, optimizer``,
#: ``model: Net``.
_TARGETS = re.compile(r"^[ \t]*([^#\n=(]+)=(?!=)", re.MULTILINE)
#: A name that is no attribute, and of which none is meant: ``model``, not ``model.fc``.
_NAME = re.compile(r"(?<![\w.])[^\W\d]\w*(?![\w.\[])")

#: The attributes in which a module has its parameters, buffers and submodules.
_TABLES = ("_parameters", "_buffers", "_modules")

#: The bytes of storages, by their devices and addresses.
Storages = dict[tuple[str, int], int]


class OldValue:
    """A value that a name was bound to before a cell, by a weak reference.

    Attributes:
        name: the name.
        storages: what it had on devices other than the host: parameters, gradients, states.
        ref: the value, as long as it lives. A callback of its end would run within the cell, and
            lose the exception of a signal's handler that meets it there.
        is_shared: whether something else held it too, before the cell.
    """

    def __init__(self, name: str, value: object, storages: Storages, *, is_shared: bool) -> None:
        self.name = name
        self.storages = storages
        self.is_shared = is_shared
        self.ref: weakref.ref[Any] = weakref.ref(value)


# -- Before the cell -------------------------------------------------------------------------------


def note_values(namespace: Mapping[str, object], source: str, torch: object) -> list[OldValue]:
    """Return the tensors, modules and optimizers of the names that a cell seems to assign.

    No code of the user's runs, and nothing is held. The cell is not parsed: it takes long, and
    most cells assign nothing of the kind.
    """
    targets = _TARGETS.findall(source)
    names = [name for each in targets for name in _NAME.findall(each)]
    found = {name: namespace.get(name) for name in names}
    if all(value is None for value in found.values()):
        return []
    reader = TorchReader(torch)
    noted = []
    # What the namespace and the list here hold, and nobody else.
    alone = next(map(sys.getrefcount, [object()])) + 1
    counts = list(map(sys.getrefcount, found.values()))
    for (name, value), count in zip(found.items(), counts, strict=True):
        cls = type(value)
        if is_one_of(cls, reader.tensor_type, reader.module_type, reader.optimizer_type):
            storages = read_storages(reader, value, with_grads=True, with_optimized=True)
            if storages:
                noted.append(OldValue(name, value, storages, is_shared=count > alone))
    return noted


def read_storages(
    reader: TorchReader, value: object, *, with_grads: bool, with_optimized: bool = False
) -> Storages:
    """Return the storages of a value on devices other than the host.

    Args:
        reader: reads tensors.
        value: a tensor, a module, an optimizer; anything else has none.
        with_grads: whether the gradients of its tensors count.
        with_optimized: whether the parameters of an optimizer count, beside its states.
    """
    storages: Storages = {}
    with reader.quiet():
        for tensor in _list_tensors(reader, value, with_optimized=with_optimized):
            parts = reader.read_tensor(tensor)
            held = [parts.storage, *parts.inner_storages]
            if with_grads and parts.grad is not None:
                held.append(reader.read_tensor(parts.grad).storage)
            for storage in held:
                info = None if storage is None else reader.read_storage(storage)
                if info is not None and info.device != HOST:
                    storages[info.device, info.address] = info.freed_bytes
    return storages


def sum_device(storages: Storages, device: str) -> int:
    """Return the bytes of the storages on a device."""
    return sum(n_bytes for (each, _), n_bytes in storages.items() if each == device)


def _list_tensors(reader: TorchReader, value: object, *, with_optimized: bool) -> Iterator[object]:
    """Yield the tensors in a value: parameters and buffers, or states and what is optimized."""
    pending = [value]
    met: set[int] = set()
    while pending:
        each = pending.pop()
        if type(each) is str or each is None or id(each) in met:
            continue
        met.add(id(each))
        if type(each) is dict:  # Most tables, at once.
            pending += each.values()
        elif is_a(each, reader.tensor_type):
            yield each
        elif is_a(each, reader.module_type):
            attributes = read_attributes(each) or {}
            pending += [dict.get(attributes, name) for name in _TABLES]
        elif is_a(each, reader.optimizer_type):
            # The keys of the states are parameters.
            pending.append(read_attribute(each, "state"))
            pending.append(read_attribute(each, "param_groups") if with_optimized else None)
        elif is_a(each, dict):
            pending += dict.values(each)
        elif is_a(each, list):
            pending += list.__iter__(each)


# -- Old values that went --------------------------------------------------------------------------


def find_overlap(
    statements: Sequence[Statement],
    old: Mapping[str, Storages],
    new: Mapping[str, Storages],
    record: CellDevice,
    namespace: Mapping[str, object],
) -> Rebinding | None:
    """Return the names whose old values stood beside the new ones in the peak of a cell.

    The allocated bytes are followed from assignment to assignment. Only where this comes to the
    figures of the cell is anything told: its peak may be that of a training step.

    Args:
        statements: the cell.
        old: what values that went at once had before it, by name; nothing for values that live on.
        new: what the names have now that came with the assignment.
        record: the figures of a device over the cell.
        namespace: the notebook's names.
    """
    device, span = record.device, record.allocated
    before_bytes, after_bytes, peak_bytes = span.before_bytes, span.after_bytes, span.peak_bytes
    if before_bytes is None or after_bytes is None or peak_bytes is None:
        return None
    numbers = {}
    #: The statements at which storages go and come, with their bytes.
    freed: dict[tuple[str, int], tuple[int, int]] = {}
    made: dict[tuple[str, int], tuple[int, int]] = {}
    for name, storages in old.items():
        number = find_replacement(statements, name, namespace)
        if number is None:
            continue
        numbers[name] = number
        for memory, n_bytes in storages.items():
            # A storage goes with the last of the names that hold it.
            freed[memory] = max((number, n_bytes), freed.get(memory, (0, 0)))
        last = max(n for n, each in enumerate(statements) if name in each.bound)
        for memory, n_bytes in new.get(name, {}).items():
            made[memory] = min((last, n_bytes), made.get(memory, (last, n_bytes)))
    n_freed, n_made = [0] * len(statements), [0] * len(statements)
    for counts, changes in ((n_freed, freed), (n_made, made)):
        for (each, _), (number, n_bytes) in changes.items():
            counts[number] += n_bytes if each == device else 0
    levels = _list_levels(before_bytes, n_made, n_freed)
    peak_at = levels.index(max(levels))
    # With all that goes from there on deleted before it.
    start_bytes = levels[peak_at] - n_made[peak_at] - sum(n_freed[peak_at:])
    later = _list_levels(start_bytes, n_made[peak_at:], [0] * len(n_made[peak_at:]))
    saved_bytes = levels[peak_at] - max(before_bytes, *levels[:peak_at], *later)
    slack_bytes = saved_bytes * _TOLERANCE
    expected_bytes = before_bytes + sum(n_made) - sum(n_freed)
    if max(abs(peak_bytes - levels[peak_at]), abs(after_bytes - expected_bytes)) > slack_bytes:
        return None
    names = [
        name
        for name, number in sorted(numbers.items(), key=lambda item: item[1])
        if number >= peak_at and sum_device(old[name], device) > slack_bytes
    ]
    line = statements[peak_at].line
    return Rebinding(tuple(names), device, saved_bytes, line=line) if names else None


def _list_levels(level: int, made: Sequence[int], freed: Sequence[int]) -> list[int]:
    """Return the allocated bytes once each statement's new values are made beside the old ones."""
    levels = []
    for made_bytes, freed_bytes in zip(made, freed, strict=True):
        levels.append(level + made_bytes)
        level += made_bytes - freed_bytes
    return levels


# -- Old values that live on -----------------------------------------------------------------------


@forgets_frames
def find_holders(
    shell: Shell, name: str, old: weakref.ref[Any], *, budget_s: float
) -> list[tuple[str, Fix]]:
    """Return what holds the old value of a name, each with what makes it let go.

    Returns:
        The paths to the value, or what holds its memory alone. ``[]`` where nothing is to be told:
        it is kept on purpose, it is rubbish, something unknown holds it, or time ran out.
    """
    with paused_collector():
        account = take_account(shell, budget_s=budget_s)
        if account is None or not account.graph.is_complete:
            return []
        place, new = account.graph.find(old()), account.graph.find(shell.user_ns.get(name))
        if place is None or new is None:
            return []
        storages = read_storages(account.graph.reader, old(), with_grads=True)
        memory = [
            each
            for each, info in account.graph.storages.items()
            if (info.device, info.address) in storages
        ]
        marks = join_marks(account.marks[each] for each in (place, *memory))
        rows = [row for row in account.rows.values() if row.mark & marks]
        if marks & ELSEWHERE or len(rows) > _MAX_HOLDERS:
            return []
        found = []
        for row in rows:
            steps = _find_way(account, row, place)
            # A holder of the new value too, as a trainer of two models is, has both on purpose.
            if row.mark & account.marks[new] or (row.root == "name" and _is_kept(steps)):
                return []
            root = Root(row.places[0], row.name, row.root)
            found.append((spell_steps(steps) or row.name, find_fix(row.root, root.steps)))
        return found


def _find_way(account: Account, row: Row, place: int) -> Steps:
    """Return the path from a row to an object; ``()`` if the row has the object's memory alone."""
    roots = [Root(each, row.name, row.root) for each in row.places]
    return Paths(account.graph, roots).list_steps(place)


def _is_kept(steps: Steps) -> bool:
    """Return whether a value is kept on purpose: by a variable, or in a list or table of such."""
    ends: Collection[str] = [step.text for step in (*steps[1:2], *steps[-1:])]
    return len(steps) == 1 or any(text.startswith("[") for text in ends)
