"""Record the engines of an ipyparallel client: the notebook's half, and the one on an engine.

A task is a ``%%px`` cell or other code for ``view.execute``, or a function for ``apply`` or
``map``. IPython has no event for a function, nor for code that is run silently, as ``view.execute``
does by itself. So a span begins where the kernel executes code or has unpacked a function, and ends
where it completes its reply.

What is recorded is published on the engine's IOPub socket. A thread of ipykernel's own does that,
within a task and between tasks. A client drops what answers none of its requests, so all messages
here answer one that the notebook made up: a future without a request, whose callbacks the client
calls on its own thread. So messages come by the client's one connection, with its authentication
and tunnels.

An engine does one thing at a time, so what it is asked to do waits behind its task.
"""

from __future__ import annotations

import functools
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from gpumemwidget.backends.hooks import Patch
from gpumemwidget.errors import RecordingError, describe_exception
from gpumemwidget.model.cells import Status
from gpumemwidget.model.processes import ProcessInfo
from gpumemwidget.recording.running_cell import find_first_line, name_cell
from gpumemwidget.remote.engines import worker
from gpumemwidget.remote.messages import Message
from gpumemwidget.remote.reader.collector import InboxSource
from gpumemwidget.remote.writer.recorder import Recorder
from gpumemwidget.session.interrupts import run_uninterrupted

if TYPE_CHECKING:
    from ipyparallel import Client

#: The type of the published messages.
_MESSAGE_TYPE = "gpumemwidget"
#: Seconds to wait for an engine that joins or leaves; one with a task does so when that has ended.
_FREE_S = 2.0

#: The header of the request that all messages to a notebook answer.
_Header: TypeAlias = Mapping[str, Any]


# -- In the notebook -------------------------------------------------------------------------------


class IpyparallelSource(InboxSource):
    """The engines of a client, also those that come later. The key of each is its number.

    Attributes:
        name: how many engines there are.
    """

    def __init__(self, client: Client) -> None:
        super().__init__()
        self.name = "0 engines"
        self._client: Any = client
        #: By number, the answer to ``join_engine``, until it is read.
        self._engines: dict[int, Any] = {}
        self._is_closed = False
        #: Held while engines are let in, so that none joins after the others have left.
        self._lock = threading.Lock()
        self._header = self._client.session.msg(_MESSAGE_TYPE)["header"]
        self._listen()
        # All free engines record the notebook's next task.
        self._ask_to_join()
        deadline_s = time.monotonic() + _FREE_S
        free = [
            str(number)
            for number, joining in self._engines.items()
            if _wait(joining, deadline_s) and joining.successful()
        ]
        with self._has_news:
            self._has_news.wait_for(
                lambda: self._heard.keys() >= set(free), max(0.0, deadline_s - time.monotonic())
            )

    def _listen(self) -> None:
        """Be called with what answers our request, also after the client was purged."""
        number = self._header["msg_id"]
        if number not in self._client._futures:  # noqa: SLF001 - nothing public says
            (listening,) = self._client.create_message_futures(number, self._header)
            listening.iopub_callbacks.append(self._hear)

    def read(self) -> Iterable[tuple[str, Message | None]]:
        """Let new engines join, and return the messages since the last call.

        Raises:
            RecordingError: an engine could not join; once for every engine.
        """
        with self._lock:
            if not self._is_closed:
                self._listen()
                self._ask_to_join()
        refusals = []
        for number, joining in self._engines.items():
            if joining is not None and joining.done():
                self._engines[number], error = None, joining.exception()
                if error is not None:
                    refusals.append(f"engine {number}: {describe_exception(error)}")
        if refusals:
            raise RecordingError(f"can't record {'; '.join(refusals)}")
        return super().read()

    def _ask_to_join(self) -> None:
        """Let the engines join that have come since the last call, and forget those that left."""
        numbers = self._client.ids
        self.name = "1 engine" if len(numbers) == 1 else f"{len(numbers)} engines"
        for number in self._engines.keys() - set(numbers):
            self._engines.pop(number, None)
        for number in numbers:
            if number not in self._engines:
                self._engines[number] = self._apply(
                    number, join_engine, _name_notebook(), self._header
                )

    def _hear(self, message: dict[str, Any]) -> None:
        """Take a batch; on the client's thread."""
        content = message["content"]
        number, lines = content.get("engine"), content.get("lines")
        if type(number) is int:
            self.put(str(number), str(lines).encode(errors="replace"))

    def is_alive(self, key: str, info: ProcessInfo) -> bool:  # noqa: ARG002 - of all sources
        """Return whether the client has the engine still, and heard of it lately."""
        is_closed = self._client._closed  # noqa: SLF001 - nothing public says
        return int(key) in self._engines and not is_closed and self.is_heard(key)

    def _apply(self, number: int, function: Callable[..., object], *args: Any) -> Any:
        """Send a function to an engine; return the future; ``None`` where it can't be sent."""
        try:
            return self._client.direct_view(number).apply_async(function, *args)
        except Exception:  # noqa: BLE001 - the engine or the client is gone meanwhile
            return None

    def close(self) -> None:
        """Take away what was added on the engines; one that is busy does it after its task."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        name = self._header["msg_id"]
        answers = [self._apply(number, leave_engine, name) for number in tuple(self._engines)]
        deadline_s = time.monotonic() + _FREE_S
        for answer in answers:
            _wait(answer, deadline_s)
        self._client.purge_local_results(name)


def _name_notebook() -> str:
    """Return a name for this notebook that it has after a restart of its kernel too."""
    # Jupyter's server gives a kernel the name of its notebook.
    notebook = os.environ.get("JPY_SESSION_NAME") or f"process {os.getpid()}"
    return f"{socket.gethostname()}: {notebook}"


def _wait(answer: Any, deadline_s: float) -> bool:
    """Wait for an answer; return whether it has come."""
    return answer is not None and bool(answer.wait(max(0.0, deadline_s - time.monotonic())))


# -- On an engine ----------------------------------------------------------------------------------


class EngineTasks:
    """Measures the tasks of this engine, as long as a notebook listens."""

    def __init__(self) -> None:
        from ipyparallel.engine import kernel  # noqa: PLC0415 - on an engine

        self._module = kernel
        self._kernel = kernel.IPythonParallelKernel.instance()
        #: By the name of each notebook, its request's id; the one that joined last at the end.
        self._listeners: dict[str, str] = {}
        self._recording: Recorder | None = None
        #: The running task's: an engine does one thing at a time.
        self._span: Any = None
        self._patch = Patch()

    def add(self, name: str, header: _Header) -> None:
        """Send to a notebook from now on, instead of one of that name."""
        listener, publish = header["msg_id"], functools.partial(self._publish, header)
        number = self._kernel.engine_id
        self._recording = worker.join(publish, role="engine", number=number, listener=listener)
        if name in self._listeners:
            worker.leave(self._listeners.pop(name))
        self._listeners[name] = listener
        # A notebook that was closed can't say so.
        if len(self._listeners) > 4:
            worker.leave(self._listeners.pop(next(iter(self._listeners))))
        if not self._patch.is_applied:
            self._patch.replace(self._module, "unpack_apply_message", self._wrap_unpack)
            self._patch.replace(self._kernel, "do_execute", self._wrap_execute)
            self._patch.replace(self._kernel, "finish_metadata", self._wrap_finish)

    def remove(self, listener: str) -> None:
        """Send a notebook nothing more; after the last one all ends."""
        worker.leave(listener)
        self._listeners = {name: kept for name, kept in self._listeners.items() if kept != listener}
        if not self._listeners:
            self._patch.undo()
            self._recording = None

    def _publish(self, header: _Header, lines: bytes) -> None:
        self._kernel.session.send(
            self._kernel.iopub_socket,
            _MESSAGE_TYPE,
            content={"engine": self._kernel.engine_id, "lines": lines.decode()},
            parent=header,
            ident=_MESSAGE_TYPE.encode(),
        )

    def _wrap_unpack(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def unpack_apply_message(*args: Any, **kwargs: Any) -> Any:
            # The function is unpacked together with its arguments: a span begins with them in
            # place, and does not measure what making them took.
            request = original(*args, **kwargs)
            self._guard(self._begin_function, *request[:2])
            return request

        return unpack_apply_message

    def _wrap_execute(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def do_execute(code: str, silent: bool, *args: Any, **kwargs: Any) -> Any:
            self._guard(self._begin_code, code, silent)
            return original(code, silent, *args, **kwargs)

        return do_execute

    def _wrap_finish(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def finish_metadata(parent: Any, metadata: Any, reply_content: Any) -> Any:
            self._guard(self._end, reply_content)
            return original(parent, metadata, reply_content)

        return finish_metadata

    def _begin_function(self, function: Any, args: Sequence[Any]) -> None:
        if function.__module__ not in (__name__, worker.__name__):
            self._begin(_name_function(function, args))

    def _begin_code(self, code: str, silent: bool) -> None:
        if code.strip():
            number = None if silent else self._kernel.shell.execution_count
            self._begin(name_cell(find_first_line(code), number))

    def _begin(self, name: str) -> None:
        assert self._recording is not None
        # A request that was interrupted at its very end had no reply.
        self._recording.end_span(self._span, "interrupted")
        self._span = self._recording.begin_span(name)

    def _end(self, reply: Mapping[str, Any]) -> None:
        assert self._recording is not None
        status: Status = "ok" if reply.get("status") == "ok" else "error"
        if reply.get("ename") == "KeyboardInterrupt":
            status = "interrupted"
        span, self._span = self._span, None
        self._recording.end_span(span, status)
        # IPython keeps the error that it has shown last.
        error = getattr(sys, "last_value", None)
        if error is not None and reply.get("ename") == type(error).__name__:
            self._recording.note_error(error)

    def _guard(self, act: Callable[..., None], *args: Any) -> None:
        if self._recording is not None:
            try:
                run_uninterrupted(act, *args)
            except Exception as exc:  # noqa: BLE001 - a failure of ours is never the task's
                self._recording.report("measuring a task", exc)


def _name_function(function: Any, args: Sequence[Any]) -> str:
    """Return the name of a function; of ipyparallel's for ``map`` the one of the user's."""
    name = str(getattr(function, "__qualname__", type(function).__qualname__))
    if not str(function.__module__).startswith("ipyparallel."):
        return name
    return _name_function(args[0], ()) if name == "_map" else name.lstrip("_")


#: Returns the one of this engine.
_find_tasks = functools.cache(EngineTasks)


def join_engine(name: str, header: _Header) -> None:
    """Send this engine's tasks to a notebook from now on, instead of one of that name.

    Args:
        name: the notebook's name.
        header: of the request that all messages answer.
    """
    _find_tasks().add(name, header)


def leave_engine(listener: str) -> None:
    """Send a notebook, which the id of its request names, nothing more."""
    _find_tasks().remove(listener)
