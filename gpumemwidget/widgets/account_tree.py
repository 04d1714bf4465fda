"""Open the account of owners in the variables tab, row by row and part by part.

The page gets the rows with the account, and the parts of a row when it is opened, a bounded number
at a time: ten thousand storages are never sent at once. What is opened here are records, so it is
answered also while a cell runs; the user's objects are looked at only to take the account.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable

from gpumemwidget.model.ownership import DeviceAccount, MemoryAccount, Owned
from gpumemwidget.report.account import word_account_note
from gpumemwidget.report.account_tree import Group, Node, list_groups
from gpumemwidget.report.render.wording import name_one_kind
from gpumemwidget.widgets.messages import MOST_VARIABLES, Message, describe_variables

#: Rows and parts in one message, but for the user's names; for more parts the page asks.
_MOST_ROWS = 500
_MOST_PARTS = 100
#: Paths that are shown of those that a text is found in.
_MOST_FOUND = 200
#: Storages of a part that is opened to see whether it has parts of its own.
_MOST_TRIED = 2000
#: Kinds, names and lines that are told of one node.
_MOST_WORDS = 4

#: Hints how to free rows that can't be ticked.
_HINTS = {
    "cuBLAS workspace": "%memrelease --cublas frees it",
    "compile cache": "torch._dynamo.reset() frees it",
}

_keys = itertools.count(1)


class AccountTree:
    """An account, with numbers for the nodes that a page knows.

    Its devices are put together, so that a name is one row. All methods may be called from any
    thread.
    """

    def __init__(self, account: MemoryAccount) -> None:
        #: Number of the account: a page may still ask about the one before.
        self.key = next(_keys)
        self._account = account
        owned = tuple(each for device in account.devices for each in device.owned)
        self._groups = list_groups(DeviceAccount("", None, owned))
        #: By number; the groups come first. With each the group that it is a part of.
        self._nodes = [(Node(each.name, each.entries, 0), each) for each in self._groups]
        self._parts: dict[int, range] = {}
        self._lock = threading.Lock()

    def describe(self) -> Message:
        """Return the account with its rows, and the user's variables as of the same moment."""
        account = self._account
        listed, rest = self._choose_rows()
        return {
            "key": self.key,
            "devices": [
                {
                    "device": each.device,
                    "allocated": each.allocated_bytes,
                    "sum": sum(owned.n_bytes for owned in each.owned),
                }
                for each in account.devices
            ],
            "rows": [self._describe_row(number) for number in listed],
            "n_more": len(rest),
            "more": _sum_devices(
                owned for number in rest for _, owned in self._groups[number].entries
            ),
            **describe_variables(account.variables),
            "is_complete": account.is_complete,
            "duration_s": account.duration_s,
            "notes": [word_account_note(note) for note in account.notes],
        }

    def _choose_rows(self) -> tuple[list[int], list[int]]:
        """Return the numbers of the rows to list and of the rest; listed names have rows."""
        names = {variable.name for variable in self._account.variables[:MOST_VARIABLES]}
        last = len(self._groups) - 1
        listed: list[int] = []
        rest: list[int] = []
        for number, group in enumerate(self._groups):
            is_listed = number < _MOST_ROWS or group.name in names or number == last
            (listed if is_listed else rest).append(number)
        return listed, rest

    def describe_parts(self, number: int, start: int = 0) -> Message:
        """Return the parts of a node, the largest first, but for ``start`` that the page has."""
        with self._lock:
            parts = self._parts.get(number)
            if parts is None:
                parts = self._parts[number] = self._open(number)
            shown, rest = parts[start : start + _MOST_PARTS], parts[start + _MOST_PARTS :]
            return {
                "key": self.key,
                "node": number,
                "start": start,
                "parts": [self._describe_part(part) for part in shown],
                "n_more": len(rest),
                "more": _sum_devices(
                    owned for part in rest for _, owned in self._nodes[part][0].entries
                ),
            }

    def find(self, text: str) -> Message:
        """Return the storages whose path contains ``text`` in any case, the biggest first."""
        wanted = text.casefold()
        found = [
            (number, "".join(steps), owned)
            for number, group in enumerate(self._groups)
            for steps, owned in group.entries
            if wanted in (group.name + "".join(steps)).casefold()
        ]
        found.sort(key=lambda each: -each[2].n_bytes)
        shown, rest = found[:_MOST_FOUND], found[_MOST_FOUND:]
        return {
            "key": self.key,
            "text": text,
            "found": [
                {"row": number, "label": label, **_describe([owned], self._groups[number])}
                for number, label, owned in shown
            ],
            "n_more": len(rest),
            "more": _sum_devices(owned for _, _, owned in rest),
        }

    def _open(self, number: int) -> range:
        node, group = self._nodes[number]
        first = len(self._nodes)
        self._nodes.extend((part, group) for part in node.open())
        return range(first, len(self._nodes))

    def _describe_row(self, number: int) -> Message:
        group = self._groups[number]
        is_one = len(group.entries) == 1
        steps = group.entries[0][0] if is_one else ()
        return {
            "node": number,
            "label": group.name,
            "is_variable": group.is_variable,
            "remark": group.remark,
            # A single storage's place is told with the row: there is nothing to choose from.
            "hint": "" if group.is_path else _HINTS.get(group.name, ""),
            "path": "".join([group.name, *steps] if group.is_path else steps) if steps else "",
            "has_parts": not is_one and any(each for each, _ in group.entries),
            **_describe([owned for _, owned in group.entries], group),
        }

    def _describe_part(self, number: int) -> Message:
        node, group = self._nodes[number]
        return {
            "node": number,
            "label": node.label,
            "n_alike": node.n_alike,
            "each": node.each_bytes if node.n_alike else None,
            # To try it out with very many takes longer than a click may.
            "has_parts": len(node.entries) > _MOST_TRIED or bool(node.open()),
            **_describe([owned for _, owned in node.entries], group),
        }


def _describe(owned: list[Owned], group: Group) -> Message:
    """Return the fields that rows, parts and storages have in common."""
    kinds: dict[str, int] = {}
    for each in owned:
        kind = name_one_kind(each.kind, each.device)
        kinds[kind] = kinds.get(kind, 0) + each.n_bytes
    rows = dict.fromkeys(row for each in owned for row in each.rows if row != group.name)
    places = dict.fromkeys(each.allocated_at for each in owned if each.allocated_at is not None)
    return {
        "owns": _sum_devices(owned),
        "kinds": sorted(kinds, key=lambda kind: -kinds[kind])[:_MOST_WORDS],
        "shared_with": list(rows)[:_MOST_WORDS],
        "n_sharing": len(rows),
        "held_elsewhere": any(each.held_elsewhere for each in owned),
        "allocated_at": list(places)[:_MOST_WORDS],
    }


def _sum_devices(owned: Iterable[Owned]) -> list[list[object]]:
    sums: dict[str, int] = {}
    for each in owned:
        sums[each.device] = sums.get(each.device, 0) + each.n_bytes
    return [[device, n_bytes] for device, n_bytes in sums.items()]
