"""Refuse what a dry run must not do: files, other processes, the network; and do not wait."""

from __future__ import annotations

import builtins
import contextlib
import io
import logging
import os
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from gpumemwidget.backends.patching import Patch


class RefusedError(BaseException):
    """A running step does what a dry run can't.

    No ``except Exception`` of the step's own catches it, and goes on another way than the real one.
    """


#: Functions of ``os`` that change files or processes; a library that does calls one of them.
_OS_FUNCTIONS = (
    *("remove", "unlink", "rename", "renames", "replace", "truncate", "symlink", "link", "chmod"),
    *("mkdir", "makedirs", "rmdir", "removedirs", "system", "popen", "fork", "kill", "execv"),
    *("execve", "posix_spawn"),
)
#: Flags of ``os.open`` with which a file is made or changed.
_WRITING_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


@contextlib.contextmanager
def effects_refused(torch: Any) -> Iterator[None]:
    """Refuse for a while what this thread does to the world, whoever calls it; skip its waits.

    Other threads go on as ever.

    Args:
        torch: the imported module ``torch``.
    """
    patch, thread = Patch(), threading.get_ident()

    def refuse(what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                if threading.get_ident() == thread:
                    raise RefusedError(
                        f"The step {what} ({original.__name__}). Leave that out to predict it."
                    )
                return original(*args, **kwargs)

            return call

        return wrap

    def refuse_writing(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            mode = kwargs.get("mode", args[1] if len(args) > 1 else "r")
            is_writing = isinstance(mode, str) and bool(set(mode) & set("wax+"))
            if threading.get_ident() == thread and is_writing:
                raise RefusedError("The step writes a file (open). Leave that out to predict it.")
            return original(*args, **kwargs)

        return call

    def refuse_opening(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, flags: int, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread and flags & _WRITING_FLAGS:
                raise RefusedError(
                    "The step writes a file (os.open). Leave that out to predict it."
                )
            return original(path, flags, *args, **kwargs)

        return call

    def refuse_kernel(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread:
                raise RefusedError(
                    f"The step starts the Triton kernel `{kernel.__name__}`, which a dry run can't "
                    "follow. Make it an operator with a fake (torch.library.custom_op)."
                )
            return original(kernel, *args, **kwargs)

        return run

    def skip_wait(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(seconds: float) -> Any:
            return None if threading.get_ident() == thread else original(seconds)

        return call

    def skip_record(original: Callable[..., Any]) -> Callable[..., Any]:
        def handle(logger: Any, record: Any) -> Any:
            return None if threading.get_ident() == thread else original(logger, record)

        return handle

    def refuse_thread(original: Callable[..., Any]) -> Callable[..., Any]:
        def start(started: threading.Thread) -> Any:
            # A class of a library's has work of its own, as the watch of progress bars.
            kind = type(started)
            is_library = "run" in vars(kind) and kind not in (threading.Thread, threading.Timer)
            if threading.get_ident() == thread and not is_library:
                raise RefusedError(
                    "The step starts a thread, whose operators a dry run can't follow. Call its "
                    "function in the step itself."
                )
            return original(started)

        return start

    patch.replace(threading.Thread, "start", refuse_thread)
    patch.replace(logging.Logger, "handle", skip_record)
    patch.replace(builtins, "open", refuse_writing)
    patch.replace(io, "open", refuse_writing)
    patch.replace(os, "open", refuse_opening)
    refused = [
        (torch, "save", "writes a file"),
        *((os, name, "changes files or processes") for name in _OS_FUNCTIONS),
        (os, "chdir", "changes the working folder"),
        (subprocess, "Popen", "starts a process"),
        (socket.socket, "connect", "uses the network"),
        (sys.modules.get("sqlite3"), "connect", "opens a database"),
    ]
    for owner, name, what in refused:
        patch.replace(owner, name, refuse(what))
    patch.replace(time, "sleep", skip_wait)
    if (triton := sys.modules.get("triton.runtime.jit")) is not None:
        patch.replace(triton.JITFunction, "run", refuse_kernel)
    try:
        with warnings.catch_warnings(), _silenced(thread):
            warnings.simplefilter("ignore")
            yield
    finally:
        patch.undo()


class _Silenced:
    """A stream that drops what one thread writes."""

    def __init__(self, stream: Any, thread: int) -> None:
        self._stream = stream
        self._thread = thread

    def write(self, text: str) -> int:
        is_dropped = threading.get_ident() == self._thread
        return len(text) if is_dropped else int(self._stream.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def _silenced(thread: int) -> Iterator[None]:
    """Show nothing of what a thread prints, as libraries do, for a while."""
    streams = sys.stdout, sys.stderr
    ours: Any = [_Silenced(each, thread) for each in streams]
    sys.stdout, sys.stderr = ours
    try:
        yield
    finally:
        if sys.stdout is ours[0]:
            sys.stdout = streams[0]
        if sys.stderr is ours[1]:
            sys.stderr = streams[1]
