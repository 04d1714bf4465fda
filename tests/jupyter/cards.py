"""Cards with buttons."""

from __future__ import annotations

from gpumemwidget.model.ooms import OomCard
from gpumemwidget.widgets.oom_buttons import CardButtons

__all__ = ["add_card"]


def add_card(buttons: CardButtons, name: str, card: OomCard) -> None:
    """Give the card of an OOM its buttons, as the extension does."""
    rows = enumerate((*card.listed_ways, None))
    ways = {row: way for row, way in rows if way is None or way.can_do}
    buttons.add(name, ways, card.event.device, card.event)
