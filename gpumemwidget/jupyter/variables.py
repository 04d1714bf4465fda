"""The variables panel's kernel side: the list, the account, the sum of what is ticked, the release.

All four walk or change the user's objects, so all wait until no cell is running, and run on the
main thread: on ipykernel 7 a message may arrive on a thread of its own, beside the running cell.
After a cell only the list is made anew; the account is taken when it is asked for. A Ctrl-C while
one of them is at work is meant for it, for no cell runs then.

What they need is imported when it is first used, so that the dashboard opens sooner.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from IPython.core.getipython import get_ipython

from gpumemwidget.jupyter.messages import Message, describe_failure, describe_holdings
from gpumemwidget.measure.monitor import Monitor
from gpumemwidget.owners.base import Shell

if TYPE_CHECKING:
    from gpumemwidget.jupyter.tree import AccountTree

__all__ = ["VariablesPanel", "schedule_on_main"]

#: Cells often come in a row (Run All): the list is made when they have paused.
_PAUSE_S = 0.3


def schedule_on_main(action: Callable[[], None], delay_s: float = 0.0) -> None:
    """Run ``action`` on the kernel's main thread, between its messages.

    At once where this is the main thread and no delay is asked for, and where there is no kernel.
    """
    loop = _find_loop()
    if loop is None or (not delay_s and threading.current_thread() is threading.main_thread()):
        action()
    elif delay_s:
        loop.add_callback(loop.call_later, delay_s, action)
    else:
        loop.add_callback(action)


def _find_loop() -> Any | None:
    """The event loop of the kernel's main thread, if there is a kernel."""
    kernel = getattr(get_ipython(), "kernel", None)
    return getattr(kernel, "io_loop", None)


class VariablesPanel:
    """Lists, sums and releases for the views.

    Args:
        monitor: says when no cell runs.
        shell: IPython's names and references.
        send: sends a message to all views.
        guard: runs an action and shows its failure in the views.
        schedule: runs an action on the main thread, after a delay.
    """

    def __init__(
        self,
        monitor: Monitor,
        shell: Shell,
        send: Callable[[Message], None],
        *,
        guard: Callable[[Callable[[], None]], None],
        schedule: Callable[[Callable[[], None], float], None] = schedule_on_main,
    ) -> None:
        self._monitor = monitor
        self._shell = shell
        self._send = send
        self._guard = guard
        self._schedule = schedule
        self._lists_soon = False
        self._takes_account = False
        #: The report of a release that no page has shown yet: it may have been loaded anew.
        self._unseen: Message | None = None
        self._tree: AccountTree | None = None
        #: Whether something may have changed since it was taken.
        self._tree_is_old = False

    def note_change(self) -> None:
        """A cell has run: what stands in the account was true before it."""
        self._tree_is_old = True

    def list_soon(self, delay_s: float = 0.0) -> None:
        """Send the list as soon as no cell runs; several wishes are one."""
        if self._lists_soon:
            return
        self._lists_soon = True
        self._schedule(lambda: self._monitor.when_idle(self._list), delay_s)

    def list_after_cell(self) -> None:
        """Send the list when the cells have paused."""
        self.list_soon(_PAUSE_S)

    def account_soon(self) -> None:
        """Take the account when no cell runs, and send it; several wishes are one.

        The views are told how far it is.
        """
        if self._monitor.running is not None:
            self._send({"kind": "account", "state": "queued"})
        if not self._takes_account:
            self._takes_account = True
            self._act(self._take_account)

    def send_parts(self, *, key: int, node: int, start: int) -> None:
        """Send what a row or a part of the account consists of."""
        if self._tree is not None and self._tree.key == key:
            self._send({"kind": "parts", **self._tree.describe_parts(node, start)})

    def send_found(self, *, key: int, text: str) -> None:
        """Send the paths of the account that a text is found in."""
        if self._tree is not None and self._tree.key == key:
            self._send({"kind": "found", **self._tree.find(text)})

    def sum_soon(self, *, request: str, names: Sequence[str]) -> None:
        """Send what the release of exactly these rows would free."""
        self._act(lambda: self._sum(request, names))

    def release_soon(self, *, request: str, names: Sequence[str], keep: bool) -> None:
        """Release these rows when no cell runs, and send the report."""
        if self._monitor.running is not None:
            self._send({"kind": "release", "id": request, "state": "queued"})
        self._act(lambda: self._release(request, names, keep=keep))

    def note_seen(self, *, request: str) -> None:
        """A page has shown what came of a release."""
        if self._unseen is not None and self._unseen["id"] == request:
            self._unseen = None

    def send_unseen(self) -> None:
        """Send again what came of a release, if no page has shown it."""
        if self._unseen is not None:
            self._send(self._unseen)

    def _act(self, action: Callable[[], None]) -> None:
        self._schedule(lambda: self._monitor.when_idle(lambda: self._guard(action)), 0.0)

    def _list(self) -> None:
        self._lists_soon = False
        self._guard(self._send_list)

    def _send_list(self) -> None:
        from gpumemwidget.owners.holdings import list_holdings  # noqa: PLC0415 - see the top

        rows = describe_holdings(list_holdings(self._shell))
        self._send({"kind": "variables", **rows, "account_is_old": self._tree_is_old})

    def _take_account(self) -> None:
        from gpumemwidget.jupyter.tree import AccountTree  # noqa: PLC0415 - see the top
        from gpumemwidget.owners.entries import take_memory_account  # noqa: PLC0415

        self._takes_account = False
        self._send({"kind": "account", "state": "running"})
        try:
            tree = AccountTree(take_memory_account(self._shell, self._monitor.hardware))
            described = tree.describe()
        except (Exception, KeyboardInterrupt) as exc:  # noqa: BLE001 - shown where the click was
            answer = {"kind": "account", "state": "failed", "message": describe_failure(exc)}
            self._send(answer)
            return
        self._tree, self._tree_is_old = tree, False
        self._send({"kind": "account", "state": "done", **described})

    def _sum(self, request: str, names: Sequence[str]) -> None:
        from gpumemwidget.owners.holdings import sum_frees  # noqa: PLC0415 - see the top

        answer: Message = {"kind": "sum", "id": request, "frees": []}
        try:
            answer["frees"] = [list(pair) for pair in sum_frees(self._shell, names)]
        except (Exception, KeyboardInterrupt) as exc:  # noqa: BLE001 - a view waits for an answer
            # Most often a name is gone since the list was made; the next list will not have it.
            answer["error"] = describe_failure(exc)
        self._send(answer)

    def _release(self, request: str, names: Sequence[str], *, keep: bool) -> None:
        from gpumemwidget.owners.plan import plan_release  # noqa: PLC0415 - see the top
        from gpumemwidget.owners.release import apply_release  # noqa: PLC0415
        from gpumemwidget.report.report import report_release  # noqa: PLC0415

        answer: Message = {"kind": "release", "id": request}
        self._send({**answer, "state": "running"})
        self.note_change()
        try:
            hardware = self._monitor.hardware
            plan = plan_release(self._shell, hardware, names, keep=keep)
            report = apply_release(plan, self._shell, hardware)
            answer.update(state="done", html=report_release(report).html)
        except (Exception, KeyboardInterrupt) as exc:  # noqa: BLE001 - shown where the click was
            answer.update(state="failed", message=describe_failure(exc))
        self._guard(self._read_now)
        # The list first, so that no row of what is gone stands beside the report.
        self._guard(self._send_list)
        self._unseen = answer
        self._send(answer)

    def _read_now(self) -> None:
        """The plot shows what the release did, also where nothing else is sampled just now."""
        self._monitor.read_now()
