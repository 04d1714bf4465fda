"""What the buttons on the cards of OOMs do.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import anywidget
import traitlets

from gpumemwidget.jupyter.frontend import read_card_esm
from gpumemwidget.jupyter.messages import Message, describe_failure
from gpumemwidget.jupyter.variables import schedule_on_main
from gpumemwidget.measure.monitor import Monitor
from gpumemwidget.owners.base import Shell
from gpumemwidget.owners.plan import plan_release
from gpumemwidget.owners.release import apply_release
from gpumemwidget.records import CellRecord
from gpumemwidget.report.oom import describe_cached, describe_released, sort_ways
from gpumemwidget.report.words import join_words
from gpumemwidget.traces import OomCard, WayOut

__all__ = ["CardButtons"]

#: Older cards than these lose their buttons.
_MOST_CARDS = 20
#: Cells often come in a row (Run All): what is left of the ways is looked at when they paused.
_PAUSE_S = 0.3
_NO_SCRIPT = "export default {}"

#: ``gone``: what it was about is not there any more.
State = Literal["ready", "queued", "running", "done", "failed", "gone"]

#: What ``plan_release`` is asked for.
_OPTIONS: dict[str, dict[str, bool]] = {
    "last exception": {"exceptions": True},
    "out": {"out": True},
    "names": {},
    "gradients": {"grads": True},
}


@dataclass(slots=True)
class _Button:
    """A way out that can be clicked."""

    way: WayOut
    #: Which row of the card it is.
    row: int
    device: str
    #: Of ``names``: what each was bound to when the card was shown.
    ids: dict[str, int]
    state: State = "ready"
    lines: tuple[str, ...] = ()

    def describe(self) -> Message:
        act = "give" if self.way.kind == "cached blocks" else "release"
        return {"row": self.row, "act": act, "state": self.state, "lines": list(self.lines)}


class CardButtons(anywidget.AnyWidget):
    """The buttons on all cards of a session; a listener of its monitor.

    Args:
        monitor: says when no cell runs, and measures.
        shell: IPython's names and references.
        on_release: called when something was released.
        schedule: runs an action on the main thread, after a delay.
    """

    _esm = traitlets.Unicode().tag(sync=True)

    def __init__(
        self,
        monitor: Monitor,
        shell: Shell,
        *,
        on_release: Callable[[], None] = lambda: None,
        schedule: Callable[[Callable[[], None], float], None] = schedule_on_main,
    ) -> None:
        self._monitor = monitor
        self._on_release = on_release
        self._shell = shell
        self._schedule = schedule
        self._cards: dict[str, list[_Button]] = {}
        # On ipykernel 7 two clicks may come on two threads.
        self._lock = threading.RLock()
        self._is_closed = False
        self._looks_soon = False
        super().__init__()
        self.on_msg(self._handle_message)
        monitor.add_listener(self)

    @traitlets.default("_esm")
    def _default_esm(self) -> str:
        return read_card_esm()

    def add(self, name: str, card: OomCard) -> None:
        """Give a card its buttons.

        Args:
            name: the class by which the page finds it.
            card: what is on it.
        """
        buttons = [
            _Button(way, row, card.event.device, _identify(self._shell, way.names))
            for row, way in enumerate(sort_ways(card.ways))
            if way.can_do and (way.kind in _OPTIONS or way.kind == "cached blocks")
        ]
        with self._lock:
            self._cards[name] = buttons
            while len(self._cards) > _MOST_CARDS:
                del self._cards[next(iter(self._cards))]
        self._tell()

    def describe(self) -> dict[str, list[Message]]:
        """For each card, by its class, its buttons: the row, what a click does, how far it is."""
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
        self._monitor.remove_listener(self)
        # nbclient saves the state of closed widgets too: leave it nothing to save.
        self._esm = _NO_SCRIPT
        # ipywidgets makes a model for the layout beside each widget and leaves it open.
        layout = self.layout
        super().close()
        layout.close()

    # -- The session goes on -----------------------------------------------------------------------

    def on_cell_started(self, cell: object) -> None:
        """Nothing: what a cell changes is seen at its end."""

    def on_cell_ended(self, record: CellRecord) -> None:
        """Look, when the cells have paused, at what of the ways is still there."""
        if record.status != "ok":
            # The exception that a card speaks of is not the last one any more. That of the cell
            # itself comes here before its card is shown.
            self._end("last exception", "A later cell failed: its exception is the last one now.")
        if not self._looks_soon and self._list_ready():
            self._looks_soon = True
            self._schedule(lambda: self._monitor.when_idle(self._look), _PAUSE_S)

    def on_samples(self, samples: object) -> None:
        """Nothing: the cards stand still."""

    def _end(self, kind: str, why: str) -> None:
        """Offer no more what all ways of a kind were about."""
        for button in self._list_ready():
            if button.way.kind == kind:
                button.state, button.lines = "gone", (why,)
        self._tell()

    def _look(self) -> None:
        self._looks_soon = False
        if self._is_closed:
            return
        for button in self._list_ready():
            why = self._find_end(button)
            if why:
                button.state, button.lines = "gone", (why,)
        self._tell()

    def _list_ready(self) -> list[_Button]:
        # What failed keeps its words until it is tried again.
        with self._lock:
            buttons = [button for buttons in self._cards.values() for button in buttons]
        return [button for button in buttons if button.state == "ready"]

    def _find_end(self, button: _Button) -> str:
        """Why there is nothing left to release; ``""`` while there may be."""
        kind = button.way.kind
        if kind == "names":
            return "" if self._list_same(button) else _describe_changed(button.way.names)
        if kind in ("out", "last exception"):
            root = "out" if kind == "out" else "exception"
            if any(reference.root == root for reference in self._shell.list_references()):
                return ""
            return "Out is empty." if kind == "out" else "No exception is held any more."
        return ""

    def _list_same(self, button: _Button) -> list[str]:
        """The names that still are bound to what the card spoke of."""
        now = _identify(self._shell, button.way.names)
        return [name for name, held in button.ids.items() if now.get(name) == held]

    # -- Clicks ------------------------------------------------------------------------------------

    def _handle_message(self, _widget: object, content: Message, _buffers: object) -> None:
        if content.get("kind") == "hello":
            self._tell()
        elif content.get("kind") == "do":
            self._click(str(content["card"]), int(content["way"]))

    def _click(self, name: str, place: int) -> None:
        with self._lock:
            buttons = self._cards.get(name, [])
            if not 0 <= place < len(buttons) or buttons[place].state not in ("ready", "failed"):
                self._tell()
                return
            button = buttons[place]
            button.state, button.lines = "queued", ()
        if self._monitor.running is not None:
            self._tell()
        self._schedule(lambda: self._monitor.when_idle(lambda: self._carry_out(button)), 0.0)

    def _carry_out(self, button: _Button) -> None:
        """Do it, and say what came of it: what a widget's callback raises is seen nowhere else."""
        if self._is_closed:
            return
        # Between the click and now a cell may have ended.
        why = self._find_end(button)
        if why:
            button.state, button.lines = "gone", (why,)
            self._tell()
            return
        button.state = "running"
        self._tell()
        try:
            state, lines = self._act(button)
        except (Exception, KeyboardInterrupt) as exc:  # noqa: BLE001 - shown where the click was
            state, lines = "failed", (describe_failure(exc),)
        button.state, button.lines = state, lines
        try:
            # The dashboard shows it too.
            self._monitor.read_now()
            self._on_release()
        except Exception as exc:  # noqa: BLE001 - what came of the click is still to be told
            self._monitor.report_failure(
                f"The dashboard could not be told of a release: {describe_failure(exc)}"
            )
        # Two ways may have led to the same memory.
        self._look()

    def _act(self, button: _Button) -> tuple[State, tuple[str, ...]]:
        hardware = self._monitor.hardware
        if button.way.kind == "cached blocks":
            before = self._read_reserved(button.device)
            hardware.empty_cache()
            after = self._read_reserved(button.device)
            return "done", (describe_cached(button.device, before, after),)
        names = self._list_same(button)
        options: dict[str, Any] = _OPTIONS[button.way.kind]
        plan = plan_release(self._shell, hardware, names, **options)
        if plan.moves and button.way.kind == "names":
            # It would be moved to the CPU under what works with it, of which the card said nothing.
            return "gone", (_describe_shared(names),)
        report = apply_release(plan, self._shell, hardware)
        if report.stopped is None:
            self._end("cached blocks", "They were given back with what was released.")
        line, more = describe_released(button.way, report, button.device)
        left = [name for name in button.way.names if name not in names]
        if left:
            more = (f"Left as it is: {join_words(left)}, bound to something else now.", *more)
        return ("done" if report.stopped is None else "failed"), (line, *more)

    def _read_reserved(self, device: str) -> int | None:
        readings = self._monitor.hardware.read()
        return next((each.reserved_bytes for each in readings if each.device == device), None)

    def _tell(self) -> None:
        if not self._is_closed:
            self.send({"cards": self.describe()})


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
