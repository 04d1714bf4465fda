"""Messages to a widget's views, as they arrive from a real kernel."""

from __future__ import annotations

from typing import Any

import pytest

from tests.jupyter.notebook import Notebook

pytestmark = pytest.mark.kernel

_OPEN = """
import anywidget, threading, contextvars
from gpumemwidget.jupyter.wire import Wire
class Chart(anywidget.AnyWidget):
    _esm = "export default {}"
chart = Chart()
wire = Wire(chart)
message = {"kind": "rows", "devices": ("cuda:0", "hôst")}
"""


def _list_sent(notebook: Notebook, code: str) -> list[dict[str, Any]]:
    """What came of a cell to the widget's views; the client has checked every signature."""
    cell = notebook.run(code)
    assert cell.status == "ok", cell.text
    return cell.list_messages("comm_msg")


def _list_fixed(message: dict[str, Any]) -> dict[str, Any]:
    """What two messages with the same content have in common."""
    header = {**message["header"], "msg_id": None, "date": None}
    parts = ("parent_header", "metadata", "content", "buffers", "msg_type")
    return {"header": header, **{part: message[part] for part in parts}}


def test_what_arrives_is_what_the_widget_itself_sends(notebook: Notebook) -> None:
    """Header, parent, metadata, content and buffers; each with an id and a time of its own."""
    notebook.run(_OPEN)

    ours, again, theirs = _list_sent(
        notebook,
        "for send in (wire.send, wire.send, chart.send):\n    send(message, [b'12345678'])",
    )

    assert _list_fixed(ours) == _list_fixed(again) == _list_fixed(theirs)
    assert ours["content"]["data"]["content"] == {"kind": "rows", "devices": ["cuda:0", "hôst"]}
    assert [bytes(buffer) for buffer in ours["buffers"]] == [b"12345678"]
    ids = [message["header"]["msg_id"] for message in (ours, again, theirs)]
    assert len(set(ids)) == 3
    dates = [message["header"]["date"] for message in (ours, again, theirs)]
    assert dates == sorted(dates)
    assert dates[0].tzinfo is not None


def test_it_did_not_take_the_long_way(notebook: Notebook) -> None:
    """In a kernel of ours nothing is left to ``widget.send``, which would be slower."""
    notebook.run(_OPEN)

    sent = _list_sent(notebook, "chart.send = None\nwire.send(message)\ndel chart.send")

    assert len(sent) == 1


def test_parent_is_the_cell_that_runs(notebook: Notebook) -> None:
    """Also when the message is the same object; a thread's is that of the context it has."""
    notebook.run(_OPEN)

    for _ in range(2):
        (message,) = _list_sent(notebook, "wire.send(message)")
        assert message["parent_header"]["msg_type"] == "execute_request"

    thread = "threading.Thread(target=contextvars.copy_context().run, args=(wire.send, message))"
    (message,) = _list_sent(notebook, f"t = {thread}; t.start(); t.join()")
    assert message["content"]["data"]["content"]["kind"] == "rows"


def test_a_closed_widget_sends_nothing(notebook: Notebook) -> None:
    """One more update may be on its way when the dashboard is closed."""
    notebook.run(_OPEN)

    sent = _list_sent(notebook, "chart.close()\nwire.send(message)")

    assert sent == []


def test_a_session_that_packs_otherwise_sends_by_itself(notebook: Notebook) -> None:
    """Its messages are not JSON, so nothing is known of how they are put together."""
    notebook.run(_OPEN)
    notebook.run(
        "session = get_ipython().kernel.session\n"
        "pack, sent = session.pack, []\n"
        "chart.send = lambda message, buffers: sent.append(message)\n"
        "session.pack = lambda content: pack(content) + b' '"
    )
    notebook.run("wire.send(message)\nsession.pack = pack")

    assert notebook.evaluate("sent") == [{"kind": "rows", "devices": ("cuda:0", "hôst")}]
