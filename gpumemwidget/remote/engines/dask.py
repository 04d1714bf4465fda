"""Record the workers of a Dask cluster: a plugin in each of them, and Dask's events to send.

The client registers a plugin, which Dask hands to each worker, also to those that come later. What
a worker records goes through Dask's events to a topic, to which this client has subscribed: Dask
transports it with its own authentication. A task's key is its span. Several clients may watch one
cluster, each with a plugin and a topic.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

from dask.utils import key_split
from distributed import Client, Scheduler, SchedulerPlugin, Worker, WorkerPlugin
from distributed.core import clean_exception

from gpumemwidget.errors import BackendError, BadInputError, GpuMemError, describe_exception
from gpumemwidget.model.cells import Status
from gpumemwidget.model.processes import ProcessInfo
from gpumemwidget.remote.engines.worker import join, leave
from gpumemwidget.remote.messages import MAX_PROCESSES, Message
from gpumemwidget.remote.reader.collector import InboxSource
from gpumemwidget.remote.writer.recorder import Recorder
from gpumemwidget.remote.writer.spans import OpenSpan

_T = TypeVar("_T")

#: Seconds to wait for the cluster to begin and to end the recording; it may do so later.
_SETUP_S = 10.0
_CLOSE_S = 5.0
#: Seconds that a client has to come back before the recording for it ends.
_CLIENT_GONE_S = 60.0


class DaskSource(InboxSource):
    """The workers of a Dask cluster, which are recorded until this is closed, as a ``Source``.

    Attributes:
        name: ``Dask at`` and the scheduler's address.

    Args:
        client: a client of the cluster, which must be open and not asynchronous.

    Raises:
        BadInputError: the client can't be used.
        GpuMemError: the workers can't be recorded.
    """

    def __init__(self, client: Client) -> None:
        super().__init__()
        if client.status != "running":
            raise BadInputError(f"the Dask client is {client.status}: give one that is connected")
        if client.asynchronous:
            raise BadInputError("the Dask client is asynchronous: give one of Client(...) alone")
        #: Most of its methods have no types.
        self._client = cast(Any, client)
        self.name = f"Dask at {self._client.scheduler.address}"
        #: The name of the plugins, too.
        self._topic = f"gpumemwidget-{secrets.token_hex(8)}"
        #: By the address of each worker that was heard: the key of the process there.
        self._keys: dict[str, str] = {}
        self._is_closed = False
        self._registration = self._start(self._register())
        try:
            # A scheduler or a worker that hangs begins when it goes on.
            wait([self._registration], _SETUP_S)
            self._check_registration()
        except BaseException:
            self.close()
            raise

    def read(self) -> Iterator[tuple[str, Message | None]]:
        """Yield the messages since the last call, each with the key of its process.

        Raises:
            BackendError: the client is closed.
            GpuMemError: the workers can't be recorded.
        """
        yield from super().read()
        if self._is_closed:
            return
        if self._client.status == "closed":
            self._keys = {}
            raise BackendError(f"the client of {self.name} is closed: watch the cluster again")
        self._check_registration()

    def is_alive(self, key: str, info: ProcessInfo) -> bool:  # noqa: ARG002 - of all sources
        """Return whether the worker was heard lately, and no other one since at its address."""
        return self._keys.get(_read_address(key)) == key and self.is_heard(key)

    def close(self) -> None:
        """Record the workers no more, and listen no more. May be called twice."""
        is_closed, self._is_closed = self._is_closed, True
        if not is_closed and self._client.status == "running":
            # A scheduler or a worker that hangs ends it when that goes on.
            with suppress(Exception):
                self._start(self._unregister()).result(_CLOSE_S)

    def _start(self, coroutine: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Run a coroutine on the client's event loop, to its end even if nobody waits so long."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._client.loop.asyncio_loop)

    def _check_registration(self) -> None:
        """Raise the error by which the workers can't be recorded, once there is one."""
        registration = self._registration
        # ``close`` cancels it.
        is_done = registration.done() and not registration.cancelled()
        error = registration.exception() if is_done else None
        if error is not None:
            raise GpuMemError(
                f"the workers of {self.name} can't be recorded ({describe_exception(error)}): "
                "gpumemwidget must be installed where they run"
            )

    # -- On the client's event loop ----------------------------------------------------------------

    async def _register(self) -> None:
        client, topic = self._client, self._topic
        client.subscribe_topic(topic, self._take)
        await client.register_plugin(_make_scheduler_plugin(topic, client.id), name=topic)
        try:
            await client.register_plugin(_make_worker_plugin(topic), name=topic)
        except ImportError:
            # Workers without gpumemwidget run as before; that no worker has it is an error.
            def is_recorded(dask_worker: Worker) -> bool:
                return getattr(dask_worker.plugins.get(topic), "is_recording", False)

            if not any((await client.run(is_recorded)).values()):
                raise

    async def _unregister(self) -> None:
        self._registration.cancel()
        self._client.unsubscribe_topic(self._topic)
        # The scheduler's plugin is the last one: with the client, it ends what is left.
        with suppress(ValueError):  # A scheduler that hung has not heard of it yet.
            await self._client.unregister_worker_plugin(self._topic)
        await self._client.unregister_scheduler_plugin(self._topic)

    def _take(self, event: Sequence[Any]) -> None:
        """Take an event of the topic, which anybody on the cluster may log to."""
        message = event[1]
        if isinstance(message, list | tuple) and len(message) == 2 and isinstance(message[0], str):
            key, lines = message
            self._keys[_read_address(key)] = key
            if len(self._keys) > MAX_PROCESSES:  # A cluster may have had many that are gone.
                heard = {own for own in self._keys.values() if self.is_heard(own)}
                self._keys = {_read_address(own): own for own in heard}
            self.put(key, lines)


def _read_address(key: str) -> str:
    return key.partition(" ")[0]


# -- In the scheduler and in the workers -----------------------------------------------------------

# Classes that are made in a function are pickled by value. So the scheduler may lack gpumemwidget,
# and a worker that joins later and lacks it logs that and starts: it would not start if it could
# not unpickle the plugin.


def _make_scheduler_plugin(topic: str, client_id: str) -> SchedulerPlugin:
    class GpuMemoryClientWatch(SchedulerPlugin):
        """Ends the recording for a client that was killed."""

        def remove_client(self, scheduler: Scheduler, client: str) -> None:
            if client == client_id:
                scheduler.loop.call_later(_CLIENT_GONE_S, self.end, scheduler)

        async def end(self, scheduler: Scheduler) -> None:
            # A client that lost only its connection may be back by now.
            if client_id not in scheduler.clients and topic in scheduler.plugins:
                await scheduler.unregister_scheduler_plugin(topic)
                if topic in scheduler.worker_plugins:
                    await scheduler.unregister_worker_plugin(None, topic)

    return GpuMemoryClientWatch()


def _make_worker_plugin(topic: str) -> WorkerPlugin:
    class GpuMemoryPlugin(WorkerPlugin):
        """Records a worker for one client."""

        is_recording = False

        def setup(self, worker: Worker) -> None:
            from gpumemwidget.remote.engines.dask import WorkerRecording  # noqa: PLC0415 - see above

            recording = WorkerRecording(worker, topic)
            self.transition = recording.transition  # type: ignore[method-assign]  # of this one
            self.teardown = recording.teardown  # type: ignore[method-assign]  # of this one
            self.is_recording = True

    return GpuMemoryPlugin()


#: Spans of the tasks that run, by their keys, for each recording of this process. Several
#: clients' plugins share them: the first one that hears of a task begins its span for all.
_spans: WeakKeyDictionary[Recorder, dict[Any, OpenSpan | None]] = WeakKeyDictionary()


class WorkerRecording:
    """Records this worker for one client; used on its event loop alone.

    Args:
        worker: the worker.
        topic: where the client listens.
    """

    def __init__(self, worker: Worker, topic: str) -> None:
        self._worker = worker
        self._topic = topic
        # One that is restarted in a container may have the address and the pid that it had.
        self._key = f"{worker.address} {secrets.token_hex(4)}"
        name = worker.name
        self._recording = join(
            self._send,
            role="worker",
            number=name if type(name) is int else None,
            label=str(name),
            listener=topic,
            find_lane=self._find_lane,
        )
        self._spans = _spans.setdefault(self._recording, {})
        for task in [*worker.state.executing, *worker.state.long_running]:
            self.transition(task.key, "ready", "executing")

    def transition(self, key: Any, start: str, finish: str, **_: Any) -> None:  # noqa: ARG002 - Dask's
        """Begin the span of a task, or end it."""
        # The states, within the worker, in which a task's function may be running.
        running = "executing", "long-running", "cancelled", "resumed"
        if finish == "executing" and key not in self._spans:
            self._spans[key] = self._recording.begin_span(key_split(key), lane=key)
        elif finish not in running and key in self._spans:
            status: dict[str, Status] = {"memory": "ok", "error": "error"}
            self._recording.end_span(self._spans.pop(key), status.get(finish, "interrupted"))
            if finish == "error":
                self._note_error(key)

    def teardown(self, worker: Worker) -> None:  # noqa: ARG002 - Dask's
        """Record no more for this client."""
        leave(self._topic)

    def _send(self, lines: bytes) -> None:
        if len(self._worker.batched_stream.buffer) > 1000:
            raise ConnectionError("the scheduler takes nothing")
        # In the order of these calls, from whichever thread they come.
        message = [self._key, lines]
        self._worker.loop.add_callback(self._worker.log_event, self._topic, message)

    def _find_lane(self) -> object:
        """Return the task that runs on this thread: spans within it don't lie beside it."""
        ident = threading.get_ident()
        return self._worker.active_threads.get(ident, ident)

    def _note_error(self, key: Any) -> None:
        task = self._worker.state.tasks.get(key)
        if task is None or task.exception is None:
            return
        # The worker has pickled the error, as Dask sends it on: with its lines, without what the
        # frames held.
        with suppress(Exception):
            _, error, _ = clean_exception(task.exception.data)
            if error is not None:
                self._recording.note_error(error)
