"""Open the account of owners in the variables tab, row by row and part by part.

The page gets the rows with the account, and the parts of a row when it is opened, a bounded number
at a time: ten thousand storages are never sent at once. What is opened here are records, so it is
answered also while a cell runs; the user's objects are looked at only to take the account.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterable, Sequence

from gpumemwidget.model.ownership import MemoryAccount
from gpumemwidget.report.account import word_account_note
from gpumemwidget.report.account_tree import Node, Row, list_rows
from gpumemwidget.report.render.wording import name_one_kind
from gpumemwidget.widgets.page import MOST_VARIABLES, Message, describe_variables

#: Rows and parts in one message, but for the user's names; for more parts the page asks.
_MOST_ROWS = 500
_MOST_PARTS = 100
#: Paths that are shown of those that a text is found in.
_MOST_FOUND = 200
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
        #: By number, each with the row that it is a part of; the rows come first.
        self._nodes = list_rows(owned for device in account.devices for owned in device.owned)
        self._n_rows = len(self._nodes)
        self._parts: dict[int, range] = {}
        self._lock = threading.Lock()

    def describe(self) -> Message:
        """Return the account with its rows, and the user's variables as of the same moment."""
        account = self._account
        names = {variable.name for variable in account.variables[:MOST_VARIABLES]}
        last = self._n_rows - 1
        listed: list[int] = []
        rest: list[Node] = []
        for number, (row, node) in enumerate(self._nodes[: self._n_rows]):
            if number < _MOST_ROWS or row.name in names or number == last:
                listed.append(number)
            else:
                rest.append(node)
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
            **_describe_rest(rest),
            **describe_variables(account.variables),
            "is_complete": account.is_complete,
            "duration_s": account.duration_s,
            "notes": [word_account_note(note) for note in account.notes],
        }

    def describe_parts(self, number: int, start: int = 0) -> Message:
        """Return the parts of a node, the largest first, but for ``start`` that the page has."""
        with self._lock:
            parts = self._parts.get(number)
            if parts is None:
                row, node = self._nodes[number]
                first = len(self._nodes)
                self._nodes.extend((row, part) for part in node.open())
                parts = self._parts[number] = range(first, len(self._nodes))
            shown, rest = parts[start : start + _MOST_PARTS], parts[start + _MOST_PARTS :]
            return {
                "key": self.key,
                "node": number,
                "start": start,
                "parts": [self._describe_part(part) for part in shown],
                **_describe_rest([self._nodes[part][1] for part in rest]),
            }

    def find(self, text: str) -> Message:
        """Return the storages whose path contains ``text`` in any case, the biggest first."""
        wanted = text.casefold()
        found = [
            (number, row, Node("".join(entry[0]), [entry]))
            for number, (row, node) in enumerate(self._nodes[: self._n_rows])
            for entry in node.entries
            if wanted in (row.name + "".join(entry[0])).casefold()
        ]
        found.sort(key=lambda each: -each[2].n_bytes)
        return {
            "key": self.key,
            "text": text,
            "found": [
                {"row": number, "label": node.label, **_describe(node, row)}
                for number, row, node in found[:_MOST_FOUND]
            ],
            **_describe_rest([node for _, _, node in found[_MOST_FOUND:]]),
        }

    def _describe_row(self, number: int) -> Message:
        row, node = self._nodes[number]
        is_one = len(node.entries) == 1
        path = "".join(node.entries[0][0]) if is_one else ""
        return {
            "node": number,
            "label": row.name,
            "is_variable": row.is_variable,
            "remark": row.remark,
            # A single storage's place is told with the row: there is nothing to choose from.
            "hint": "" if row.is_path else _HINTS.get(row.name, ""),
            "path": row.name + path if row.is_path and path else path,
            "has_parts": node.has_parts and not is_one,
            **_describe(node, row),
        }

    def _describe_part(self, number: int) -> Message:
        row, node = self._nodes[number]
        return {
            "node": number,
            "label": node.label,
            "n_alike": node.n_alike,
            "each": node.each_bytes,
            "has_parts": node.has_parts,
            **_describe(node, row),
        }


def _describe(node: Node, row: Row) -> Message:
    """Return the fields that rows, parts and storages have in common."""
    names = [name for name in node.rows if name != row.name]
    devices = [owned.device for _, owned in node.entries]
    kinds = dict.fromkeys(name_one_kind(kind, devices[0]) for kind in node.kinds)
    return {
        "owns": _sum_devices([node]),
        "kinds": list(kinds)[:_MOST_WORDS],
        "shared_with": names[:_MOST_WORDS],
        "n_sharing": len(names),
        "held_elsewhere": node.is_held_elsewhere,
        "allocated_at": list(node.places)[:_MOST_WORDS],
    }


def _describe_rest(nodes: Sequence[Node]) -> Message:
    """Return how many nodes are left out, and their bytes."""
    return {"n_more": len(nodes), "more": _sum_devices(nodes)}


def _sum_devices(nodes: Iterable[Node]) -> list[list[object]]:
    sums: Counter[str] = Counter()
    for _, owned in (entry for node in nodes for entry in node.entries):
        sums[owned.device] += owned.n_bytes
    return [[device, n_bytes] for device, n_bytes in sums.items()]
