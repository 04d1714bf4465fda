"""The workers and actors of a real Ray cluster in one collector."""

from __future__ import annotations

import builtins
import doctest
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed: it has no wheel for each Python")

import ray
from ray.cluster_utils import Cluster

import gpumemwidget
from gpumemwidget.errors import BackendError, BadInputError
from gpumemwidget.model.processes import ProcessState
from gpumemwidget.remote.engines import ray_worker
from gpumemwidget.remote.engines.ray import RaySource
from gpumemwidget.remote.engines.ray_worker import GpuMemCollector
from tests.remote.programs import wait_for
from tests.remote.watching import Watching, find_peak

# Ray takes some ten seconds to begin.
pytestmark = pytest.mark.slow

MIB = 1024**2
_DEADLINE_S = 40.0
_HOOK = {"worker_process_setup_hook": "tests.remote.test_ray.simulate_gpu"}


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
    wait_for(until.exists)
    held = read_stat("current")
    _gpus.free(handle)
    return os.getpid(), held


def measure(name: str, n_bytes: int) -> int:
    """Fill and empty the GPU in a span; return the allocator's own peak since that began."""
    with gpumemwidget.span(name):
        _gpus.free(_gpus.allocate(n_bytes))
        return read_stat("peak")


class Trainer:
    """An actor."""

    def __init__(self) -> None:
        self.batch: bytearray | None = bytearray(MIB)

    def hold(self, n_bytes: int, until: Path) -> tuple[int, int]:
        return hold(n_bytes, until)

    def measure(self, n_bytes: int) -> int:
        return measure("of an actor", n_bytes)

    def read(self) -> tuple[int, bytearray | None, list[str]]:
        threads = [each.name for each in threading.enumerate() if "gpumemwidget" in each.name]
        return os.getpid(), self.batch, threads


class AsyncTrainer:
    """An actor that runs several methods at a time."""

    async def get_pid(self) -> int:
        return os.getpid()

    async def measure(self, n_bytes: int) -> int:
        return measure("of an async actor", n_bytes)


# -- In the driver ---------------------------------------------------------------------------------


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


def connect(cluster: Cluster, env: dict[str, Any]) -> None:
    ray.init(cluster.address, runtime_env=env, namespace="tests", log_to_driver=False)


def watch() -> Watching:
    return Watching(RaySource())


def wait_for_pids(watching: Watching, *pids: int) -> list[ProcessState]:
    """Return the states of some actors, in this order."""
    states = watching.wait(
        lambda states: {*pids} <= {state.info.pid for state in find_actors(states)}
    )
    found = {state.info.pid: state for state in find_actors(states)}
    return [found[pid] for pid in pids]


@pytest.fixture(scope="module")
def watching(cluster: Cluster) -> Iterator[Watching]:
    """A watched job, which several tests share: a new one takes seconds."""
    connect(cluster, gpumemwidget.ray_env(_HOOK))
    watching = watch()
    yield watching
    watching.close()


def find_actors(states: list[ProcessState]) -> list[ProcessState]:
    return [state for state in states if state.info.role == "actor"]


def read_allocated(states: list[ProcessState]) -> dict[int, int | None]:
    """Return the allocated bytes of each process by its pid, where a sample has it."""
    return {
        state.info.pid: reading.allocated_bytes
        for state in states
        for reading in state.readings
        if reading.device == "cuda:0"
    }


# -- Jobs of their own: before those that share one ------------------------------------------------


def test_notebooks_join_an_actor_that_outlives_them(cluster: Cluster) -> None:
    """One that closes leaves no collector and no sampler; the next one begins anew.

    The last one is in another job: the one before was killed.
    """
    connect(cluster, gpumemwidget.ray_env({"worker_process_setup_hook": simulate_gpu}))
    actor = ray.remote(Trainer).options(name="survivor", lifetime="detached").remote()
    pid, *_ = ray.get(actor.read.remote())
    first = watch()
    states = wait_for_pids(first, pid)
    first.close()
    first.close()
    wait_for(lambda: ray.get(actor.read.remote())[2] == ["gpumemwidget-ray"])
    names = ray.util.list_named_actors()
    second = watch()
    states += wait_for_pids(second, pid)
    ray.shutdown()
    connect(cluster, {})
    third = watch()
    actor = ray.get_actor("survivor")
    ray.get(actor.read.remote())
    states += wait_for_pids(third, pid)
    wait_for(lambda: [state.status for state in second.look()] == ["lost"])
    third.close()
    second.close()
    ray.kill(actor)
    ray.shutdown()

    assert names == ["survivor"]
    assert [state.info.label for state in states] == ["survivor"] * 3
    assert isinstance(second.failures[-1][1], BackendError)


def test_watching_needs_a_connection() -> None:
    """The message says what to call first."""
    with pytest.raises(BadInputError, match=r"call ray\.init\(\) first"):
        RaySource()


# -- Spans -----------------------------------------------------------------------------------------


def test_figures_of_workers_are_the_allocators(watching: Watching, tmp_path: Path) -> None:
    """Samples have what each worker reads itself, and the peak of a span in a task is exact."""
    sizes, end = {100 * MIB, 300 * MIB}, tmp_path / "end"
    refs = [ray.remote(hold).remote(n_bytes, end) for n_bytes in sizes]

    states = watching.wait(lambda states: sizes <= {*read_allocated(states).values()})
    end.touch()
    held = dict(ray.get(refs))
    peak = ray.get(ray.remote(measure).remote("of a task", 400 * MIB))
    span = watching.wait_for_spans("of a task")[-1]

    allocated = read_allocated(states)
    assert {pid: allocated[pid] for pid in held} == held
    labels = {state.info.pid: state.info.label for state in states}
    assert {labels[pid] for pid in held} == {f"worker {pid}" for pid in held}
    assert (*find_peak(span), span.shared_with) == ("exact", peak, 0)
    assert peak == 400 * MIB


def test_an_actor_with_several_methods_at_a_time(watching: Watching) -> None:
    """A span in a method is exact."""
    actor = ray.remote(AsyncTrainer).options(name="async").remote()
    wait_for_pids(watching, ray.get(actor.get_pid.remote()))

    peak = ray.get(actor.measure.remote(100 * MIB))
    span = watching.wait_for_spans("of an async actor")[-1]

    assert (*find_peak(span), span.shared_with) == ("exact", peak, 0)


# -- Listeners -------------------------------------------------------------------------------------


def test_a_second_watch_of_a_job_sees_all_of_it(watching: Watching) -> None:
    """Also what was recorded before it began; the first one goes on when it closes."""
    actor = ray.remote(Trainer).options(num_cpus=0).remote()
    pid, *_ = ray.get(actor.read.remote())
    (first,) = wait_for_pids(watching, pid)

    ray.get(actor.measure.remote(50 * MIB))
    watching.wait_for_spans("of an actor")[-1]
    other = watch()
    (second,) = wait_for_pids(other, pid)
    before = other.wait_for_spans("of an actor", 1)
    ray.get(actor.measure.remote(60 * MIB))
    both = other.wait_for_spans("of an actor", 2)
    other.close()
    ray.get(actor.measure.remote(70 * MIB))
    spans = watching.wait_for_spans("of an actor", 3)

    assert second.info == first.info
    assert (before, both) == (spans[:1], spans[:2])
    assert [find_peak(span) for span in spans] == [("exact", n * MIB) for n in (50, 60, 70)]
    assert [state.status for state in wait_for_pids(watching, pid)] == ["running"]


# -- Ends ------------------------------------------------------------------------------------------


def test_a_killed_process_is_lost_and_others_end(watching: Watching) -> None:
    """Rows stay; one that is stopped still runs, and an actor that Ray ends has ended."""
    killed, stopped, ended = (ray.remote(Trainer).options(num_cpus=0).remote() for _ in range(3))
    pids = [ray.get(actor.read.remote())[0] for actor in (killed, stopped, ended)]
    wait_for_pids(watching, *pids)

    os.kill(pids[0], signal.SIGKILL)
    os.kill(pids[1], signal.SIGSTOP)
    try:
        del ended

        def read_statuses(states: list[ProcessState]) -> list[str]:
            statuses = {state.info.pid: state.status for state in find_actors(states)}
            return [statuses[pid] for pid in pids]

        watching.wait(lambda states: read_statuses(states) == ["lost", "running", "ended"])
    finally:
        os.kill(pids[1], signal.SIGCONT)


# -- Without a cluster -----------------------------------------------------------------------------


@pytest.mark.usefixtures("watching")
def test_closing_while_it_is_read_is_no_error() -> None:
    """The reader waits for the collector that ``close`` ends."""
    source = RaySource()
    failures: list[BackendError] = []
    is_over = threading.Event()

    def read() -> None:
        while not is_over.is_set():
            try:
                list(source.read())
            except BackendError as error:
                failures.append(error)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    is_over.wait(2.0)
    source.close()
    is_over.wait(2.0)
    is_over.set()
    reader.join(_DEADLINE_S)

    assert failures == []


def test_a_collector_keeps_so_much_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it refuses stays with the worker, until the notebook has taken the rest."""
    monkeypatch.setattr(ray_worker, "_MAX_WAITING_BYTES", 5)
    collector = GpuMemCollector()

    is_taken = [collector.push("worker", b"1234"), collector.push("worker", b"1234")]
    first = collector.take()
    is_taken.append(collector.push("worker", b"5678"))

    assert is_taken == [True, False, True]
    assert [lines for _, lines in (*first, *collector.take())] == [b"1234", b"5678"]


def test_the_example_gives_what_it_shows() -> None:
    """The example of ``ray_env`` in the documents is true."""
    [example] = doctest.DocTestFinder(recurse=False).find(gpumemwidget.ray_env, module=False)
    example.globs = {"gpumemwidget": gpumemwidget}

    failed, attempted = doctest.DocTestRunner().run(example)
    # doctest leaves it, as the interactive prompt does.
    vars(builtins).pop("_", None)

    assert (failed, attempted > 0) == (0, True)
