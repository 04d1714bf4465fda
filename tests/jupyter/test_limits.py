"""``%memlimit`` and ``%memreset`` in a shell, on simulated GPUs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpumemwidget.session.session import current_session
from gpumemwidget.testing import DeviceFullError
from tests.backends.late_cuda import delay_cuda
from tests.jupyter.machine import GIB, MIB, TOTAL, Machine

Load = Callable[..., Machine]


@pytest.fixture
def load(make_machine: Load) -> Load:
    """Loads the extension on two GPUs."""

    def start(*, is_initialized: bool = True, version: str = "2.11.0") -> Machine:
        gpus = make_machine(n_gpus=2, version=version)
        if not is_initialized:
            delay_cuda(gpus.torch)
        gpus.run("%load_ext gpumemwidget")
        return gpus

    return start


@pytest.fixture
def gpus(load: Load) -> Machine:
    """The first of them is in use."""
    gpus = load()
    gpus.allocator.touch(0)
    return gpus


def test_a_share_an_amount_and_off(gpus: Machine) -> None:
    """Each is shown as it stands, to the byte in the allocator."""
    shown = [gpus.say(f"%memlimit {each}") for each in ("0.8", "80%", "12 GiB", "12.5GiB", "off")]

    assert [each.partition("cuda:0 ")[2] for each in shown] == [
        "64.00 GiB 80.00 GiB 0 B 64.00 GiB",
        "64.00 GiB 80.00 GiB 0 B 64.00 GiB",
        "12.00 GiB 80.00 GiB 0 B 12.00 GiB",
        "12.50 GiB 80.00 GiB 0 B 12.50 GiB",
        "none 80.00 GiB 0 B 80.00 GiB cuda:1 none not in use yet",
    ]
    assert gpus.allocator.allocators[0].allowed_bytes == TOTAL


def test_the_limits_are_shown(gpus: Machine) -> None:
    """Of all GPUs, whoever has set them; a GPU is not in use by it."""
    gpus.say("torch.cuda.set_per_process_memory_fraction(0.25, 0)")
    gpus.say("%memlimit 12GiB --device cuda:1")

    shown = gpus.say("%memlimit")

    assert shown == (
        "device limit of reserved left cuda:0 20.00 GiB 80.00 GiB 0 B 20.00 GiB "
        "cuda:1 12.00 GiB 80.00 GiB not in use yet"
    )
    assert gpus.allocator.list_touched() == (0,)
    assert "cuda:1" not in gpus.say("%memlimit --device cuda:0")


def test_a_cell_runs_into_the_limit(gpus: Machine) -> None:
    """Beyond it a request fails, below it none does; the ledger counts the failure."""
    gpus.say("%memlimit 100MiB")

    assert gpus.say("kept = gpu.allocate(80 << 20)") == ""
    assert "DeviceFullError" in gpus.say("more = gpu.allocate(30 << 20)")

    device = current_session().monitor.ledger.records[-1].devices[0]
    assert (device.device, device.num_ooms) == ("cuda:0", 1)


def test_a_limit_waits_for_the_first_use(load: Load) -> None:
    """Nothing is in use yet, so it is for every GPU: and stands before the first byte."""
    gpus = load(is_initialized=False)

    shown = gpus.say("%memlimit 0.5")

    assert shown == (
        "device limit of reserved left cuda:0 50 % not in use yet cuda:1 50 % not in use "
        "yet PyTorch sets these limits when CUDA is first used."
    )
    assert gpus.allocator.list_touched() == ()
    assert "DeviceFullError" in gpus.say("torch.cuda.init(); x = gpu.allocate(41 << 30)")
    assert gpus.say("x = gpu.allocate(39 << 30)") == ""


def test_unloading_leaves_what_is_set_and_forgets_what_waits(load: Load) -> None:
    """As a call of torch's would stay; and says so. What the user set is the user's."""
    gpus = load(is_initialized=False)
    gpus.say("%memlimit 12GiB")
    said = _drop_host_peak(gpus.say("%unload_ext gpumemwidget"))
    gpus.torch.cuda.init()

    assert said == (
        "gpumemwidget: the limit that waited for cuda:0 is forgotten. "
        "gpumemwidget: the limit that waited for cuda:1 is forgotten."
    )
    assert [gpus.allocator.allocators[index].allowed_bytes for index in range(2)] == [None, None]
    assert gpus.torch.cuda._queued_calls == []

    other = load()
    other.allocator.touch(0)
    other.allocator.touch(1)
    other.say("%memlimit 12GiB --device cuda:0")
    other.say("torch.cuda.set_per_process_memory_fraction(0.5, 1)")
    said = _drop_host_peak(other.say("%unload_ext gpumemwidget"))

    assert said == (
        "gpumemwidget: cuda:0 keeps its limit of 12.00 GiB, until "
        "torch.cuda.set_per_process_memory_fraction(1.0, 0)."
    )
    assert [other.allocator.allocators[index].allowed_bytes for index in range(2)] == [
        12 * GIB,
        40 * GIB,
    ]
    with pytest.raises(DeviceFullError):
        other.allocator.allocate(13 * GIB)


def _drop_host_peak(said: str) -> str:
    """What is said of limits: whether the process has had more memory is the tests' before."""
    return said.partition(" gpumemwidget: this process's peak-RSS")[0]


# -- Peaks -----------------------------------------------------------------------------------------


def test_peaks_begin_anew(gpus: Machine) -> None:
    """PyTorch's, on every GPU in use, with what they were; the cell's own peak stays exact."""
    gpus.say("gpu.free(gpu.allocate(40 << 20))")

    shown = gpus.say(
        "gpu.free(gpu.allocate(60 << 20))\n%memreset\npeak = torch.cuda.max_memory_allocated(0)"
    )

    assert "cuda:0 60.00 MiB 100.00 MiB" in shown
    assert gpus.shell.user_ns["peak"] == 0
    record = current_session().monitor.ledger.records[-1]
    assert record.devices[0].allocated.peak_bytes == 60 * MIB
    assert record.devices[0].peak_is == "exact"
