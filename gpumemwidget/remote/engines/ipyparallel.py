"""Watch the engines of an ipyparallel client.

``ipyparallel_engine`` runs on the engines and says what is told there, and how. Here a future
without a request listens: the client calls its callbacks, on its own thread, with each message that
answers it. So messages come by the client's one connection, with its authentication and tunnels,
while tasks run and between them.

An engine does one thing at a time. What it is asked to do (to join, to tell its clock, to release
names) waits behind its task, and nobody here waits for it longer than a few seconds.
"""

from __future__ import annotations

import functools
import itertools
import os
import socket
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpumemwidget.errors import RecordingError, describe_exception
from gpumemwidget.model.processes import ProcessInfo
from gpumemwidget.model.releases import ReleaseRequest
from gpumemwidget.remote.engines import ipyparallel_engine, worker
from gpumemwidget.remote.engines.inbox import Inbox
from gpumemwidget.remote.gathering.releases import Outcome
from gpumemwidget.remote.messages import Devices, Message, decode, encode

if TYPE_CHECKING:
    from ipyparallel import Client

#: Seconds between two measurements of an engine's clock, and after one that failed.
_CLOCK_EVERY_S = 600.0
_CLOCK_AGAIN_S = 10.0
#: Number of round trips of a measurement; the shortest counts.
_ROUND_TRIPS = 3
#: Maximum seconds of a round trip that tells the clock.
_MAX_ROUND_TRIP_S = 1.0
#: Seconds within which an engine has to answer, or counts as busy.
_FREE_S = 2.0
#: Seconds to wait for a release, which a free engine begins at once.
_RELEASE_S = 60.0


@dataclass(slots=True, eq=False)
class _Engine:
    """An engine that was asked to join."""

    number: int
    uuid: str
    #: The answer to ``join_engine``; ``None`` once it is read.
    joining: Any
    has_joined: bool = False
    #: It tells too many other notebooks, and no longer this one.
    is_forgotten: bool = False
    #: The answer to ``read_clock``.
    ping: Any = None
    ping_due_s: float = 0.0
    n_pings: int = 0
    round_trip_s: float = _MAX_ROUND_TRIP_S
    #: Seconds by which its clock is ahead of ours.
    offset_s: float | None = None
    #: The recording that it tells of, and the place there of its next batch.
    recording: int = 0
    place: int = 0
    #: Number of batches that were lost on the way.
    n_lost: int = 0


class IpyparallelSource:
    """The engines of a client: those that are there, come later, or were restarted.

    Attributes:
        name: how many engines there are.
    """

    def __init__(self, client: Client) -> None:
        self.name = "0 engines"
        self._client: Any = client
        self._engines: dict[str, _Engine] = {}
        self._inbox = Inbox()
        self._is_closed = False
        header = self._client.session.msg(ipyparallel_engine.MESSAGE_TYPE)["header"]
        header = {key: header[key] for key in ("msg_id", "msg_type", "session", "username")}
        #: Which notebook listens, and the request that nobody sent, which all messages answer.
        self._listener = (_name_notebook(), header)
        self._listening: Any = self._client.create_message_futures(header["msg_id"], header)[0]
        self._listening.iopub_callbacks.append(self._hear)

    # -- Listening ---------------------------------------------------------------------------------

    def read(self) -> Iterator[tuple[str, Message]]:
        """Let new engines join, and yield the messages since the last call.

        Raises:
            RecordingError: an engine could not join; once for each.
        """
        refusals = []
        self._ask_new()
        for engine in list(self._engines.values()):
            if engine.joining is not None and engine.joining.done():
                joining, engine.joining = engine.joining, None
                error = joining.exception()
                if error is None:
                    engine.has_joined = True
                    recording, began = joining.result()
                    yield _name_recording(engine.uuid, recording), decode(began)
                elif self._is_there(engine):
                    refusals.append(f"engine {engine.number}: {describe_exception(error)}")
            if engine.is_forgotten:
                engine.has_joined = engine.is_forgotten = False
                self._ask_to_join(engine)
            elif engine.has_joined and time.monotonic() >= engine.ping_due_s:
                self._ping(engine)
        yield from self._inbox.take()
        if refusals:
            raise RecordingError(f"can't record {'; '.join(refusals)}")

    def _ask_new(self) -> None:
        numbers = self._client.ids
        for number in numbers:
            uuid = self._client._engines.get(number)  # noqa: SLF001 - a restart shows nowhere else
            if uuid is not None and uuid not in self._engines and not self._is_closed:
                engine = self._engines[uuid] = _Engine(number, uuid, None)
                self._ask_to_join(engine)
        self.name = "1 engine" if len(numbers) == 1 else f"{len(numbers)} engines"

    def _ask_to_join(self, engine: _Engine) -> None:
        engine.joining = self._apply(engine, ipyparallel_engine.join_engine, *self._listener)

    def _hear(self, message: dict[str, Any]) -> None:
        """Keep a batch until it is read; on the client's thread."""
        content = message["content"]
        uuid, recording, place, lines = (
            content.get(key) for key in ("engine", "recording", "place", "lines")
        )
        is_batch = type(uuid) is type(lines) is str and type(recording) is type(place) is int
        engine = self._engines.get(uuid) if is_batch else None
        if engine is None:
            return
        if recording != engine.recording:
            engine.recording, engine.place = recording, 0
        n_lost, engine.place = place - engine.place, place + 1
        data = lines.encode(errors="replace")
        if n_lost:
            engine.n_lost += max(n_lost, 1)
            # Samples count from those before: the next are passed over until they are told anew.
            data = encode(Devices(())) + data
        self._inbox.put(_name_recording(uuid, recording), data)

    def is_alive(self, key: str, info: ProcessInfo) -> bool:  # noqa: ARG002 - of all sources
        """Return whether the client has the engine still."""
        engine = self._find(key)
        return engine is not None and self._is_there(engine)

    def count_unread(self, key: str) -> int:
        """Return how many batches were lost on the way, or lines no messages."""
        engine = self._find(key)
        return self._inbox.count_unread(key) + (0 if engine is None else engine.n_lost)

    def _find(self, key: str) -> _Engine | None:
        return self._engines.get(key.rpartition("/")[0])

    def _is_there(self, engine: _Engine) -> bool:
        client = self._client
        is_open = not (self._is_closed or client._closed)  # noqa: SLF001 - nothing public tells
        return is_open and client._engines.get(engine.number) == engine.uuid  # noqa: SLF001 - see above

    # -- Asking ------------------------------------------------------------------------------------

    def _apply(
        self, engine: _Engine, function: Callable[..., object], *args: Any, **kwargs: Any
    ) -> Any:
        """Send a function to an engine; return the future; ``None`` where it can't be sent."""
        try:
            return self._client.direct_view(engine.number).apply_async(function, *args, **kwargs)
        except Exception:  # noqa: BLE001 - the engine or the client is gone meanwhile
            return None

    def measure_offset(self, key: str) -> float | None:
        """Return the seconds by which an engine's clock is ahead of ours, by a round trip."""
        engine = self._find(key)
        return None if engine is None else engine.offset_s

    def _ping(self, engine: _Engine) -> Any:
        """Ask for an engine's clock, unless an answer is awaited; return the future or ``None``."""
        if engine.ping is None or engine.ping.done():
            engine.ping_due_s = time.monotonic() + _CLOCK_AGAIN_S
            sent_at = time.time()
            engine.ping = self._apply(engine, ipyparallel_engine.read_clock, *self._listener)
            if engine.ping is not None:
                engine.ping.add_done_callback(functools.partial(_note_clock, engine, sent_at))
        return engine.ping

    def _is_free(self, engine: _Engine, deadline_s: float) -> bool:
        """Wait until an engine has answered the newest ping and its clock is known."""
        ping = engine.ping
        while ping is not None and _wait(ping, deadline_s) and ping.exception() is None:
            if engine.offset_s is not None:
                return True
            ping = self._ping(engine)
        return False

    def release(
        self, keys: Collection[str], request: ReleaseRequest, *, dry_run: bool
    ) -> dict[str, Outcome]:
        """Release names on some engines at once; return what came of it by key.

        An engine that is gone, or has a task, is answered for by a refusal: nothing will be
        released there later, either.

        Args:
            keys: the engines, as ``read`` names them.
            request: the names.
            dry_run: only plan.
        """
        outcomes: dict[str, Outcome] = {}
        engines: dict[str, _Engine] = {}
        for key in keys:
            engine = self._find(key)
            if engine is None or not self._is_there(engine):
                outcomes[key] = "this engine is gone: nothing is released there"
            else:
                engines[key] = engine
                self._ping(engine)
        deadline_s = time.monotonic() + _FREE_S
        release = ipyparallel_engine.release_names
        data = worker.write_request(request)
        asked = {}
        for key, engine in engines.items():
            outcomes[key] = f"engine {engine.number} is busy: try again when its task has ended"
            if self._is_free(engine, deadline_s):
                not_after = time.time() + (engine.offset_s or 0.0) + _FREE_S
                asked[key] = self._apply(
                    engine, release, data, dry_run=dry_run, not_after=not_after
                )
        deadline_s = time.monotonic() + _RELEASE_S
        for key, answer in asked.items():
            outcomes[key] = _read_answer(answer, deadline_s) or outcomes[key]
        return outcomes

    # -- The end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Take away what was added on the engines; one that is busy does it after its task."""
        if self._is_closed:
            return
        _open_names.discard(self._listener[0])
        there = [engine for engine in self._engines.values() if self._is_there(engine)]
        self._is_closed = True
        leave = ipyparallel_engine.leave_engine
        answers = [self._apply(engine, leave, *self._listener) for engine in there]
        deadline_s = time.monotonic() + _FREE_S
        for answer in answers:
            if answer is not None:
                _wait(answer, deadline_s)
        self._listening.iopub_callbacks.clear()
        message_id = self._listener[1]["msg_id"]
        self._client._futures.pop(message_id, None)  # noqa: SLF001 - as the client itself does
        self._client.metadata.pop(message_id, None)


def watch_ipyparallel(client: Client) -> IpyparallelSource:
    """Return the engines of a client as a source, for a collector."""
    return IpyparallelSource(client)


#: The names of the open sources of this process.
_open_names: set[str] = set()


def _name_notebook() -> str:
    """Return a name for this notebook that it has after a restart of its kernel too."""
    # Jupyter's server tells a kernel its notebook.
    notebook = os.environ.get("JPY_SESSION_NAME") or f"process {os.getpid()}"
    names = (f"{socket.gethostname()}: {notebook} #{place}" for place in itertools.count())
    name = next(name for name in names if name not in _open_names)
    _open_names.add(name)
    return name


def _name_recording(uuid: str, recording: int) -> str:
    return f"{uuid}/{recording}"


def _note_clock(engine: _Engine, sent_at: float, answer: Any) -> None:
    """Note an engine's clock when its answer has come; on the client's thread."""
    now = time.time()
    if answer.exception() is not None:
        return
    there, is_told = answer.result()
    engine.is_forgotten |= not is_told
    if engine.n_pings % _ROUND_TRIPS == 0:
        engine.round_trip_s = _MAX_ROUND_TRIP_S
    engine.n_pings += 1
    if now - sent_at < engine.round_trip_s:
        engine.round_trip_s = now - sent_at
        engine.offset_s = there - (sent_at + now) / 2
    if engine.n_pings % _ROUND_TRIPS:
        engine.ping_due_s = 0.0
    elif engine.offset_s is not None:
        engine.ping_due_s = time.monotonic() + _CLOCK_EVERY_S


def _wait(answer: Any, deadline_s: float) -> bool:
    """Wait for an answer; return whether it has come."""
    return bool(answer.wait(max(0.0, deadline_s - time.monotonic())))


def _read_answer(answer: Any, deadline_s: float) -> Outcome | None:
    """Return the outcome of a release; ``None``: it came too late to begin."""
    if answer is None:
        return "this engine is gone: nothing is released there"
    if not _wait(answer, deadline_s):
        return f"no answer within {_RELEASE_S:.0f} s: what became of it is not known"
    error = answer.exception()
    if error is not None:
        return f"it failed there: {describe_exception(error)}"
    data = answer.result()
    return None if data is None else worker.read_outcome(data)
