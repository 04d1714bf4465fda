"""Limits on real GPUs: they hold to the byte, and no device comes into use by them."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from gpumemwidget.backends.cuda.backend import CudaBackend
from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.backends.host import HostBackend
from gpumemwidget.model.devices import LimitRequest
from tests.gpu.conftest import needs_two
from tests.gpu.processes import GIB, MIB, SHELL, run_python

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]

#: From this release on a limit is set without touching its device.
IS_EARLY = tuple(int(each) for each in torch.__version__.split(".")[:2]) >= (2, 11)
needs_early = pytest.mark.skipif(not IS_EARLY, reason="only a GPU in use can be limited")


def clean_up() -> None:
    """Without a limit, and without what earlier tests left in the cache."""
    torch.cuda.set_per_process_memory_fraction(1.0, 0)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


@pytest.fixture
def hardware() -> Iterator[Hardware]:
    """The first GPU is in use."""
    kept = torch.zeros(1, device="cuda:0")
    clean_up()
    hardware = Hardware([CudaBackend(torch), HostBackend()])
    yield hardware
    hardware.close()
    del kept
    clean_up()


def take(n_bytes: int) -> torch.Tensor:
    return torch.empty(n_bytes, dtype=torch.uint8, device="cuda:0")


def read_limit(hardware: Hardware) -> int | None:
    return next(each.limit_bytes for each in hardware.read_limits() if each.device == "cuda:0")


# -- To the byte -----------------------------------------------------------------------------------


def test_a_limit_holds_to_the_byte(hardware: Hardware) -> None:
    """A segment of just what is left fits; with one byte less it does not."""
    reserved = torch.cuda.memory_reserved(0)

    hardware.set_limit("cuda:0", LimitRequest(reserved + 20 * MIB - 1))
    with pytest.raises(torch.cuda.OutOfMemoryError):
        take(20 * MIB)
    hardware.set_limit("cuda:0", LimitRequest(reserved + 20 * MIB))
    kept = take(20 * MIB)

    assert torch.cuda.memory_reserved(0) == reserved + 20 * MIB == read_limit(hardware)
    del kept


@pytest.mark.parametrize("n_bytes", [1, 12 * GIB, 12 * GIB + 1, 7_777_777_777])
def test_what_is_set_is_what_is_read(hardware: Hardware, n_bytes: int) -> None:
    """In the device's description too; the whole is what CUDA tells."""
    hardware.set_limit("cuda:0", LimitRequest(n_bytes))

    info = next(each for each in hardware.list_devices() if each.device == "cuda:0")
    limit = next(each for each in hardware.read_limits() if each.device == "cuda:0")
    total = torch.cuda.mem_get_info(0)[1]
    assert (info.limit_bytes, limit.limit_bytes, limit.total_bytes) == (n_bytes, n_bytes, total)
    assert limit.reserved_bytes == torch.cuda.memory_reserved(0)


def test_a_share_is_torchs_own(hardware: Hardware) -> None:
    """Set by us or by the user, it is the same; off takes both away."""
    hardware.set_limit("cuda:0", LimitRequest(share=0.37))
    ours = read_limit(hardware)
    torch.cuda.set_per_process_memory_fraction(0.37, 0)
    users = read_limit(hardware)
    hardware.set_limit("cuda:0", LimitRequest())

    assert ours == users == int(0.37 * torch.cuda.mem_get_info(0)[1])
    assert read_limit(hardware) is None


# -- Devices that are not in use -------------------------------------------------------------------


@needs_early
def test_a_limit_waits_for_the_first_use() -> None:
    """Asked for before CUDA is in use, it is there before the first byte; nothing is touched."""
    out = run_python(
        SHELL
        + """
import sys
print(shell.run_cell("%memlimit 2GiB --device cuda:0").error_in_exec)
print("torch", "torch" in sys.modules)
import torch
cell("%memlimit 2GiB --device cuda:0")
print("initialised", torch.cuda.is_initialized(), torch._C._cuda_hasPrimaryContext(0))
torch.cuda.init()
cell("%memlimit")
print("context", torch._C._cuda_hasPrimaryContext(0))
def attempt(n_gib):
    try:
        return torch.empty(n_gib << 30, dtype=torch.uint8, device="cuda:0").numel() >> 30
    except torch.cuda.OutOfMemoryError:
        return "out of memory"
first = attempt(3)
cell("1 + 1")
print("first", first, "then", attempt(3), attempt(1))
print("limit", [each.limit_bytes for each in gpumemwidget.limit(device="cuda:0")])
"""
    )

    assert "torch False" in out
    assert "cuda:0 can't be limited yet: import a torch that has CUDA first" in out
    assert out.count("not in use yet") >= 2
    assert "initialised False False" in out
    assert "context False" in out
    assert "first out of memory then out of memory 1" in out
    assert f"limit [{2 * GIB}]" in out


@needs_early
def test_what_waits_is_taken_back() -> None:
    """By off and by unloading: the first use finds no limit."""
    for line in ("%memlimit off", "%unload_ext gpumemwidget"):
        out = run_python(
            SHELL
            + f"""
import torch
cell("%memlimit 2GiB")
cell("{line}")
torch.empty(3 << 30, dtype=torch.uint8, device="cuda:0")
print("had")
"""
        )
        assert "had" in out


@needs_two
@needs_early
def test_an_untouched_second_device_stays_so() -> None:
    """Its limit is set and shown, and holds; only its own first use makes a context there."""
    out = run_python(
        SHELL
        + """
import torch
has_context = torch._C._cuda_hasPrimaryContext
def attempt(n_gib, device):
    try:
        return torch.empty(n_gib << 30, dtype=torch.uint8, device=device).numel() >> 30
    except torch.cuda.OutOfMemoryError:
        return "out of memory"
hardware = monitor.hardware
used = lambda: hardware.read_devices()[1].use.used_bytes
before = used()
cell("%memlimit 2GiB --device cuda:1")
x = torch.zeros(1, device="cuda:0")
cell("%memlimit 4GiB --device cuda:1")
cell("%memlimit")
cell("%memstat")
hardware.read()
print("untouched", not has_context(1), used() - before < 16 << 20)
print("current", torch.cuda.current_device())
y = torch.zeros(1, device="cuda:1")
cell("1 + 1")
print("second", attempt(5, "cuda:1"), attempt(3, "cuda:1"))
print("first", attempt(5, "cuda:0"))
print("limits", [each.limit_bytes for each in gpumemwidget.limit()])
print("current", torch.cuda.current_device())
"""
    )

    assert "untouched True True" in out
    assert "second out of memory 3" in out
    assert "first 5" in out
    assert f"limits [None, {4 * GIB}" in out
    assert out.count("current 0") == 2


@needs_two
@needs_early
def test_using_the_second_first_touches_the_first_by_nothing() -> None:
    """A limit that waits for the first, current device makes no context there."""
    out = run_python(
        SHELL
        + """
import torch
cell("%memlimit 2GiB --device cuda:0")
y = torch.zeros(1, device="cuda:1")
cell("%memlimit")
print("contexts", torch._C._cuda_hasPrimaryContext(0), torch._C._cuda_hasPrimaryContext(1))
"""
    )

    assert "contexts False True" in out
