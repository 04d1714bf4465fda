"""A page that shows the dashboard: keeps and reads what it is sent, says what a person does."""

from __future__ import annotations

import json
import struct
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from gpumemwidget.session.session import Session, current_session
from gpumemwidget.widgets.dashboard import Dashboard

__all__ = ["Message", "Page", "unpack_rows"]

Message = dict[str, Any]
Figures = tuple[float, ...]


class Page:
    """A page with one view of the loaded extension's dashboard."""

    def __init__(self, shell: InteractiveShell) -> None:
        self.shell = shell
        self.session: Session = current_session()
        self.monitor = self.session.monitor
        self.dashboard: Dashboard = self.session.attach(Dashboard)
        self.sent: list[Message] = []
        self.dashboard.send = self._keep

    def say(self, kind: str, **content: object) -> list[Message]:
        """Send a message, and take what came back but for readings."""
        self.sent.clear()
        self.dashboard._handle_custom_msg({"kind": kind, **content}, [])
        return [message for message in self.sent if message["kind"] not in ("rows", "devices")]

    def see(self, *, visible: bool = True, variables: bool = False, **more: object) -> None:
        """Come into view, or go out of it."""
        view = {"view": "a", "visible": visible, "variables": variables, "device": None}
        asks = {"snapshot": False, "since_s": None, "list": False, "look": False}
        self.say("view", **{**view, **asks, **more})

    def run(self, source: str) -> None:
        """Run a cell that must not fail."""
        self.shell.run_cell(source, store_history=True).raise_error()

    def list(self, kind: str) -> list[Message]:
        """The messages of one kind since the page has last said something."""
        return [message for message in self.sent if message["kind"] == kind]

    def _keep(self, content: Message, buffers: object = None) -> None:
        json.dumps(content)
        self.sent.append({**content, "buffers": buffers})


def unpack_rows(data: bytes, n_devices: int) -> list[tuple[float, list[Figures]]]:
    """Each row as its time, then of each device allocated, reserved and the peaks of both."""
    width = 1 + 4 * n_devices
    rows: list[tuple[float, list[Figures]]] = []
    for start in range(0, len(data), 8 * width):
        time_s, *figures = struct.unpack_from(f"<{width}d", data, start)
        devices = [tuple(figures[k : k + 4]) for k in range(0, len(figures), 4)]
        rows.append((time_s, devices))
    return rows
