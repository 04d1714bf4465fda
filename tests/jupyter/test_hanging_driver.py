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
    def list_infos(self, uuids=None):
        self.hang()
        return super().list_infos(uuids)

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
def test_a_driver_that_hangs_stops_nobody(hanging: Notebook) -> None:
    """Plain and traced cells run while a page asks for everything, and a Ctrl-C stops a cell.

    PyTorch's own figures are shown with a word on the driver. The extension is unloaded and loaded
    again, and finds the driver's figures once it answers.
    """
    n_before = hanging.evaluate("len(gpumemwidget.monitor().ledger)")
    _look(hanging)

    cells = [hanging.run(f"x = {number}") for number in range(3)]
    traced = hanging.run("%%memtrace\nmore = gpus.allocate(1 << 20)")
    n_after, n_hanging = hanging.evaluate("(len(gpumemwidget.monitor().ledger), n_hanging)")
    msg_id = hanging.start("print('on')\nwhile True: pass")
    hanging.wait_for_output(msg_id, "on")
    hanging.interrupt()
    stopped = hanging.finish(msg_id)
    state = hanging.run("%memstat")
    unloaded = hanging.run("%unload_ext gpumemwidget")
    loaded = hanging.run("%load_ext gpumemwidget")
    hanging.run("libc.pthread_mutex_unlock(mutex)")
    while hanging.evaluate("n_hanging"):
        pass
    answered = hanging.run("%memstat")

    assert [cell.status for cell in (*cells, traced, state, unloaded, loaded)] == ["ok"] * 7
    assert "1.00 MiB" in traced.text
    assert n_after == n_before + 4
    assert n_hanging > 0
    assert (stopped.status, stopped.reply["ename"]) == ("error", "KeyboardInterrupt")
    assert "1.00 GiB" in state.text
    assert "the driver does not answer" in state.text
    assert "failed" not in unloaded.text + loaded.text
    assert "cuda:1" in answered.text
