"""Show a card under each cell that ends with an OOM."""

from __future__ import annotations

import linecache
import uuid
from dataclasses import replace
from typing import Any

from IPython.core.getipython import get_ipython
from IPython.display import display

from gpumemwidget.model.cells import CellRecord
from gpumemwidget.model.ooms import OomCard
from gpumemwidget.oom.detection import OomSign, find_oom
from gpumemwidget.session.oom_watch import EndedRun, OomWatch
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
    """Show a card in the cell that runs, or has just ended.

    The card is static HTML, so that a saved notebook, a page without a kernel and a reloaded one
    all show it whole. Where there is a kernel, the page puts buttons into it.
    """
    from gpumemwidget.report.oom import report_oom  # noqa: PLC0415

    name = f"gmw-oom-{uuid.uuid4().hex[:12]}"
    display(report_oom(card, name=name))  # type: ignore[no-untyped-call]
    if hasattr(get_ipython(), "kernel") and any(way.can_do for way in card.ways):
        with session.reporting("adding buttons to the card of an OOM"):
            from gpumemwidget.widgets.oom_buttons import CardButtons  # noqa: PLC0415 - brings ipywidgets

            ways = {row: way for row, way in enumerate(card.ways) if way.can_do}
            session.attach(CardButtons).add(name, ways, card.event.device, card.event)


def _find_sign(result: Any) -> OomSign | None:
    """Return the OOM that a run's error tells of."""
    return None if result is None else find_oom(result.error_in_exec)


def _find_source(cells: dict[str, int], number: int | None) -> str:
    """Return a cell as it was compiled, its magics made calls; ``""`` if IPython forgot it."""
    names = [name for name, cell_number in cells.items() if cell_number == number]
    return "".join(linecache.getlines(names[-1])) if names else ""
