"""Record the workers of a Dask cluster: a plugin in each of them, and Dask's events to tell.

The client registers a plugin, which Dask hands to each worker, also to those that come later. What
a worker records goes through Dask's events to a topic, to which this client has subscribed: Dask
transports it with its own authentication. A task's key is its span. Several clients may watch one
cluster, each with a plugin and a topic.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar, cast

import msgspec
from dask.utils import key_split
from distributed import Client, Worker, WorkerPlugin
from distributed.core import clean_exception
from tornado.ioloop import PeriodicCallback

from gpumemwidget.errors import BadInputError, BusyError, GpuMemError, describe_exception
from gpumemwidget.model.cells import Status
from gpumemwidget.model.processes import ProcessInfo
from gpumemwidget.model.releases import ReleaseRequest
from gpumemwidget.remote.engines.inbox import Inbox
from gpumemwidget.remote.engines.worker import join, leave, read_outcome, write_request
from gpumemwidget.remote.engines.worker import refuse as refuse_release
from gpumemwidget.remote.engines.worker import release as release_names
from gpumemwidget.remote.gathering.releases import Outcome
from gpumemwidget.remote.messages import Message
from gpumemwidget.remote.telling.spans import OpenSpan

#: Seconds between two looks at which workers there are.
_LOOK_EVERY_S = 1.0
#: Seconds between the first two readings of a worker's clock, each of which leaves a line in the
#: worker's log; it doubles each time, up to so many.
_CLOCK_FIRST_S = 15.0
_CLOCK_LAST_S = 3600.0
#: Seconds after its last message within which a worker counts as alive.
_SILENT_S = 3.0
#: Seconds that the cluster has to begin and to end the recording, and a worker to release names.
_SETUP_S = 10.0
_CLOSE_S = 5.0
_RELEASE_S = 30.0
#: Seconds between two questions of a worker to the scheduler whether its client is still there.
_CLIENT_CHECK_S = 60.0
#: Maximum number of processes that are told apart.
_MAX_HEARD = 10_000
#: Maximum number of messages that wait for a scheduler which doesn't take them.
_MAX_UNSENT = 1000
#: Maximum share of a worker's time for cards of OOMs.
_CARD_SHARE = 0.1
#: States of a task, within the worker, whose function may be running.
_RUNNING_STATES = frozenset({"executing", "long-running", "cancelled", "resumed"})

_T = TypeVar("_T")


def watch_dask(client: Client) -> DaskSource:
    """Record all workers of a cluster from now on, until the result is closed.

    Args:
        client: a client of the cluster, which must be open and not asynchronous.

    Raises:
        BadInputError: the client can't be used.
        GpuMemError: the workers can't be recorded.
    """
    if client.status != "running":
        raise BadInputError(f"the Dask client is {client.status}: give one that is connected")
    if client.asynchronous:
        raise BadInputError("the Dask client is asynchronous: give one made by Client(...) alone")
    return DaskSource(client)


class DaskSource:
    """The workers of a Dask cluster, as a ``Source``.

    Attributes:
        name: ``Dask at`` and the scheduler's address.
    """

    def __init__(self, client: Client) -> None:
        #: Most of its methods have no types.
        self._client = cast(Any, client)
        self._loop: asyncio.AbstractEventLoop = self._client.loop.asyncio_loop
        self.name = f"Dask at {self._client.scheduler.address}"
        #: The plugin's name, too.
        self._topic = f"gpumemwidget-{secrets.token_hex(8)}"
        self._inbox = Inbox()
        self._heard_s: dict[str, float] = {}
        #: Of each address the key of the process that was heard there last.
        self._keys: dict[str, str] = {}
        self._workers: frozenset[str] = frozenset()
        #: By address: how long the quickest reading of its clock took, and what it said.
        self._offsets: dict[str, tuple[float, float]] = {}
        self._is_closed = False
        self._looks: Future[None] | None = None
        try:
            # A worker that hangs begins when it goes on; the others need not wait for it.
            with suppress(asyncio.TimeoutError, TimeoutError):
                self._wait(self._register(), _SETUP_S)
        except BaseException as exc:
            self.close()
            if isinstance(exc, GpuMemError) or not isinstance(exc, Exception):
                raise
            raise GpuMemError(
                f"the workers of {self.name} can't be recorded ({describe_exception(exc)}): "
                "gpumemwidget must be installed where they run"
            ) from None
        self._looks = asyncio.run_coroutine_threadsafe(self._keep_looking(), self._loop)

    def read(self) -> Iterable[tuple[str, Message]]:
        """Return the messages since the last call, each with the key of its process."""
        return self._inbox.take()

    def is_alive(self, key: str, info: ProcessInfo) -> bool:  # noqa: ARG002 - of all sources
        """Return whether the scheduler knows the worker, or it was heard of just now."""
        if time.monotonic() - self._heard_s.get(key, float("-inf")) < _SILENT_S:
            return True
        address = _read_address(key)
        return address in self._workers and self._keys.get(address) == key

    def measure_offset(self, key: str) -> float | None:
        """Return the seconds by which a worker's clock is ahead of ours; ``None``: not known."""
        offset = self._offsets.get(_read_address(key))
        return None if offset is None else offset[1]

    def count_unread(self, key: str) -> int:
        """Return how many messages of a worker could not be read."""
        return self._inbox.count_unread(key)

    def release(
        self, keys: Sequence[str], request: ReleaseRequest, *, dry_run: bool
    ) -> dict[str, Outcome]:
        """Release names in some workers, side by side, and return what came of it in each.

        A worker that runs a task, is gone or does not answer in time is answered for by a text.

        Args:
            keys: the workers, by the keys of their messages.
            request: what to release.
            dry_run: only plan.
        """

        async def release_all() -> list[Outcome]:
            data = write_request(request)
            releases = [self._release(key, data, dry_run=dry_run) for key in keys]
            return await asyncio.gather(*releases)

        if self._client.status != "running":
            return dict.fromkeys(keys, "the Dask client is closed: watch the cluster with another")
        return dict(zip(keys, self._wait(release_all(), _RELEASE_S + _CLOSE_S), strict=True))

    def close(self) -> None:
        """Record the workers no more, and listen no more. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._looks is not None:
            self._looks.cancel()
        if self._client.status == "running":
            # Workers that can't be told now find out that nobody listens.
            with suppress(Exception):
                self._wait(self._unregister(), _CLOSE_S)
        self._inbox.take()

    # -- On the client's event loop ----------------------------------------------------------------

    def _wait(self, work: Coroutine[Any, Any, _T], seconds: float) -> _T:
        future = asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, seconds), self._loop)
        try:
            return future.result(seconds + _CLOSE_S)
        finally:
            future.cancel()

    async def _register(self) -> None:
        client = self._client
        client.subscribe_topic(self._topic, self._take)
        plugin = _make_plugin(self._topic, client.id, _CLIENT_CHECK_S)
        await client.register_plugin(plugin, name=self._topic)
        self._workers = frozenset(await client.nthreads())

    async def _unregister(self) -> None:
        topic = self._topic
        self._client.unsubscribe_topic(topic)

        # Not of a module, so that it is pickled by value: the scheduler may lack gpumemwidget.
        def forget_events(dask_scheduler: Any) -> None:
            # Else they are kept for good. The workers' last ones are still on their way.
            broker = getattr(dask_scheduler, "_broker", None)  # Not in 2024.1.
            forget = dask_scheduler.events.pop if broker is None else broker.truncate
            dask_scheduler.loop.call_later(1.0, forget, topic)

        try:
            await self._client.unregister_worker_plugin(name=topic)
        finally:
            await self._client.run_on_scheduler(forget_events)

    def _take(self, event: Sequence[Any]) -> None:
        """Take an event of the topic, which anybody on the cluster may log to."""
        message = event[1]
        if self._is_closed or not isinstance(message, list | tuple) or len(message) != 3:
            return
        address, process, lines = message
        if isinstance(address, str) and isinstance(process, str):
            key = f"{address} {process}"
            # The ones heard of last stand last.
            self._heard_s.pop(key, None)
            self._heard_s[key], self._keys[address] = time.monotonic(), key
            if len(self._heard_s) > _MAX_HEARD:
                forgotten = next(iter(self._heard_s))
                del self._heard_s[forgotten]
                self._keys.pop(_read_address(forgotten), None)
                self._offsets.pop(_read_address(forgotten), None)
            self._inbox.put(key, lines)

    async def _keep_looking(self) -> None:
        #: By address: when its clock is read next, and the seconds until the time after.
        due: dict[str, tuple[float, float]] = {}
        readings: set[asyncio.Task[None]] = set()
        while True:
            try:
                workers = await asyncio.wait_for(self._client.nthreads(), _SETUP_S)
                self._workers = frozenset(workers)
            except Exception:  # noqa: BLE001 - the cluster or the client is gone, maybe for good
                self._workers = frozenset()
            now_s = time.monotonic()
            due = {each: due.get(each, (now_s, _CLOCK_FIRST_S)) for each in self._workers}
            for address, (when_s, pause_s) in due.items():
                if when_s <= now_s:
                    due[address] = now_s + pause_s, min(2 * pause_s, _CLOCK_LAST_S)
                    reading = asyncio.create_task(self._read_clock(address))
                    readings.add(reading)
                    reading.add_done_callback(readings.discard)
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _read_clock(self, address: str) -> None:
        with suppress(Exception):
            began_s = time.time()
            theirs = await self._run(address, time.time, _SETUP_S)
            ended_s = time.time()
            known_s, offset_s = self._offsets.get(address, (float("inf"), 0.0))
            # An old reading counts less and less: clocks drift.
            self._offsets[address] = (2 * known_s, offset_s)
            if ended_s - began_s <= known_s:
                offset_s = float(theirs) - (began_s + ended_s) / 2
                self._offsets[address] = (ended_s - began_s, offset_s)

    async def _release(self, key: str, request: bytes, *, dry_run: bool) -> Outcome:
        address = _read_address(key)
        if address not in self._workers or self._keys.get(address) != key:
            return "the worker is gone"
        # By the worker's clock: what comes late is not carried out behind our back.
        late_at = time.time() + _RELEASE_S + (self.measure_offset(key) or 0.0)
        try:
            work = (request, late_at, dry_run)
            return read_outcome(await self._run(address, _release_in_worker, _RELEASE_S, *work))
        except (asyncio.TimeoutError, TimeoutError):
            return f"the worker did not answer within {_RELEASE_S:.0f} s"
        except msgspec.MsgspecError:
            return "the worker's answer can't be read: is another gpumemwidget installed there?"
        except Exception as exc:  # noqa: BLE001 - one worker's failure is not another's
            return f"the worker could not be asked ({describe_exception(exc)})"

    async def _run(
        self, address: str, function: Callable[..., object], seconds: float, *args: object
    ) -> Any:
        """Return what a function returns in one worker: with others, all wait for the slowest."""
        answers = self._client.run(function, *args, workers=[address])
        return (await asyncio.wait_for(answers, seconds))[address]


def _read_address(key: str) -> str:
    return key.rpartition(" ")[0]


# -- In the worker ---------------------------------------------------------------------------------


def _make_plugin(topic: str, client_id: str, check_s: float) -> WorkerPlugin:
    # A class that is made here is pickled by value. So a worker that joins later and that lacks
    # gpumemwidget logs that and starts; it would not start if it could not unpickle the plugin.
    class GpuMemoryPlugin(WorkerPlugin):
        """Records a worker for one client."""

        def setup(self, worker: Worker) -> None:
            from gpumemwidget.remote.engines.dask import WorkerRecording  # noqa: PLC0415 - see above

            self.recording = WorkerRecording(worker, topic, client_id, check_s)

        def transition(self, key: Any, start: str, finish: str, **_: Any) -> None:  # noqa: ARG002
            if hasattr(self, "recording"):
                self.recording.take_transition(key, finish)

        def teardown(self, worker: Worker) -> None:  # noqa: ARG002 - Dask's
            if hasattr(self, "recording"):
                self.recording.close()

    return GpuMemoryPlugin()


#: The recordings of this process, one for each client that watches.
_recordings: list[WorkerRecording] = []


class WorkerRecording:
    """Records this worker for one client; used on its event loop alone.

    Args:
        worker: the worker.
        topic: where the client listens.
        client_id: by which the scheduler knows the client.
        check_s: seconds between two questions to the scheduler whether the client is there.

    Raises:
        BusyError: the process is a notebook that records itself, or has several workers.
    """

    def __init__(self, worker: Worker, topic: str, client_id: str, check_s: float) -> None:
        self._worker = worker
        if any(each._worker is not worker for each in _recordings):  # noqa: SLF001 - of this class
            raise BusyError("several Dask workers share a process: start them with processes=True")
        self._topic, self._client_id, self._check_s = topic, client_id, check_s
        self._address, self._id = worker.address, secrets.token_hex(4)
        self._spans: dict[Any, OpenSpan | None] = {}
        self._card_due_s = 0.0
        name = worker.name
        self._recorder = join(
            self._send,
            role="worker",
            number=name if type(name) is int else None,
            label=str(name),
            listener=topic,
        )
        _recordings.append(self)
        self._recorder.find_lane = self._find_lane
        if _recordings[0] is self:
            for task in [*worker.state.executing, *worker.state.long_running]:
                self.take_transition(task.key, "executing")
        self._check = PeriodicCallback(self._check_client, check_s * 1000)
        self._check.start()

    def take_transition(self, key: Any, finish: str) -> None:
        """Begin the span of a task, or end it."""
        if _recordings[:1] != [self]:
            return  # Of several clients' plugins in a worker, one tells for all.
        if finish == "executing" and key not in self._spans:
            self._spans[key] = self._recorder.begin_span(key_split(key), lane=key)
        elif finish not in _RUNNING_STATES and key in self._spans:
            status: dict[str, Status] = {"memory": "ok", "error": "error"}
            self._recorder.end_span(self._spans.pop(key), status.get(finish, "interrupted"))
            if finish == "error":
                self._note_error(key)

    def close(self) -> None:
        """Record no more for this client. May be called twice."""
        if self in _recordings:
            self._check.stop()
            is_first = _recordings[0] is self
            _recordings.remove(self)
            if is_first and _recordings:
                _recordings[0]._spans = self._spans  # noqa: SLF001 - of this class
            leave(self._topic)

    def _send(self, lines: bytes) -> None:
        stream = self._worker.batched_stream
        is_open = stream is not None and stream.comm is not None and not stream.comm.closed()
        if not is_open or len(stream.buffer) > _MAX_UNSENT:
            raise ConnectionError("the scheduler takes nothing")
        # In the order of these calls, from whichever thread they come.
        message = [self._address, self._id, lines]
        self._worker.loop.add_callback(self._worker.log_event, self._topic, message)

    def _find_lane(self) -> object:
        """Return the task that runs on this thread: spans within it don't lie beside it."""
        ident = threading.get_ident()
        return self._worker.active_threads.get(ident, ident)

    def _note_error(self, key: Any) -> None:
        began_s = time.monotonic()
        task = self._worker.state.tasks.get(key)
        if task is None or task.exception is None or began_s < self._card_due_s:
            return
        # The worker itself has made text of the error, as Dask sends it on: with lines, without
        # what the frames held.
        with suppress(Exception):
            traceback = None if task.traceback is None else task.traceback.data
            _, error, lines = clean_exception(task.exception.data, traceback)
            if error is not None:
                self._recorder.note_error(error.with_traceback(error.__traceback__ or lines))
        ended_s = time.monotonic()
        self._card_due_s = ended_s + (ended_s - began_s) / _CARD_SHARE

    async def _check_client(self) -> None:
        """Take the plugin away if its client has gone without doing so: a killed notebook."""
        with suppress(Exception):
            scheduler = self._worker.scheduler
            events = await scheduler.events(topic=self._client_id)
            actions = [event.get("action") for _, event in events if isinstance(event, dict)]
            lives = [action for action in actions if action in {"add-client", "remove-client"}]
            if lives[-1:] == ["remove-client"]:
                self.close()
                # All workers notice at once: the first one does it for all.
                await asyncio.sleep(random.random() * self._check_s)
                if self._topic in self._worker.plugins:
                    await scheduler.unregister_worker_plugin(name=self._topic)


def _release_in_worker(request: bytes, late_at: float, dry_run: bool, dask_worker: Worker) -> bytes:
    """Release names, on the worker's event loop: meanwhile no task begins."""
    if time.time() > late_at:
        return refuse_release("the request came too late")
    if dask_worker.active_keys:
        return refuse_release("a task is running in the worker: wait for its end")
    return release_names(request, dry_run=dry_run)
