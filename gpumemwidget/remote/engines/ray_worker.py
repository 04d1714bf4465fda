"""Record a worker or an actor of Ray, where a notebook watches its job.

Ray tells nobody when a task begins or ends, but it writes the task's name into the title of the
process. A thread reads that title twenty times a second, so spans begin and end a little late, and
their peaks are sampled. Those of functions that ``measured`` wraps are exact.

The same thread is the only one that talks to Ray. What is recorded is handed to it, and where the
notebook does not take it, that waits within bounds.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import os
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import psutil  # type: ignore[import-untyped]  # no types are published with it
import ray

from gpumemwidget.errors import describe_exception

if TYPE_CHECKING:
    from gpumemwidget.remote.engines.worker import Recording

_P = ParamSpec("_P")
_T = TypeVar("_T")

#: How the names of collectors begin; the id of the job and the time follow.
_PREFIX = "gpumemwidget"
#: Seconds between two looks at the title: of a recorded process, and of others.
_LOOK_EVERY_S = 0.05
_IDLE_LOOK_EVERY_S = 0.25
#: Seconds between two searches for a collector, and between two tries to send a refused batch.
_SEARCH_EVERY_S = 2.0
_RETRY_AFTER_S = 0.5
#: The name of the one who listens to a recording.
_LISTENER = "ray"
#: Seconds that a recording which ends waits for its last words to be taken.
_LAST_WORDS_S = 1.0
#: Maximum number of bytes that a collector keeps for a notebook that does not take them.
_MAX_WAITING_BYTES = 32 * 1024 * 1024


# -- The collector ---------------------------------------------------------------------------------


class GpuMemCollector:
    """Gathers what workers tell until the notebook takes it: an actor without a CPU of its own."""

    def __init__(self) -> None:
        self._batches: list[tuple[str, bytes, float | None]] = []
        self._n_bytes = 0
        self._tickets: set[str] = set()

    def push(self, key: str, lines: bytes, offset_s: float | None) -> tuple[bool, float]:
        """Take lines of a process; return whether there was room for them, and the time.

        Args:
            key: the process.
            lines: its messages.
            offset_s: seconds by which its clock is ahead of this one's, if measured.
        """
        has_room = self._n_bytes + len(lines) <= _MAX_WAITING_BYTES
        if has_room:
            self._n_bytes += len(lines)
            self._batches.append((str(key), lines, offset_s))
        return has_room, time.time()

    def take(self) -> tuple[list[tuple[str, bytes, float | None]], float]:
        """Return what was pushed since the last call, and the time."""
        batches, self._batches, self._n_bytes = self._batches, [], 0
        return batches, time.time()

    def offer(self, ticket: str) -> None:
        """Put up a ticket, which allows one thing to be done once."""
        self._tickets.add(ticket)

    def claim(self, ticket: str) -> bool:
        """Take a ticket away; return whether it was still there."""
        is_there = ticket in self._tickets
        self._tickets.discard(ticket)
        return is_there


def name_collector(job_id: str) -> str:
    """Return the name of a new collector; those of later ones come after it."""
    return f"{_PREFIX}-{job_id}-{time.time_ns():020d}"


def _find_collector() -> Any:
    """Return the newest collector of this job, or else of its namespace; ``None`` without one.

    An actor that outlives its job is found by the next notebook in its namespace.
    """
    names = [name for name in ray.util.list_named_actors() if name.startswith(f"{_PREFIX}-")]
    own = f"{_PREFIX}-{ray.get_runtime_context().get_job_id()}-"
    names.sort(key=lambda name: (name.startswith(own), name.rpartition("-")[2]))
    with contextlib.suppress(ValueError):  # It has gone meanwhile.
        return ray.get_actor(names[-1]) if names else None
    return None


class Call:
    """A call of an actor's method that nobody waits for, with its times by our clock."""

    def __init__(self, method: Any, *arguments: object) -> None:
        self._sent_s = time.time()
        self._back_s = self._sent_s
        self.future: Future[Any] = method.remote(*arguments).future()
        self.future.add_done_callback(self._note_time)

    @property
    def age_s(self) -> float:
        """Seconds since the call."""
        return time.time() - self._sent_s

    def _note_time(self, _future: object) -> None:
        self._back_s = time.time()

    def measure(self, there_s: float) -> tuple[float, float]:
        """Return the round trip and the seconds by which our clock is ahead of the actor's.

        Args:
            there_s: when the actor was called, by its clock.
        """
        return self._back_s - self._sent_s, (self._sent_s + self._back_s) / 2 - there_s


class Offset:
    """The seconds by which our clock is ahead of an actor's, by the fastest of the last calls."""

    def __init__(self) -> None:
        self._measured: deque[tuple[float, float]] = deque(maxlen=64)

    def add(self, call: Call, there_s: float) -> None:
        """Measure it by a call; see ``Call.measure``."""
        self._measured.append(call.measure(there_s))

    @property
    def seconds(self) -> float | None:
        """The offset; ``None`` before the first call."""
        return min(self._measured)[1] if self._measured else None


class _Channel:
    """Sends the batches of one recording to a collector, one after the other.

    Attributes:
        is_broken: the collector is gone.
    """

    def __init__(self, collector: Any) -> None:
        self.is_broken = False
        self._collector = collector
        # By the first part Ray tells how the process ended.
        self._key = f"{ray.get_runtime_context().get_worker_id()}-{secrets.token_hex(8)}"
        self._batch: bytes | None = None
        self._call: Call | None = None
        self._due_s = 0.0
        self._offset = Offset()

    def send(self, lines: bytes) -> None:
        """Take a batch; any thread may call it, and Ray is not called.

        Raises:
            BlockingIOError: the batch before is still on its way.
        """
        if self._batch is not None:
            raise BlockingIOError("the batch before is still on its way")
        self._batch = lines

    def pump(self) -> None:
        """See what became of the batch on its way, and send the next one."""
        try:
            if self._call is None or self._call.future.done():
                self._send_next()
        except Exception:  # noqa: BLE001 - the actor has died, or its node has
            self.is_broken = True

    def _send_next(self) -> None:
        call, self._call = self._call, None
        now_s = time.monotonic()
        if call is not None:
            is_taken, there_s = call.future.result()
            self._offset.add(call, there_s)
            if is_taken:
                self._batch = None
            else:
                self._due_s = now_s + _RETRY_AFTER_S
        if self._batch is not None and now_s >= self._due_s:
            self._call = Call(self._collector.push, self._key, self._batch, self._offset.seconds)

    def drain(self, until_s: float) -> None:
        """Send what there is, and wait until it is taken; at most to a monotonic time."""
        while self._batch is not None and not self.is_broken and time.monotonic() < until_s:
            self.pump()
            if self._call is not None:
                with contextlib.suppress(Exception):
                    self._call.future.result(max(0.0, until_s - time.monotonic()))


# -- The worker ------------------------------------------------------------------------------------


class _Member:
    """Records this process from its first task on, as long as there is a collector."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_stopped = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpumemwidget-ray", daemon=True)
        #: When the next search for a collector is due, and whether the last one has ended.
        self._search_due_s = 0.0
        self._is_searched = threading.Event()
        self._is_searched.set()
        self._recorder: Recording | None = None
        self._channel: _Channel | None = None
        self._is_actor = False
        self._seen: Any = None
        self._title = ""
        #: Number of calls of measured functions that run.
        self._n_measured = 0

    def start(self) -> None:
        """Begin, on a thread."""
        # A process that ends has left Ray before its exit handlers run.
        atexit.register(self._stop)
        self._thread.start()

    def _stop(self) -> None:
        self._is_stopped = True
        self._wake.set()

    # -- Tasks that are measured -------------------------------------------------------------------

    def begin_task(self, name: str) -> tuple[Recording, Any] | None:
        """Begin the span of a task on its own thread; return what ``end_task`` takes.

        Where no notebook was looked for lately, it waits for that, once and up to two seconds.
        """
        if self._recorder is None and not self._is_stopped:
            now_s = time.monotonic()
            if now_s >= self._search_due_s and self._is_searched.is_set():
                self._ask_for_search(now_s)
                self._wake.set()
            self._is_searched.wait(max(0.0, self._search_due_s - now_s))
        with self._lock:
            if self._recorder is None:
                return None
            self._n_measured += 1
            seen, self._seen = self._seen, None
            if seen is not None and threading.current_thread() is threading.main_thread():
                # The thread was faster: from here on the span is exact.
                seen.is_seen = False
                return self._recorder, seen
            self._recorder.end_span(seen)
            return self._recorder, self._recorder.begin_span(name)

    def end_task(self, begun: tuple[Recording, Any], error: BaseException | None) -> None:
        """End what ``begin_task`` began."""
        recorder, span = begun
        recorder.end_span(span, "ok" if error is None else "error")
        if error is not None:
            recorder.note_error(error)
        with self._lock:
            self._n_measured -= 1
            self._title = _read_title()

    # -- The thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        is_told = False
        while not self._is_stopped:
            self._wake.wait(_LOOK_EVERY_S if self._recorder else _IDLE_LOOK_EVERY_S)
            self._wake.clear()
            try:
                with self._lock:
                    self._look()
                if not self._is_searched.is_set():
                    self._search()
            except Exception as exc:  # noqa: BLE001 - a failure of ours is never the worker's
                if not is_told:
                    what = describe_exception(exc)
                    print(f"gpumemwidget: can't record this worker ({what})", file=sys.stderr)
                is_told = True
        self._is_searched.set()

    def _look(self) -> None:
        title, now_s = _read_title(), time.monotonic()
        # A call after Ray's end would make it begin anew.
        if title.startswith(GpuMemCollector.__name__) or not ray.is_initialized():
            self._is_stopped = True
        elif self._recorder is None:
            if title != "IDLE" and now_s >= self._search_due_s:
                self._ask_for_search(now_s)
        elif self._channel is None or self._channel.is_broken or self._recorder is not _find():
            self._leave()
        elif title != self._title and not self._is_actor and _get_actor_id():
            # A process that ran tasks has become an actor.
            self._leave()
            self._ask_for_search(now_s)
        else:
            self._channel.pump()
        if self._recorder is not None and title != self._title and not self._n_measured:
            self._title = title
            self._follow(title)

    def _follow(self, title: str) -> None:
        """End the task that was seen, and begin the one that the title tells."""
        assert self._recorder is not None
        seen, self._seen = self._seen, None
        self._recorder.end_span(seen)
        # An idle actor's title is its class; those of its methods have a dot.
        if "." in title if self._is_actor else title != "IDLE":
            self._seen = self._recorder.begin_span(title, lane=threading.main_thread().ident)
            if self._seen is not None:
                self._seen.is_seen = True

    # -- Joining and leaving -----------------------------------------------------------------------

    def _ask_for_search(self, now_s: float) -> None:
        self._search_due_s = now_s + _SEARCH_EVERY_S
        self._is_searched.clear()

    def _search(self) -> None:
        """Join a collector where there is one. Only the thread asks Ray, which may take long."""
        try:
            collector = _find_collector()
            if collector is not None:
                with self._lock:
                    self._join(collector)
        finally:
            self._is_searched.set()

    def _join(self, collector: Any) -> None:
        from gpumemwidget.remote.engines import worker  # noqa: PLC0415 - when a notebook watches

        self._channel = _Channel(collector)
        self._is_actor = _get_actor_id() is not None
        self._recorder = worker.join(
            self._channel.send,
            role="actor" if self._is_actor else "worker",
            label=_name_process(),
            listener=_LISTENER,
        )
        self._title = ""

    def _leave(self) -> None:
        recorder, self._recorder = self._recorder, None
        channel, self._channel = self._channel, None
        seen, self._seen = self._seen, None
        if recorder is None or channel is None:
            return
        from gpumemwidget.remote.engines import worker  # noqa: PLC0415 - imported by now

        until_s = time.monotonic() + _LAST_WORDS_S
        channel.drain(until_s)
        recorder.end_span(seen)
        worker.leave(_LISTENER)
        channel.drain(until_s)


def _find() -> Recording | None:
    from gpumemwidget.remote.telling.recorder import find_recorder  # noqa: PLC0415 - imported by now
    from gpumemwidget.remote.telling.relay import find_relay  # noqa: PLC0415

    return find_recorder() or find_relay()


def _read_title() -> str:
    """Return what Ray says that this process does: ``train``, ``Trainer.step``, ``IDLE``."""
    read = getattr(ray._raylet, "getproctitle", None)  # noqa: SLF001 - read only, 0.2 µs
    title: str = read() if read is not None else " ".join(psutil.Process().cmdline())
    title = title.strip().removeprefix("ray::").removesuffix("::Exiting").removesuffix("()")
    # A named actor's first title has its name; a function within another one has that one's.
    title = title.rpartition(":")[2] if title.endswith(".__init__") else title
    return title.rpartition("<locals>.")[2]


def _get_actor_id() -> str | None:
    actor_id: str | None = ray.get_runtime_context().get_actor_id()
    return actor_id


def _name_process() -> str:
    """Return an actor's name, or its class or ``worker`` with the pid."""
    if _get_actor_id() is None:
        return f"worker {os.getpid()}"
    name: str = ray.get_runtime_context().get_actor_name()
    return name or f"{_read_title().partition('.')[0]} {os.getpid()}"


# -- The doors -------------------------------------------------------------------------------------

_members: list[_Member] = []
_members_lock = threading.Lock()


def start() -> None:
    """Record this worker where a notebook watches its job. May be called twice."""
    _find_member()


def _find_member() -> _Member | None:
    """Return this worker's member; ``None`` in a process that is no worker of Ray's."""
    context = ray.get_runtime_context() if ray.is_initialized() else None
    if context is None or context.worker.mode != ray.WORKER_MODE:
        return None
    with _members_lock:
        if not _members:
            member = _Member()
            member.start()
            _members.append(member)
        return _members[0]


def measured(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Measure each call of a task, or of an actor's method, exactly.

    Ray's workers are recorded from the first such call on, also those that began without
    ``ray_env``. Anywhere else the function runs as it is.

    Example:
        ::

            @ray.remote(num_gpus=1)
            @measured
            def train(config): ...
    """
    name = function.__qualname__.rpartition("<locals>.")[2]
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def run_async(*args: _P.args, **kwargs: _P.kwargs) -> Any:
            with _measure(name):
                return await function(*args, **kwargs)

        return run_async  # type: ignore[return-value]
    if inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def run_generator(*args: _P.args, **kwargs: _P.kwargs) -> Any:
            with _measure(name):
                return (yield from function(*args, **kwargs))

        return run_generator

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with _measure(name):
            return function(*args, **kwargs)

    return run


@contextlib.contextmanager
def _measure(name: str) -> Iterator[None]:
    member, begun = None, None
    with contextlib.suppress(Exception):  # A failure of ours is never the task's.
        member = _find_member()
        begun = None if member is None else member.begin_task(name)
    error: BaseException | None = None
    try:
        yield
    except BaseException as exc:
        error = exc
        raise
    finally:
        if member is not None and begun is not None:
            with contextlib.suppress(Exception):
                member.end_task(begun, error)
        del error
