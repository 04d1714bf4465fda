"""The magics and functions that ask the processes of real engines."""

from __future__ import annotations

import builtins
import doctest
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

import gpumemwidget
from gpumemwidget.errors import BadInputError, UnknownNameError
from gpumemwidget.model.releases import ReleaseReport
from gpumemwidget.remote.reader import watching
from tests.remote.programs import SLACK_BYTES
from tests.remote.test_ipyparallel import start_cluster
from tests.shell import open_shell

pytest.importorskip("ipyparallel", reason="ipyparallel is not installed")

_DEADLINE_S = 30.0


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A client of two engines, each with a tensor ``x``."""
    with start_cluster(tmp_path_factory.mktemp("cluster"), 2) as running:
        client = running.connect_client_sync()
        client.wait_for_engines(2, timeout=_DEADLINE_S)
        yield client
        client.close()


@pytest.fixture
def shell(tmp_path: Path, client: Any) -> Iterator[InteractiveShell]:
    """A notebook that watches the engines."""
    client[:].execute("import torch; x = torch.ones(1 << 20); y = torch.ones(10)", block=True)
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


def _read_x(client: Any) -> list[bool]:
    client[:].execute("is_there = x is not None", block=True)
    return list(client[:].pull("is_there", block=True))


def test_all_processes_are_in_the_reports(
    shell: InteractiveShell, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``--all`` adds the engines to the devices, and all that they have run to the cells."""
    monkeypatch.setattr(watching, "_ENGINES_S", _DEADLINE_S)
    client[:].execute("z = torch.ones(100)", block=True)
    ledger = _run(shell, "%memledger --all")

    stat = _run(shell, "%memstat --all")

    assert ledger.count("z = torch.ones(100)") == 2
    assert "2 processes" in stat
    assert "engine 0" in stat
    assert "engine 0" in ledger
    assert "engine 1" in ledger


def test_a_name_is_released_where_it_is_asked_for(shell: InteractiveShell, client: Any) -> None:
    """On one engine first, then a name that only one engine has is released on none."""
    plan = _run(shell, "%memrelease x @engine1 --dry-run")
    planned = _read_x(client)
    done = gpumemwidget.release_elsewhere("engine1", "x")
    there = _read_x(client)
    client[1].execute("del y", block=True)
    refused = _run(shell, "%memrelease y @all")
    kept = client[0].pull("y", block=True)

    assert "Will free" in plan
    assert planned == [True, True]
    [(state, report)] = done.outcomes
    assert (state.info.number, type(report), done.is_done) == (1, ReleaseReport, True)
    assert dict(report.allocated_freed_bytes)["host"] >= (4 << 20) - SLACK_BYTES
    assert there == [True, False]
    assert "Nothing was released anywhere: engine 1 refused." in refused
    assert "'y' is not a variable" in refused
    assert kept is not None


@pytest.mark.parametrize("name", ["release_elsewhere", "watch_cluster"])
def test_examples_give_what_they_show(name: str, shell: InteractiveShell, client: Any) -> None:
    """The examples in the documents are true beside two engines."""
    function = getattr(gpumemwidget, name)
    [example] = doctest.DocTestFinder(recurse=False).find(function, name, module=False)
    example.globs = {**shell.user_ns, "gpumemwidget": gpumemwidget, "client": client}

    failed, attempted = doctest.DocTestRunner().run(example)
    # doctest leaves it, as the interactive prompt does.
    vars(builtins).pop("_", None)

    assert (failed, attempted > 0) == (0, True)


@pytest.mark.usefixtures("shell")
def test_a_place_that_is_not_there_is_refused() -> None:
    """The message says which places there are."""
    with pytest.raises(UnknownNameError, match=r"no process @engine7 .* @engine0, @engine1"):
        gpumemwidget.release_elsewhere("@engine7", "x")
    with pytest.raises(BadInputError, match="can't be of type int: give an ipyparallel"):
        gpumemwidget.watch_cluster(3)


def test_without_other_processes_the_next_step_is_named(tmp_path: Path) -> None:
    """A release elsewhere and ``%memstat --all`` name the calls that begin to watch."""
    with open_shell(tmp_path / "ipython") as shell:
        _run(shell, "%load_ext gpumemwidget")
        with pytest.raises(BadInputError, match="no other process is watched"):
            gpumemwidget.release_elsewhere("all", "x")
        shown = _run(shell, "%memstat --all")
        assert shown.count("No other process is watched: gpumemwidget.watch(FOLDER)") == 1
        _run(shell, "%unload_ext gpumemwidget")
