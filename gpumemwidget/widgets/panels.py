"""Serve the tabs that walk the user's objects, for when no cell runs: Variables and Device.

**Variables**: the list, the account, what holds a name, what is ticked, the release. All of them
walk or change the user's objects, so all wait until no cell is running, and run on the main thread:
on ipykernel 7 a message may arrive on a thread of its own, beside the running cell. After a cell
only the list is made anew; the account is taken when it is asked for. A Ctrl-C while one of them is
at work is meant for it, for no cell runs then. The page gets the rows with the account, and the
parts of a row when it is opened, a bounded number at a time: ten thousand storages are never sent
at once. What is opened are records, so it is answered also while a cell runs.

**Device**: whole devices in parts, the map of each, its use over time, and children. The parts are
computed while a view shows them. The drivers are asked once a second, also while a cell runs: over
about that long they average how busy a GPU is. Then the processes below this one are listed too, if
a view shows them. A device in view goes out as its static report. ``js/device.js`` reads these
messages.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict
from functools import partial

from gpumemwidget.model.breakdowns import Breakdown
from gpumemwidget.model.devices import HOST, ChildProcess, DeviceState, find_outside_bytes
from gpumemwidget.model.ownership import MemoryAccount, Variable
from gpumemwidget.model.releases import ReleaseRequest
from gpumemwidget.recording.monitor import Monitor
from gpumemwidget.report.account import Node, Row, list_rows, word_account_note
from gpumemwidget.report.devices import report_breakdown
from gpumemwidget.report.release import report_explanation, report_release
from gpumemwidget.report.render.wording import name_one_kind, word_driver_failure
from gpumemwidget.session.whole_devices import DeviceBreakdowns
from gpumemwidget.widgets.page import CELL_PAUSE_S, Message, Page, attempt, describe_failure
from gpumemwidget.widgets.progress_line import pass_progress

# -- Variables -------------------------------------------------------------------------------------


#: Seconds that the search for what ticked rows free together may take.
_SUM_BUDGET_S = 2.0
#: Maximum number of variables in a message: a page takes seconds to lay out more.
_MOST_VARIABLES = 500
_MOST_PARTS = 100
#: Paths that are shown of those that a text is found in.
_MOST_FOUND = 200
#: Kinds, names and lines that are shown of one node.
_MOST_WORDS = 4

#: Hints how to free rows that can't be ticked.
_HINTS = {
    "cuBLAS workspace": "%memrelease --cublas frees it",
    "compile cache": "torch._dynamo.reset() frees it",
}

_keys = itertools.count(1)


class VariablesPanel:
    """Lists, sums and releases for the views."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._session = page.session
        self._lists_soon = False
        self._takes_account = False
        self._tree: AccountTree | None = None
        #: True if something may have changed since the account was taken.
        self._tree_is_old = False

    def note_change(self) -> None:
        """Mark the account as old: a cell has run, or something was released."""
        self._tree_is_old = True

    def list_soon(self, delay_s: float = 0.0) -> None:
        """Send the list as soon as no cell runs; several requests are answered once."""
        if self._lists_soon:
            return
        self._lists_soon = True
        self._page.run_when_idle(self._list, delay_s)

    def account_soon(self) -> None:
        """Take the account when no cell runs, and send it; several requests are answered once.

        The views show how far it is.
        """
        if not self._takes_account:
            self._takes_account = True
            self._answer_soon({"kind": "account"}, self._take_account)

    def send_parts(self, request: Message) -> None:
        """Send the parts of a row, or of a part, of the account."""
        if self._tree is not None and self._tree.key == request["key"]:
            parts = self._tree.describe_parts(request["node"], request["start"])
            self._page.send({"kind": "parts", **parts})

    def send_found(self, request: Message) -> None:
        """Send the paths of the account that contain a text."""
        if self._tree is not None and self._tree.key == request["key"]:
            self._page.send({"kind": "found", **self._tree.find(request["text"])})

    def sum_soon(self, request: Message) -> None:
        """Send what the release of exactly these rows would free."""
        self._page.run_when_idle(partial(self._sum, request))

    def explain_soon(self, request: Message) -> None:
        """Send what holds the memory of a name, when no cell runs."""
        self._answer_soon({"kind": "why", "id": request["id"]}, partial(self._explain, request))

    def release_soon(self, request: Message) -> None:
        """Release rows when no cell runs, and send the report."""
        answer = {"kind": "release", "id": request["id"]}
        self._answer_soon(answer, partial(self._release, request), self._show_release)

    def _answer_soon(
        self,
        answer: Message,
        work: Callable[[], Message],
        finish: Callable[[], object] = lambda: None,
    ) -> None:
        """Work on an answer when no cell runs; the views show meanwhile how far it is."""
        if self._session.monitor.running is not None:
            self._page.send({**answer, "state": "queued"})
        self._page.run_when_idle(partial(self._answer, answer, work, finish))

    def _answer(
        self, answer: Message, work: Callable[[], Message], finish: Callable[[], object]
    ) -> None:
        def show(words: str) -> None:
            self._page.send({**answer, "state": "running", "progress": words})

        def work_in_sight() -> Message:
            with pass_progress(show):
                return work()

        self._page.send({**answer, "state": "running"})
        outcome = attempt(work_in_sight)
        finish()
        self._page.send({**answer, **outcome})

    def _list(self) -> None:
        if not self._lists_soon:
            return  # A release has sent the list meanwhile.
        self._lists_soon = False
        variables = self._session.variables()
        rows = _describe_variables(variables)
        self._page.send({"kind": "variables", **rows, "account_is_old": self._tree_is_old})

    def _take_account(self) -> Message:
        self._takes_account = False
        tree = AccountTree(self._session.owners())
        described = tree.describe()
        self._tree, self._tree_is_old = tree, False
        return described

    def _sum(self, request: Message) -> None:
        answer: Message = {"kind": "sum", "id": request["id"]}
        try:
            # The view says meanwhile that it is counted.
            with pass_progress(lambda _words: None):
                found = self._session.sum_frees(
                    request["names"], keep=request["keep"], budget_s=_SUM_BUDGET_S
                )
            answer.update(asdict(found))
        except (Exception, KeyboardInterrupt) as exc:  # noqa: BLE001 - a view waits for an answer
            # Most often a name is gone since the list was made; the next list will not have it.
            answer["error"] = describe_failure(exc)
        self._page.send(answer)

    def _explain(self, request: Message) -> Message:
        return {"html": report_explanation(self._session.why(request["name"])).html}

    def _release(self, request: Message) -> Message:
        # The list that follows the release is sent with its report.
        self._lists_soon = True
        # The report itself says if a Ctrl-C came after the first change.
        asked = ReleaseRequest(tuple(request["names"]), keep=request["keep"])
        return {"html": report_release(self._session.release(asked)).html}

    def _show_release(self) -> None:
        # The plot shows what the release did, also if nothing else is sampled just now.
        self._page.guard(self._session.monitor.read_now)
        # Before the report, so that no row of what is gone stands beside it.
        self._page.guard(self._list)


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
        names = {variable.name for variable in account.variables[:_MOST_VARIABLES]}
        last = self._n_rows - 1
        listed: list[int] = []
        rest: list[Node] = []
        for number, (row, node) in enumerate(self._nodes[: self._n_rows]):
            # As many as variables, for the same reason; the user's names are all sent.
            if number < 500 or row.name in names or number == last:
                listed.append(number)
            else:
                rest.append(node)
        return {
            "key": self.key,
            "devices": [
                {
                    "device": part.device,
                    "allocated": part.allocated_bytes,
                    "sum": sum(owned.n_bytes for owned in part.owned),
                }
                for part in account.devices
            ],
            "rows": [self._describe_row(number) for number in listed],
            **_describe_rest(rest),
            **_describe_variables(account.variables),
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
            # A single storage's place stands in its row: there is nothing to choose from.
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


def _describe_variables(variables: Sequence[Variable]) -> Message:
    return {
        "variables": [asdict(variable) for variable in variables[:_MOST_VARIABLES]],
        "n_more_variables": max(0, len(variables) - _MOST_VARIABLES),
    }


# -- Devices ---------------------------------------------------------------------------------------


#: Maximum number of children in a message.
_MAX_CHILDREN = 50


class DevicePanel:
    """Sends whole devices to the views; ``list_seen`` returns those that visible views show."""

    def __init__(self, page: Page, *, list_seen: Callable[[], Collection[str]]) -> None:
        self._session = page.session
        self._monitor = page.session.monitor
        self._send = page.send
        self._run_when_idle = page.run_when_idle
        self._list_seen = list_seen
        self._looks_soon = False
        self._children: Message | None = None

    def look_soon(self) -> None:
        """Send the devices as soon as no cell runs; several requests are answered once."""
        if self._monitor.running is not None:
            self._send({"kind": "device", "state": "queued"})
        self._look_in(0.0)
        self._children = None
        self.send_children()

    def note_change(self) -> None:
        """Send the devices when the cells have paused, if somebody looks."""
        if self._list_seen():
            self._look_in(CELL_PAUSE_S)

    def send_children(self) -> None:
        """Send the processes below this one, if somebody looks and one is new; on any thread."""
        if not self._list_seen():
            return
        message: Message = {
            "kind": "live",
            **describe_children(self._monitor.hardware.list_children()),
        }
        if message != self._children:
            self._children = message
            self._send(message)

    def _look_in(self, delay_s: float) -> None:
        if self._looks_soon and delay_s:
            return
        self._looks_soon = True
        self._run_when_idle(self._look, delay_s)

    def _look(self) -> None:
        # Two requests may be queued; the first look has answered both.
        is_due, self._looks_soon = self._looks_soon, False
        devices = self._list_seen()
        # None is seen if the tab was closed meanwhile; opening it asks again.
        if not is_due or not devices:
            return
        self._send({"kind": "device", "state": "running"})
        self._send({"kind": "device", **attempt(partial(self._describe, devices))})

    def _describe(self, devices: Collection[str]) -> Message:
        # It is asked after each cell while somebody looks, and the next cell waits for it.
        taken = self._session.breakdown(budget_s=0.5)
        return {
            "wall_s": self._monitor.clock.wall(),
            "breakdowns": [
                _describe_breakdown(record, taken, is_seen=record.device in devices)
                for record in taken.records
            ],
        }


class DeviceUseHistory:
    """The drivers' figures of whole devices over time, sent to the views."""

    def __init__(
        self, monitor: Monitor, send: Callable[[Message], None], *, is_seen: Callable[[], bool]
    ) -> None:
        self._monitor = monitor
        self._send = send
        self._is_seen = is_seen
        self._asked_s: float | None = None
        self._now: list[Message] = []
        #: For each moment its time, and for each GPU the bytes in use, how busy it was, and the
        #: bytes that this process had there outside PyTorch. A page that joins gets them all: at
        #: least a quarter of an hour, as the drivers are asked at most once a second.
        self._moments: deque[tuple[float, dict[str, list[int | None]]]] = deque(maxlen=900)
        self._lock = threading.Lock()

    def send(self) -> bool:
        """Send the drivers' figures if they are due, and return whether they were sent."""
        is_due = self._is_seen() and self._ask()
        if is_due:
            self._send({"kind": "use", "time_s": self._asked_s, "devices": self._now})
        return is_due

    def describe(self) -> Message:
        """Return what a page that joins needs: the newest figures, and those before."""
        self._ask()
        with self._lock:
            moments = list(self._moments)
        return {"devices": self._now, "moments": [list(moment) for moment in moments]}

    def _ask(self) -> bool:
        """Ask the drivers if a second has passed; return whether it has."""
        now_s = self._monitor.clock.now()
        with self._lock:
            # A sampler's tick may be early.
            if self._asked_s is not None and now_s - self._asked_s < 0.95:
                return False
            self._asked_s = now_s
        hardware = self._monitor.hardware
        own = dict(self._monitor.read_own_uses())
        states = hardware.read_devices()
        devices = [_describe_use(state, own.get(state.info.device)) for state in states]
        moment = {
            use["device"]: [use["used"], use["busy"], use["outside"]]
            for use in devices
            if use["device"] != HOST and use["used"] is not None
        }
        with self._lock:
            self._now = devices
            self._moments.append((now_s, moment))
        return True


# -- Messages --------------------------------------------------------------------------------------


def _describe_use(state: DeviceState, own_bytes: int | None) -> Message:
    """Describe a device with what its driver says of it now, and of this process there."""
    use, info, reading = state.use, state.info, state.reading
    reserved_bytes = 0 if reading is None else reading.reserved_bytes
    return {
        "device": info.device,
        "name": info.name,
        "total": (use and use.total_bytes) or info.total_bytes,
        # By PyTorch, or by another library of this process.
        "is_touched": reading is not None or bool(own_bytes),
        "own": own_bytes,
        "outside": find_outside_bytes(own_bytes, reserved_bytes),
        "used": None if use is None else use.used_bytes,
        "free": None if use is None else use.free_bytes,
        "busy": None if use is None else use.utilization_percent,
        # Read at the moment of the driver's figures, which this process's counters outrun.
        "reserved": reading and reading.reserved_bytes,
        "note": word_driver_failure(use.device, use.failure) if use and use.failure else "",
    }


def _describe_breakdown(breakdown: Breakdown, taken: DeviceBreakdowns, *, is_seen: bool) -> Message:
    return {
        "device": breakdown.device,
        # Then nobody knows which of this notebook's children are on it.
        "hides_children": any("children" in part.merged for part in breakdown.parts),
        "html": report_breakdown([breakdown], maps=taken.maps, notes=taken.notes).html
        if is_seen
        else None,
    }


def describe_children(children: Sequence[ChildProcess]) -> Message:
    """Describe the processes below this one, those with the most memory first."""
    ordered = sorted(children, key=lambda child: (-_weigh(child), child.pid))
    return {
        "children": [
            {
                "pid": child.pid,
                "parent": child.parent_pid,
                "name": child.name,
                "resident": child.resident_bytes,
                "devices": [list(pair) for pair in child.devices],
            }
            for child in ordered[:_MAX_CHILDREN]
        ],
        "n_more_children": max(0, len(ordered) - _MAX_CHILDREN),
    }


def _weigh(child: ChildProcess) -> int:
    # In steps: of resident sizes that are nearly the same none is to overtake the other.
    n_bytes = sum(device_bytes or 0 for _, device_bytes in child.devices) + (
        child.resident_bytes or 0
    )
    return n_bytes.bit_length()
