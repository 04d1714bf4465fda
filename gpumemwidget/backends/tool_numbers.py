"""Take one of the few tool numbers of ``sys.monitoring``, from Python 3.12 on.

What follows loops has one for good; what reads lines, and what records calls of modules, have one
each while they run. They share none: an event that is switched off is so for all of a number.
"""

from __future__ import annotations

import sys
from typing import Any


def find_monitoring() -> Any:
    """Return the module ``sys.monitoring``; ``None`` before Python 3.12."""
    return getattr(sys, "monitoring", None)


def take_tool_number(name: str) -> int | None:
    """Return a number for a tool of that name; ``None`` where others have them all."""
    monitoring = find_monitoring()
    if monitoring is None:
        return None
    # Python reserves 3 and 4 for no kind, and 5 for optimizers, of which there are none.
    for number in (3, 4, 5):
        try:
            monitoring.use_tool_id(number, name)
        except ValueError:
            continue
        return number
    return None
