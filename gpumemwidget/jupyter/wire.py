"""Messages to a widget's views, ten a second, packed with no more work than they need.

On its way through ipywidgets, comm and jupyter_client a message is cleaned twice and packed in four
parts, though of an update nothing is new but its numbers, which are in the binary part already. So
what stays the same is packed once here. What crosses the wire are the same frames, signed by the
kernel's own session and sent through its own socket.

https://jupyter-client.readthedocs.io/en/stable/messaging.html#the-wire-protocol
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from ipywidgets import Widget

from gpumemwidget.jupyter.messages import Message

__all__ = ["Wire"]

#: Between the addresses and the message.
_DELIMITER = b"<IDS|MSG>"
_MESSAGE_ID = "gpumemwidget-message-id"
_DATE = "gpumemwidget-date"
_HEADER = re.compile(f'(.*"){_MESSAGE_ID}(".*"){_DATE}(".*)'.encode(), re.DOTALL)


class Wire:
    """Sends what ``widget.send`` sends, sooner.

    One thread at a time. Where the kernel is not ipykernel, or its messages are not packed as JSON,
    ``widget.send`` itself does it.

    Args:
        widget: whose messages these are.
    """

    def __init__(self, widget: Widget) -> None:
        self._widget = widget
        self._comm: Any = None
        #: The packed header before the message's id, between that and its date, and behind both.
        self._header: tuple[bytes, bytes, bytes] | None = None
        self._metadata = b""
        #: The last ones, held so that no other object can come to stand at their address.
        self._parent: object = None
        self._packed_parent = b""
        self._message: object = None
        self._packed_content = b""

    def send(self, message: Message, buffers: Sequence[bytes] = ()) -> None:
        """Send a message to all views.

        Args:
            message: JSON. The same object sent again is not packed again: it must not change.
            buffers: its binary part.
        """
        comm: Any = self._widget.comm
        if comm is not self._comm:
            self._comm, self._parent, self._message = comm, None, None
            self._header = _pack_header(comm)
        if self._header is None:
            self._widget.send(message, list(buffers))
            return
        kernel = comm.kernel
        session, socket = kernel.session, kernel.iopub_socket
        if socket is None or (session.check_pid and os.getpid() != session.pid):
            return  # The kernel is on its way out, or this is a fork of it.
        parent = kernel.get_parent()
        if parent is not self._parent:
            self._packed_parent = session.pack(parent.get("header") or {})
            self._metadata = session.pack(session.metadata)
            self._parent = parent
        if message is not self._message:
            data = {"method": "custom", "content": message}
            self._packed_content = session.pack({"data": data, "comm_id": comm.comm_id})
            self._message = message
        start, middle, end = self._header
        date = datetime.now(timezone.utc).isoformat()[: -len("+00:00")]
        header = b"%b%b%b%bZ%b" % (start, session.msg_id.encode(), middle, date.encode(), end)
        parts = [header, self._packed_parent, self._metadata, self._packed_content]
        # Signed in one piece, which gives the same as one after the other.
        signature = session.sign([b"".join(parts)])
        socket.send_multipart([comm.topic, _DELIMITER, signature, *parts, *buffers])


def _pack_header(comm: Any) -> tuple[bytes, bytes, bytes] | None:
    """What is the same in the header of every message; ``None`` where all is not as we know it."""
    if type(comm).__module__ != "ipykernel.comm.comm" or comm.kernel is None:
        return None
    session = comm.kernel.session
    # A session of another class may send in a way of its own.
    if type(session) is not sys.modules["jupyter_client.session"].Session or session.adapt_version:
        return None
    # Within a message's id, as it is written into the header.
    if session.pack(session.session) != b'"%b"' % session.session.encode():
        return None
    header = {**session.msg_header("comm_msg"), "msg_id": _MESSAGE_ID, "date": _DATE}
    found = _HEADER.fullmatch(session.pack(header))
    return None if found is None else (found[1], found[2], found[3])
