"""Show a card under each cell that ends with an OOM, and under each that keeps more with each run.

A card is static HTML, so that a saved notebook, a page without a kernel and a reloaded one all show
it whole. Where there is a kernel, the page puts buttons into it. A model's old value that takes
memory beside the new one is reported here, too.
"""

from __future__ import annotations

import linecache
import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from IPython.core.getipython import get_ipython
from IPython.core.interactiveshell import InteractiveShell
from IPython.display import DisplayHandle, display

from gpumemwidget.model.cells import CellRecord
from gpumemwidget.model.leaks import Leak, Rebinding
from gpumemwidget.model.ooms import OomCard, OomEvent, Remedy
from gpumemwidget.oom.detection import OomSign, find_oom
from gpumemwidget.report.leaks import (
    find_release,
    list_cuts,
    report_leak,
    report_rebinding,
    word_release,
)
from gpumemwidget.session.leak_watch import LeakWatch
from gpumemwidget.session.oom_watch import EndedRun, OomWatch
from gpumemwidget.session.rebinds import RebindWatch
from gpumemwidget.session.session import Session
from gpumemwidget.tracing.sources import find_cell_sources


class OomCards:
    """Shows a card under each cell that ends with an OOM."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._watch = OomWatch(session.shell, session.hardware, session.report_failure)
        self.open = self._watch.open
        self.close = self._watch.close
        self.start = self._watch.start

    def end_inner(self, result: Any) -> None:
        """Note the OOM of a run within the cell, as ``%%capture`` makes one."""
        self._watch.end_inner(_find_sign(result))

    def end(self, record: CellRecord | None, result: Any) -> None:
        """Show the card of a cell that has ended with an OOM, below its traceback."""
        info = None if result is None else result.info
        source = "" if info is None else info.raw_cell
        card = self._watch.end(_find_sign(result), lambda: self._describe_run(source, record))
        if card is not None:
            predicted = self._session.monitor.expectations.find_remedies(source)
            show_card(replace(card, predicted=predicted), self._session)

    def _describe_run(self, source: str, record: CellRecord | None) -> EndedRun:
        cells = self._session.shell.read_cell_numbers()
        number = None if record is None else record.execution_count
        return EndedRun(
            source, _find_source(cells, number), find_cell_sources(source, number, cells), number
        )


def show_card(card: OomCard, session: Session) -> None:
    """Show the card of an OOM in the cell that runs, or has just ended."""
    from gpumemwidget.report.oom import report_oom  # noqa: PLC0415 - when needed

    session.oom_cards.append(card)
    name = f"gmw-oom-{uuid.uuid4().hex[:12]}"
    display(report_oom(card, name=name))  # type: ignore[no-untyped-call]
    rows = enumerate((*card.listed_ways, None))
    ways = {row: way for row, way in rows if way is None or way.can_do}
    _add_buttons(session, name, ways, card.event.device, card.event)


def _add_buttons(
    session: Session,
    name: str,
    ways: Mapping[int, Remedy | None],
    device: str,
    event: OomEvent | None = None,
) -> None:
    """Give a card its buttons, by its class, where there is a kernel; ``ways`` by their rows."""
    if ways and hasattr(get_ipython(), "kernel"):
        with session.reporting("adding buttons to a card"):
            from gpumemwidget.widgets.oom_buttons import CardButtons  # noqa: PLC0415 - brings ipywidgets

            session.attach(CardButtons).add(name, ways, device, event)


def _find_sign(result: Any) -> OomSign | None:
    """Return the OOM in a run's error."""
    return None if result is None else find_oom(result.error_in_exec)


def _find_source(cells: dict[str, int], number: int | None) -> str:
    """Return a cell as it was compiled, its magics made calls; ``""`` if IPython forgot it."""
    names = [name for name, cell_number in cells.items() if cell_number == number]
    return "".join(linecache.getlines(names[-1])) if names else ""


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
        #: The newest cards, with their classes.
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
        name = f"gmw-leak-{uuid.uuid4().hex[:12]}"
        card = display(report_leak(leak, name=name), display_id=True)  # type: ignore[no-untyped-call]
        if card is not None:  # There is none in a plain Python.
            self._cards[leak] = card, name
            while len(self._cards) > 20:
                del self._cards[next(iter(self._cards))]
        release = find_release(leak)
        commands = [command for _, command in list_cuts(leak)]
        ways = {} if release is None else {commands.index(word_release(release)): release}
        _add_buttons(self._session, name, ways, leak.device)

    def _update(self, change: tuple[Leak, Leak]) -> None:
        known, leak = change
        if known in self._cards:
            card, name = self._cards[leak] = self._cards.pop(known)
            card.update(report_leak(leak, name=name))  # type: ignore[no-untyped-call]

    def _mark_released(self, _: object) -> None:
        """Grey the cards of leaks whose variables were released."""
        namespace = self._session.shell.user_ns
        for leak, (card, name) in list(self._cards.items()):
            release = find_release(leak)
            names = () if release is None else release.names
            if names and all(namespace.get(variable) is None for variable in names):
                del self._cards[leak]
                report = report_leak(leak, name=name, released=names)
                card.update(report)  # type: ignore[no-untyped-call]

    def _show_rebinding(self, rebinding: Rebinding) -> None:
        if rebinding.name not in self._watch.list_ignored():
            display(report_rebinding(rebinding))  # type: ignore[no-untyped-call]
