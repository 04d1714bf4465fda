"""Limits are set and read to the byte, and no device comes into use by them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumemwidget.backends.cuda.backend import CudaBackend, find_share
from gpumemwidget.errors import BackendError
from gpumemwidget.model.devices import HardwareNote, HardwareNoteKind, Limit, LimitRequest
from gpumemwidget.report.render.wording import word_hardware_note
from gpumemwidget.testing import SimulatedGpus, simulate_torch
from tests.backends.late_cuda import delay_cuda

MIB = 1 << 20
GIB = 1 << 30
#: What an H100 has to PyTorch.
TOTAL = 85_017_493_504
OLD = "2.6.0"


class Gpu:
    """Simulated GPUs, of which none is in use, with the backend over them."""

    def __init__(self, version: str = "2.11.0", *, is_initialized: bool = True) -> None:
        self.allocator = SimulatedGpus(3, total_bytes=TOTAL)
        self.torch: Any = simulate_torch(self.allocator, version=version)
        if not is_initialized:
            delay_cuda(self.torch)
        if version == OLD:
            self.torch.cuda.set_per_process_memory_fraction = self._set_as_of_old
            del self.torch._C._cuda_getMemoryFraction
        self.backend = CudaBackend(self.torch)

    def _set_as_of_old(self, fraction: float, device: int) -> None:
        """It asks CUDA how large the device is, which brings it into use."""
        self.torch.cuda.mem_get_info(device)
        self.allocator.set_fraction(fraction, device)

    def read(self) -> list[tuple[str, int | None, bool]]:
        return [
            (each.device, each.limit_bytes, each.is_waiting) for each in self.backend.read_limits()
        ]


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    gpu = Gpu()
    yield gpu
    gpu.backend.close()


@pytest.fixture
def old() -> Iterator[Gpu]:
    gpu = Gpu(OLD)
    yield gpu
    gpu.backend.close()


@pytest.fixture
def early() -> Iterator[Gpu]:
    """CUDA is not in use yet."""
    gpu = Gpu(is_initialized=False)
    yield gpu
    gpu.backend.close()


@given(st.integers(1, 1 << 45), st.data())
def test_every_number_of_bytes_has_a_share(total_bytes: int, data: st.DataObject) -> None:
    """PyTorch's product, cut to a whole number, is the limit; and what it tells leads back."""
    limit_bytes = data.draw(st.integers(1, total_bytes))

    share = find_share(limit_bytes, total_bytes)

    assert 0 < share <= 1
    assert int(share * total_bytes) == limit_bytes
    assert round(limit_bytes / total_bytes * total_bytes) == limit_bytes


@pytest.mark.parametrize("version", ["2.11.0", OLD])
def test_a_limit_in_bytes_is_exact(version: str) -> None:
    """The allocator allows just so much, and the device is described with it."""
    gpu = Gpu(version)
    gpu.allocator.touch(1)
    found = []

    for limit_bytes in (1, 12 * GIB, 12 * GIB + 1, TOTAL - 1):
        gpu.backend.set_limit("cuda:1", LimitRequest(limit_bytes))
        allowed = gpu.allocator.allocators[1].allowed_bytes
        (info,) = gpu.backend.list_devices()
        (limit,) = gpu.backend.read_limits()
        found.append((allowed, info.limit_bytes, limit))
    gpu.backend.close()

    assert found == [
        (n_bytes, n_bytes, Limit("cuda:1", n_bytes, TOTAL, 0))
        for n_bytes in (1, 12 * GIB, 12 * GIB + 1, TOTAL - 1)
    ]


# -- Devices that are not in use -------------------------------------------------------------------


def test_no_device_comes_into_use(gpu: Gpu, early: Gpu, old: Gpu) -> None:
    """By setting, reading or taking away."""
    old.backend.set_limit("cuda:2", LimitRequest())
    assert old.read() == []
    assert old.allocator.list_touched() == ()
    for each in (gpu, early):
        each.backend.set_limit("cuda:0", LimitRequest(GIB))
        each.backend.set_limit("cuda:1", LimitRequest(share=0.5))
        each.backend.set_limit("cuda:2", LimitRequest(GIB))
        each.backend.set_limit("cuda:2", LimitRequest())
        each.read()
        assert each.backend.list_devices() == ()
        assert each.allocator.list_touched() == ()


def test_older_releases_refuse_before_the_device_is_in_use(old: Gpu) -> None:
    """They would touch it; once it is in use they take the limit."""
    with pytest.raises(BackendError, match=r"cuda:1 is not in use yet, and PyTorch 2\.6\.0"):
        old.backend.set_limit("cuda:1", LimitRequest(12 * GIB))
    assert old.allocator.list_touched() == ()
    old.allocator.touch(1)

    old.backend.set_limit("cuda:1", LimitRequest(12 * GIB))

    assert old.read() == [("cuda:1", 12 * GIB, False)]
    assert old.allocator.allocators[1].allowed_bytes == 12 * GIB


def test_what_waits_and_can_t_be_set_is_a_note(early: Gpu) -> None:
    """CUDA's initialisation goes on."""
    early.backend.set_limit("cuda:7", LimitRequest(GIB))

    early.torch.cuda.init()

    assert early.torch.cuda.is_initialized()
    assert tuple(map(word_hardware_note, early.backend.take_notes())) == (
        "The limit of cuda:7 is not set: there is no device 7: there are 3 simulated GPUs",
    )
    assert early.read() == []


def test_a_forked_child_has_no_limit(early: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits was asked for its parent."""
    early.backend.set_limit("cuda:0", LimitRequest(GIB))
    own = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: own + 1)

    early.torch.cuda.init()

    assert early.allocator.allocators[0].allowed_bytes is None


def test_what_waits_touches_nothing_under_another_allocator(early: Gpu) -> None:
    """With one that was chosen since, a limit would bring its device into use."""
    early.backend.set_limit("cuda:0", LimitRequest(GIB))
    early.torch.cuda.memory.get_allocator_backend = lambda: "cudaMallocAsync"

    early.torch.cuda.init()

    (note,) = early.backend.take_notes()
    assert (note.kind, note.device) == (HardwareNoteKind.LIMIT_FAILED, "cuda:0")
    assert note.text.startswith("cuda:0 is not in use yet")
    assert early.allocator.list_touched() == ()


def test_an_allocator_without_limits(gpu: Gpu) -> None:
    """A pluggable one refuses both to set one and to tell of one."""

    def refuse(*_: Any) -> float:
        raise RuntimeError("CUDAPluggableAllocator does not yet support getMemoryFraction")

    gpu.allocator.touch(0)
    gpu.torch._C._cuda_getMemoryFraction = refuse
    gpu.torch.cuda.set_per_process_memory_fraction = refuse

    with pytest.raises(BackendError, match="PyTorch could not limit cuda:0"):
        gpu.backend.set_limit("cuda:0", LimitRequest(GIB))

    assert gpu.backend.list_devices()[0].limit_bytes is None


# -- Beside limits ---------------------------------------------------------------------------------


def test_pinned_memory(gpu: Gpu, early: Gpu) -> None:
    """What the allocator has of it from the system, from its first use on, by its newest name."""
    before = gpu.backend.read_pinned()
    for each in (gpu, early):
        each.allocator.pinned.add(128 * MIB)
    after = gpu.backend.read_pinned()
    counts = {
        name: {"current": current, "peak": 9, "allocated": 9, "freed": 0}
        for name, current in (("allocated_bytes", 3), ("reserved_bytes", 4))
    }
    gpu.torch._C._cuda_hostMemoryStats = lambda: counts
    renamed = gpu.backend.read_pinned()
    del gpu.torch._C._cuda_hostMemoryStats

    assert (before, after, renamed) == (None, 128 * MIB, 4)
    assert early.backend.read_pinned() is gpu.backend.read_pinned() is None


@pytest.mark.parametrize("version", ["2.11.0", OLD])
def test_a_gpu_in_error_keeps_nothing_else_from_being_told(version: str) -> None:
    """What it refuses is unknown, and it is said once why."""
    gpu = Gpu(version)
    gpu.allocator.touch(1)
    gpu.allocator.pinned.add(128 * MIB)

    def refuse(*_: object) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nMore of it")

    for owner, name in (
        (gpu.torch.cuda, "mem_get_info"),
        (gpu.torch.cuda, "get_device_properties"),
        (gpu.torch._C, "_cuda_hostMemoryStats"),
    ):
        setattr(owner, name, refuse)
    limits = [gpu.backend.read_limits() for _ in range(2)]
    pinned = gpu.backend.read_pinned()
    notes = gpu.backend.take_notes()
    gpu.backend.close()

    assert limits == [(Limit("cuda:1", None, None, 0),)] * 2
    assert pinned is None
    why = "CUDA error: an illegal memory access was encountered"
    assert notes == (
        HardwareNote(HardwareNoteKind.UNREAD, why, "cuda:1", "total memory"),
        HardwareNote(HardwareNoteKind.UNREAD, why, "host", "pinned memory"),
    )
