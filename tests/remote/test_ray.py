"""The workers and actors of a real Ray cluster in one collector."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed: it has no wheel for each Python")

import ray
from ray.cluster_utils import Cluster

from gpumemwidget.errors import BackendError, BadInputError
from gpumemwidget.model.processes import ProcessState, SpanRecord
from gpumemwidget.model.releases import ReleasePlan, ReleaseReport, ReleaseRequest
from gpumemwidget.remote.engines import ray as adapter
from gpumemwidget.remote.engines import ray_worker
from gpumemwidget.remote.engines.ray import RaySource, measured, ray_env, watch_ray
from gpumemwidget.remote.engines.ray_worker import GpuMemCollector
from gpumemwidget.remote.gathering.collector import Collector

# Ray takes some ten seconds to begin.
pytestmark = pytest.mark.slow

MIB = 1024**2
_DEADLINE_S = 40.0


# -- In the workers --------------------------------------------------------------------------------

#: The simulated GPU of a worker, once it has one.
_gpus: Any = None


def simulate_gpu() -> None:
    global _gpus  # noqa: PLW0603 - one for the worker's life
    from gpumemwidget.testing import simulate_gpus

    _gpus = simulate_gpus(1)
    _gpus.touch()


def read_stat(which: str) -> int:
    n_bytes: int = _gpus.stats()["allocated_bytes"]["all"][which]
    return n_bytes


def hold(n_bytes: int, until: Path) -> tuple[int, int]:
    """Hold memory until a file is there; return the pid, and what the allocator has meanwhile."""
    handle = _gpus.allocate(n_bytes)
    wait_until(until.exists)
    held = read_stat("current")
    _gpus.free(handle)
    return os.getpid(), held


@measured
def train(n_bytes: int) -> int:
    """Fill and empty the GPU; return the allocator's own peak since the task began."""
    _gpus.free(_gpus.allocate(n_bytes))
    return read_stat("peak")


@measured
def fail() -> None:
    raise MemoryError


@measured
async def train_async(n_bytes: int) -> int:
    _gpus.free(_gpus.allocate(n_bytes))
    return read_stat("peak")


class Trainer:
    """An actor."""

    def __init__(self) -> None:
        self.batch: bytearray | None = bytearray(MIB)

    def hold(self, n_bytes: int, until: Path) -> tuple[int, int]:
        return hold(n_bytes, until)

    def read(self) -> tuple[int, bytearray | None, list[str]]:
        threads = [each.name for each in threading.enumerate() if "gpumemwidget" in each.name]
        return os.getpid(), self.batch, threads


class AsyncTrainer(Trainer):
    """An actor that runs several methods at a time."""

    async def train(self, n_bytes: int) -> int:
        return await train_async(n_bytes)


# -- In the driver ---------------------------------------------------------------------------------


def wait_until(is_so: Callable[[], object]) -> None:
    end_s = time.monotonic() + _DEADLINE_S
    while not is_so():
        assert time.monotonic() < end_s, "it does not become so"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A cluster that outlives its drivers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False}
        )
        yield cluster
        ray.shutdown()
        cluster.shutdown()


@contextlib.contextmanager
def connect(cluster: Cluster, env: dict[str, Any] | None = None) -> Iterator[None]:
    hook = {"worker_process_setup_hook": "tests.remote.test_ray.simulate_gpu"}
    ray.init(
        cluster.address,
        runtime_env=ray_env(hook) if env is None else env,
        namespace="tests",
        log_to_driver=False,
    )
    try:
        yield
    finally:
        ray.shutdown()


@pytest.fixture
def job(cluster: Cluster) -> Iterator[None]:
    with connect(cluster):
        yield


class Watching:
    """A job that is watched, and what is known of its processes."""

    def __init__(self, *actors: Any) -> None:
        self.source: RaySource = watch_ray(actors)
        self.failures: list[tuple[str, Exception]] = []
        self.keys: dict[str, str] = {}
        self._collector = Collector(lambda what, exc: self.failures.append((what, exc)))
        self._collector.add(self)  # type: ignore[arg-type]  # it stands before its source

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def read(self) -> Any:
        for key, message in self.source.read():
            if hasattr(message, "process"):
                self.keys[message.process.id] = key
            yield key, message

    def look(self) -> list[ProcessState]:
        self._collector.read()
        return list(self._collector.processes)

    def wait(self, is_so: Callable[[list[ProcessState]], object]) -> list[ProcessState]:
        """Return the states as soon as something is so of them."""
        states: list[ProcessState] = []

        def look() -> object:
            states[:] = self.look()
            return is_so(states)

        wait_until(look)
        assert not self.failures
        return states

    def wait_for_span(self, name: str) -> SpanRecord:
        found: list[SpanRecord] = []

        def look() -> object:
            found[:] = [s for state in self.look() for s in state.spans if s.name == name]
            return found

        wait_until(look)
        return found[0]

    def close(self) -> None:
        self._collector.close()
        self.source.close()


@pytest.fixture
def watching(job: None) -> Iterator[Watching]:
    watching = Watching()
    yield watching
    watching.close()


def find_running(states: list[ProcessState], name: str) -> list[ProcessState]:
    return [state for state in states if state.running and state.running.name == name]


def read_allocated(state: ProcessState) -> int | None:
    (gpu,) = [reading for reading in state.readings if reading.device == "cuda:0"]
    return gpu.allocated_bytes


def find_peak(span: SpanRecord) -> tuple[str | None, int | None]:
    (gpu,) = [device for device in span.devices if device.device == "cuda:0"]
    return gpu.peak_is, gpu.allocated.peak_bytes


# -- Tasks -----------------------------------------------------------------------------------------


def test_two_workers_tell_what_they_read_themselves(watching: Watching, tmp_path: Path) -> None:
    """While a task runs, the worker's figures are the allocator's; its span says it is sampled."""
    sizes, end = {100 * MIB, 300 * MIB}, tmp_path / "end"
    refs = [ray.remote(hold).remote(n_bytes, end) for n_bytes in sizes]

    states = watching.wait(
        lambda states: {read_allocated(s) for s in find_running(states, "hold")} == sizes
    )
    end.touch()
    told = dict(ray.get(refs))
    spans = watching.wait(lambda states: [len(state.spans) for state in states] == [1, 1])

    assert {state.info.pid: read_allocated(state) for state in states} == told
    assert {state.info.label for state in states} == {f"worker {pid}" for pid in told}
    assert all(abs(state.clock_offset_s or 1.0) < 0.5 for state in spans)
    peaks = {find_peak(span) for state in spans for span in state.spans}
    assert {kind for kind, _ in peaks} == {"sampled"}


def test_a_measured_task_is_exact(watching: Watching) -> None:
    """Its peak is the allocator's own; an error of memory leaves its card, and is raised on."""
    peak = ray.get(ray.remote(train).remote(300 * MIB))
    with pytest.raises(MemoryError):
        ray.get(ray.remote(fail).remote())

    span, failed = watching.wait_for_span("train"), watching.wait_for_span("fail")
    states = watching.wait(lambda states: any(state.ooms for state in states))

    assert find_peak(span) == ("exact", peak) == ("exact", 300 * MIB)
    assert (span.status, span.shared_with, failed.status) == ("ok", 0, "error")
    assert [card.event.device for state in states for card in state.ooms] == ["host"]
    assert train.__name__ == "train"


def test_a_worker_without_the_hook_is_joined_by_what_it_runs(cluster: Cluster) -> None:
    """Of a job that began without ray_env, measured functions and named handles are recorded."""
    with connect(cluster, {"worker_process_setup_hook": simulate_gpu}):
        actor = ray.remote(Trainer).remote()
        pid, *_ = ray.get(actor.read.remote())
        watching = Watching(actor)
        peak = ray.get(ray.remote(train).remote(200 * MIB))

        span = watching.wait_for_span("train")
        ray.get(actor.read.remote())
        states = watching.wait(lambda states: len(states) == 2)
        watching.close()

        assert find_peak(span) == ("exact", peak)
        assert {state.info.label for state in states if state.info.role == "actor"} == {
            f"Trainer {pid}"
        }


# -- Actors ----------------------------------------------------------------------------------------


def test_methods_are_spans_and_attributes_are_released(
    watching: Watching, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A release is made between two methods, or not at all; an actor without a name refuses."""
    end, request = tmp_path / "end", ReleaseRequest(("batch",))
    named = ray.remote(Trainer).options(name="trainer").remote()
    unnamed = ray.remote(Trainer).remote()
    busy = named.hold.remote(50 * MIB, end)
    ray.get(unnamed.read.remote())
    states = watching.wait(lambda states: len(states) == 2 and find_running(states, "Trainer.hold"))
    keys = {state.info.label: watching.keys[state.info.id] for state in states}
    key, other = keys.pop("trainer"), *keys.values()
    monkeypatch.setattr(adapter, "_BEGIN_RELEASE_S", 0.5)

    late = watching.source.release([key, other], request, dry_run=False)
    end.touch()
    ray.get(busy)
    monkeypatch.setattr(adapter, "_BEGIN_RELEASE_S", _DEADLINE_S)
    plan = watching.source.release([key], request, dry_run=True)[key]
    _, kept, _ = ray.get(named.read.remote())
    report = watching.source.release([key], request, dry_run=False)[key]
    _, released, _ = ray.get(named.read.remote())

    assert "in a method: nothing was changed" in str(late[key])
    assert "has no name by which Ray finds it" in str(late[other])
    assert isinstance(plan, ReleasePlan)
    assert plan.request == request
    assert kept == bytearray(MIB)
    assert isinstance(report, ReleaseReport)
    assert released is None
    assert {state.info.role for state in states} == {"actor"}
    assert watching.wait_for_span("Trainer.hold").status == "ok"


def test_an_actor_with_several_methods_at_a_time(watching: Watching) -> None:
    """Its measured methods are exact, and nothing is released there."""
    actor = ray.remote(AsyncTrainer).options(name="async").remote()
    peak = ray.get(actor.train.remote(100 * MIB))
    span = watching.wait_for_span("train_async")
    (state,) = watching.look()
    key = watching.keys[state.info.id]

    outcomes = watching.source.release([key], ReleaseRequest(("batch",)), dry_run=False)

    assert find_peak(span) == ("exact", peak)
    assert "several methods at a time" in str(outcomes[key])


# -- Ends ------------------------------------------------------------------------------------------


def test_a_killed_process_is_lost_and_others_end(watching: Watching) -> None:
    """Rows stay; one that is stopped still runs, and an actor that Ray ends has ended."""
    killed, stopped, ended = (ray.remote(Trainer).options(num_cpus=0).remote() for _ in range(3))
    pids = [ray.get(actor.read.remote())[0] for actor in (killed, stopped, ended)]
    watching.wait(lambda states: {state.info.pid for state in states} == set(pids))

    os.kill(pids[0], signal.SIGKILL)
    os.kill(pids[1], signal.SIGSTOP)
    try:
        del ended
        states = watching.wait(
            lambda states: sorted(s.status for s in states) == ["ended", "lost", "running"]
        )
    finally:
        os.kill(pids[1], signal.SIGCONT)

    statuses = {state.info.pid: state.status for state in states}
    assert [statuses[pid] for pid in pids] == ["lost", "running", "ended"]


def test_a_restarted_notebook_joins_an_actor_that_outlives_it(cluster: Cluster) -> None:
    """The next notebook in the namespace watches it, though the first one never said goodbye."""
    with connect(cluster):
        first = Watching()
        actor = ray.remote(Trainer).options(name="survivor", lifetime="detached").remote()
        pid, *_ = ray.get(actor.read.remote())
        first.wait(lambda states: len(states) == 1)
    with connect(cluster):
        second = Watching()
        actor = ray.get_actor("survivor")
        ray.get(actor.read.remote())
        states = second.wait(lambda states: len(states) == 1)
        second.close()
        ray.kill(actor)

    assert [(state.info.pid, state.info.label) for state in states] == [(pid, "survivor")]
    first.look()
    assert isinstance(first.failures[-1][1], BackendError)
    first.close()


def test_close_ends_the_recording(watching: Watching) -> None:
    """No collector and no sampler is left, tasks run on, and a later watch begins anew."""
    actor = ray.remote(Trainer).remote()
    ray.get(actor.read.remote())
    watching.wait(lambda states: len(states) == 1)

    watching.close()
    watching.close()
    wait_until(lambda: ray.get(actor.read.remote())[2] == ["gpumemwidget-ray"])
    names = ray.util.list_named_actors()
    again = Watching()
    states = again.wait(lambda states: len(states) == 1)
    again.close()

    assert not [name for name in names if name.startswith("gpumemwidget")]
    assert [state.info.role for state in states] == ["actor"]


def test_a_collector_keeps_so_much_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it refuses stays with the worker, until the notebook has taken the rest."""
    monkeypatch.setattr(ray_worker, "_MAX_WAITING_BYTES", 5)
    collector = GpuMemCollector()

    taken = [collector.push("worker", b"1234", None)[0] for _ in range(2)]
    batches, _ = collector.take()
    taken.append(collector.push("worker", b"5678", 0.5)[0])

    assert taken == [True, False, True]
    assert [*batches, *collector.take()[0]] == [("worker", b"1234", None), ("worker", b"5678", 0.5)]


def test_watching_needs_a_connection() -> None:
    """The message says what to call first."""
    ray.shutdown()

    with pytest.raises(BadInputError, match=r"call ray\.init\(\) first"):
        watch_ray()
