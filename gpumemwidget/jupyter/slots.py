"""Places behind a cell's live chart, kept free for what is to stand there when the cell has ended.

The report of a traced cell is several outputs (a mimebundle is drawn by one renderer), and all of
them belong where the chart was, above what the cell printed meanwhile. An output without text takes
no room in a page; what stands in it later is an update, as it is with the chart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["Slots"]

_NOTHING = {"text/plain": "", "text/html": ""}


class Slots:
    """Outputs that are empty until they are filled.

    Args:
        first: the handle of the output that they stand behind, which is filled first.
        n_more: how many they are.
    """

    def __init__(self, first: Any, n_more: int) -> None:
        from IPython.display import display  # noqa: PLC0415 - only where something is shown

        self._handles = [
            first,
            *(
                display(_NOTHING, raw=True, display_id=True)  # type: ignore[no-untyped-call]
                for _ in range(n_more)
            ),
        ]

    def fill(self, things: Sequence[object]) -> None:
        """Put one thing into each, in order; what is left over stays empty.

        Args:
            things: no more than there are outputs.
        """
        if len(things) > len(self._handles):
            raise ValueError(f"{len(things)} things for {len(self._handles)} outputs")
        for handle, thing in zip(self._handles, things, strict=False):
            handle.update(thing)
