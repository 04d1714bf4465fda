"""What a page sends: whatever it is, nothing of it reaches the user's cells."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumemwidget.widgets.oom_buttons import CardButtons
from tests.jupyter.cards import add_card
from tests.jupyter.page import Page
from tests.report.oom_examples import make_card

#: A view that comes, as a page tells it.
_VIEW = {
    "kind": "view",
    "view": "a",
    "visible": True,
    "variables": True,
    "device": None,
    "snapshot": False,
    "since_s": None,
    "list": False,
    "look": False,
}
#: Kinds of requests, but for the one that takes long, and the fields that any of them has.
_KINDS = ("view", "gone", "snapshot", "variables", "parts", "find", "sum", "release")
_FIELDS = (*_VIEW, "key", "node", "start", "text", "id", "names", "keep", "card", "way")

_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from([2**70, -1, math.nan, math.inf, "host", "cuda:0", "x" * 20_000])
    | st.text(max_size=8),
    lambda parts: (
        st.lists(parts, max_size=3) | st.dictionaries(st.text(max_size=5), parts, max_size=3)
    ),
    max_leaves=5,
)


@st.composite
def _messages(draw: st.DrawFn, kinds: tuple[str, ...]) -> object:
    """Mostly a message of a known kind with fields that may be missing, or anything."""
    if draw(st.integers(0, 9)) == 0:
        return draw(_JSON)
    names = draw(st.lists(st.sampled_from(_FIELDS[1:]), max_size=len(_FIELDS), unique=True))
    usual: dict[str, object] = {**_VIEW, "id": "1", "keep": False}
    return {
        **{key: value for key, value in usual.items() if draw(st.booleans())},
        **{name: draw(_JSON) for name in names},
        "kind": draw(st.sampled_from(kinds)),
    }


class _Pages(Page):
    """A dashboard and cards that are shown, with what their views are sent."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self.buttons = self.session.attach(CardButtons)
        add_card(self.buttons, "one", make_card())
        self.buttons.send = self._keep

    def live(self) -> None:
        """What goes on in a session beside the messages: samples, and a cell that ends."""
        self.monitor.read_now()
        self.run("1")


@pytest.fixture
def pages(shell: Any) -> _Pages:
    shell.run_line_magic("load_ext", "gpumemwidget")
    return _Pages(shell)


@pytest.mark.parametrize(
    "content",
    [
        {**_VIEW, "view": []},
        {"kind": "view", "view": "a"},
        {"kind": None},
        None,
    ],
)
def test_a_malformed_message_is_answered_in_the_widget_and_nowhere_else(
    pages: _Pages, capsys: pytest.CaptureFixture[str], content: Any
) -> None:
    """One line in the view that is shown; samples and cells go on as if it had not come."""
    pages.dashboard._handle_custom_msg(_VIEW, [])
    pages.sent.clear()
    capsys.readouterr()

    pages.dashboard._handle_custom_msg(content, [])
    answers = pages.list("trouble")
    pages.live()

    captured = capsys.readouterr()
    assert len(answers) == 1
    assert (captured.err, captured.out.replace("Out[1]: 1", "").strip()) == ("", "")


@given(message=_messages(_KINDS))
def test_no_message_to_the_dashboard_reaches_a_cell(
    pages: _Pages, capsys: pytest.CaptureFixture[str], message: Any
) -> None:
    """Of whatever fields: it is answered, refused or dropped."""
    pages.dashboard._handle_custom_msg(message, [])
    pages.monitor.read_now()

    assert capsys.readouterr().err == ""


@given(message=_messages(("hello", "do")))
def test_no_message_to_the_cards_reaches_a_cell(
    pages: _Pages, capsys: pytest.CaptureFixture[str], message: Any
) -> None:
    """The same for the buttons; what is not understood does nothing."""
    before = pages.buttons.describe()

    pages.buttons._handle_custom_msg(message, [])

    assert capsys.readouterr().err == ""
    assert pages.buttons.describe() == before


def test_views_beyond_bounds_are_forgotten(pages: _Pages) -> None:
    """A page that gives itself a new name with each message fills no memory."""
    for number in range(500):
        pages.dashboard._handle_custom_msg({**_VIEW, "view": f"v{number}"}, [])

    assert len(pages.dashboard._feed._views.said) == 200
    assert "v499" in pages.dashboard._feed._views.said
