"""Record a worker or an actor of Ray, where notebooks watch its namespace.

Ray tells nobody when a task begins or ends, but it writes the task's name into the title of the
process. A thread reads that title twenty times a second, so spans begin and end a little late, and
their peaks are sampled.

The same thread is the only one that talks to Ray. What is recorded is handed to it, and where a
notebook does not take it, that waits within bounds.
"""

from __future__ import annotations

import atexit
import contextlib
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Collection
from concurrent.futures import Future
from typing import Any

import psutil  # type: ignore[import-untyped]  # no types are published with it
import ray

from gpumemwidget.errors import describe_exception

#: How the names of collectors begin.
_PREFIX = "gpumemwidget-collector-"
#: Seconds between two looks at the title: of a recorded process, and of others.
_LOOK_EVERY_S = 0.05
_IDLE_LOOK_EVERY_S = 0.25
#: Seconds between two searches for collectors, and between two tries to send a refused batch.
_SEARCH_EVERY_S = 2.0
_RETRY_AFTER_S = 0.5
#: Seconds that a recording which ends waits for its last words to be taken.
_LAST_WORDS_S = 1.0
#: Maximum number of batches of a worker that are on their way or wait for that.
_MAX_BATCHES = 2
#: Maximum number of bytes that a collector keeps for a notebook that does not take them.
_MAX_WAITING_BYTES = 32 * 1024 * 1024


# -- The collector ---------------------------------------------------------------------------------


class GpuMemCollector:
    """Gathers what workers tell until the notebook takes it: an actor without a CPU of its own."""

    def __init__(self) -> None:
        self._batches: list[tuple[str, bytes, float]] = []
        self._n_bytes = 0

    def push(self, key: str, lines: bytes) -> bool:
        """Take lines of a process; return whether there was room for them."""
        has_room = self._n_bytes + len(lines) <= _MAX_WAITING_BYTES
        if has_room:
            self._n_bytes += len(lines)
            self._batches.append((key, lines, time.time()))
        return has_room

    def take(self) -> list[tuple[str, bytes, float]]:
        """Return what was pushed since the last call: the process, its lines, when they came."""
        batches, self._batches, self._n_bytes = self._batches, [], 0
        return batches


def name_collector() -> str:
    """Return the name of a new collector."""
    return f"{_PREFIX}{secrets.token_hex(8)}"


def _find_collectors(known: Collection[str] = ()) -> dict[str, Any]:
    """Return the collectors of this namespace by their names, without those that are known.

    They may be of other jobs: an actor can outlive its own.
    """
    collectors = {}
    for name in ray.util.list_named_actors():
        if name.startswith(_PREFIX) and name not in known:
            with contextlib.suppress(ValueError):  # The actor has gone meanwhile.
                collectors[name] = ray.get_actor(name)
    return collectors


class _Channel:
    """Sends the batches of one recording to a collector, one after the other.

    Attributes:
        is_broken: the collector is gone.
        is_ending: the recording ends, and its last words are taken however many batches wait.
    """

    def __init__(self, collector: Any) -> None:
        self.is_broken = self.is_ending = False
        self._collector = collector
        # By the first part Ray tells how the process ended.
        self._key = f"{ray.get_runtime_context().get_worker_id()}-{secrets.token_hex(8)}"
        self._batches: deque[bytes] = deque()
        #: The answer to the first of the batches, once that is on its way.
        self._answer: Future[bool] | None = None
        self._due_s = 0.0

    def send(self, lines: bytes) -> None:
        """Take a batch; any thread may call it, and Ray is not called.

        Raises:
            BlockingIOError: the batches before are still on their way.
        """
        if len(self._batches) >= _MAX_BATCHES and not self.is_ending:
            raise BlockingIOError("the batches before are still on their way")
        self._batches.append(lines)

    def pump(self) -> None:
        """See what became of the batch on its way, and send the next one."""
        try:
            if self._answer is not None and self._answer.done():
                is_taken, self._answer = self._answer.result(), None
                if is_taken:
                    self._batches.popleft()
                else:
                    self._due_s = time.monotonic() + _RETRY_AFTER_S
            if self._batches and self._answer is None and time.monotonic() >= self._due_s:
                self._answer = self._collector.push.remote(self._key, self._batches[0]).future()
        except Exception:  # noqa: BLE001 - the actor has died, or its node has
            self.is_broken = True

    def drain(self) -> None:
        """Send what there is, and wait a second at most until it is taken."""
        until_s = time.monotonic() + _LAST_WORDS_S
        while self._batches and not self.is_broken and time.monotonic() < until_s:
            self.pump()
            time.sleep(0.01)


# -- The worker ------------------------------------------------------------------------------------


class _Member:
    """Records this process from its first task on, as long as there is a collector."""

    def __init__(self) -> None:
        self._stopped = threading.Event()
        self._process = psutil.Process()

    def start(self) -> None:
        """Begin, on a thread."""
        # A process that ends has left Ray before its exit handlers run.
        atexit.register(self._stopped.set)
        threading.Thread(target=self._run, name="gpumemwidget-ray", daemon=True).start()

    def _run(self) -> None:
        is_told = False
        while self._waits(_IDLE_LOOK_EVERY_S):
            try:
                title = self._read_title()
                if GpuMemCollector.__name__ in title:
                    return
                if title != "IDLE":
                    if _find_collectors():
                        self._record()
                    else:
                        self._stopped.wait(_SEARCH_EVERY_S)
            except Exception as exc:  # noqa: BLE001 - a failure of ours is never the worker's
                if not is_told:
                    what = describe_exception(exc)
                    print(f"gpumemwidget: can't record this worker ({what})", file=sys.stderr)
                is_told = True

    def _record(self) -> None:
        """Record until the last collector has gone; those that come meanwhile are told too."""
        from gpumemwidget.remote.engines import worker  # noqa: PLC0415 - when a notebook watches
        from gpumemwidget.remote.telling.spans import SEEN  # noqa: PLC0415

        is_actor, title, search_due_s = _is_actor(), "", 0.0
        recording: Any = None
        span: Any = None
        channels: dict[str, _Channel] = {}
        while self._waits(_LOOK_EVERY_S):
            is_same = recording is worker.find_recording()
            # A process that ran tasks may become an actor.
            if recording is not None and (not is_same or is_actor is not _is_actor()):
                for channel in channels.values():
                    channel.is_ending = True
                recording.end_span(span)
                recording.close()
                for channel in channels.values():
                    channel.drain()
                return
            if time.monotonic() >= search_due_s:
                search_due_s = time.monotonic() + _SEARCH_EVERY_S
                for name, collector in _find_collectors(channels).items():
                    channels[name] = _Channel(collector)
                    recording = worker.join(
                        channels[name].send,
                        role="actor" if is_actor else "worker",
                        label=self._name(is_actor=is_actor),
                        listener=name,
                    )
            for name, channel in list(channels.items()):
                channel.pump()
                if channel.is_broken:
                    del channels[name]
                    worker.leave(name)
            if not channels:
                if recording is not None:
                    recording.end_span(span)
                return
            last, title = title, self._read_title()
            if title != last:
                recording.end_span(span)
                is_task = _is_method(title) if is_actor else title != "IDLE"
                span = recording.begin_span(title, lane=SEEN) if is_task else None

    def _waits(self, seconds: float) -> bool:
        """Wait; return whether to go on: a call after Ray's end would make it begin anew."""
        return not self._stopped.wait(seconds) and ray.is_initialized()

    def _read_title(self) -> str:
        """Return what Ray says that this process does: ``train``, ``Trainer.step``, ``IDLE``."""
        title = " ".join(self._process.cmdline()).strip().removeprefix("ray::")
        # The constructor of an actor with a name has that in front.
        return title.rpartition(":")[2]

    def _name(self, *, is_actor: bool) -> str:
        """Return an actor's name, or its class or ``worker`` with the pid."""
        if not is_actor:
            return f"worker {self._process.pid}"
        name: str = ray.get_runtime_context().get_actor_name()
        return name or f"{self._read_title().partition('.')[0]} {self._process.pid}"


def _is_actor() -> bool:
    return ray.get_runtime_context().get_actor_id() is not None


def _is_method(title: str) -> bool:
    """Return whether an actor's title is a method of the user's.

    That of an idle actor is its class, without a dot; ``__ray_call__`` runs what we ask for.
    """
    return "." in title and not title.endswith(".__ray_call__")


_members: list[_Member] = []


def start() -> None:
    """Record this worker where a notebook watches its job. May be called twice."""
    if not _members:
        _members.append(_Member())
        _members[0].start()
