"""Show what grows: a card under the cell that keeps more with each run or step.

A model's old value that takes memory beside the new one is reported there, too.
"""

from __future__ import annotations

import uuid

from IPython.core.getipython import get_ipython
from IPython.core.interactiveshell import InteractiveShell
from IPython.display import DisplayHandle, display

from gpumemwidget.model.leaks import Leak, Rebinding
from gpumemwidget.session.leak_watch import LeakWatch
from gpumemwidget.session.rebinds import RebindWatch
from gpumemwidget.session.session import Session

#: Maximum number of cards that are kept up to date.
_MAX_CARDS = 20


class LeakCards:
    """Shows each leak that a session finds.

    What is found while a cell runs is shown at once, and its card is updated until the cell's
    end. What is found at the end is shown below what the cell has displayed.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._watch = session.attach(LeakWatch)
        self._watch.found.add(self._note)
        self._watch.updated.add(self._update)
        session.released.add(self._mark_released)
        self._waiting: list[Leak] = []
        #: The newest cards, with the class of each.
        self._cards: dict[Leak, tuple[DisplayHandle, str]] = {}
        self._rebinds = session.attach(RebindWatch)
        self._rebindings: list[Rebinding] = []
        self._rebinds.found.add(self._rebindings.append)

    def open(self) -> None:
        """Begin to follow cells."""
        self._watch.open(InteractiveShell.run_code.__code__)
        self._rebinds.open()

    def end(self) -> None:
        """Show what was found at a cell's end."""
        waiting, self._waiting = self._waiting, []
        for leak in waiting:
            self._show(leak)
        while self._rebindings:
            self._show_rebinding(self._rebindings.pop(0))

    def _note(self, leak: Leak) -> None:
        if self._session.monitor.running is None:
            self._waiting.append(leak)
        else:
            self._show(leak)

    def _show(self, leak: Leak) -> None:
        from gpumemwidget.report.leaks import find_release, report_leak  # noqa: PLC0415 - when needed

        name = f"gmw-leak-{uuid.uuid4().hex[:12]}"
        card = display(report_leak(leak, name=name), display_id=True)  # type: ignore[no-untyped-call]
        if card is not None:  # There is none in a plain Python.
            self._cards[leak] = card, name
            while len(self._cards) > _MAX_CARDS:
                del self._cards[next(iter(self._cards))]
        release = find_release(leak)
        if release is not None and hasattr(get_ipython(), "kernel"):
            with self._session.reporting("adding a button to the card of a leak"):
                from gpumemwidget.widgets.oom_buttons import CardButtons  # noqa: PLC0415 - brings ipywidgets

                self._session.attach(CardButtons).add(name, {1: release}, leak.device)

    def _update(self, change: tuple[Leak, Leak]) -> None:
        from gpumemwidget.report.leaks import report_leak  # noqa: PLC0415 - when needed

        known, leak = change
        if known in self._cards:
            card, name = self._cards[leak] = self._cards.pop(known)
            card.update(report_leak(leak, name=name))  # type: ignore[no-untyped-call]

    def _mark_released(self, _: object) -> None:
        """Grey the cards of leaks whose variables were released."""
        from gpumemwidget.report.leaks import find_release, report_leak  # noqa: PLC0415 - when needed

        namespace = self._session.shell.user_ns
        for leak, (card, name) in list(self._cards.items()):
            release = find_release(leak)
            names = () if release is None else release.names
            if names and all(namespace.get(variable) is None for variable in names):
                del self._cards[leak]
                report = report_leak(leak, name=name, released=names)
                card.update(report)  # type: ignore[no-untyped-call]

    def _show_rebinding(self, rebinding: Rebinding) -> None:
        from gpumemwidget.report.leaks import report_rebinding  # noqa: PLC0415 - when needed

        if rebinding.name not in self._watch.list_ignored():
            display(report_rebinding(rebinding))  # type: ignore[no-untyped-call]
