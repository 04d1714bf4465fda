"""Serve the buttons on the cards of OOMs and of leaks.

One widget for all cards of a session, without a view: in the page it finds the cards by their
class and puts buttons into them. So nothing of it is an output that could be missing later; a front
end that makes no widgets without a view leaves the commands to type, as they stand on the card.
Which buttons there are is no part of the widget's state, which some save with the notebook: it is
sent to a page that asks, and where no kernel answers there are none.

Nothing here holds what a card is about: names, and the ids of what they were bound to, are all that
is remembered.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any, Literal

import anywidget
import traitlets

from gpumemwidget.model.ooms import OomEvent, Remedy, RemedyKind
from gpumemwidget.model.releases import ReleaseRequest
from gpumemwidget.oom.detection import describe_oom
from gpumemwidget.ownership.shell import Shell
from gpumemwidget.recording.files import find_target, write_whole
from gpumemwidget.report.oom import describe_cached, describe_released, judge_now
from gpumemwidget.report.render.wording import join_words
from gpumemwidget.session.session import Session
from gpumemwidget.widgets.page import (
    Message,
    Outgoing,
    describe_failure,
    read_static,
    run_when_idle,
)
from gpumemwidget.widgets.progress_line import pass_progress

#: ``gone``: what it was about is not there any more.
State = Literal["ready", "queued", "running", "done", "failed", "gone"]


@dataclass(slots=True)
class _Button:
    """A way out that can be clicked."""

    #: ``None``: save the session as a page.
    way: Remedy | None
    #: Number of the row on the card.
    row: int
    device: str
    #: The OOM that the card is about; ``None`` for a leak.
    event: OomEvent | None
    #: Ids of the objects that the way releases, as the card was shown.
    ids: tuple[int, ...]
    state: State = "ready"
    lines: tuple[str, ...] = ()
    #: Whether there is room now for what the cell requested.
    has_room: bool = False

    def describe(self) -> Message:
        way, act, question = self.way, "release", ""
        if way is None:
            act = "save"
        elif way.kind is RemedyKind.CACHED_BLOCKS:
            act = "give"
        elif way.loses_training_state:
            question = f"Release {join_words(way.names)}? This loses training state."
        return {
            "row": self.row,
            "act": act,
            "state": self.state,
            "lines": [*self.lines],
            "question": question,
            "has_room": self.has_room,
        }


class CardButtons(anywidget.AnyWidget):
    """The buttons on all cards of a session."""

    _esm = traitlets.Unicode().tag(sync=True)
    #: ``True`` if the page has to ask for the messages that wait.
    polls = traitlets.Bool(default_value=False).tag(sync=True)

    def __init__(self, session: Session) -> None:
        self._session = session
        self._monitor = session.monitor
        self._cards: dict[str, list[_Button]] = {}
        # On ipykernel 7 two clicks may come on two threads.
        self._lock = threading.RLock()
        self._is_closed = False
        self._outgoing = Outgoing(self, session.monitor)
        super().__init__(_esm=read_static("cards.js"), polls=self._outgoing.is_polled)
        self.on_msg(self._handle_message)

    def add(
        self,
        name: str,
        ways: Mapping[int, Remedy | None],
        device: str,
        event: OomEvent | None = None,
    ) -> None:
        """Give a card its buttons: ``ways`` by the number of their rows on the card.

        ``None`` among them saves the session. The page finds the card by its class, ``name``.
        """
        shell = self._session.shell
        buttons = [
            _Button(way, row, device, event, _identify(shell, way)) for row, way in ways.items()
        ]
        with self._lock:
            self._cards[name] = buttons
            while len(self._cards) > 20:
                del self._cards[next(iter(self._cards))]
        self._send_cards()

    def describe(self) -> dict[str, list[Message]]:
        """Return each card's buttons by the card's class: the row, what a click does, its state."""
        with self._lock:
            return {
                name: [button.describe() for button in buttons]
                for name, buttons in self._cards.items()
            }

    def close(self) -> None:
        """Take the buttons out of every page. May be called twice."""
        # A widget that goes is closed once more, also one whose making failed.
        if getattr(self, "_is_closed", True):
            return
        self._is_closed = True
        # ipywidgets makes a model for the layout beside each widget and leaves it open.
        layout = self.layout
        super().close()
        layout.close()

    # -- Clicks ------------------------------------------------------------------------------------

    def _handle_message(self, _widget: object, content: Any, _buffers: object) -> None:
        asked = content if isinstance(content, dict) else {}
        name, way = asked.get("card"), asked.get("way")
        with self._outgoing.answering():
            if isinstance(name, str) and isinstance(way, int):
                self._click(name, way)
            elif asked.get("kind") == "poll":
                self._outgoing.send_kept()
            else:  # A page that joins.
                self._send_cards()

    def _click(self, name: str, place: int) -> None:
        with self._lock:
            buttons = self._cards.get(name, [])
            button = buttons[place] if 0 <= place < len(buttons) else None
            if button is None or button.state not in ("ready", "failed"):
                self._send_cards()
                return
            button.state, button.lines = "queued", ()
        if self._monitor.running is not None:
            self._send_cards()
        run_when_idle(self._monitor, partial(self._carry_out, button))

    def _carry_out(self, button: _Button) -> None:
        """Act, and show what came of it: an error in a widget's callback is seen nowhere else."""
        if self._is_closed:
            return
        # A cell may have bound a name anew since the card was shown, or failed in another way.
        if _identify(self._session.shell, button.way) != button.ids:
            words = "This is not what it was at the error: the command beside it releases what is "
            self._show(button, "gone", f"{words}there now.")
            return
        self._show(button, "running")
        try:
            with pass_progress(lambda words: self._show(button, "running", words)):
                state, lines = self._act(button)
        except (Exception, KeyboardInterrupt) as exc:  # noqa: BLE001 - shown where the click was
            state, lines = "failed", (describe_failure(exc),)
        with self._session.reporting("showing a release in the dashboard"):
            self._monitor.read_now()
        self._show(button, state, *lines)

    def _act(self, button: _Button) -> tuple[State, tuple[str, ...]]:
        hardware, event, way = self._monitor.hardware, button.event, button.way
        device = button.device
        if way is None:
            return "done", (f"Written to {self._save()}.",)
        if way.kind is RemedyKind.CACHED_BLOCKS:
            before = describe_oom(hardware, device)
            hardware.empty_cache()
            return "done", (describe_cached(before, describe_oom(hardware, device)),)
        report = self._session.release(
            ReleaseRequest(
                way.names,
                out=way.kind is RemedyKind.OUT,
                exceptions=way.kind is RemedyKind.LAST_EXCEPTION,
            )
        )
        line, *more = describe_released(way, report, device)
        if report.stopped is not None:
            return "failed", (line, *more)
        if event is None:
            return "done", (line, *more)
        now = describe_oom(hardware, device, requested_bytes=event.requested_bytes)
        button.has_room, judgement = judge_now(now)
        return "done", (line, judgement, *more)

    def _save(self) -> Path:
        """Write the session as a page into the current folder, under a name that is free there."""
        from gpumemwidget.session.story import write_story  # noqa: PLC0415 - when it is used

        page = write_story(self._session).encode("utf-8", "replace")
        names = chain(["oom.html"], (f"oom-{number}.html" for number in count(2)))
        # Another notebook may write into the same folder: the name is looked for last.
        target = next(path for path in map(find_target, names) if not path.exists())
        write_whole(target, page)
        return target

    def _show(self, button: _Button, state: State, *lines: str) -> None:
        button.state, button.lines = state, lines
        self._send_cards()

    def _send_cards(self) -> None:
        if not self._is_closed:
            self._outgoing.send({"cards": self.describe()})


def _identify(shell: Shell, way: Remedy | None) -> tuple[int, ...]:
    """Return the ids of the objects that a way out releases: of its names, or the exception.

    An id may be given again to what is made later: to take one for the other, a new object of a
    name would have to come to stand just where the old one stood.
    """
    if way is None:
        return ()
    if way.kind is RemedyKind.LAST_EXCEPTION:
        return (id(getattr(sys, "last_value", None)),)
    return tuple(id(shell.user_ns.get(name)) for name in way.names)
