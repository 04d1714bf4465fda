"""A driver that hangs, under an open dashboard and an open panel, in a real kernel."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import ipykernel
import pytest

from tests.jupyter.notebook import Notebook, open_notebook

#: Simulated GPUs whose driver hangs in C, as NVML does on a lost GPU: no signal ends the call.
_MACHINE = """
import ctypes, gpumemwidget
from gpumemwidget.backends.driver import nvml
from gpumemwidget.testing import SimulatedDriver, simulate_gpus

libc = ctypes.CDLL(None)
mutex = ctypes.create_string_buffer(64)  # zeros are an unlocked mutex
n_hanging = 0

class HangingDriver(SimulatedDriver):
    def list_infos(self):
        self.hang()
        return super().list_infos()

    def read_use(self, device):
        self.hang()
        return super().read_use(device)

    def list_processes(self, device):
        self.hang()
        return super().list_processes(device)

    def close(self):
        self.hang()
        super().close()

    def hang(self):
        global n_hanging
        n_hanging += 1
        libc.pthread_mutex_lock(mutex)
        libc.pthread_mutex_unlock(mutex)
        n_hanging -= 1

gpus = simulate_gpus(2)
gpus.driver = HangingDriver(gpus)
kept = gpus.allocate(1 << 30)
"""
#: What the page says: its view of the dashboard is seen, with the variables and a device in parts.
_VIEW = {
    "kind": "view",
    "view": "a",
    "visible": True,
    "variables": True,
    "device": "cuda:0",
    "snapshot": True,
    "since_s": None,
    "list": True,
    "look": True,
}


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[Notebook]:
    """A kernel with an open dashboard and an open panel; its driver has just begun to hang."""
    with open_notebook(tmp_path) as notebook:
        assert notebook.run(_MACHINE).status == "ok"
        loaded = notebook.run("%load_ext gpumemwidget\n%memdash --side\n%memdash")
        assert loaded.status == "ok", loaded.text
        _look(notebook)
        notebook.run("nvml._LIMIT_S = nvml._FIRST_LIMIT_S = 0.5")
        notebook.run("libc.pthread_mutex_lock(mutex)")
        while notebook.evaluate("n_hanging") == 0:
            notebook.run("gpus.free(kept); kept = gpus.allocate(1 << 30)")
        yield notebook


def _look(notebook: Notebook) -> None:
    """Let a page look at the dashboard, the panel and the list of kernels."""
    model_id = notebook.evaluate("gpumemwidget.dashboard().model_id")
    notebook.send_to_comm(model_id, {"method": "custom", "content": _VIEW})
    comm_ids = notebook.list_comms("gpumemwidget")
    # Old kernels, as in Colab, do not list the comms that they open themselves.
    assert len(comm_ids) == (0 if ipykernel.version_info[:2] < (6, 18) else 1)
    for comm_id in comm_ids:
        notebook.send_to_comm(comm_id, {"kind": "look", "page": "p", "is_seen": True})
        notebook.send_to_comm(comm_id, {"kind": "kernels"})


@pytest.mark.kernel
def test_cells_run_and_are_recorded(hanging: Notebook) -> None:
    """Plain ones, traced ones, and those that run while a page asks for everything."""
    n_before = hanging.evaluate("len(gpumemwidget.monitor().ledger)")
    _look(hanging)

    cells = [hanging.run(f"x = {number}") for number in range(3)]
    traced = hanging.run("%%memtrace\nmore = gpus.allocate(1 << 20)")

    assert [cell.status for cell in (*cells, traced)] == ["ok"] * 4
    assert "1.00 MiB" in traced.text
    assert hanging.evaluate("len(gpumemwidget.monitor().ledger)") == n_before + 4
    assert hanging.evaluate("n_hanging") > 0


@pytest.mark.kernel
def test_a_ctrl_c_stops_a_cell_and_the_next_one_runs(hanging: Notebook) -> None:
    """It arrives in the cell's own line."""
    msg_id = hanging.start("print('on')\nwhile True: pass")
    hanging.wait_for_output(msg_id, "on")

    hanging.interrupt()
    stopped = hanging.finish(msg_id)

    assert (stopped.status, stopped.reply["ename"]) == ("error", "KeyboardInterrupt")
    assert hanging.run("6 * 7").text == "42"


@pytest.mark.kernel
def test_a_question_is_answered_without_the_driver(hanging: Notebook) -> None:
    """PyTorch's own figures are there, and a word on the driver."""
    state = hanging.run("%memstat")

    assert state.status == "ok"
    assert "1.00 GiB" in state.text
    assert "the driver does not answer" in state.text


@pytest.mark.kernel
def test_the_extension_is_unloaded_and_loaded_again(hanging: Notebook) -> None:
    """And finds the driver's figures once it answers."""
    unloaded = hanging.run("%unload_ext gpumemwidget")
    loaded = hanging.run("%load_ext gpumemwidget")
    hanging.run("libc.pthread_mutex_unlock(mutex)")
    while hanging.evaluate("n_hanging"):
        pass
    state = hanging.run("%memstat")

    assert (unloaded.status, loaded.status) == ("ok", "ok")
    assert "failed" not in unloaded.text + loaded.text
    assert "cuda:1" in state.text
