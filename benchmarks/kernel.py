"""A real kernel with a front end that counts: what crosses the wire, to the byte.

The front end here is a few lines that say what a browser's view says, so that a kernel's own cost
can be told apart from a browser's, which may share its cores.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import zmq
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import start_new_kernel

__all__ = ["CountedKernel", "Message", "start_kernel"]

_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Message:
    """One message that the kernel published, and what it weighs."""

    kind: str
    content: dict[str, Any]
    n_bytes: int

    @property
    def is_update(self) -> bool:
        """Whether it brings the dashboard a new sample, and not the start or end of a cell."""
        return self.is_of("rows")

    def is_of(self, kind: str) -> bool:
        """Whether it is a message of this kind to the dashboard's pages."""
        data = self.content.get("data", {}) if self.kind == "comm_msg" else {}
        return bool(data.get("content", {}).get("kind") == kind)


class CountedKernel:
    """Runs cells and counts what the kernel publishes meanwhile."""

    def __init__(self, client: BlockingKernelClient) -> None:
        self._client = client
        self._dashboard_id = ""

    def run(self, code: str) -> list[Message]:
        """Run a cell; all that was published until the kernel was idle again.

        Raises:
            RuntimeError: the cell failed.
        """
        request = self._client.execute(code)
        return self._read_until_idle(request)

    def open_dashboard(self) -> list[Message]:
        """Show the dashboard; what was published for it."""
        messages = self.run("%memdash")
        self._dashboard_id = next(
            message.content["comm_id"]
            for message in messages
            if message.kind == "comm_open"
            and "anywidget" in str(message.content["data"]["state"].get("_model_module"))
        )
        return messages

    def set_visible(
        self, visible: bool, *, device: str | None = None, processes: bool = False
    ) -> list[Message]:
        """Say as a view does that it is seen, or is not any more.

        Args:
            visible: whether it is seen.
            device: the device whose parts it shows; ``None``: not those of any.
            processes: whether it shows the processes that are watched.
        """
        view = {"kind": "view", "view": "counted", "visible": visible, "snapshot": visible}
        view |= {"device": device, "look": device is not None, "since_s": None, "list": False}
        view["processes"] = processes
        data = {"method": "custom", "content": {**view, "variables": False}}
        return self._send_to_comm(self._dashboard_id, data)

    def _send_to_comm(self, comm_id: str, data: dict[str, Any]) -> list[Message]:
        message = self._client.session.msg("comm_msg", {"comm_id": comm_id, "data": data})
        self._client.shell_channel.send(message)
        return self._read_until_idle(message["header"]["msg_id"])

    @staticmethod
    def read_printed(messages: list[Message]) -> Any:
        """Return what a cell printed as JSON."""
        printed = (each.content["text"] for each in messages if each.kind == "stream")
        return json.loads("".join(printed))

    def _read_until_idle(self, request: str) -> list[Message]:
        messages: list[Message] = []
        socket = self._client.iopub_channel.socket
        deadline_s = time.monotonic() + _TIMEOUT_S
        while True:
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0 or not socket.poll(int(remaining_s * 1000), zmq.POLLIN):
                raise RuntimeError("the kernel did not become idle")
            frames = socket.recv_multipart()
            _, parts = self._client.session.feed_identities(frames)
            message = self._client.session.deserialize(parts)
            content = message["content"]
            kind = message["header"]["msg_type"]
            messages.append(Message(kind, content, sum(len(frame) for frame in frames)))
            if kind == "error":
                raise RuntimeError("\n".join(content["traceback"]))
            is_ours = message["parent_header"].get("msg_id") == request
            if is_ours and kind == "status" and content["execution_state"] == "idle":
                return messages


@contextmanager
def start_kernel() -> Iterator[CountedKernel]:
    """A kernel of its own, with its own folder for IPython's files."""
    environment = {**os.environ, "IPYTHONDIR": tempfile.mkdtemp(prefix="gpumemwidget-bench-")}
    manager, client = start_new_kernel(env=environment)
    try:
        yield CountedKernel(client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
