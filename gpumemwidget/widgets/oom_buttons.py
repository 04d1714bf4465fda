"""Serve the buttons on the cards of OOMs.

One widget for all cards of a session, without a view: in the page it finds the cards by their
class and puts buttons into them. So nothing of it is an output that could be missing later; a front
end that makes no widgets without a view leaves the commands to type, as they stand on the card.
Which buttons there are is no part of the widget's state, which some save with the notebook: it is
told to a page that asks, and where no kernel answers there are none.

Nothing here holds what a card is about: names, and the ids of what they were bound to, are all that
is remembered.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import anywidget
import traitlets

from gpumemwidget.errors import BadInputError
from gpumemwidget.model.cells import CellRecord
from gpumemwidget.model.ooms import OomCard, OomEvent, Remedy
from gpumemwidget.model.releases import ReleaseRequest
from gpumemwidget.oom.event import describe_oom
from gpumemwidget.ownership.shell import Shell
from gpumemwidget.report.oom import describe_cached, describe_released, judge_now
from gpumemwidget.report.render.wording import join_words
from gpumemwidget.session.session import Session
from gpumemwidget.widgets.messages import CARD_REQUESTS, Message, check_request, describe_failure
from gpumemwidget.widgets.page import read_esm, schedule_on_main
from gpumemwidget.widgets.progress_line import tell_progress

#: Maximum number of cards with buttons, the newest.
_MAX_CARDS = 20
_NO_SCRIPT = "export default {}"
#: Shown beside the other buttons of a card once one was used.
_OLD_FIGURE = "The figure beside it is as of the error."

#: ``gone``: what it was about is not there any more.
State = Literal["ready", "queued", "running", "done", "failed", "gone"]

#: Kinds of ways out whose button releases something; "cached blocks" only empties a cache.
_RELEASING_KINDS = ("last exception", "out", "names")


@dataclass(slots=True)
class _Button:
    """A way out that can be clicked."""

    way: Remedy
    #: Number of the row on the card.
    row: int
    device: str
    #: Id of the object that each of the way's names was bound to when the card was shown.
    ids: dict[str, int]
    state: State = "ready"
    lines: tuple[str, ...] = ()

    def describe(self) -> Message:
        question = ""
        if self.way.loses_training_state:
            question = f"Release {join_words(self.way.names)}? This loses training state."
        return {
            "row": self.row,
            "act": "give" if self.way.kind == "cached blocks" else "release",
            "state": self.state,
            "lines": [*self.lines],
            "question": question,
        }


@dataclass(slots=True)
class _Card:
    """A card with its buttons."""

    event: OomEvent
    buttons: list[_Button]
    #: The first line anew, once a button was used; ``""`` while the card's own is true.
    verdict: str = ""


class CardButtons(anywidget.AnyWidget):
    """The buttons on all cards of a session."""

    _esm = traitlets.Unicode().tag(sync=True)
    #: Name of the widget in the pages' script.
    widget = traitlets.Unicode("cards").tag(sync=True)

    def __init__(self, session: Session) -> None:
        self._session = session
        self._monitor = session.monitor
        self._shell = session.shell
        self._cards: dict[str, _Card] = {}
        # On ipykernel 7 two clicks may come on two threads.
        self._lock = threading.RLock()
        self._is_closed = False
        self._stop_listening = session.monitor.cell_ended.add(self._notice_cell)
        super().__init__()
        self.on_msg(self._handle_message)

    @traitlets.default("_esm")
    def _default_esm(self) -> str:
        return read_esm()

    def add(self, name: str, card: OomCard) -> None:
        """Give a card its buttons; the page finds it by its class, ``name``."""
        buttons = [
            _Button(way, row, card.event.device, _identify(self._shell, way.names))
            for row, way in enumerate(card.ways)
            if way.can_do and way.kind in (*_RELEASING_KINDS, "cached blocks")
        ]
        with self._lock:
            self._cards[name] = _Card(card.event, buttons)
            while len(self._cards) > _MAX_CARDS:
                del self._cards[next(iter(self._cards))]
        self._send_cards()

    def describe(self) -> dict[str, list[Message]]:
        """Return each card's buttons by the card's class: the row, what a click does, its state."""
        with self._lock:
            return {
                name: [button.describe() for button in card.buttons]
                for name, card in self._cards.items()
            }

    def list_verdicts(self) -> dict[str, str]:
        """Return the new first line of each card whose button was used, by the card's class."""
        with self._lock:
            return {name: card.verdict for name, card in self._cards.items() if card.verdict}

    def close(self) -> None:
        """Take the buttons out of every page. May be called twice."""
        # A widget that goes is closed once more, also one whose making failed.
        if getattr(self, "_is_closed", True):
            return
        self._is_closed = True
        self._stop_listening()
        # nbclient saves the state of closed widgets too: leave it nothing to save.
        self._esm = _NO_SCRIPT
        # ipywidgets makes a model for the layout beside each widget and leaves it open.
        layout = self.layout
        super().close()
        layout.close()

    # -- What is still there -----------------------------------------------------------------------

    def _notice_cell(self, record: CellRecord) -> None:
        # The exception that a card speaks of is not the last one any more. That of the cell itself
        # comes here before its card is shown.
        if record.status != "ok":
            self._withdraw(
                "last exception", "A later cell failed: its exception is the last one now."
            )

    def _withdraw(self, kind: str, why: str) -> None:
        """Take back the offers of all ways of a kind."""
        for button in self._list_ready():
            if button.way.kind == kind:
                button.state, button.lines = "gone", (why,)
        self._send_cards()

    def _withdraw_gone(self) -> None:
        """Take back the offers whose memory has gone with another one."""
        for button in self._list_ready():
            why = self._explain_gone(button)
            if why:
                button.state, button.lines = "gone", (why,)
        self._send_cards()

    def _list_ready(self) -> list[_Button]:
        # A button that failed keeps its words until it is tried again.
        with self._lock:
            buttons = [button for card in self._cards.values() for button in card.buttons]
        return [button for button in buttons if button.state == "ready"]

    def _explain_gone(self, button: _Button) -> str:
        """Return why there is nothing left to release; ``""`` while there may be."""
        kind = button.way.kind
        if kind == "names":
            return "" if self._list_unchanged(button) else _describe_changed(button.way.names)
        if kind in ("out", "last exception"):
            root = "out" if kind == "out" else "exception"
            if any(reference.root == root for reference in self._shell.list_references()):
                return ""
            return "Out is empty." if kind == "out" else "No exception is held any more."
        return ""

    def _list_unchanged(self, button: _Button) -> list[str]:
        """Return the names that still are bound to the objects of the card."""
        now = _identify(self._shell, button.way.names)
        return [name for name, held in button.ids.items() if now.get(name) == held]

    # -- Clicks ------------------------------------------------------------------------------------

    def _handle_message(self, _widget: object, content: object, _buffers: object) -> None:
        try:
            request = check_request(content, CARD_REQUESTS)
        except BadInputError:
            # There is no place on the cards for it: the page sees that nothing was done.
            self._send_cards()
            return
        if request["kind"] == "hello":
            self._send_cards()
        else:
            self._click(request["card"], request["way"])

    def _click(self, name: str, place: int) -> None:
        with self._lock:
            card = self._cards.get(name)
            button = None
            if card is not None and 0 <= place < len(card.buttons):
                button = card.buttons[place]
            if card is None or button is None or button.state not in ("ready", "failed"):
                self._send_cards()
                return
            button.state, button.lines = "queued", ()
        if self._monitor.running is not None:
            self._send_cards()
        schedule_on_main(lambda: self._monitor.when_idle(lambda: self._carry_out(card, button)))

    def _carry_out(self, card: _Card, button: _Button) -> None:
        """Act, and show what came of it: an error in a widget's callback is seen nowhere else."""
        if self._is_closed:
            return
        # A cell may have dropped it since the card was shown.
        why = self._explain_gone(button)
        if why:
            self._tell(button, "gone", why)
            return
        self._tell(button, "running")
        try:
            with tell_progress(lambda words: self._tell(button, "running", words)):
                button.state, button.lines = self._act(button)
        except KeyboardInterrupt:
            # A Ctrl-C that comes later is told in the release's report.
            button.state, button.lines = "failed", ("Interrupted: nothing was changed.",)
        except Exception as exc:  # noqa: BLE001 - shown where the click was
            button.state, button.lines = "failed", (describe_failure(exc),)
        if button.state == "done":
            with self._session.reporting("bringing the card of an OOM up to date"):
                card.verdict = judge_now(
                    describe_oom(
                        self._monitor.hardware,
                        card.event.device,
                        requested_bytes=card.event.requested_bytes,
                    )
                )
                for other in card.buttons:
                    if other.state == "ready":
                        other.lines = (_OLD_FIGURE,)
        with self._session.reporting("telling the dashboard of a release"):
            self._monitor.read_now()
        # Two ways may have led to the same memory.
        self._withdraw_gone()

    def _tell(self, button: _Button, state: State, *lines: str) -> None:
        button.state, button.lines = state, lines
        self._send_cards()

    def _request(self, button: _Button) -> ReleaseRequest:
        """Return the release that a click on the button asks for now."""
        kind = button.way.kind
        return ReleaseRequest(
            tuple(self._list_unchanged(button)),
            out=kind == "out",
            exceptions=kind == "last exception",
            # The card said nothing of moving what something else works with to the CPU.
            may_move=kind != "names",
        )

    def _act(self, button: _Button) -> tuple[State, tuple[str, ...]]:
        hardware = self._monitor.hardware
        if button.way.kind == "cached blocks":
            before = self._read_reserved(button.device)
            hardware.empty_cache()
            after = self._read_reserved(button.device)
            return "done", (describe_cached(button.device, before, after),)
        request = self._request(button)
        names = request.names
        report = self._session.release(request)
        if report.plan.moves and not request.may_move:
            return "gone", (_describe_shared(names),)
        if report.stopped is None:
            self._withdraw("cached blocks", "They were given back with what was released.")
        line, more = describe_released(button.way, report, button.device)
        left = [name for name in button.way.names if name not in names]
        if left:
            more = (f"Left as it is: {join_words(left)}, bound to something else now.", *more)
        return ("done" if report.stopped is None else "failed"), (line, *more)

    def _read_reserved(self, device: str) -> int | None:
        reserved = {one.device: one.reserved_bytes for one in self._monitor.hardware.read()}
        return reserved.get(device)

    def _send_cards(self) -> None:
        if not self._is_closed:
            self.send({"cards": self.describe(), "verdicts": self.list_verdicts()})


def _identify(shell: Shell, names: Sequence[str]) -> dict[str, int]:
    """The id of what each of the names is bound to; without those that are not bound, or to None.

    An id may be given again to what is made later: to take one for the other, a new object of a
    name would have to come to stand just where the old one stood.
    """
    namespace = shell.user_ns
    return {name: id(held) for name in names if (held := namespace.get(name)) is not None}


def _describe_shared(names: Sequence[str]) -> str:
    verb = "is" if len(names) == 1 else "are"
    return (
        f"{join_words(names)} {verb} held by something else too by now, and would have to be moved "
        f"to the CPU under it: %memrelease --dry-run {' '.join(names)} shows what."
    )


def _describe_changed(names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"{names[0]} is not what it was any more."
    return f"{join_words(names)} are not what they were any more."
