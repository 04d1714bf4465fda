"""The buttons on the cards of OOMs, in a real shell with real tensors; the test plays the page."""

from __future__ import annotations

import errno
import gc
import json
import os
import re
import signal
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from IPython.utils.capture import capture_output

from gpumemwidget.jupyter.outputs import show_card
from gpumemwidget.model.ooms import OomCard, Remedy, RemedyKind
from gpumemwidget.model.predictions import PredictedRemedy
from gpumemwidget.progress import Stage, report_progress
from gpumemwidget.report.oom import report_oom
from gpumemwidget.session.session import Session, current_session
from gpumemwidget.widgets.dashboard import Dashboard
from gpumemwidget.widgets.oom_buttons import CardButtons
from tests.jupyter.cards import add_card
from tests.jupyter.machine import Machine
from tests.report.oom_examples import make_card, make_host_card

_MIB = 1024**2


class _Page:
    """A page that shows cards and clicks on them."""

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self.session: Session = current_session()
        self.buttons = self.session.attach(CardButtons)

    def run(self, source: str, *, fails: bool = False) -> None:
        result = self.shell.run_cell(source, store_history=True)
        if not fails:
            result.raise_error()

    def click(self, name: str, way: int = 0) -> None:
        self.buttons._handle_custom_msg({"kind": "do", "card": name, "way": way}, [])

    def read(self, name: str, way: int = 0) -> tuple[str, list[str]]:
        """How far a way is, and what is said of it."""
        state = self.buttons.describe()
        json.dumps(state)
        return state[name][way]["state"], state[name][way]["lines"]


@pytest.fixture
def page(shell: Any) -> _Page:
    shell.run_line_magic("load_ext", "gpumemwidget")
    shell.user_ns["torch"] = torch
    return _Page(shell)


def _make_way(kind: str, *names: str, **more: object) -> Remedy:
    values: dict[str, object] = {"gives_bytes": 64 * _MIB, "gives_is": "exact", **more}
    return Remedy(RemedyKind(kind), names=names, **values)  # type: ignore[arg-type]


def _make_card(*ways: Remedy) -> OomCard:
    return make_host_card(ways=ways)


def test_each_way_that_we_can_go_has_a_button(page: _Page) -> None:
    """In the rows of the card, which stand by what they give."""
    add_card(page.buttons, "one", make_card())

    buttons = page.buttons.describe()["one"]

    assert [(each["row"], each["act"]) for each in buttons] == [
        (0, "release"),
        (3, "release"),
        (4, "give"),
        (5, "release"),
        (8, "save"),
    ]


def test_the_session_is_saved_as_a_page(
    page: _Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a name that is free, with the card; a folder that can't be written to is said."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "oom.html").write_text("mine")
    with capture_output():
        show_card(make_host_card(), page.session)
    add_card(page.buttons, "one", _make_card())
    add_card(page.buttons, "two", _make_card())

    page.click("one")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", _fail_to_write)
        page.click("two")

    assert page.read("one") == ("done", [f"Written to {tmp_path / 'oom-2.html'}."])
    assert "Out of memory on the host" in (tmp_path / "oom-2.html").read_text("utf-8")
    assert (tmp_path / "oom.html").read_text() == "mine"
    state, (line,) = page.read("two")
    assert state == "failed"
    assert line.startswith(f"can't write {tmp_path / 'oom-3.html'}: No space left on device")


def _fail_to_write(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_buttons_are_told_to_a_page_that_asks(page: _Page) -> None:
    """And are no part of the state, which a saved notebook may hold beside a dead kernel."""
    add_card(page.buttons, "one", make_card())
    sent: list[dict[str, Any]] = []
    page.buttons.send = lambda content, _buffers=None: sent.append(content)

    page.buttons._handle_custom_msg({"kind": "hello"}, [])

    assert sent == [{"cards": page.buttons.describe()}]
    assert not [
        value for value in page.buttons.get_state().values() if "last exception" in str(value)
    ]
    assert "cards" not in page.buttons.get_state()


def _interrupt() -> int:
    signal.raise_signal(signal.SIGINT)
    report_progress(Stage.WALK_OBJECTS, 1)
    return 1 << 40


def _fail() -> int:
    raise RuntimeError("made to fail")


@pytest.mark.parametrize(
    ("fail", "words"),
    [
        (_interrupt, "interrupted; nothing was changed"),
        (_fail, "RuntimeError: made to fail"),
    ],
)
def test_a_release_that_stopped_can_be_tried_again(
    page: _Page, monkeypatch: pytest.MonkeyPatch, fail: Callable[[], int], words: str
) -> None:
    """A failure, or a Ctrl-C, which is heard also where SIGINT is ignored."""
    page.run("big = torch.ones(16, 1024, 1024)")
    add_card(page.buttons, "one", _make_card(_make_way("names", "big")))
    hardware = page.session.monitor.hardware
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(hardware, "available_host_bytes", fail)
            page.click("one")
            stopped = page.read("one")
        page.click("one")
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)

    assert stopped == ("failed", [words])
    assert page.read("one")[0] == "done"


def test_only_what_loses_training_state_asks(page: _Page) -> None:
    """Once, in place: the page shows the question that it is sent."""
    state = _make_way("names", "model", loses_training_state=True)
    add_card(page.buttons, "one", _make_card(_make_way("names", "x"), _make_way("out"), state))

    questions = [each["question"] for each in page.buttons.describe()["one"]]

    assert questions == ["", "", "Release model? This loses training state.", ""]


def test_second_click_does_nothing(page: _Page) -> None:
    """What is done is not done again to what the name holds by then."""
    page.run("big = torch.ones(16, 1024, 1024)")
    add_card(page.buttons, "one", _make_card(_make_way("names", "big")))
    page.click("one")
    told = page.read("one")
    page.run("big = torch.ones(3)")

    page.click("one")
    page.click("one", 7)
    page.click("no such card")

    assert page.read("one") == told
    assert page.shell.user_ns["big"].numel() == 3


def test_name_of_something_new_is_left_alone(page: _Page) -> None:
    """The card spoke of another object; a click that comes just then changes nothing."""
    page.run("big = torch.ones(16, 1024, 1024)\nother = torch.ones(16, 1024, 1024)")
    add_card(page.buttons, "one", _make_card(_make_way("names", "big", "other")))
    page.shell.user_ns["big"] = torch.ones(3)

    page.click("one")

    state, (line,) = page.read("one")
    assert state == "gone"
    assert line.startswith("This is not what it was at the error")
    assert page.shell.user_ns["big"].numel() == 3
    assert page.shell.user_ns["other"] is not None


def test_out_is_released(page: _Page) -> None:
    """Displayed values go, and there is nothing for another card; how much is missing is told."""
    page.run("torch.ones(16, 1024, 1024)")
    add_card(page.buttons, "one", _make_card(_make_way("out")))
    add_card(page.buttons, "two", _make_card(_make_way("out")))

    page.click("one")

    page.click("two")

    assert page.read("one")[0] == "done"
    assert page.read("one")[1][1].startswith("You are still about ")
    assert page.read("two")[0] == "done"


def test_cached_blocks_of_a_gpu_are_given_back(make_machine: Callable[..., Machine]) -> None:
    """On a simulated GPU: what is reserved falls by what lay unused, to the byte."""
    machine = make_machine()
    gpu = machine.allocator
    gpu.allocate(3 * 1024 * _MIB)
    gpu.free(gpu.allocate(1024 * _MIB))
    machine.run("%load_ext gpumemwidget")
    page = _Page(machine.shell)
    add_card(
        page.buttons, "one", make_card(ways=(_make_way("cached blocks", gives_bytes=1024 * _MIB),))
    )

    page.click("one")

    told = ["Gave back 1.00 GiB on cuda:0. Now 3.00 GiB reserved."]
    assert page.read("one") == ("done", told)


def test_click_during_a_cell_waits(page: _Page) -> None:
    """Also where it comes on a thread of its own, beside the running cell."""
    page.run("big = torch.ones(16, 1024, 1024)")
    add_card(page.buttons, "one", _make_card(_make_way("names", "big")))
    seen = []

    def click_beside() -> None:
        thread = threading.Thread(target=page.click, args=("one",))
        thread.start()
        thread.join()
        seen.append((page.read("one")[0], page.shell.user_ns["big"] is None))

    page.shell.user_ns["click_beside"] = click_beside
    page.run("click_beside()")

    assert seen == [("queued", False)]
    assert page.read("one")[0] == "done"
    assert page.shell.user_ns["big"] is None


def test_later_failure_ends_the_exception(page: _Page) -> None:
    """The last exception is another one now: a click must not drop it under the old promise."""
    page.run("1 / 0", fails=True)
    add_card(page.buttons, "one", _make_card(_make_way("last exception")))
    page.run("x = 1")
    before = page.read("one")
    page.run("[][1]", fails=True)

    page.click("one")

    assert before == ("ready", [])
    assert page.read("one")[0] == "gone"
    assert any(each.root == "exception" for each in page.session.shell.list_references())


def test_dashboard_is_told_of_a_release(page: _Page) -> None:
    """Its list of variables would show what is gone, for no cell has run."""
    page.run("big = torch.ones(16, 1024, 1024)")
    dashboard = page.session.attach(Dashboard)
    sent: list[dict[str, Any]] = []
    dashboard.send = lambda content, _buffers=None: sent.append(content)
    dashboard._feed.hear("a", visible=True, variables=True)
    add_card(page.buttons, "one", _make_card(_make_way("names", "big")))
    sent.clear()

    page.click("one")

    [variables] = [message for message in sent if message["kind"] == "variables"]
    assert [row for row in variables["variables"] if row["name"] == "big"] == []


def test_nothing_that_a_card_is_about_is_held(page: _Page) -> None:
    """Neither the object of a name nor what a release has worked with."""
    page.run("big = torch.ones(16, 1024, 1024)\nother = torch.ones(4)")
    big, other = (weakref.ref(page.shell.user_ns[name]) for name in ("big", "other"))
    add_card(
        page.buttons, "one", _make_card(_make_way("names", "big"), _make_way("names", "other"))
    )

    page.click("one")
    del page.shell.user_ns["other"]
    gc.collect()

    assert big() is None
    assert other() is None


def test_cards_are_bounded(page: _Page) -> None:
    """The oldest lose their buttons."""
    for number in range(25):
        add_card(page.buttons, f"card {number}", _make_card(_make_way("out")))

    names = list(page.buttons.describe())

    assert names == [f"card {number}" for number in range(5, 25)]


def test_unloading_ends_the_buttons(page: _Page, shell: Any) -> None:
    """Their widget is closed, and a click that is still under way does nothing."""
    page.run("big = torch.ones(4)")
    add_card(page.buttons, "one", _make_card(_make_way("names", "big")))

    shell.run_line_magic("unload_ext", "gpumemwidget")
    page.click("one")

    assert page.buttons.comm is None
    assert page.shell.user_ns["big"] is not None
    page.buttons.close()


def test_terminal_shows_the_text_alone(
    shell: Any, page: _Page, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is nothing to click in it."""
    before = page.buttons.describe()

    capsys.readouterr()
    show_card(make_card(), current_session())
    out = capsys.readouterr().out

    assert out.startswith("You are about 1.40 GiB short.")
    assert page.buttons.describe() == before


def test_buttons_stand_in_the_rows_of_their_ways_beside_a_prediction(
    shell: Any, page: _Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Estimated changes to the cell are not listed then, and the rows below them move up."""
    card = make_card(
        predicted=(PredictedRemedy("half the batch", "batch[:8]", 1 << 30, 1 << 31, 1 << 30, True),)
    )
    before = set(page.buttons.describe())
    monkeypatch.setattr(shell, "kernel", object(), raising=False)

    show_card(card, current_session())

    (name,) = set(page.buttons.describe()) - before
    listed, _ = report_oom(card, name=name).html.split("Ways to need less")
    rows = re.findall(r"<tr.*?</tr>", listed[listed.index("What you can do") :])
    *places, last = [button["row"] for button in page.buttons.describe()[name]]
    assert len(places) == sum(way.can_do for way in card.ways) > 1
    for place in places:
        assert "%memrelease" in rows[place] or "empty_cache()" in rows[place]
    assert "%memsave" in rows[last]
