"""Whether the user's ``clear_output()`` has taken away what a cell displayed before.

Then there is nothing left to update, and what is to be seen must be displayed afresh; displaying it
afresh without need would show it twice, or end a ``clear_output(wait=True)`` too early.
"""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["ClearWatch"]


class ClearWatch:
    """Looks at the messages that a cell publishes, from before our own display on.

    ``clear_output(wait=True)`` takes effect with the next output only. That may be a display, which
    is a message too, or a print, which is not: so from such a call on, and only then, the streams
    are looked at until the first write.

    Args:
        publisher: the kernel's ``ZMQDisplayPublisher``.
    """

    def __init__(self, publisher: Any) -> None:
        self._publisher = publisher
        self._cell: str | None = None
        self._is_cleared = False
        self._is_pending = False
        self._probes: list[_WriteProbe] = []
        publisher.register_hook(self._look)

    def stop(self, *, showed_result: bool) -> bool:
        """Stop watching, and say whether the display is gone.

        Args:
            showed_result: whether the cell ended with a value or a traceback, which are outputs.
        """
        self._publisher.unregister_hook(self._look)
        for probe in self._probes:
            probe.stop()
        was_written = any(probe.was_written for probe in self._probes)
        self._probes.clear()
        return self._is_cleared or (self._is_pending and (was_written or showed_result))

    def _look(self, message: dict[str, Any]) -> dict[str, Any]:
        kind = message["msg_type"]
        cell = message["parent_header"].get("msg_id")
        if self._cell is None and kind == "display_data":
            self._cell = cell  # The first display is our own.
        elif cell == self._cell and not _is_captured(cell):
            if kind == "clear_output":
                self._see_clear(wait=message["content"]["wait"])
            elif kind == "display_data" and self._is_pending:
                self._is_cleared = True
        return message

    def _see_clear(self, *, wait: bool) -> None:
        if not wait:
            self._is_cleared = True
        elif not self._is_pending:
            self._is_pending = True
            self._probes = [_WriteProbe(stream) for stream in (sys.stdout, sys.stderr)]


def _is_captured(cell: str | None) -> bool:
    """Whether an ``ipywidgets.Output`` takes the cell's outputs now, so that it is the one cleared.

    ipywidgets has no public list of its widgets; without the private one the answer is no, and a
    report is then shown once more below.
    """
    module = sys.modules.get("ipywidgets.widgets.widget")
    widgets = list(getattr(module, "_instances", {}).values())
    return any(
        type(widget).__name__ == "Output" and getattr(widget, "msg_id", None) == cell
        for widget in widgets
    )


class _WriteProbe:
    """Notes the first text that is written to a stream, and is gone with it."""

    def __init__(self, stream: Any) -> None:
        self.was_written = False
        self._stream = stream
        self._is_set = True
        try:
            stream.write = self._write
        except AttributeError:
            # Not one of ipykernel's streams (redirected): what goes there is no output of the cell.
            self._is_set = False

    def stop(self) -> None:
        if self._is_set and self._stream.__dict__.get("write") == self._write:
            del self._stream.write
        self._is_set = False

    def _write(self, text: str) -> Any:
        self.was_written |= bool(text)
        if text:
            self.stop()
        return type(self._stream).write(self._stream, text)
