"""The card of an OOM in the notebook.

It is static HTML, so that a saved notebook, a page without a kernel and a reloaded one all show it
whole. Where there is a kernel, its buttons come to it (``oombuttons.py``).
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from gpumemwidget.report.oom import report_oom
from gpumemwidget.traces import OomCard

if TYPE_CHECKING:
    from gpumemwidget.jupyter.extension import Extension
    from gpumemwidget.jupyter.oombuttons import CardButtons

__all__ = ["show_card"]


def show_card(card: OomCard, extension: Extension) -> None:
    """Show a card in the cell that runs, or has just ended."""
    from IPython.display import display  # noqa: PLC0415 - only where something is shown

    name = f"gmw-oom-{uuid.uuid4().hex[:12]}"
    report = report_oom(card, name=name)
    display(report)  # type: ignore[no-untyped-call]
    if any(way.can_do for way in card.ways) and hasattr(extension.ipython, "kernel"):
        try:
            _find_buttons(extension).add(name, card)
        except Exception as exc:  # noqa: BLE001 - the card stands, with the commands to type
            extension.report_failure("adding buttons to the card of an OOM", exc)


def _find_buttons(extension: Extension) -> CardButtons:
    from gpumemwidget.jupyter.oombuttons import CardButtons  # noqa: PLC0415 - brings ipywidgets

    if extension.card_buttons is None:
        extension.card_buttons = CardButtons(
            extension.monitor, extension.shell, on_release=extension.note_change
        )
    return extension.card_buttons
