"""Record a worker or an actor of Ray, where notebooks watch its namespace.

Ray has no hook for the begin and the end of a task, so spans are those that the user's code marks.
What is recorded goes to an actor of each notebook, and waits within bounds while that takes none.
Nothing here calls Ray on a task's own thread.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import secrets
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import psutil  # type: ignore[import-untyped]  # no types are published with it
import ray

from gpumemwidget.errors import describe_exception
from gpumemwidget.model.processes import ProcessRole

#: How the names of collectors begin.
PREFIX = "gpumemwidget-collector-"
#: Maximum number of bytes that a collector keeps for a notebook that does not take them.
_MAX_WAITING_BYTES = 32 * 1024 * 1024


# -- The collector ---------------------------------------------------------------------------------


class GpuMemCollector:
    """Keeps what workers send until the notebook takes it: an actor without a CPU of its own."""

    def __init__(self) -> None:
        self._batches: list[tuple[str, bytes]] = []
        self._n_bytes = 0

    def push(self, key: str, lines: bytes) -> bool:
        """Take lines of a process; return whether there was room for them."""
        has_room = self._n_bytes + len(lines) <= _MAX_WAITING_BYTES
        if has_room:
            self._n_bytes += len(lines)
            self._batches.append((key, lines))
        return has_room

    def take(self) -> list[tuple[str, bytes]]:
        """Return what was pushed since the last call: the process and its lines."""
        batches, self._batches, self._n_bytes = self._batches, [], 0
        return batches


def _open_channel(collector: Any) -> Callable[[bytes], None]:
    """Return what sends the batches of one recording to a collector, on the calling thread."""
    # The first part is the id by which Ray knows how the process ended.
    key = f"{ray.get_runtime_context().get_worker_id()}-{secrets.token_hex(8)}"
    answers: list[Future[bool]] = []

    def send(lines: bytes) -> None:
        if not ray.is_initialized():
            # A call after Ray's end would make it begin anew.
            raise ConnectionError("Ray has ended")
        if not answers:
            # ``ray.get`` would say that the worker's task waits, and Ray would begin another one.
            answers.append(collector.push.remote(key, lines).future())
        # Whoever calls this again after a failure does so with the same lines: they are sent once,
        # and the answer is waited for again.
        is_taken = answers[0].result(1.0)
        answers.clear()
        if not is_taken:
            raise BlockingIOError("the notebook takes nothing")

    return send


# -- The worker ------------------------------------------------------------------------------------


class _Member:
    """Records this process from its first task on, as long as there is a collector."""

    def __init__(self) -> None:
        self._stopped = threading.Event()
        self._process = psutil.Process()
        #: The names of the collectors that get what is recorded, and as what the process is known.
        self._collectors: set[str] = set()
        self._role: ProcessRole = "worker"
        # A process that ends has left Ray before its exit handlers run.
        atexit.register(self._stopped.set)
        threading.Thread(target=self._run, name="gpumemwidget-ray", daemon=True).start()

    def _run(self) -> None:
        is_idle, has_failed = True, False
        # A call after Ray's end would make it begin anew.
        while not self._stopped.wait(1.0) and ray.is_initialized():
            try:
                title = self._read_title()
                if GpuMemCollector.__name__ in title:
                    return
                # A task may be shorter than the wait, and leaves its modules.
                is_idle = is_idle and title == "IDLE" and "torch" not in sys.modules
                if not is_idle:
                    self._update()
            except Exception as exc:  # noqa: BLE001 - a failure of ours is never the worker's
                if not has_failed:
                    what = describe_exception(exc)
                    print(f"gpumemwidget: can't record this worker ({what})", file=sys.stderr)
                has_failed = True

    def _update(self) -> None:
        """Record for the collectors that there are now, and for no others."""
        # Their imports take a while: not before a notebook watches.
        from gpumemwidget.remote.engines import worker  # noqa: PLC0415
        from gpumemwidget.remote.writer.recorder import find_recorder  # noqa: PLC0415

        actors = ray.util.list_named_actors()  # Of this namespace, also of other jobs.
        names = {name for name in actors if name.startswith(PREFIX)}
        for name in self._collectors - names:
            worker.leave(name)
        role: ProcessRole = "actor" if ray.get_runtime_context().get_actor_id() else "worker"
        recording = find_recorder("engine")
        # A process that ran tasks may become an actor.
        if recording is not None and role != self._role:
            recording.close()
            recording = None
        self._role = role
        self._collectors &= names if recording is not None else set()
        for name in names - self._collectors:
            with contextlib.suppress(ValueError):  # The collector has gone meanwhile.
                send = _open_channel(ray.get_actor(name))
                worker.join(send, role=role, label=self._name(), listener=name)
                self._collectors.add(name)

    def _read_title(self) -> str:
        """Return what Ray says that this process does: ``train``, ``Trainer.step``, ``IDLE``."""
        title = " ".join(self._process.cmdline()).strip().removeprefix("ray::")
        # The constructor of an actor with a name has that in front.
        return title.rpartition(":")[2]

    def _name(self) -> str:
        """Return an actor's name, or its class or ``worker`` with the pid."""
        if self._role == "worker":
            return f"worker {self._process.pid}"
        name: str = ray.get_runtime_context().get_actor_name()
        return name or f"{self._read_title().partition('.')[0]} {self._process.pid}"


@functools.cache
def start() -> None:
    """Record this worker where a notebook watches its job. May be called twice."""
    _Member()
