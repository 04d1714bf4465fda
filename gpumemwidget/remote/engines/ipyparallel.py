"""Watch the engines of an ipyparallel client.

``ipyparallel_engine`` runs on the engines and says what is sent there, and how. Here a future
without a request listens: the client calls its callbacks, on its own thread, with each message that
answers it. So messages come by the client's one connection, with its authentication and tunnels,
while tasks run and between them.

An engine does one thing at a time, so what it is asked to do waits behind its task.
"""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from ipyparallel import Client

from gpumemwidget.errors import RecordingError, describe_exception
from gpumemwidget.model.processes import ProcessInfo
from gpumemwidget.remote.engines import ipyparallel_engine
from gpumemwidget.remote.engines.inbox import InboxSource
from gpumemwidget.remote.messages import Message

#: Seconds to wait for an engine that joins or leaves; one with a task does so when that has ended.
_FREE_S = 2.0


@dataclass(slots=True, eq=False)
class _Engine:
    """An engine that was asked to join."""

    #: The answer to ``join_engine``, until it is read.
    joining: Any = None
    #: The newest recording that it sends.
    key: str = ""
    #: Set by the first message.
    is_heard: threading.Event = field(default_factory=threading.Event)


class IpyparallelSource(InboxSource):
    """The engines of a client, also those that come later.

    Attributes:
        name: how many engines there are.
    """

    def __init__(self, client: Client) -> None:
        super().__init__()
        self.name = "0 engines"
        self._client: Any = client
        #: By number.
        self._engines: dict[int, _Engine] = {}
        self._is_closed = False
        header = self._client.session.msg(ipyparallel_engine.MESSAGE_TYPE)["header"]
        #: The notebook's name, and the request that nobody sent, which all messages answer.
        self._listener = (_name_notebook(), header)
        self._listen()
        # All free engines record the notebook's next task.
        self._ask_to_join()
        deadline_s = time.monotonic() + _FREE_S
        for engine in self._engines.values():
            if _wait(engine.joining, deadline_s):
                engine.is_heard.wait(max(0.0, deadline_s - time.monotonic()))

    # -- Listening ---------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Be called with what answers our request, also after the client was purged."""
        _, header = self._listener
        if header["msg_id"] not in self._client._futures:  # noqa: SLF001 - nothing public says
            (listening,) = self._client.create_message_futures(header["msg_id"], header)
            listening.iopub_callbacks.append(self._hear)

    def read(self) -> Iterable[tuple[str, Message]]:
        """Let new engines join, and return the messages since the last call.

        Raises:
            RecordingError: an engine could not join; once for each.
        """
        if not self._is_closed:
            self._listen()
        self._ask_to_join()
        refusals = []
        for number, engine in self._engines.items():
            joining = engine.joining
            if joining is not None and joining.done():
                engine.joining, error = None, joining.exception()
                if error is not None:
                    refusals.append(f"engine {number}: {describe_exception(error)}")
        if refusals:
            raise RecordingError(f"can't record {'; '.join(refusals)}")
        return super().read()

    def _ask_to_join(self) -> None:
        """Let the engines join that have come since the last call, and forget those that left."""
        numbers = [] if self._is_closed else self._client.ids
        self.name = "1 engine" if len(numbers) == 1 else f"{len(numbers)} engines"
        for number in self._engines.keys() - set(numbers):
            self._engines.pop(number, None)
        for number in numbers:
            if number not in self._engines:
                # Before it is asked, as it may send something before that is noted here.
                engine = self._engines[number] = _Engine()
                join = ipyparallel_engine.join_engine
                engine.joining = self._apply(number, join, *self._listener)

    def _hear(self, message: dict[str, Any]) -> None:
        """Take a batch; on the client's thread."""
        content = message["content"]
        number, recording, lines = (content.get(key) for key in ("engine", "recording", "lines"))
        engine = self._engines.get(number) if type(number) is int else None
        if engine is not None:
            engine.key = f"{number}/{recording}"
            self.put(engine.key, str(lines).encode(errors="replace"))
            engine.is_heard.set()

    def is_alive(self, key: str, info: ProcessInfo) -> bool:  # noqa: ARG002 - of all sources
        """Return whether the client has the engine still, and heard of it lately."""
        return not self.is_silent(key) and self._find_number(key) is not None

    def _find_number(self, key: str) -> int | None:
        """Return the number of the engine that sends a recording; ``None`` if it is gone."""
        number = int(key.partition("/")[0])
        engine = self._engines.get(number)
        is_closed = self._client._closed  # noqa: SLF001 - nothing public says
        return None if engine is None or engine.key != key or is_closed else number

    # -- Asking ------------------------------------------------------------------------------------

    def _apply(
        self, number: int, function: Callable[..., object], *args: Any, **kwargs: Any
    ) -> Any:
        """Send a function to an engine; return the future; ``None`` where it can't be sent."""
        try:
            return self._client.direct_view(number).apply_async(function, *args, **kwargs)
        except Exception:  # noqa: BLE001 - the engine or the client is gone meanwhile
            return None

    def begin_release(self, key: str, order: bytes) -> Future[bytes] | str:
        """Release names on an engine, once it has no task; see ``ReleasingSource``."""
        number = self._find_number(key)
        release = ipyparallel_engine.release_names
        answer = None if number is None else self._apply(number, release, order)
        return "this engine is gone: nothing is released there" if answer is None else answer

    # -- The end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Take away what was added on the engines; one that is busy does it after its task."""
        if self._is_closed:
            return
        self._is_closed = True
        name, header = self._listener
        leave = ipyparallel_engine.leave_engine
        answers = [self._apply(number, leave, name, header) for number in tuple(self._engines)]
        deadline_s = time.monotonic() + _FREE_S
        for answer in answers:
            _wait(answer, deadline_s)
        self._client.purge_local_results(header["msg_id"])
        _open_names.discard(name)


#: The names of the open sources of this process.
_open_names: set[str] = set()


def _name_notebook() -> str:
    """Return a name for this notebook that it has after a restart of its kernel too."""
    # Jupyter's server gives a kernel the name of its notebook.
    notebook = os.environ.get("JPY_SESSION_NAME") or f"process {os.getpid()}"
    names = (f"{socket.gethostname()}: {notebook} #{place}" for place in itertools.count())
    name = next(name for name in names if name not in _open_names)
    _open_names.add(name)
    return name


def _wait(answer: Any, deadline_s: float) -> bool:
    """Wait for an answer; return whether it has come, or none is to be expected."""
    return answer is None or bool(answer.wait(max(0.0, deadline_s - time.monotonic())))
