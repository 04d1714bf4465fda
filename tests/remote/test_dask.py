"""The workers of real Dask clusters in one collector."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("distributed", reason="Dask's cluster is not installed")

from distributed import Client, Event, LocalCluster, Worker
from distributed.comm import Comm

from gpumemwidget.errors import BackendError, BadInputError, GpuMemError
from gpumemwidget.remote.engines import dask as adapter
from gpumemwidget.remote.engines.dask import DaskSource
from gpumemwidget.remote.reader.recordings import share_gpus
from gpumemwidget.report.processes import report_processes
from tests.remote.programs import wait_for
from tests.remote.watching import Watching, find_peak

MIB = 1024**2
_DEADLINE_S = 20.0


# -- In the workers --------------------------------------------------------------------------------

#: The simulated GPU of a worker, once it has one.
_gpus: Any = None


def simulate_gpu() -> None:
    global _gpus  # noqa: PLW0603 - one for the worker's life
    from gpumemwidget.testing import simulate_gpus

    _gpus = simulate_gpus(1)
    _gpus.touch()


def train(n_bytes: int) -> int:
    """Fill and empty the GPU; return the peak that its allocator has since the task began."""
    _gpus.free(_gpus.allocate(n_bytes))
    peak: int = _gpus.stats()["allocated_bytes"]["all"]["peak"]
    return peak


def fill_beside_others(n_bytes: int, mine: str, other: str) -> None:
    handle = _gpus.allocate(n_bytes)
    Event(mine).set()
    Event(other).wait(timeout=_DEADLINE_S)
    _gpus.free(handle)


def measure_inside() -> None:
    import gpumemwidget

    with gpumemwidget.span("inner"):
        pass


def increment(number: int) -> int:
    return number + 1


def fail() -> None:
    raise MemoryError


def hang(until: str) -> None:
    Event(until).wait()


def list_remains(dask_worker: Worker) -> list[str]:
    threads = [each.name for each in threading.enumerate() if "gpumemwidget" in each.name]
    # The driver is asked now and then, on a thread that ends with the answer.
    threads = sorted({*threads} - {"gpumemwidget-driver"})
    return [*threads, *(name for name in dask_worker.plugins if "gpumemwidget" in name)]


def hide_package(*, hides: bool) -> None:
    if hides:
        sys.modules["gpumemwidget.remote.engines.dask"] = None  # type: ignore[assignment]
    else:
        del sys.modules["gpumemwidget.remote.engines.dask"]
        importlib.import_module("gpumemwidget.remote.engines.dask")


# -- In the client ---------------------------------------------------------------------------------


@contextmanager
def start_cluster(**options: Any) -> Iterator[LocalCluster]:
    settings = {"processes": True, "n_workers": 2, "threads_per_worker": 1}
    with LocalCluster(**settings | options, dashboard_address="127.0.0.1:0") as cluster:
        with Client(cluster, set_as_default=False) as client:
            client.run(simulate_gpu)
        yield cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with start_cluster() as cluster:
        yield cluster


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Client]:
    with Client(cluster, set_as_default=False) as client:
        yield client


def list_plugins(cluster: LocalCluster) -> list[str]:
    names = [*cluster.scheduler.plugins, *cluster.scheduler.worker_plugins]
    return [name for name in names if "gpumemwidget" in name]


def is_back(cluster: LocalCluster, client: Client, lost_comm: Comm) -> bool:
    comms = cluster.scheduler.client_comms.get(client.id)
    return comms is not None and comms.comm is not lost_comm


@pytest.fixture
def watching(client: Client) -> Iterator[Watching]:
    watching = Watching(DaskSource(client))
    yield watching
    watching.close()


# -- Fast ------------------------------------------------------------------------------------------


def test_a_task_has_the_exact_peak_that_its_worker_reads_itself(
    client: Client, watching: Watching
) -> None:
    """Each worker is a row on this host, and a task's span is named without the key's hash."""
    states = watching.wait(lambda states: len(states) == 2 and all(s.devices for s in states))
    address = client.submit(train, 1, pure=False).result() and next(iter(client.nthreads()))

    read = client.submit(train, 300 * MIB, key="train-1f2e3d4c5b6a7988", workers=[address])
    peak = read.result()
    spans = watching.wait_for_spans("train", 2)

    assert sorted((state.info.role, state.info.number) for state in states) == [
        ("worker", 0),
        ("worker", 1),
    ]
    assert [state.status for state in states] == ["running", "running"]
    assert peak == 300 * MIB
    assert ("exact", peak) in [find_peak(span) for span in spans]
    assert {span.shared_with for span in spans} == {0}
    assert {span.status for span in spans} == {"ok"}


def test_a_span_within_a_task_does_not_share_with_it(client: Client, watching: Watching) -> None:
    """The task's own span counts as around it, though another thread has begun it."""
    client.submit(measure_inside, pure=False).result()

    (inner,) = watching.wait_for_spans("inner")
    (outer,) = watching.wait_for_spans("measure_inside")

    assert (inner.shared_with, outer.shared_with) == (0, 0)


def test_a_failed_task_leaves_its_card(client: Client, watching: Watching) -> None:
    """An error that says that memory ran out is described; the task fails as it would have."""
    with pytest.raises(MemoryError):
        client.submit(fail, pure=False).result()

    (span,) = watching.wait_for_spans("fail")
    states = watching.wait(lambda states: any(state.ooms for state in states))

    assert span.status == "error"
    assert [card.event.device for state in states for card in state.ooms] == ["host"]


@pytest.mark.slow
def test_two_clients_watch_side_by_side(cluster: LocalCluster, watching: Watching) -> None:
    """The second sees what was before it, and the first one's end does not end its view."""
    first = watching
    client = first.source._client
    client.submit(train, 100 * MIB, pure=False).result()
    first.wait_for_spans("train")

    with Client(cluster, set_as_default=False) as other:
        second = Watching(DaskSource(other))
        spans = second.wait_for_spans("train")
        seen = {state.info.id for state in first.wait(lambda states: len(states) == 2)}
        first.close()
        other.submit(increment, 1, pure=False).result()
        states = second.wait_for_spans("increment") and second.wait(lambda states: len(states) == 2)
        second.close()

        assert find_peak(spans[0]) == ("exact", 100 * MIB)
        assert spans[0].shared_with == 0
        assert {state.info.id for state in states} == seen
        assert {state.status for state in states} == {"running"}
        assert all(not remains for remains in other.run(list_remains).values())


def test_close_takes_everything_away(cluster: LocalCluster, client: Client) -> None:
    """No plugin and no thread of ours is left, and closing twice is closing."""
    watching = Watching(DaskSource(client))
    watching.wait(lambda states: len(states) == 2)

    watching.close()
    watching.close()

    assert list(client.run(list_remains).values()) == [[], []]
    assert list_plugins(cluster) == []


def test_a_watch_ends_with_its_client(
    monkeypatch: pytest.MonkeyPatch, cluster: LocalCluster
) -> None:
    """Its rows are lost, and what to do is said."""
    monkeypatch.setattr(adapter, "_CLIENT_GONE_S", 0.0)
    with Client(cluster, set_as_default=False) as client:
        watching = Watching(DaskSource(client))
        watching.wait(lambda states: len(states) == 2)

    with pytest.raises(BackendError, match="is closed: watch the cluster again"):
        list(watching.source.read())
    states = watching.look()
    watching.close()

    assert [state.status for state in states] == ["lost", "lost"]
    wait_for(lambda: not list_plugins(cluster))


def test_what_is_no_message_is_counted(client: Client, watching: Watching) -> None:
    """Anybody on the cluster may log to the topic: what can't be read changes nothing else."""
    (state, _) = watching.wait(lambda states: len(states) == 2)
    key, topic = watching.keys[state.info.id], watching.source._topic

    client.log_event(topic, {"action": "none of ours"})
    client.log_event(topic, [key, b"not a message\n{}\n"])
    client.log_event(topic, [key, 7])

    states = watching.wait(lambda states: any(each.n_unread == 3 for each in states))
    assert [each.n_unread for each in states if each.info.id != state.info.id] == [0]


def test_a_worker_without_the_package_is_left_alone(client: Client) -> None:
    """It runs as before and is not shown; the others are."""
    hidden, shown = client.nthreads()
    client.run(hide_package, hides=True, workers=[hidden])
    try:
        watching = Watching(DaskSource(client))
        watching.wait(lambda states: len(states) == 1)
        remains = client.run(list_remains)
        result = client.submit(increment, 1, workers=[hidden], pure=False).result()
        watching.close()
    finally:
        client.run(hide_package, hides=False, workers=[hidden])

    assert [key.partition(" ")[0] for key in watching.keys.values()] == [shown]
    assert result == 2
    assert not any("sending" in name for name in remains[hidden])
    assert list(client.run(list_remains).values()) == [[], []]


def test_watching_is_refused_where_no_worker_has_the_package(
    monkeypatch: pytest.MonkeyPatch, client: Client
) -> None:
    """Tasks run on, nothing of ours is left, and what is noticed late is reported late."""
    client.run(hide_package, hides=True)
    try:
        with pytest.raises(GpuMemError, match="must be installed where they run"):
            DaskSource(client)
        wait_for(lambda: not any(client.run(list_remains).values()))
        assert client.submit(increment, 1, pure=False).result() == 2

        with monkeypatch.context() as patch:
            patch.setattr(adapter, "_SETUP_S", 0.001)
            watching = Watching(DaskSource(client))
        wait_for(lambda: watching.look() or watching.failures)
        watching.close()
        assert "must be installed where they run" in str(watching.failures[0])
    finally:
        client.run(hide_package, hides=False)
    wait_for(lambda: not any(client.run(list_remains).values()))


def test_a_closed_client_is_refused(cluster: LocalCluster) -> None:
    """The message says what is wrong with it."""
    with Client(cluster, set_as_default=False) as client:
        pass

    with pytest.raises(BadInputError, match="the Dask client is closed"):
        DaskSource(client)


# -- Slow ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_tasks_side_by_side_share_their_peaks() -> None:
    """Where a worker has two threads, a task's span says how many others it shares with."""
    with start_cluster(n_workers=1, threads_per_worker=2) as cluster, Client(cluster) as client:
        watching = Watching(DaskSource(client))
        one = client.submit(fill_beside_others, 100 * MIB, "one", "two", pure=False)
        other = client.submit(fill_beside_others, 200 * MIB, "two", "one", pure=False)
        client.gather([one, other])
        client.submit(train, 50 * MIB).result()

        spans = watching.wait_for_spans("fill_beside_others", 2)
        (alone,) = watching.wait_for_spans("train")
        (state,) = watching.wait(lambda states: len(states) == 1)
        watching.close()

        assert {span.shared_with for span in spans} == {1}
        assert {find_peak(span)[1] for span in spans} == {300 * MIB}
        assert (alone.shared_with, find_peak(alone)) == (0, ("exact", 50 * MIB))
        report = " ".join(report_processes([state], share_gpus([state]), ()).html.split())
        assert "fill_beside_others, shared by 2 tasks" in report


@pytest.mark.slow
def test_a_killed_worker_keeps_its_row(client: Client, watching: Watching) -> None:
    """It is lost, with its last figures; the one that takes its place is a row of its own."""
    client.submit(train, 100 * MIB, pure=False).result()
    watching.wait_for_spans("train")
    states = watching.wait(lambda states: len(states) == 2)
    (victim,) = [state for state in states if state.spans]
    before = set(client.nthreads())

    os.kill(victim.info.pid, signal.SIGKILL)
    states = watching.wait(
        lambda states: sorted(s.status for s in states) == ["lost", "running", "running"]
    )

    client.run(simulate_gpu, workers=list(set(client.nthreads()) - before))
    (lost,) = [state for state in states if state.status == "lost"]
    assert lost.info == victim.info
    peaks = {peak.device: peak.allocated_bytes for peak in lost.peaks}
    assert peaks["cuda:0"] == 100 * MIB


@pytest.mark.slow
def test_a_hanging_task_holds_up_nobody(client: Client, watching: Watching) -> None:
    """It is shown as running, and other workers' tasks meanwhile."""
    states = watching.wait(lambda states: len(states) == 2)
    addresses = [watching.keys[state.info.id].split(" ")[0] for state in states]
    hanging = client.submit(hang, "never", workers=addresses[:1], pure=False)
    watching.wait(lambda states: next(s.running and s.running.name for s in states) == "hang")

    client.submit(increment, 1, workers=addresses[1:], pure=False).result()
    others = watching.wait_for_spans("increment")
    Event("never", client=client).set()
    hanging.result()

    assert others
    assert watching.wait_for_spans("hang")


@pytest.mark.slow
def test_a_lost_notebook_is_noticed_and_another_joins(
    monkeypatch: pytest.MonkeyPatch, cluster: LocalCluster
) -> None:
    """The workers of a client that is gone record no more; the next client begins anew."""
    monkeypatch.setattr(adapter, "_CLIENT_GONE_S", 0.1)
    with Client(cluster, set_as_default=False) as lost:
        watching = Watching(DaskSource(lost))
        watching.wait(lambda states: len(states) == 2)

    with Client(cluster, set_as_default=False) as client:
        wait_for(lambda: not any(client.run(list_remains).values()))
        assert list_plugins(cluster) == []
        again = Watching(DaskSource(client))
        client.submit(train, MIB, pure=False).result()
        (span,) = again.wait_for_spans("train")
        again.close()
    watching.close()

    assert find_peak(span) == ("exact", MIB)


@pytest.mark.slow
def test_a_lost_connection_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, cluster: LocalCluster, client: Client
) -> None:
    """A client that is back within a minute goes on watching."""
    monkeypatch.setattr(adapter, "_CLIENT_GONE_S", 3.0)
    watching = Watching(DaskSource(client))
    watching.wait(lambda states: len(states) == 2)
    is_over, loop = threading.Event(), cluster.loop

    connection = cluster.scheduler.client_comms[client.id].comm
    loop.add_callback(connection.abort)
    wait_for(lambda: is_back(cluster, client, connection))
    loop.add_callback(loop.call_later, 3.0, is_over.set)
    is_over.wait(_DEADLINE_S)
    client.submit(increment, 1, pure=False).result()

    assert watching.wait_for_spans("increment")
    watching.close()
