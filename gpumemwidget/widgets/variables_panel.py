"""Serve the variables tab: the list, the account, the sum of what is ticked, and the release.

All four walk or change the user's objects, so all wait until no cell is running, and run on the
main thread: on ipykernel 7 a message may arrive on a thread of its own, beside the running cell.
After a cell only the list is made anew; the account is taken when it is asked for. A Ctrl-C while
one of them is at work is meant for it, for no cell runs then.

What is needed for that is imported when it is first used, so that the dashboard opens sooner.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import TYPE_CHECKING

from gpumemwidget.model.releases import ReleaseRequest
from gpumemwidget.widgets.page import (
    CELL_PAUSE_S,
    Message,
    Page,
    describe_failure,
    describe_variables,
)
from gpumemwidget.widgets.progress_line import tell_progress

if TYPE_CHECKING:
    from gpumemwidget.widgets.owner_tree import AccountTree

#: Seconds that the search for what ticked rows free together may take.
_SUM_BUDGET_S = 2.0


class VariablesPanel:
    """Lists, sums and releases for the views."""

    def __init__(self, page: Page) -> None:
        self._session = page.session
        self._monitor = page.session.monitor
        self._send = page.send
        self._guard = page.guard
        self._run_when_idle = page.run_when_idle
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
        """Send what the release of exactly these rows would free."""
        self._run_when_idle(lambda: self._sum(request))

    def release_soon(self, request: Message) -> None:
        """Release rows when no cell runs, and send the report."""
        if self._monitor.running is not None:
            self._send({"kind": "release", "id": request["id"], "state": "queued"})
        self._run_when_idle(lambda: self._release(request))

    def _list(self) -> None:
        if not self._lists_soon:
            return  # A release has sent the list meanwhile.
        self._lists_soon = False
        variables = self._session.variables()
        rows = describe_variables(variables)
        self._send({"kind": "variables", **rows, "account_is_old": self._tree_is_old})

    def _take_account(self) -> None:
        from gpumemwidget.widgets.owner_tree import AccountTree  # noqa: PLC0415 - see the top

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

    def _sum(self, request: Message) -> None:
        answer: Message = {"kind": "sum", "id": request["id"]}
        try:
            # The view says meanwhile that it is counted.
            with tell_progress(lambda _words: None):
                found = self._session.sum_frees(
                    request["names"], keep=request["keep"], budget_s=_SUM_BUDGET_S
                )
            answer.update(asdict(found))
        except (Exception, KeyboardInterrupt) as exc:  # noqa: BLE001 - a view waits for an answer
            # Most often a name is gone since the list was made; the next list will not have it.
            answer["error"] = describe_failure(exc)
        self._send(answer)

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
        except (Exception, KeyboardInterrupt) as exc:  # noqa: BLE001 - shown where the click was
            # A Ctrl-C that comes after the first change is told in the report.
            answer.update(state="failed", message=describe_failure(exc))
        # The plot shows what the release did, also if nothing else is sampled just now.
        self._guard(self._monitor.read_now)
        # The list first, so that no row of what is gone stands beside the report.
        self._guard(self._list)
        self._send(answer)

    def _tell_progress(self, message: Message) -> AbstractContextManager[None]:
        """Tell the views how far the work in a ``with`` block has got, where the click was."""
        return tell_progress(
            lambda words: self._send({**message, "state": "running", "progress": words})
        )
