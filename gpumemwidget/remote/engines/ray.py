"""Watch the workers and actors of a Ray job.

What they record goes to an actor of the notebook's job, which keeps it until it is taken. Ray sends
all of it, with its own authentication. The notebook's end ends that actor, and the workers record
no more.
"""

from __future__ import annotations

import contextlib
import importlib
import secrets
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from gpumemwidget.errors import BackendError, BadInputError, describe_exception
from gpumemwidget.model.processes import ProcessInfo
from gpumemwidget.remote.engines import ray_worker
from gpumemwidget.remote.messages import Began, Ended, Message
from gpumemwidget.remote.reader.collector import InboxSource

_HOOK = "worker_process_setup_hook"
#: Seconds of silence after which Ray is asked whether a process is alive.
_QUIET_S = 2.0


def ray_env(runtime_env: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a runtime environment for recorded workers; see ``gpumemwidget.ray_env``."""
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


class RaySource(InboxSource):
    """The recorded workers and actors of the Ray job that this process is connected to.

    Raises:
        BadInputError: ``ray.init`` was not called.
    """

    def __init__(self) -> None:
        if not ray.is_initialized():
            raise BadInputError("Ray is not connected: call ray.init() first")
        super().__init__()
        context = ray.get_runtime_context()
        self._job_id: str = context.get_job_id()
        self.name = f"Ray job {self._job_id}"
        self._is_closed = False
        #: The question that the collector has not yet answered.
        self._answer: Future[list[tuple[str, bytes]]] | None = None
        #: By their keys, the processes that are not known to have ended.
        self._running: dict[str, ProcessInfo] = {}
        name = f"{ray_worker.PREFIX}{secrets.token_hex(8)}"
        here = NodeAffinitySchedulingStrategy(context.get_node_id(), soft=True)
        self._collector: Any = (
            ray.remote(ray_worker.GpuMemCollector)
            .options(name=name, num_cpus=0, scheduling_strategy=here)
            .remote()
        )

    def read(self) -> Iterator[tuple[str, Message | None]]:
        """Yield the messages since the last call, each with the key of its process.

        Raises:
            BackendError: the collector is gone.
        """
        if not self._is_closed:
            self._fetch()
            for key, message in super().read():
                if type(message) is Began:
                    self._running[key] = message.process
                elif type(message) is Ended:
                    self._running.pop(key, None)
                yield key, message
            yield from self._find_ended()

    def _fetch(self) -> None:
        """Take what the collector has, if it answers soon."""
        if not self._is_connected:
            self._running.clear()
            raise BackendError(f"{self.name} is over: watch the new one after ray.init()")
        try:
            self._answer = self._answer or self._collector.take.remote().future()
            batches = self._answer.result(0.5)
        except FutureTimeoutError:
            return  # The collector begins, or is busy.
        except Exception as exc:  # noqa: BLE001 - raised as an error of ours
            if self._is_closed:
                return  # ``close`` has ended the collector while this waited for it.
            self._running.clear()
            what = describe_exception(exc)
            raise BackendError(
                f"the collector of {self.name} is gone ({what}): watch the job again"
            ) from None
        self._answer = None
        for key, lines in batches:
            self.put(key, lines)

    @property
    def _is_connected(self) -> bool:
        """True while the job goes on: a call after its end would make Ray begin another one."""
        return bool(ray.is_initialized() and ray.get_runtime_context().get_job_id() == self._job_id)

    def _find_ended(self) -> Iterator[tuple[str, Message]]:
        """Yield the ends that Ray knows of: a process that it ends can't send that itself."""
        for key in list(self._running):
            end = "" if self.is_heard(key, _QUIET_S) else _read_end(key)
            # A silent process counts as lost if Ray doesn't know.
            if end or (end is None and not self.is_heard(key)):
                del self._running[key]
            # One that was killed is lost.
            if end and not end.startswith("SYSTEM_ERROR"):
                yield key, Ended(0.0, "" if end.startswith("INTENDED") else end)

    def is_alive(self, key: str, info: ProcessInfo) -> bool:  # noqa: ARG002 - of all sources
        """Return whether a process was heard of lately, or else Ray knows it to run."""
        return key in self._running or self.is_heard(key, _QUIET_S)

    def close(self) -> None:
        """End the collector; the workers record no more. May be called twice."""
        is_closed, self._is_closed = self._is_closed, True
        if not is_closed and self._is_connected:
            ray.kill(self._collector)


def _read_end(key: str) -> str | None:
    """Return how a worker ended: ``INTENDED_USER_EXIT: …``, ``SYSTEM_ERROR: …`` if it was killed.

    ``""`` while it runs; ``None`` where this release of Ray does not say. ``ray.util.state`` has
    it too, but needs the dashboard's server, which plain Ray has not.
    """
    with contextlib.suppress(Exception):
        from ray.core.generated import common_pb2, gcs_pb2  # noqa: PLC0415 - not in each release

        gcs = ray._private.state.state._connect_and_get_accessor()  # noqa: SLF001 - read only
        record = gcs.get_worker_info(ray.WorkerID(bytes.fromhex(key.partition("-")[0])))
        data = gcs_pb2.WorkerTableData.FromString(record)
        exit_type = common_pb2.WorkerExitType.Name(data.exit_type)
        return "" if data.is_alive else f"{exit_type}: {data.exit_detail[:200]}"
    return None
