"""Measure the tasks of an ipyparallel engine, and publish them: what runs on the engine.

A task is a ``%%px`` cell or other code for ``view.execute``, or a function for ``apply`` or
``map``. IPython has no event for a function, nor for code that is run silently, as ``view.execute``
does by itself. So a span begins where the kernel executes code or has unpacked a function, and ends
where it completes its reply.

What is recorded is published on the engine's IOPub socket. A thread of ipykernel's own does that,
within a task and between tasks. ``ipyparallel.datapub.publish_data`` uses the same
socket, but pickles, and publishes in the name of the task that runs. A client drops what answers
none of its requests, so all messages here answer one that the notebook made up.
"""

from __future__ import annotations

import functools
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from gpumemwidget.backends.patching import Patch
from gpumemwidget.errors import Notes, describe_exception
from gpumemwidget.model.cells import Status
from gpumemwidget.recording.running_cell import find_first_line, name_cell
from gpumemwidget.remote.engines import worker
from gpumemwidget.remote.writer.recorder import Recorder
from gpumemwidget.session.interrupts import run_uninterrupted

#: The type of the published messages.
MESSAGE_TYPE = "gpumemwidget"
#: Maximum number of notebooks that get what is recorded: the ones that joined last.
_MAX_LISTENERS = 4

#: The header of the request that all messages to a notebook answer.
Header: TypeAlias = Mapping[str, Any]


class EngineTasks:
    """Measures the tasks of this engine, as long as a notebook listens."""

    def __init__(self) -> None:
        from ipyparallel.engine import kernel  # noqa: PLC0415 - on an engine

        self._module = kernel
        self._kernel = kernel.IPythonParallelKernel.instance()
        #: By the name of the notebook; the one that joined last at the end.
        self._listeners: dict[str, Header] = {}
        self._recording: Recorder | None = None
        #: The running task's: an engine does one thing at a time.
        self._span: Any = None
        self._failures: Notes[str] = Notes()
        self._patch = Patch()

    def add(self, name: str, header: Header) -> None:
        """Send to a notebook from now on, instead of one of that name."""
        # Every notebook gets another name for the recording, also one that joins anew.
        publish = functools.partial(self._publish, header, secrets.token_hex(4))
        number = self._kernel.engine_id
        self._recording = worker.join(publish, role="engine", number=number, listener=name)
        self._listeners.pop(name, None)
        self._listeners[name] = header
        # A notebook that was closed can't say so.
        for oldest in list(self._listeners)[:-_MAX_LISTENERS]:
            self.remove(oldest, self._listeners[oldest])
        if not self._patch.is_applied:
            self._patch.replace(self._module, "unpack_apply_message", self._wrap_unpack)
            self._patch.replace(self._kernel, "do_execute", self._wrap_execute)
            self._patch.replace(self._kernel, "finish_metadata", self._wrap_finish)

    def remove(self, name: str, header: Header) -> None:
        """Send a notebook nothing more, unless it has joined anew; after the last one all ends."""
        if self._listeners.get(name) == header:
            del self._listeners[name]
            worker.leave(name)
        if not self._listeners:
            self._patch.undo()
            self._recording = None

    def _publish(self, header: Header, recording: str, lines: bytes) -> None:
        self._kernel.session.send(
            self._kernel.iopub_socket,
            MESSAGE_TYPE,
            content={
                "engine": self._kernel.engine_id,
                "recording": recording,
                "lines": lines.decode(),
            },
            parent=header,
            ident=MESSAGE_TYPE.encode(),
        )

    # -- Tasks -------------------------------------------------------------------------------------

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
        if function.__module__ != __name__:
            self._begin(_name_function(function, args))

    def _begin_code(self, code: str, silent: bool) -> None:
        if code.strip():
            number = None if silent else self._kernel.shell.execution_count
            self._begin(name_cell(find_first_line(code), number))

    def _begin(self, name: str) -> None:
        if self._recording is not None:
            # A request that was interrupted at its very end had no reply.
            self._recording.end_span(self._span, "interrupted")
            self._span = self._recording.begin_span(name)

    def _end(self, reply: Mapping[str, Any]) -> None:
        if self._recording is None:
            return
        span, self._span = self._span, None
        self._recording.end_span(span, _read_status(reply))
        # IPython keeps the error that it has shown last.
        error = getattr(sys, "last_value", None)
        if error is not None and reply.get("ename") == type(error).__name__:
            self._recording.note_error(error)

    def _guard(self, act: Callable[..., None], *args: Any) -> None:
        try:
            run_uninterrupted(act, *args)
        except Exception as exc:  # noqa: BLE001 - a failure of ours is never the task's
            if self._failures.add(type(exc).__name__):
                why = describe_exception(exc)
                sys.stderr.write(f"gpumemwidget: measuring failed ({why}); the task goes on\n")


def _name_function(function: Any, args: Sequence[Any]) -> str:
    """Return the name of a function; of ipyparallel's for ``map`` the one of the user's."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__qualname__", None)
    if name is None:  # An object. What ``ipyparallel.require`` returns has the function's name.
        name = getattr(function, "__name__", type(function).__qualname__)
    if not str(function.__module__).startswith("ipyparallel."):
        return str(name)
    return _name_function(args[0], ()) if name == "_map" else str(name).lstrip("_")


def _read_status(reply: Mapping[str, Any]) -> Status:
    if reply.get("status") == "ok":
        return "ok"
    return "interrupted" if reply.get("ename") == "KeyboardInterrupt" else "error"


# -- What a notebook calls -------------------------------------------------------------------------


#: Returns the one of this engine.
_find_tasks = functools.cache(EngineTasks)


def join_engine(name: str, header: Header) -> None:
    """Send this engine's tasks to a notebook from now on, instead of one of that name.

    Args:
        name: the notebook's name.
        header: of the request that all messages answer.
    """
    _find_tasks().add(name, header)


def leave_engine(name: str, header: Header) -> None:
    """Send a notebook nothing more, unless it has joined anew."""
    _find_tasks().remove(name, header)


def release_names(order: bytes) -> bytes:
    """Release names of this engine; see ``worker.release``."""
    return worker.release(order)
