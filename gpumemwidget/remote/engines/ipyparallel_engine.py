"""Measure the tasks of an ipyparallel engine, and publish them: what runs on the engine.

A task is a ``%%px`` cell or other code for ``view.execute``, or a function for ``apply`` or
``map``. IPython has no event for a function, nor for code that is run silently, as ``view.execute``
does by itself. So the kernel's ``do_execute`` and ``do_apply`` are wrapped, which see all of them.

What is told is published on the engine's IOPub socket. A thread of ipykernel's own does that for
any thread, within a task and between tasks. ``ipyparallel.datapub.publish_data`` uses the same
socket, but pickles, and publishes in the name of the task that runs. A client drops what answers
none of its requests, so all messages here answer one that the listener made up.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpumemwidget.backends.patching import Patch
from gpumemwidget.errors import Notes, describe_exception
from gpumemwidget.model.cells import Status
from gpumemwidget.recording.cells import find_first_line
from gpumemwidget.remote.engines import worker
from gpumemwidget.remote.engines.function_names import read_function_name
from gpumemwidget.remote.messages import Began, encode
from gpumemwidget.session.interrupts import run_uninterrupted
from gpumemwidget.session.session import find_session

#: Maximum number of notebooks that are told; beyond that the one not heard longest is not.
_MAX_LISTENERS = 4
#: The type of the published messages.
MESSAGE_TYPE = "gpumemwidget"
#: The function that ipyparallel sends for ``map``; its first argument is the user's function.
_MAP = ("ipyparallel.client.remotefunction", "_map")


@dataclass(slots=True, eq=False)
class _Listener:
    """A notebook that is told of this engine."""

    #: The header of the request that all messages answer.
    header: Mapping[str, str]
    #: By which it tells one recording, from its first message on, from another.
    recording: int = field(default_factory=itertools.count(1).__next__)
    #: Number of batches that were published.
    n_sent: int = 0


class EngineTasks:
    """Measures the tasks of this engine, as long as anybody listens.

    Where the extension is loaded, that measures. A new recording begins where it is loaded or
    unloaded later.

    Args:
        kernel: the engine's kernel.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        #: By name, those that were heard last at the end.
        self._listeners: dict[str, _Listener] = {}
        self._recording: worker.Recording | None = None
        self._session = find_session()
        self._failures: Notes[str] = Notes()
        self._patch = Patch()
        self._patch.replace(kernel, "do_apply", self._wrap_apply)
        self._patch.replace(kernel, "do_execute", self._wrap_execute)

    def add(self, name: str, header: Mapping[str, str]) -> tuple[int, bytes]:
        """Tell a listener from now on; return the recording's number and its first message."""
        self._listeners.pop(name, None)
        while len(self._listeners) >= _MAX_LISTENERS:
            # A notebook that was closed can't say so.
            self.remove(next(iter(self._listeners)))
        self._follow_session()
        recording = self._join(name, header)
        info = recording.log.info
        return self._listeners[name].recording, b"" if info is None else encode(Began(info))

    def hear(self, name: str, header: Mapping[str, str]) -> bool:
        """Note that a listener is there; return ``False`` where another one has its name."""
        listener = self._listeners.get(name)
        if listener is None or listener.header["msg_id"] != header["msg_id"]:
            return False
        self._listeners[name] = self._listeners.pop(name)
        return True

    def has(self, name: str) -> bool:
        """Return whether a listener of that name is told."""
        return name in self._listeners

    def remove(self, name: str) -> None:
        """Tell a listener nothing more; with the last one ends the recording."""
        self._listeners.pop(name, None)
        worker.leave(name)

    def close(self) -> None:
        """Leave the kernel as it was."""
        self._patch.undo()
        self._recording = None

    @property
    def has_listeners(self) -> bool:
        """Return whether anybody listens."""
        return bool(self._listeners)

    def _join(self, name: str, header: Mapping[str, str]) -> worker.Recording:
        listener = _Listener(header)
        self._recording = worker.join(
            functools.partial(self._publish, listener),
            role="engine",
            number=self._kernel.engine_id,
            listener=name,
        )
        self._listeners[name] = listener
        return self._recording

    def _follow_session(self) -> None:
        """Begin a new recording if the extension was loaded or unloaded."""
        session = find_session()
        if session is self._session:
            return
        self._session = session
        if self._recording is not None:
            self._recording.close()
        for name, listener in list(self._listeners.items()):
            self._join(name, listener.header)

    def _publish(self, listener: _Listener, lines: bytes) -> None:
        self._kernel.session.send(
            self._kernel.iopub_socket,
            MESSAGE_TYPE,
            content={
                "engine": self._kernel.ident,
                "recording": listener.recording,
                "place": listener.n_sent,
                "lines": lines.decode(),
            },
            parent=listener.header,
            ident=MESSAGE_TYPE.encode(),
        )
        listener.n_sent += 1

    # -- Tasks -------------------------------------------------------------------------------------

    def _wrap_apply(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def do_apply(content: Any, bufs: Any, *args: Any, **kwargs: Any) -> Any:
            module, name = _name_task(bufs)
            if module == __name__:
                return original(content, bufs, *args, **kwargs)
            span = run_uninterrupted(self._begin, name or "apply")
            reply = None
            try:
                reply = original(content, bufs, *args, **kwargs)
                return reply
            finally:
                run_uninterrupted(self._end, span, reply[0] if reply else {})

        return do_apply

    def _wrap_execute(self, original: Callable[..., Any]) -> Callable[..., Any]:
        async def do_execute(code: str, silent: bool, *args: Any, **kwargs: Any) -> Any:
            span = run_uninterrupted(self._begin_cell, code, silent)
            reply = None
            try:
                reply = original(code, silent, *args, **kwargs)
                if inspect.isawaitable(reply):
                    reply = await reply
                return reply
            finally:
                run_uninterrupted(self._end, span, reply or {})

        return do_execute

    def _begin_cell(self, code: str, silent: bool) -> Any:
        # Of the extension's session IPython's events make a cell, unless it is run silently.
        if not code.strip() or (find_session() is not None and not silent):
            return None
        return self._begin(
            find_first_line(code), None if silent else self._kernel.shell.execution_count
        )

    def _begin(self, name: str, number: int | None = None) -> Any:
        try:
            self._follow_session()
            return self._recording and self._recording.begin_span(name, number)
        except Exception as exc:  # noqa: BLE001 - a failure of ours is never the task's
            self._report("measuring a task", exc)
            return None

    def _end(self, span: Any, reply: Mapping[str, Any]) -> None:
        try:
            if self._recording is None:
                return
            self._recording.end_span(span, _read_status(reply))
            # IPython keeps the error that it has shown last.
            error = getattr(sys, "last_value", None)
            if error is not None and reply.get("ename") == type(error).__name__:
                self._recording.note_error(error)
            self._follow_session()
        except Exception as exc:  # noqa: BLE001 - a failure of ours is never the task's
            self._report("measuring a task", exc)

    def _report(self, what: str, exc: Exception) -> None:
        if self._failures.add(f"{what}: {type(exc).__name__}"):
            print(
                f"gpumemwidget: {what} failed ({describe_exception(exc)}); the task goes on",
                file=sys.stderr,
            )


def _name_task(bufs: Sequence[Any]) -> tuple[str, str]:
    """Return the module and the name of the function that a request applies."""
    try:
        module, name = read_function_name(bufs[0])
        # Between them is the number of arguments.
        if (module, name) == _MAP and len(bufs) > 2:
            module, name = read_function_name(bufs[2])
    except Exception:  # noqa: BLE001 - what is no request is the kernel's to refuse
        return "", ""
    # ``push`` and ``pull`` are functions of ipyparallel's.
    return module, name.lstrip("_") if module.startswith("ipyparallel.") else name


def _read_status(reply: Mapping[str, Any]) -> Status:
    if reply.get("status") == "ok":
        return "ok"
    return "interrupted" if reply.get("ename") == "KeyboardInterrupt" else "error"


# -- What a listener calls -------------------------------------------------------------------------

#: What measures this engine's tasks, if anything.
_tasks: list[EngineTasks] = []


def join_engine(name: str, header: Mapping[str, str]) -> tuple[int, bytes]:
    """Tell a listener of this engine's tasks from now on, in the place of an earlier one.

    Args:
        name: the listener's name.
        header: of the request that all messages answer.

    Returns:
        The number of the recording, and its first message.
    """
    from ipyparallel.engine.kernel import IPythonParallelKernel  # noqa: PLC0415 - on an engine

    if not _tasks:
        _tasks.append(EngineTasks(IPythonParallelKernel.instance()))
    try:
        return _tasks[0].add(name, header)
    finally:
        _close_idle()


def leave_engine(name: str, header: Mapping[str, str]) -> None:
    """Tell a listener nothing more, unless another one has taken its place."""
    if _tasks and _tasks[0].hear(name, header):
        _tasks[0].remove(name)
        _close_idle()


def _close_idle() -> None:
    if not _tasks[0].has_listeners:
        _tasks.pop().close()


def read_clock(name: str, header: Mapping[str, str]) -> tuple[float, bool]:
    """Return the seconds since the epoch by this host's clock, and whether a listener is told."""
    if _tasks:
        _tasks[0].hear(name, header)
    return time.time(), bool(_tasks) and _tasks[0].has(name)


def release_names(request: bytes, *, dry_run: bool, not_after: float) -> bytes | None:
    """Release names of this engine; return the outcome as ``worker.release`` does.

    Args:
        request: what ``worker.write_request`` returned.
        dry_run: only plan.
        not_after: a moment by this host's clock. If it is later, nothing is done and ``None`` is
            returned: nobody waits for the outcome any more.
    """
    return None if time.time() > not_after else worker.release(request, dry_run=dry_run)
