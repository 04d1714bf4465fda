"""The account of owners on a real GPU: what is allocated, to the byte, with nothing unknown."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from gpumemwidget.backends.hardware import Hardware, detect_hardware
from gpumemwidget.model.ownership import (
    AccountNote,
    DeviceAccount,
    MemoryAccount,
    MemorySource,
    Owned,
)
from gpumemwidget.ownership.account import take_memory_account
from tests.gpu.test_cuda import run_python
from tests.gpu.workloads import WORKLOADS
from tests.ownership.conftest import notebook  # noqa: F401 - a fixture
from tests.ownership.notebook import Notebook

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]

MIB = 1024**2
#: More than any walk here takes: what the account says is complete.
BUDGET_S = 30.0


@pytest.fixture
def hardware() -> Iterator[Hardware]:
    """This machine's GPUs and its host memory; what earlier tests left in C++ is cleared."""
    torch.cuda.init()
    torch._C._cuda_clearCublasWorkspaces()
    hardware = detect_hardware()
    yield hardware
    hardware.close()
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()


def take_account(notebook: Notebook) -> MemoryAccount:  # noqa: F811
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
def test_every_byte_has_an_owner(
    name: str,
    notebook: Notebook,  # noqa: F811
    record_property: Callable[[str, object], None],
) -> None:
    """Whatever was run: the account is what is allocated, 0 unknown, and nothing has changed."""
    for cell in WORKLOADS[name]:
        notebook.run(cell)
    is_ok = notebook.ip.last_execution_result.success

    account = take_account(notebook)

    device = find_device(account)
    record_property("allocated_bytes", device.allocated_bytes)
    record_property("account_s", round(account.duration_s, 4))
    record_property("kinds", dict(device.sum_kinds()))
    nameless = [each for each in device.owned if each.root not in ("name", "out", "exception")]
    record_property("nameless", [(each.owner, each.n_bytes, each.root) for each in nameless])
    assert is_ok is (name != "OOM")
    assert account.is_complete
    unknown = [each for each in device.owned if each.kind == "unknown"]
    assert unknown == []
    assert dict(device.sum_kinds()).get("unknown", 0) == 0


def test_a_trained_model_is_told_by_its_kinds(notebook: Notebook) -> None:  # noqa: F811
    """Parameters, gradients and Adam's two moments: each as many bytes as torch says they are."""
    for cell in WORKLOADS["GPT-2, a live graph"]:
        notebook.run(cell)
    model = notebook.ip.user_ns["model"]
    n_bytes = sum(each.untyped_storage().nbytes() for each in model.parameters())
    del model

    account = take_account(notebook)

    kinds = dict(find_device(account).sum_kinds())
    # A block may be as much as 1 MiB bigger than what was asked for.
    for kind, least_bytes in (
        ("parameter", n_bytes),
        ("gradient", n_bytes),
        ("optimizer state", 2 * n_bytes),
    ):
        assert least_bytes <= kinds[kind] < 1.02 * least_bytes, kind
    assert kinds["saved for backward"] > 100 * MIB
    assert kinds["cuBLAS workspace"] >= 32 * MIB
    weight = find_owned(account, "model.transformer.h[3].mlp.c_fc.weight")
    assert (weight.kind, weight.root, weight.rows[0]) == ("parameter", "name", "model")


def test_a_private_pool_bears_its_graphs_name(notebook: Notebook) -> None:  # noqa: F811
    """What CUDA graphs hold that no tensor does: workspaces and random state."""
    for cell in WORKLOADS["CUDA graph"]:
        notebook.run(cell)

    account = take_account(notebook)

    found = {each.owner: each for each in find_device(account).owned}
    pool = found["cuBLAS workspace in the private pool of graph on cuda:0"]
    state = found["random state of CUDA graphs on cuda:0"]
    assert (pool.kind, pool.n_bytes) == ("CUDA-graph pool", 33 * MIB)
    assert (state.kind, state.n_bytes) == ("CUDA-graph pool", 1024)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU alone")
def test_every_device_has_an_account_of_its_own(notebook: Notebook) -> None:  # noqa: F811
    """A model that is spread over two GPUs, and a tensor moved from one to the other."""
    notebook.run(
        "import torch\n"
        "first = torch.nn.Linear(256, 512, device='cuda:0')\n"
        "second = torch.nn.Linear(512, 256, device='cuda:1')\n"
        "x = torch.ones(64, 256, device='cuda:0')\n"
        "loss = second(first(x).relu().to('cuda:1')).square().mean()\n"
        "loss.backward(retain_graph=True)\n"
        "torch.cuda.synchronize(0)\n"
        "torch.cuda.synchronize(1)"
    )

    account = take_account(notebook)

    assert [each.device for each in account.devices] == ["cuda:0", "cuda:1", "host"]
    for index, each in enumerate(account.devices[:2]):
        assert each.allocated_bytes == torch.cuda.memory_allocated(index)
        assert sum(owned.n_bytes for owned in each.owned) == each.allocated_bytes
        assert dict(each.sum_kinds()).get("unknown", 0) == 0
        owners = {owned.owner for owned in each.owned}
        assert f"cuBLAS workspace of cuda:{index}" in owners
        assert f"{('first', 'second')[index]}.weight.grad" in owners


def test_what_a_stream_still_uses_is_not_allocated(notebook: Notebook) -> None:  # noqa: F811
    """A tensor that is freed while another stream uses it is pending, and in no account."""
    for cell in WORKLOADS["streams"]:
        notebook.run(cell)

    segments = notebook.hardware.read_segments()
    account = take_account(notebook)

    blocks = [block for segment in segments for block in segment.blocks]
    assert [each.n_bytes for each in blocks if each.state == "active_pending_free"] == [8 * MIB]
    assert dict(find_device(account).sum_kinds()).get("unknown", 0) == 0


def test_memory_of_another_allocator_is_not_counted(notebook: Notebook) -> None:  # noqa: F811
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


def test_the_line_that_allocated_it_is_told_where_a_history_is_recorded(
    notebook: Notebook,  # noqa: F811
) -> None:
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


def test_blocks_are_not_read_before_cuda_is_in_use() -> None:
    """To ask for them initialises nothing."""
    out = run_python(
        """
import torch
from gpumemwidget.backends.hardware import detect_hardware
hardware = detect_hardware()
print(hardware.read_segments(), torch.cuda.is_initialized())
print(torch._C._cuda_hasPrimaryContext(0))
x = torch.ones(1, device="cuda")
print([segment.device for segment in hardware.read_segments()])
hardware.close()
"""
    )

    assert out.splitlines() == ["() False", "False", "['cuda:0']"]


ADDS_UP = """
from gpumemwidget.backends.hardware import detect_hardware
import torch
kept = [torch.ones(n, device="cuda") for n in (10, 3_000_000, 100, 40_000_000)]
del kept[1]
hardware = detect_hardware()
gpu, *_ = hardware.read()
segments = hardware.read_segments()
blocks = [block for segment in segments for block in segment.blocks]
in_use = sum(block.n_bytes for block in blocks if block.state == "active_allocated")
print(torch.cuda.get_allocator_backend(), len(segments) > 0)
print(in_use == gpu.allocated_bytes, sum(each.n_bytes for each in segments) == gpu.reserved_bytes)
print(hardware.take_notes())
hardware.close()
"""


def test_segments_that_grow_add_up_too() -> None:
    """With ``expandable_segments`` only what is mapped is a segment."""
    out = run_python(
        "import os; os.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'expandable_segments:True'\n" + ADDS_UP
    )

    assert out.splitlines() == ["native True", "True True", "()"]


def test_an_allocator_that_keeps_no_blocks_is_no_failure() -> None:
    """CUDA's own asynchronous one tells what it has, but not its blocks: there is a note."""
    out = run_python(
        "import os; os.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'backend:cudaMallocAsync'\n" + ADDS_UP
    )

    backend, sums, notes = out.splitlines()
    assert backend == "cudaMallocAsync False"
    assert sums == "False False"
    assert "the allocator's blocks" in notes


@pytest.mark.parametrize(
    "source",
    ["torch.empty(100 << 20, dtype=torch.uint8, pin_memory=True)", "torch.ones(9999).pin_memory()"],
)
def test_pinned_memory_is_not_mallocs(source: str, notebook: Notebook) -> None:  # noqa: F811
    """However it was made: it is told beside what malloc has handed out, as no part of it."""
    notebook.run(f"import torch\nstaging = {source}")

    account = take_account(notebook)

    host = next(each for each in account.devices if each.device == "host")
    n_bytes = notebook.ip.user_ns["staging"].untyped_storage().nbytes()
    assert [each for each in host.owned if each.owner == "staging"] == []
    assert AccountNote("host", n_bytes, MemorySource.PINNED) in account.notes
