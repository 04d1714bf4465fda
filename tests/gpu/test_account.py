"""The account of owners on a real GPU: what is allocated, to the byte, with nothing unknown."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch

from gpumemwidget.model.ownership import (
    AccountNote,
    DeviceAccount,
    MemoryAccount,
    Owned,
)
from gpumemwidget.ownership.account import take_memory_account
from tests.gpu.processes import MIB, run_program
from tests.gpu.workloads import WORKLOADS
from tests.ownership.notebook import Notebook

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]

#: More than any walk here takes: what the account says is complete.
BUDGET_S = 30.0


def take_account(notebook: Notebook) -> MemoryAccount:
    """The account, held against the allocator: exact, and nothing changed by it."""
    torch.cuda.synchronize()
    before = (torch.cuda.memory_allocated(0), torch.cuda.memory_reserved(0))
    peaks = (torch.cuda.max_memory_allocated(0), torch.cuda.max_memory_reserved(0))
    account = take_memory_account(notebook.shell, notebook.hardware, budget_s=BUDGET_S)
    assert (torch.cuda.memory_allocated(0), torch.cuda.memory_reserved(0)) == before
    assert (torch.cuda.max_memory_allocated(0), torch.cuda.max_memory_reserved(0)) == peaks
    device = find_device(account)
    assert device.allocated_bytes == before[0]
    assert sum(each.n_bytes for each in device.owned) == before[0]
    return account


def find_device(account: MemoryAccount) -> DeviceAccount:
    return next(each for each in account.devices if each.device == "cuda:0")


def find_owned(account: MemoryAccount, owner: str) -> Owned:
    return next(each for each in find_device(account).owned if each.owner == owner)


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_byte_has_an_owner(name: str, notebook: Notebook) -> None:
    """Whatever was run: the account is what is allocated, 0 unknown, and nothing has changed."""
    for cell in WORKLOADS[name]:
        notebook.run(cell)
    is_ok = notebook.ip.last_execution_result.success

    account = take_account(notebook)

    device = find_device(account)
    assert is_ok is (name != "OOM")
    assert account.is_complete
    unknown = [each for each in device.owned if each.kind == "unknown"]
    assert unknown == []
    assert dict(device.sum_kinds()).get("unknown", 0) == 0


def test_a_private_pool_bears_its_graphs_name(notebook: Notebook) -> None:
    """What CUDA graphs hold that no tensor does: workspaces and random state."""
    for cell in WORKLOADS["CUDA graph"]:
        notebook.run(cell)

    account = take_account(notebook)

    found = {each.owner: each for each in find_device(account).owned}
    pool = found["cuBLAS workspace in the private pool of graph on cuda:0"]
    state = found["random state of CUDA graphs on cuda:0"]
    assert (pool.kind, pool.n_bytes) == ("CUDA-graph pool", 33 * MIB)
    assert (state.kind, state.n_bytes) == ("CUDA-graph pool", 1024)


def test_what_a_stream_still_uses_is_not_allocated(notebook: Notebook) -> None:
    """A tensor that is freed while another stream uses it is pending, and in no account."""
    for cell in WORKLOADS["streams"]:
        notebook.run(cell)

    segments = notebook.hardware.read_segments()
    account = take_account(notebook)

    blocks = [block for segment in segments for block in segment.blocks]
    assert [each.n_bytes for each in blocks if each.state == "active_pending_free"] == [8 * MIB]
    assert dict(find_device(account).sum_kinds()).get("unknown", 0) == 0


def test_memory_of_another_allocator_is_not_counted(notebook: Notebook) -> None:
    """A tensor over memory that torch has not allocated is no part of what is allocated."""
    torch.zeros(1, device="cuda")
    driver = ctypes.CDLL("libcuda.so.1")
    pointer = ctypes.c_uint64()
    assert driver.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(4 * MIB)) == 0

    interface = {
        "shape": (4 * MIB,),
        "typestr": "|u1",
        "data": (pointer.value, False),
        "version": 2,
    }
    foreign = SimpleNamespace(__cuda_array_interface__=interface)
    notebook.put(foreign=torch.as_tensor(foreign, device="cuda"))

    account = take_account(notebook)

    assert not any(each.owner.startswith("foreign") for each in find_device(account).owned)
    assert AccountNote("cuda:0", 4 * MIB) in account.notes
    notebook.ip.user_ns.pop("foreign")
    assert driver.cuMemFree_v2(pointer) == 0


def test_the_line_that_allocated_it_is_told_where_a_history_is_recorded(notebook: Notebook) -> None:
    """By cell and line, for tensors and for what no tensor holds; the history goes on."""
    notebook.run("import torch\ntorch.cuda.memory._record_memory_history('state', stacks='python')")
    notebook.run("a = torch.ones(1000, device='cuda')\n\nb = torch.ones(1 << 22, device='cuda')")
    try:
        account = take_account(notebook)
        notebook.run("c = torch.ones(1000, device='cuda')")
        again = take_account(notebook)
    finally:
        torch.cuda.memory._record_memory_history(None)

    assert find_owned(account, "a").allocated_at == "In [2], line 1"
    assert find_owned(account, "b").allocated_at == "In [2], line 3"
    assert find_owned(again, "c").allocated_at == "In [3], line 1"


_ADDS_UP = """
from gpumemwidget.backends.hardware import detect_hardware
import json, torch
kept = [torch.ones(n, device="cuda") for n in (10, 3_000_000, 100, 40_000_000)]
del kept[1]
hardware = detect_hardware()
gpu, *_ = hardware.read()
segments = hardware.read_segments()
blocks = [block for segment in segments for block in segment.blocks]
in_use = sum(block.n_bytes for block in blocks if block.state == "active_allocated")
reserved = sum(segment.n_bytes for segment in segments)
print(json.dumps([
    torch.cuda.get_allocator_backend(), len(segments) > 0, in_use == gpu.allocated_bytes,
    reserved == gpu.reserved_bytes, str(hardware.take_notes())]))
hardware.close()
"""


@pytest.mark.parametrize(
    ("setting", "backend", "has_blocks"),
    [
        ("expandable_segments:True", "native", True),
        ("backend:cudaMallocAsync", "cudaMallocAsync", False),
    ],
)
def test_segments_add_up_where_the_allocator_has_some(
    setting: str, backend: str, *, has_blocks: bool
) -> None:
    """Also those that grow, of what is mapped; CUDA's own allocator has none, which is a note."""
    *found, notes = run_program(_ADDS_UP, PYTORCH_CUDA_ALLOC_CONF=setting)

    assert found == [backend, has_blocks, has_blocks, has_blocks]
    assert (notes == "()") is has_blocks
    assert has_blocks or "the allocator's blocks" in notes
