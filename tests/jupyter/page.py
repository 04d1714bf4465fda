"""A page that shows the dashboard: it keeps what it is sent, and says what a person does."""

from __future__ import annotations

import json
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from gpumemwidget.session.session import Session, current_session
from gpumemwidget.widgets.dashboard import Dashboard, open_dashboard

__all__ = ["Message", "Page"]

Message = dict[str, Any]


class Page:
    """A page with one view of the loaded extension's dashboard."""

    def __init__(self, shell: InteractiveShell) -> None:
        self.shell = shell
        self.session: Session = current_session()
        self.monitor = self.session.monitor
        self.dashboard: Dashboard = open_dashboard(self.session)
        self.sent: list[Message] = []
        self.dashboard.send = self._keep

    def say(self, kind: str, **content: object) -> list[Message]:
        """Send a message, and take what came back but for readings."""
        self.sent.clear()
        self.dashboard._handle_custom_msg({"kind": kind, **content}, [])
        return [message for message in self.sent if message["kind"] not in ("rows", "devices")]

    def see(self, *, visible: bool = True, variables: bool = False, **more: object) -> None:
        """Come into view, or go out of it."""
        view = {"view": "a", "visible": visible, "variables": variables, "snapshot": False}
        self.say("view", **view, **more)

    def run(self, source: str) -> None:
        """Run a cell that must not fail."""
        self.shell.run_cell(source, store_history=True).raise_error()

    def list(self, kind: str) -> list[Message]:
        """The messages of one kind since the page has last said something."""
        return [message for message in self.sent if message["kind"] == kind]

    def _keep(self, content: Message, buffers: object = None) -> None:
        json.dumps(content)
        self.sent.append({**content, "buffers": buffers})
