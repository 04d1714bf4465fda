"""Watch the workers and actors of a Ray job: see ``watch_ray``.

What they tell goes to an actor of the notebook's job, which keeps it until it is taken: Ray carries
all of it, with its own authentication. The notebook's end ends that actor, and the workers record
no more.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from gpumemwidget.errors import BackendError, BadInputError, describe_exception
from gpumemwidget.model.processes import ProcessInfo
from gpumemwidget.model.releases import ReleaseRequest
from gpumemwidget.remote.engines import worker
from gpumemwidget.remote.engines.inbox import Inbox
from gpumemwidget.remote.engines.ray_worker import (
    Call,
    GpuMemCollector,
    Offset,
    measured,
    name_collector,
)
from gpumemwidget.remote.gathering.recordings import runs_here
from gpumemwidget.remote.gathering.releases import Outcome
from gpumemwidget.remote.messages import Began, Ended, Message
from gpumemwidget.remote.telling.program import ProgramShell

__all__ = ["RaySource", "measured", "ray_env", "watch_ray"]

_HOOK = "worker_process_setup_hook"
#: Seconds that a notebook waits for the collector's answer at a time.
_ANSWER_S = 0.5
#: Seconds after which a collector that was there and does not answer is told of.
_NO_ANSWER_S = 10.0
#: Seconds of silence after which Ray is asked whether a process is alive, and after which it counts
#: as lost where Ray can't tell: it tells something twice a second.
_QUIET_S = 2.0
_SILENT_S = 15.0
#: Seconds within which an actor has to begin a release, and to end it.
_BEGIN_RELEASE_S = 5.0
_END_RELEASE_S = 60.0
#: Maximum number of processes whose state is kept, the newest.
_MAX_PROCESSES = 4096


def ray_env(runtime_env: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a runtime environment in which every worker of a Ray job can be watched.

    Ray calls its ``worker_process_setup_hook`` in each worker before the first task. That starts a
    thread, and imports nothing else before a notebook watches. A worker without gpumemwidget goes
    on as it would.

    Args:
        runtime_env: an environment of your own, to which this is added. A hook of its own is called
            first.

    Example:
        ::

            ray.init(runtime_env=ray_env())
    """
    env = dict(runtime_env or {})
    own = env.get(_HOOK)

    # A function within a function is sent as it is: a worker need not have this module.
    def start_worker() -> None:
        if callable(own):
            own()
        elif own is not None:
            module, _, name = own.rpartition(".")
            getattr(importlib.import_module(module), name)()
        try:
            from gpumemwidget.remote.engines import ray_worker  # noqa: PLC0415 - in the worker

            ray_worker.start()
        except Exception as exc:  # noqa: BLE001 - a failure of ours is never the worker's
            print(f"gpumemwidget: can't record this worker ({exc})")

    return {**env, _HOOK: start_worker}


def watch_ray(actors: Sequence[Any] = ()) -> RaySource:
    """Watch the workers of the Ray job that this process is connected to.

    Recorded are workers that began with ``ray_env``, and those in which a function runs that
    ``measured`` wraps.

    Args:
        actors: handles of actors that began without either: they are recorded too, from the end of
            the method that they run.

    Raises:
        BadInputError: ``ray.init`` was not called.
    """
    return RaySource(actors)


@dataclass(slots=True)
class _Told:
    """The facts about a process that its messages do not tell."""

    heard_s: float
    #: Seconds by which its clock is ahead of the collector's.
    offset_s: float | None = None
    info: ProcessInfo | None = None
    has_ended: bool = False
    #: What Ray says of a silent process; ``None`` where it was not asked, or can't tell.
    is_alive: bool | None = None


class RaySource:
    """The recorded workers and actors of a Ray job, as a source of a ``Collector``.

    Args:
        actors: handles of actors that are to be recorded from now on.

    Raises:
        BadInputError: ``ray.init`` was not called.
    """

    def __init__(self, actors: Sequence[Any] = ()) -> None:
        if not ray.is_initialized():
            raise BadInputError("Ray is not connected: call ray.init() first")
        context = ray.get_runtime_context()
        self._job_id: str = context.get_job_id()
        self.name = f"Ray job {self._job_id}"
        self._is_closed = False
        self._call: Call | None = None
        self._offset = Offset()
        self._told: dict[str, _Told] = {}
        self._inbox = Inbox()
        here = NodeAffinitySchedulingStrategy(context.get_node_id(), soft=True)
        self._collector: Any = (
            ray.remote(GpuMemCollector)
            .options(name=name_collector(self._job_id), num_cpus=0, scheduling_strategy=here)
            .remote()
        )
        for actor in actors:
            actor.__ray_call__.remote(_make_starter())

    def read(self) -> Iterator[tuple[str, Message]]:
        """Yield the messages since the last call, each with the key of its process.

        Raises:
            BackendError: the collector is gone, or does not answer now.
        """
        if self._is_closed:
            return
        if not self._is_connected:
            raise BackendError(f"{self.name} is over: watch the new one after ray.init()")
        try:
            call = self._call = self._call or Call(self._collector.take)
            batches, there_s = call.future.result(_ANSWER_S)
        except FutureTimeoutError:
            if self._offset.seconds is not None and call.age_s > _NO_ANSWER_S:
                raise BackendError(f"the collector of {self.name} does not answer") from None
            return
        except Exception as exc:  # noqa: BLE001 - told as an error of ours
            self._call = None
            what = describe_exception(exc)
            raise BackendError(
                f"the collector of {self.name} is gone ({what}): watch the job again"
            ) from None
        self._call = None
        self._offset.add(call, there_s)
        for key, lines, offset_s in batches:
            told = self._told.setdefault(key, _Told(0.0))
            told.heard_s, told.offset_s, told.is_alive = time.monotonic(), offset_s, None
            self._inbox.put(key, lines)
        for key, message in self._inbox.take():
            told = self._told[key]
            told.info = message.process if type(message) is Began else told.info
            told.has_ended |= type(message) is Ended
            yield key, message
        yield from self._find_ended()
        for key in list(self._told)[:-_MAX_PROCESSES]:
            del self._told[key]

    @property
    def _is_connected(self) -> bool:
        """True while the job goes on: a call after its end would make Ray begin another one."""
        return bool(ray.is_initialized() and ray.get_runtime_context().get_job_id() == self._job_id)

    def _find_ended(self) -> Iterator[tuple[str, Message]]:
        """Yield the ends that Ray knows of: a process that it ends can't tell that itself."""
        now_s = time.monotonic()
        for key, told in list(self._told.items()):
            if told.info is None or told.has_ended or told.is_alive is False:
                continue
            if now_s - told.heard_s < _QUIET_S:
                continue
            state = _read_worker(key)
            told.is_alive = None if state is None else state.is_alive
            # One that was killed is lost.
            if state is not None and not state.is_alive and state.exit_type != "SYSTEM_ERROR":
                told.has_ended = True
                yield key, Ended(max(0.0, state.ended_at - told.info.started_at), state.error)

    def is_alive(self, key: str, info: ProcessInfo) -> bool:
        """Return whether a process was heard of lately, or else is known to run."""
        told = self._told.get(key)
        if told is None:
            return False
        silent_s = time.monotonic() - told.heard_s
        if silent_s < _QUIET_S or told.is_alive is not None:
            return told.is_alive is not False
        is_here = info.host == socket.gethostname()
        return runs_here(info) if is_here else silent_s < _SILENT_S

    def measure_offset(self, key: str) -> float | None:
        """Return the seconds by which a process's clock is ahead of ours; ``None``: not known."""
        told, own_s = self._told.get(key), self._offset.seconds
        if told is None or told.offset_s is None or own_s is None:
            return None
        return told.offset_s - own_s

    def count_unread(self, key: str) -> int:
        """Return how many messages of a process could not be read."""
        return self._inbox.count_unread(key)

    def close(self) -> None:
        """End the collector; the workers record no more. May be called twice."""
        is_closed, self._is_closed = self._is_closed, True
        if not is_closed and self._is_connected:
            ray.kill(self._collector)

    # -- Releases ----------------------------------------------------------------------------------

    def release(
        self, keys: Sequence[str], request: ReleaseRequest, *, dry_run: bool
    ) -> dict[str, Outcome]:
        """Release attributes of named actors, between two of their methods.

        Args:
            keys: the processes.
            request: what to release: ``model`` is the actor's ``self.model``.
            dry_run: only plan.

        Returns:
            What it came to in each process; text: why it was refused.
        """
        data = worker.write_request(request)
        asked = {key: self._ask(key, data, dry_run=dry_run) for key in keys}
        until_s = time.monotonic() + _BEGIN_RELEASE_S
        return {
            key: answer if isinstance(answer, str) else self._await(*answer, until_s=until_s)
            for key, answer in asked.items()
        }

    def _ask(self, key: str, data: bytes, *, dry_run: bool) -> str | tuple[Future[Any], str]:
        """Ask an actor for a release, with the ticket that it needs; or return a refusal."""
        info = None if (told := self._told.get(key)) is None else told.info
        if info is None or not self._is_connected or not self.is_alive(key, info):
            return "the process is gone"
        if info.role != "actor":
            return (
                "a worker of Ray's has no names of its own: what its tasks leave there goes with "
                "the process; @ray.remote(max_calls=1) ends it after each task"
            )
        try:
            actor = ray.get_actor(info.label)
            ticket = secrets.token_hex(8)
            self._collector.offer.remote(ticket).future().result(_ANSWER_S)
            release = actor.__ray_call__.remote(
                _release_in_actor, data, dry_run, self._collector, ticket
            )
            return release.future(), ticket
        except ValueError:
            return f"{info.label} has no name by which Ray finds it: create it with options(name=…)"
        except Exception as exc:  # noqa: BLE001 - named in the answer
            return f"Ray can't ask the actor: {describe_exception(exc)}"

    def _await(self, future: Future[Any], ticket: str, *, until_s: float) -> Outcome:
        try:
            try:
                answer = future.result(max(0.0, until_s - time.monotonic()))
            except FutureTimeoutError:
                # Whoever takes the ticket first decides whether it is done.
                if self._collector.claim.remote(ticket).future().result(_ANSWER_S):
                    return "the actor is in a method: nothing was changed; try again after it"
                answer = future.result(_END_RELEASE_S)
        except FutureTimeoutError:
            return "the actor has begun, and does not answer: look at its log"
        except Exception as exc:  # noqa: BLE001 - named in the answer
            return f"the actor failed: {describe_exception(exc)}"
        return worker.read_outcome(answer)


@dataclass(frozen=True, slots=True)
class _WorkerState:
    """A worker as Ray itself knows it."""

    is_alive: bool
    #: ``INTENDED_USER_EXIT``, ``NODE_OUT_OF_MEMORY``; ``SYSTEM_ERROR`` for one that was killed.
    exit_type: str
    exit_detail: str
    #: In seconds since the epoch.
    ended_at: float

    @property
    def error(self) -> str:
        """The error that ended it; ``""`` for none."""
        is_meant = self.exit_type.startswith("INTENDED")
        return "" if is_meant else f"{self.exit_type}: {self.exit_detail[:200]}"


def _read_worker(key: str) -> _WorkerState | None:
    """Return what Ray knows of a worker; ``None`` where this release of Ray does not tell.

    ``ray.util.state`` has it too, but needs the dashboard's server, which plain Ray has not.
    """
    with contextlib.suppress(Exception):
        from ray.core.generated import common_pb2, gcs_pb2  # noqa: PLC0415 - not in each release

        state = ray._private.state.state  # noqa: SLF001 - read only
        if hasattr(state, "_connect_and_get_accessor"):
            accessor = state._connect_and_get_accessor()  # noqa: SLF001
        else:  # As in Ray 2.9.
            state._check_connected()  # noqa: SLF001
            accessor = state.global_state_accessor
        record = accessor.get_worker_info(ray.WorkerID(bytes.fromhex(key.partition("-")[0])))
        data = gcs_pb2.WorkerTableData.FromString(record)
        exit_type = common_pb2.WorkerExitType.Name(data.exit_type)
        return _WorkerState(data.is_alive, exit_type, data.exit_detail, data.end_time_ms / 1000)
    return None


# -- In an actor -----------------------------------------------------------------------------------


def _make_starter() -> Callable[[object], None]:
    start = ray_env()[_HOOK]
    # Ray gives the actor to what it calls.
    return lambda _actor: start()


class _ActorShell(ProgramShell):
    """An actor as a ``Shell``: its names are its attributes."""

    def __init__(self, actor: object) -> None:
        self._actor = actor

    @property
    def user_ns(self) -> MutableMapping[str, object]:
        """The attributes."""
        return vars(self._actor)

    @user_ns.setter
    def user_ns(self, _namespace: MutableMapping[str, object]) -> None:
        raise AttributeError("an actor's attributes stay")


def _release_in_actor(
    actor: object, request: bytes, dry_run: bool, collector: Any, ticket: str
) -> bytes:
    """Release attributes of an actor, in it."""
    methods = inspect.getmembers(type(actor), inspect.iscoroutinefunction)
    if methods or threading.current_thread() is not threading.main_thread():
        return worker.refuse(
            "the actor runs several methods at a time: one of them may use the memory"
        )
    if not ray.get(collector.claim.remote(ticket), timeout=_BEGIN_RELEASE_S):
        return worker.refuse("the notebook no longer waits: nothing was changed")
    return worker.release(request, dry_run=dry_run, shell=_ActorShell(actor))
