"""What a page in Colab receives: plain JSON, and at a time at which Colab shows it."""

from __future__ import annotations

import base64
import json
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from gpumemwidget.session.session import current_session
from gpumemwidget.widgets.oom_buttons import CardButtons
from gpumemwidget.widgets.page import MAX_KEPT_CHARS, Outgoing
from tests.jupyter.cards import add_card
from tests.jupyter.page import Message, Page, unpack_rows
from tests.report.oom_examples import make_card


@pytest.fixture
def in_colab(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that every kernel of Colab's has."""
    monkeypatch.setitem(sys.modules, "google.colab", ModuleType("google.colab"))


@pytest.fixture
def page(in_colab: None, shell: Any) -> Page:
    shell.run_line_magic("load_ext", "gpumemwidget")
    return Page(shell)


class _Widget:
    """A widget whose messages are kept."""

    def __init__(self) -> None:
        self.sent: list[tuple[Message, list[bytes]]] = []

    def send(self, message: Message, buffers: list[bytes] | None = None) -> None:
        self.sent.append((message, buffers or []))


def _make_outgoing(*, is_running: bool = False) -> tuple[_Widget, Outgoing]:
    widget = _Widget()
    monitor = SimpleNamespace(running=object() if is_running else None)
    return widget, Outgoing(widget, monitor)  # type: ignore[arg-type]


def _send_from_thread(outgoing: Outgoing, message: Message, *buffers: bytes) -> None:
    thread = threading.Thread(target=outgoing.send, args=(message, buffers))
    thread.start()
    thread.join()


def _list_messages(sent: list[Message]) -> list[Message]:
    return [message for batch in sent for message in batch["messages"]]


def test_message_of_a_background_thread_waits_for_the_question(in_colab: None) -> None:
    """In the order in which they were sent, as one message, and once."""
    widget, outgoing = _make_outgoing(is_running=True)
    _send_from_thread(outgoing, {"kind": "a"}, b"\0\xff")
    _send_from_thread(outgoing, {"kind": "b"})
    before = [*widget.sent]

    outgoing.send_kept()
    outgoing.send_kept()

    kept = [{"kind": "a", "buffers": ["AP8="]}, {"kind": "b"}]
    assert before == []
    assert widget.sent == [
        ({"kind": "batch", "messages": kept}, []),
        ({"kind": "batch", "messages": []}, []),
    ]


def test_what_was_kept_goes_before_what_is_sent_at_once(in_colab: None) -> None:
    """Messages carry running numbers: none may overtake another."""
    widget, outgoing = _make_outgoing()
    _send_from_thread(outgoing, {"kind": "a"})

    with outgoing.answering():
        outgoing.send({"kind": "b"})
    outgoing.send({"kind": "c"})

    assert widget.sent == [({"kind": "batch", "messages": [{"kind": "a"}, {"kind": "b"}]}, [])]


def test_messages_that_nobody_asks_for_are_bounded(in_colab: None) -> None:
    """The oldest go; the newest stays, however large it is."""
    widget, outgoing = _make_outgoing()
    for letter in "abc":
        outgoing.send({"text": letter * (MAX_KEPT_CHARS // 3)})
    outgoing.send_kept()
    outgoing.send({"text": "d" * MAX_KEPT_CHARS})
    outgoing.send_kept()

    several, large = (message["messages"] for message, _ in widget.sent)
    assert [message["text"][0] for message in several] == ["b", "c"]
    assert [message["text"][0] for message in large] == ["d"]


def test_state_is_plain_json(page: Page) -> None:
    """A manager that gets buffers' places without the buffers can't make the widget."""
    page.monitor.read_now()

    state = json.loads(json.dumps(page.dashboard.get_state()))

    assert state["polls"] is True
    snapshot = state["snapshot"]
    rows = unpack_rows(base64.b64decode(snapshot["data"]), len(snapshot["columns"]))
    assert rows[-1][0] == page.monitor.history.samples()[-1].time_s


def test_page_gets_its_readings_when_it_asks(page: Page) -> None:
    """Nothing arrives unasked, though the sampler has its own thread; no number is left out."""
    page.see()
    page.say("poll")
    page.sent.clear()
    sampled = threading.Event()
    stop = page.monitor.sampled.add(lambda _: sampled.set())
    assert sampled.wait(60)
    stop()
    before = [*page.sent]

    messages = _list_messages(page.say("poll"))

    rows = [message for message in messages if message["kind"] == "rows"]
    told = [message["seq"] for message in messages if "seq" in message]
    (data,) = rows[0]["buffers"]
    assert before == []
    assert len(unpack_rows(base64.b64decode(data), len(rows[0]["devices"]))) > 0
    assert told == [*range(told[0], told[0] + len(told))]


def test_page_hears_at_once_that_a_cell_runs_and_later_that_it_ended(page: Page) -> None:
    """A kernel that computes answers no question: its page is not to take it for dead."""
    page.see()
    page.say("poll")
    page.sent.clear()

    page.run("x = 1")

    at_once = [message["kind"] for message in _list_messages(page.sent)]
    later = [message["kind"] for message in _list_messages(page.say("poll"))]
    assert "started" in at_once
    assert "ended" not in at_once
    assert "ended" in later


def test_answer_comes_with_the_question(page: Page) -> None:
    """A person who asked does not wait for the next second."""
    page.see(variables=True)

    answers = _list_messages(page.say("variables"))

    assert "variables" in [message["kind"] for message in answers]


def test_cards_are_told_when_their_page_asks(in_colab: None, shell: Any) -> None:
    """The page says hello, or asks for what came since."""
    shell.run_line_magic("load_ext", "gpumemwidget")
    buttons = current_session().attach(CardButtons)
    sent: list[Message] = []
    buttons.send = lambda content, _buffers=None: sent.append(content)
    add_card(buttons, "one", make_card())

    buttons._handle_custom_msg({"kind": "poll"}, [])
    buttons._handle_custom_msg({"kind": "hello"}, [])

    assert buttons.polls
    batch = {"kind": "batch", "messages": [{"cards": buttons.describe()}]}
    assert sent == [batch, batch]
