"""The engines of real ipyparallel clusters in one collector."""

from __future__ import annotations

import builtins
import doctest
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]  # no types are published with it
import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

import gpumemwidget
from gpumemwidget.errors import BadInputError
from gpumemwidget.model.processes import ProcessState, SpanRecord
from gpumemwidget.remote.engines.ipyparallel import IpyparallelSource
from gpumemwidget.remote.reader import collector, recordings
from tests.remote.watching import Watching
from tests.shell import open_shell

ipyparallel = pytest.importorskip("ipyparallel", reason="ipyparallel is not installed")


MIB = 1024**2
#: The kernel's own figures trail by a batch of pages for each CPU.
SLACK_BYTES = 2 * MIB
_DEADLINE_S = 30.0

#: What each engine has before it is watched.
_SETUP = """
from gpumemwidget.testing import simulate_gpus
gpus = simulate_gpus(1)
gpus.touch()

def read_peak():
    return gpus.stats()["allocated_bytes"]["all"]["peak"]
"""


# -- On the engines --------------------------------------------------------------------------------


def on_engine(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function run in an engine's namespace, where this module can't be imported."""
    function.__module__ = "__main__"
    return function


@on_engine
def train(n_bytes: int) -> int:
    """Fill and empty the GPU; return the allocator's own peak since the task began."""
    gpus.free(gpus.allocate(n_bytes))  # type: ignore[name-defined]  # noqa: F821 - an engine's
    return read_peak()  # type: ignore[name-defined,no-any-return]  # noqa: F821


@on_engine
def train_one(n_bytes: int) -> int:
    """Do as ``train``, as one item of a ``map``."""
    gpus.free(gpus.allocate(n_bytes))  # type: ignore[name-defined]  # noqa: F821
    return n_bytes


@on_engine
def fill_host(n_bytes: int) -> int:
    """Return the highest resident size in bytes, as the kernel has it, with a block in place."""
    from pathlib import Path

    block = bytearray(n_bytes)
    mark = Path("/proc/self/status").read_text().partition("VmHWM:")[2]
    del block
    return int(mark.split()[0]) * 1024


@on_engine
def run_out() -> None:
    bytearray(2**62)


@on_engine
def await_file(path: str) -> None:
    import os
    import time

    while not os.path.exists(path):  # noqa: PTH110 - without an import more
        time.sleep(0.01)


@on_engine
def read_ledger() -> dict[str, Any]:
    """Return what the extension on an engine has recorded, but for magics, by the cell's name."""
    from gpumemwidget.recording.running_cell import name_cell
    from gpumemwidget.session.session import current_session

    ledger = current_session().monitor.ledger
    return {
        name_cell(record.first_line, record.execution_count): record.devices
        for record in ledger.records
        if not record.first_line.startswith("%")
    }


@on_engine
def list_remains() -> list[str]:
    """Return what of ours is in an engine."""
    import threading

    from ipyparallel.engine import kernel
    from IPython import get_ipython

    # The driver is asked now and then, on a thread that ends with the answer.
    threads = sorted({thread.name for thread in threading.enumerate()} - {"gpumemwidget-driver"})
    hooks = [*vars(get_ipython().kernel).values(), kernel.unpack_apply_message]
    return [name for name in threads if name.startswith("gpumem")] + [
        hook.__name__ for hook in hooks if "gpumem" in str(getattr(hook, "__module__", ""))
    ]


# -- Here ------------------------------------------------------------------------------------------


@contextmanager
def start_cluster(folder: Path, n_engines: int) -> Iterator[Any]:
    cluster = ipyparallel.Cluster(
        n=n_engines,
        profile_dir=str(folder),
        cluster_id="",
        delay=0,
        log_level=logging.ERROR,
        # An engine is registered at the second heartbeat, of which there is one in 3 s else.
        controller_args=["--HeartMonitor.period=500"],
    )
    try:
        client = cluster.start_and_connect_sync(n=n_engines, activate=False)
        client[:].execute(_SETUP).get(timeout=_DEADLINE_S)
        client.close()
        yield cluster
    finally:
        cluster.stop_cluster_sync()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Two engines, each with a simulated GPU."""
    with start_cluster(tmp_path_factory.mktemp("cluster"), 2) as running:
        yield running


@pytest.fixture
def client(cluster: Any) -> Iterator[Any]:
    client = cluster.connect_client_sync()
    client.wait_for_engines(2, timeout=_DEADLINE_S)
    yield client
    client.close()


def find_device(span: SpanRecord, device: str = "cuda:0") -> Any:
    return next(each for each in span.devices if each.device == device)


def are_running(n_engines: int) -> Callable[[list[ProcessState]], bool]:
    return lambda processes: (
        [process.info.number for process in processes if process.status == "running"]
        == list(range(n_engines))
    )


def watch_engines(client: Any) -> Watching:
    return Watching(IpyparallelSource(client))


@contextmanager
def watch(client: Any, *, n_engines: int = 2) -> Iterator[Watching]:
    watched = watch_engines(client)
    try:
        watched.wait(are_running(n_engines))
        yield watched
    finally:
        watched.close()


def test_tasks_have_the_figures_that_the_engine_reads(client: Any) -> None:
    """A function, a ``%%px`` cell and a silent one are spans with the allocator's own peaks."""
    engine = client[1]
    with watch(client) as watched:
        peak = engine.apply_sync(train, 300 * MIB)
        cell = "gpus.free(gpus.allocate(200 * 2**20)); peak = read_peak()"
        reply = engine.execute(cell, silent=False).get()
        seen = engine["peak"]
        engine.execute("block = gpus.allocate(100 * 2**20)").get(timeout=_DEADLINE_S)
        mark = engine.apply_sync(fill_host, 150 * MIB)
        engine.map_sync(train_one, [10 * MIB, 20 * MIB])
        engine.execute("gpus.free(block); del block").get(timeout=_DEADLINE_S)

        trained = find_device(watched.wait_for_spans("train", on=1)[-1])
        ran = watched.wait_for_spans(f"In [{reply.execution_count}] {cell}", on=1)[-1]
        filled = find_device(watched.wait_for_spans("fill_host", on=1)[-1], "host")
        silent = find_device(watched.wait_for_spans("block = gpus.allocate(100 * 2**20)", on=1)[-1])
        mapped = find_device(watched.wait_for_spans("train_one", on=1)[-1])

    assert (
        (trained.allocated.peak_bytes, trained.peak_is) == (peak, "exact") == (300 * MIB, "exact")
    )
    assert find_device(ran).allocated.peak_bytes == seen == 200 * MIB
    assert silent.allocated.after_bytes == 100 * MIB
    assert abs(filled.reserved.peak_bytes - mark) < SLACK_BYTES
    assert mapped.allocated.peak_bytes == 120 * MIB


def test_the_first_task_is_recorded_on_all_engines(client: Any) -> None:
    """Watching waits for the engines that are free, so what is run next has its spans."""
    watched = watch_engines(client)
    try:
        first = watched.look()
        client[:].map_sync(train_one, [10 * MIB, 20 * MIB])

        peaks = [
            find_device(watched.wait_for_spans("train_one", on=number)[-1]) for number in range(2)
        ]
    finally:
        watched.close()

    assert [process.info.number for process in first] == [0, 1]
    assert [peak.allocated.peak_bytes for peak in peaks] == [10 * MIB, 20 * MIB]


def test_a_function_has_the_name_that_a_person_gave_it(client: Any) -> None:
    """So have what ``map`` calls, and ipyparallel's own functions."""
    engine = client[0]
    with watch(client) as watched:
        engine.apply_sync(pow, 2, 3)
        engine.map_sync(abs, [3])
        engine.apply_sync(Fraction(1, 2).limit_denominator)
        engine.push({"y": 1}, block=True)
        engine.pull("y", block=True)
        watched.wait_for_spans("pull", on=0)
        names = [span.name for span in watched.look()[0].spans]

    assert names == ["pow", "abs", "Fraction.limit_denominator", "push", "pull"]


def test_an_oom_of_a_task_is_shown_with_its_card(client: Any) -> None:
    """The error of a function is its engine's, and an OOM among them has its card here."""
    with watch(client) as watched:
        with pytest.raises(ipyparallel.error.RemoteError):
            client[0].apply_sync(run_out)

        span = watched.wait_for_spans("run_out", on=0)[-1]
        (process, _) = watched.wait(lambda processes: processes[0].ooms)

    assert span.status == "error"
    assert process.ooms[0].event.state.info.device == "host"


@pytest.mark.slow
def test_an_engine_with_the_extension(client: Any) -> None:
    """It is recorded beside it, each with exact peaks, and on when that is unloaded."""
    view = client[:]
    view.execute("%load_ext gpumemwidget", silent=False).get()
    with watch(client) as watched:
        first = watched.wait(are_running(2))
        view.apply_sync(train, 300 * MIB)
        cell = "gpus.free(gpus.allocate(200 * 2**20))"
        reply = view.execute(cell, silent=False).get()[0]
        (ledger, _) = view.apply_sync(read_ledger)
        name = f"In [{reply.execution_count}] {cell}"
        ran, trained = (
            watched.wait_for_spans(name, on=0)[-1],
            watched.wait_for_spans("train", on=0)[-1],
        )

        view.execute("%unload_ext gpumemwidget", silent=False).get()
        view.apply_sync(train_one, 50 * MIB)
        span = watched.wait_for_spans("train_one", on=0)[-1]
        processes = watched.wait(are_running(2))

    own = next(device for device in ledger[name] if device.device == "cuda:0")
    assert own.allocated.peak_bytes == find_device(ran).allocated.peak_bytes == 200 * MIB
    assert find_device(trained).allocated.peak_bytes == 300 * MIB
    assert find_device(span).allocated.peak_bytes == 50 * MIB
    assert {process.info.id for process in first} == {process.info.id for process in processes}


@pytest.mark.slow
def test_an_engine_that_hangs_holds_up_no_other(client: Any, tmp_path: Path) -> None:
    """Others go on, and are heard."""
    with watch(client) as watched:
        hanging = client[0].apply_async(await_file, str(tmp_path / "go"))
        processes = watched.wait(lambda processes: processes[0].running is not None)
        client[1].apply_sync(train, 100 * MIB)
        span = watched.wait_for_spans("train", on=1)[-1]
        (tmp_path / "go").touch()
        hanging.get(timeout=_DEADLINE_S)

    assert processes[0].running is not None
    assert processes[0].running.name == "await_file"
    assert find_device(span).allocated.peak_bytes == 100 * MIB


@pytest.mark.slow
def test_a_late_engine_is_joined_and_a_killed_one_keeps_its_row(cluster: Any, client: Any) -> None:
    """One that comes later is shown, and one that was killed is lost with its last figures."""
    with watch(client) as watched:
        cluster.start_engines_sync(n=1)
        processes = watched.wait(are_running(3))
        client[2].execute("block = bytearray(50 * 2**20)", silent=False).get()
        watched.wait_for_spans("In [1] block = bytearray(50 * 2**20)", on=2)
        os.kill(processes[2].info.pid, signal.SIGKILL)

        *others, killed = watched.wait(
            lambda processes: [process.status for process in processes][2] == "lost"
        )

    assert [process.status for process in others] == ["running", "running"]
    assert [span.name for span in killed.spans] == ["In [1] block = bytearray(50 * 2**20)"]
    assert killed.readings


def test_a_purged_client_goes_on_watching(client: Any) -> None:
    """What the client forgets of its tasks does not end the watch."""
    with watch(client) as watched:
        client.wait(timeout=_DEADLINE_S)
        client.purge_everything()
        watched.look()
        client[0].apply_sync(train, 100 * MIB)

        span = watched.wait_for_spans("train", on=0)[-1]

    assert find_device(span).allocated.peak_bytes == 100 * MIB


@pytest.mark.slow
def test_engines_whose_controller_was_killed_are_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client does not notice; nothing comes any more."""
    monkeypatch.setattr(collector, "SILENT_S", 2.0)
    with start_cluster(tmp_path, 1) as cluster:
        client = cluster.connect_client_sync()
        client.wait_for_engines(1, timeout=_DEADLINE_S)
        with watch(client, n_engines=1) as watched:
            watched.wait(lambda processes: processes[0].readings)
            controller = psutil.Process(cluster.controller.pid)
            for process in (controller, *controller.children(recursive=True)):
                process.kill()

            (lost,) = watched.wait(lambda processes: processes[0].status == "lost")
        client.close()

    assert lost.readings


def test_a_restarted_notebook_joins_again_and_leaves_nothing(cluster: Any, client: Any) -> None:
    """It replaces itself, gets what it missed, and leaves nothing at its end."""
    killed = cluster.connect_client_sync()
    earlier = watch_engines(killed).wait(are_running(2))
    killed.close()
    client[:].apply_sync(train, 100 * MIB)

    with watch(client) as watched:
        span = watched.wait_for_spans("train", on=0)[-1]
        processes = watched.wait(are_running(2))
        during = client[0].apply_sync(list_remains)

    assert [each.info.id for each in processes] == [each.info.id for each in earlier]
    assert find_device(span).allocated.peak_bytes == 100 * MIB
    assert during == [
        "gpumemwidget-sampler",
        "gpumemwidget-sending",
        "do_execute",
        "finish_metadata",
        "unpack_apply_message",
    ]
    assert client[:].apply_sync(list_remains) == [[], []]


@pytest.mark.slow
def test_several_notebooks_watch_and_the_first_of_five_no_longer(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four listen to the same engines, a fifth takes the first one's place, and others may go."""
    with ExitStack() as stack:
        notebooks = []
        for number in range(5):
            monkeypatch.setenv("JPY_SESSION_NAME", f"{number}.ipynb")
            notebooks.append(stack.enter_context(watch(client)))
        first, second, *_, last = notebooks
        client[:].apply_sync(train, 100 * MIB)
        both = [watched.wait_for_spans("train", on=0)[-1] for watched in (second, last)]
        last.close()
        client[:].apply_sync(train_one, 100 * MIB)
        later = second.wait_for_spans("train_one", on=0)[-1]
        seen = {span.name for state in first.look() for span in state.spans}

    assert both[0] == both[1]
    assert find_device(later).allocated.peak_bytes == 100 * MIB
    assert "train" not in seen
    assert client[:].apply_sync(list_remains) == [[], []]


# -- The magics and functions of a notebook --------------------------------------------------------


@pytest.fixture
def shell(tmp_path: Path, client: Any) -> Iterator[InteractiveShell]:
    """A notebook that watches two engines."""
    client[:].execute("import torch", block=True)
    with open_shell(tmp_path / "ipython") as shell:
        _run(shell, "%load_ext gpumemwidget")
        watch = gpumemwidget.watch_cluster(client)
        _wait_for_engines(shell)
        yield shell
        watch.close()
        _run(shell, "%unload_ext gpumemwidget")


def _run(shell: InteractiveShell, cell: str) -> str:
    with capture_output() as captured:
        shell.run_cell(cell, store_history=True).raise_error()
    shown = [output.data["text/plain"] for output in captured.outputs]
    return "\n".join([captured.stdout, *shown])


def _wait_for_engines(shell: InteractiveShell) -> None:
    deadline_s = time.monotonic() + _DEADLINE_S
    while "engine 1" not in _run(shell, "%memstat --all"):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_all_processes_are_in_the_reports(
    shell: InteractiveShell, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``--all`` adds the engines to the devices, and all that they have run to the cells."""
    monkeypatch.setattr(recordings, "_ENGINES_S", _DEADLINE_S)
    client[:].execute("z = torch.ones(100)", block=True)
    ledger = _run(shell, "%memledger --all")

    stat = _run(shell, "%memstat --all")

    assert ledger.count("z = torch.ones(100)") == 2
    assert "2 processes" in stat
    assert "engine 0" in stat
    assert "engine 0" in ledger
    assert "engine 1" in ledger


def test_each_engine_releases_names_by_its_own_magic(client: Any) -> None:
    """As ``%px %memrelease x`` asks it to, also while it is watched."""
    view = client[:]
    with watch(client):
        view.execute("import torch; x = torch.ones(1 << 20)", block=True)
        view.execute("%load_ext gpumemwidget", block=True)
        asked = view.execute("%memrelease x", silent=False)
        asked.get(timeout=_DEADLINE_S)
        view.execute("%unload_ext gpumemwidget", block=True)
    reports = [shown["data"]["text/plain"] for outputs in asked.outputs for shown in outputs]

    assert len(reports) == 2
    assert all("Release x · done" in report for report in reports)
    assert all("host: planned 4.00 MiB" in report for report in reports)
    assert view.pull("x", block=True) == [None, None]


def test_the_example_gives_what_it_shows(shell: InteractiveShell, client: Any) -> None:
    """The one of ``watch_cluster`` in the documents is true beside two engines."""
    function = gpumemwidget.watch_cluster
    [example] = doctest.DocTestFinder(recurse=False).find(function, "watch_cluster", module=False)
    example.globs = {**shell.user_ns, "gpumemwidget": gpumemwidget, "client": client}

    failed, attempted = doctest.DocTestRunner().run(example)
    # doctest leaves it, as the interactive prompt does.
    vars(builtins).pop("_", None)

    assert (failed, attempted > 0) == (0, True)


@pytest.mark.usefixtures("shell")
def test_what_is_no_client_is_refused() -> None:
    """The message says what can be given."""
    with pytest.raises(BadInputError, match="can't be of type int: give an ipyparallel"):
        gpumemwidget.watch_cluster(3)


def test_without_other_processes_the_next_step_is_named(tmp_path: Path) -> None:
    """``%memstat --all`` names the calls that begin to watch."""
    with open_shell(tmp_path / "ipython") as shell:
        _run(shell, "%load_ext gpumemwidget")
        shown = _run(shell, "%memstat --all")
        assert shown.count("No other process is watched: gpumemwidget.watch(FOLDER)") == 1
        _run(shell, "%unload_ext gpumemwidget")
