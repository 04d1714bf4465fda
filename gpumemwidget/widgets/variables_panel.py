"""Serve the variables tab: the list, the account, the sum of what is ticked, and the release.

All four walk or change the user's objects, so all wait until no cell is running, and run on the
main thread: on ipykernel 7 a message may arrive on a thread of its own, beside the running cell.
After a cell only the list is made anew; the account is taken when it is asked for. A Ctrl-C while
one of them is at work is meant for it, for no cell runs then.

What is needed for that is imported when it is first used, so that the dashboard opens sooner.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from gpumemwidget.model.ownership import DeviceBytes
from gpumemwidget.model.requests import ReleaseRequest
from gpumemwidget.session.session import Session
from gpumemwidget.widgets.messages import (
    Message,
    describe_bytes,
    describe_failure,
    describe_joint,
    describe_variables,
)
from gpumemwidget.widgets.panel import CELL_PAUSE_S, Panel
from gpumemwidget.widgets.progress_line import tell_progress

if TYPE_CHECKING:
    from gpumemwidget.widgets.account_tree import AccountTree

__all__ = ["VariablesPanel"]

#: Maximum number of views for which a sum is counted at a time.
_MAX_SUMS = 200


class VariablesPanel(Panel):
    """Lists, sums and releases for the views; see ``Panel`` for its arguments."""

    def __init__(
        self,
        session: Session,
        send: Callable[[Message], None],
        *,
        guard: Callable[[Callable[[], None]], None],
    ) -> None:
        super().__init__(session, send, guard=guard)
        self._lists_soon = False
        self._takes_account = False
        #: The report of a release that no page has shown yet: it may have been loaded anew.
        self._unseen: Message | None = None
        #: The last request of each view for a sum, while it is being counted.
        self._sums: dict[str, str] = {}
        #: Bytes that each row frees by itself, as of the last list.
        self._row_frees: dict[str, DeviceBytes] = {}
        self._tree: AccountTree | None = None
        #: True if something may have changed since the account was taken.
        self._tree_is_old = False

    def note_change(self) -> None:
        """Mark the account as old: a cell has run, or something was released."""
        self._tree_is_old = True
        self._row_frees.clear()

    def list_soon(self, delay_s: float = 0.0) -> None:
        """Send the list as soon as no cell runs; several requests are answered once."""
        if self._lists_soon:
            return
        self._lists_soon = True
        self._run_when_idle(self._list, delay_s)

    def list_after_cell(self) -> None:
        """Send the list when the cells have paused."""
        self.list_soon(CELL_PAUSE_S)

    def account_soon(self) -> None:
        """Take the account when no cell runs, and send it; several requests are answered once.

        The views are told how far it is.
        """
        if self._monitor.running is not None:
            self._send({"kind": "account", "state": "queued"})
        if not self._takes_account:
            self._takes_account = True
            self._run_when_idle(self._take_account)

    def send_parts(self, request: Message) -> None:
        """Send the parts of a row, or of a part, of the account."""
        if self._tree is not None and self._tree.key == request["key"]:
            parts = self._tree.describe_parts(request["node"], request["start"])
            self._send({"kind": "parts", **parts})

    def send_found(self, request: Message) -> None:
        """Send the paths of the account that contain a text."""
        if self._tree is not None and self._tree.key == request["key"]:
            self._send({"kind": "found", **self._tree.find(request["text"])})

    def sum_soon(self, request: Message) -> None:
        """Send what the release of exactly these rows would free.

        If the search for it runs out of time, a lower bound is sent, and then the exact figure as
        soon as longer searches between cells have found it; none is longer than a release's own.
        A view's next request ends the search for its last one.
        """
        from gpumemwidget.ownership.variables import LIST_BUDGET_S  # noqa: PLC0415 - see the top

        view, number, names = request["view"], request["id"], request["names"]
        self._sums.pop(view, None)
        self._sums[view] = number
        while len(self._sums) > _MAX_SUMS:
            del self._sums[next(iter(self._sums))]
        self._run_when_idle(lambda: self._sum(view, number, names, LIST_BUDGET_S))

    def forget_view(self, view: str) -> None:
        """Count nothing more for a view that is closed."""
        self._sums.pop(view, None)

    def release_soon(self, request: Message) -> None:
        """Release rows when no cell runs, and send the report."""
        if self._monitor.running is not None:
            self._send({"kind": "release", "id": request["id"], "state": "queued"})
        self._run_when_idle(lambda: self._release(request))

    def note_seen(self, request: Message) -> None:
        """Note that a page has shown the report of a release."""
        if self._unseen is not None and self._unseen["id"] == request["id"]:
            self._unseen = None

    def send_unseen(self) -> None:
        """Send the report of a release again, if no page has shown it."""
        if self._unseen is not None:
            self._send(self._unseen)

    def _list(self) -> None:
        if not self._lists_soon:
            return  # A release has sent the list meanwhile.
        self._lists_soon = False
        variables = self._session.variables()
        self._row_frees = {row.name: row.frees_bytes for row in variables}
        rows = describe_variables(variables)
        self._send({"kind": "variables", **rows, "account_is_old": self._tree_is_old})

    def _take_account(self) -> None:
        from gpumemwidget.widgets.account_tree import AccountTree  # noqa: PLC0415 - see the top

        self._takes_account = False
        self._send({"kind": "account", "state": "running"})
        try:
            with self._tell_progress({"kind": "account"}):
                tree = AccountTree(self._session.owners())
            described = tree.describe()
        except (Exception, KeyboardInterrupt) as exc:  # noqa: BLE001 - shown where the click was
            answer = {"kind": "account", "state": "failed", "message": describe_failure(exc)}
            self._send(answer)
            return
        self._tree, self._tree_is_old = tree, False
        self._send({"kind": "account", "state": "done", **described})

    def _sum(self, view: str, request: str, names: Sequence[str], budget_s: float) -> None:
        """Search for ``budget_s`` seconds; if that was too short, search again for twice as long.

        Each search begins anew, for a cell may have run in between. A cell that waits has its turn
        between two of them, and a Ctrl-C ends the counting. So does a search that was as long as a
        release would look.
        """
        from gpumemwidget.releasing.plan import RELEASE_BUDGET_S  # noqa: PLC0415

        if self._sums.get(view) != request:
            return
        answer: Message = {"kind": "sum", "id": request, "counting": False}
        bound = DeviceBytes(is_at_least=True).combine_bounds(
            self._row_frees[name] for name in names if name in self._row_frees
        )
        started_s = time.perf_counter()
        try:
            # The view says meanwhile that it is counted.
            with tell_progress(lambda _words: None):
                found = self._session.sum_frees(names, budget_s=budget_s)
            frees_bytes = found.frees_bytes
            answer["frees"] = describe_bytes(frees_bytes.combine_bounds([bound]))
            answer["joint"] = describe_joint(found.joint)
            # Not the time alone may end a search: a longer one would not help then.
            is_out_of_time = time.perf_counter() - started_s > budget_s / 2
            can_be_longer = is_out_of_time and budget_s < RELEASE_BUDGET_S
            answer["counting"] = frees_bytes.is_at_least and can_be_longer
        except KeyboardInterrupt as exc:
            answer.update(frees=describe_bytes(bound), interrupted=describe_failure(exc))
        except Exception as exc:  # noqa: BLE001 - a view waits for an answer
            # Most often a name is gone since the list was made; the next list will not have it.
            answer.update(frees=describe_bytes(bound), error=describe_failure(exc))
        self._send(answer)
        if answer["counting"]:
            longer_s = min(2 * budget_s, RELEASE_BUDGET_S)
            self._run_when_idle(lambda: self._sum(view, request, names, longer_s), CELL_PAUSE_S)
        else:
            self._sums.pop(view, None)

    def _release(self, request: Message) -> None:
        from gpumemwidget.report.release import report_release  # noqa: PLC0415 - see the top

        answer: Message = {"kind": "release", "id": request["id"]}
        self._send({**answer, "state": "running"})
        # The list that follows the release is sent below.
        self._lists_soon = True
        try:
            with self._tell_progress(answer):
                asked = ReleaseRequest(tuple(request["names"]), keep=request["keep"])
                report = self._session.release(asked)
            answer.update(state="done", html=report_release(report).html)
        except KeyboardInterrupt:
            # A Ctrl-C that comes later is told in the report.
            answer.update(state="failed", message="Interrupted: nothing was changed.")
        except Exception as exc:  # noqa: BLE001 - shown where the click was
            answer.update(state="failed", message=describe_failure(exc))
        # The plot shows what the release did, also if nothing else is sampled just now.
        self._guard(self._read_now)
        # The list first, so that no row of what is gone stands beside the report.
        self._guard(self._list)
        self._unseen = answer
        self._send(answer)

    def _tell_progress(self, message: Message) -> AbstractContextManager[None]:
        """Tell the views how far the work in a ``with`` block has got, where the click was."""
        return tell_progress(
            lambda words: self._send({**message, "state": "running", "progress": words})
        )

    def _read_now(self) -> None:
        self._monitor.read_now()
