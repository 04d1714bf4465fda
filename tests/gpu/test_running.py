"""The account within an allocation that fails on a real GPU, and the names of its blocks."""

from __future__ import annotations

import pytest
import torch

from gpumemwidget.backends.cuda.oom_observer import OomMoment, OomObserver
from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.model.ownership import MemoryAccount
from gpumemwidget.ownership.account import take_block_account, take_running_account
from tests.ownership.notebook import Notebook

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]

_MODEL = """
import torch
layer = torch.nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
model = torch.nn.TransformerEncoder(layer, 12, enable_nested_tensor=False).cuda()
optimizer = torch.optim.AdamW(model.parameters())
def step(batch):
    loss = model(batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
step(torch.randn(8, 128, 512, device="cuda"))
class Boom(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1
    @staticmethod
    def backward(ctx, grad):
        scratch = torch.ones(3_000_017, device="cuda")
        torch.empty(1 << 43, dtype=torch.uint8, device="cuda")
"""


def _list_blocks(hardware: Hardware) -> dict[int, int]:
    """Bytes of all allocated blocks, by their addresses."""
    return {
        block.address: block.n_bytes
        for segment in hardware.read_segments()
        for block in segment.blocks
        if block.state == "active_allocated"
    }


def test_an_oom_in_a_backward(notebook: Notebook, hardware: Hardware) -> None:
    """On autograd's own thread, with the graph still standing; nothing is allocated meanwhile."""
    seen: list[MemoryAccount] = []
    failures: list[Exception] = []

    def look(moment: OomMoment) -> None:
        before = torch.cuda.memory_stats(0)
        account = take_running_account(notebook.shell, hardware, moment.device, budget_s=0.7)
        assert torch.cuda.memory_stats(0) == before
        seen.append(account)

    notebook.run(_MODEL)
    observer = OomObserver(look, lambda _, exc: failures.append(exc))
    observer.open()
    notebook.run(
        "def train(batch):\n"
        "    loss = Boom.apply(model(batch)).square().mean()\n"
        "    loss.backward()\n"
        "train(torch.randn(8, 128, 512, device='cuda'))"
    )
    observer.close()

    assert failures == []
    error = notebook.ip.last_execution_result.error_in_exec
    assert isinstance(error, torch.cuda.OutOfMemoryError)
    (account,) = seen
    (device,) = account.devices
    assert account.is_complete
    assert sum(each.n_bytes for each in device.owned) == device.allocated_bytes
    owners = {each.owner for each in device.owned}
    assert any(each.startswith("running: backward() line ") for each in owners)
    saved = [each for each in device.owned if each.kind == "saved for backward"]
    assert sum(each.n_bytes for each in saved) > 100 << 20
    assert any(each.root == "thread" for each in saved)
    assert dict(device.sum_kinds()).get("unknown", 0) < (device.allocated_bytes or 0) // 20


def test_each_block_has_its_name(notebook: Notebook, hardware: Hardware) -> None:
    """After a step: all blocks are there, and all that is in them has a path."""
    before = _list_blocks(hardware)
    notebook.run(_MODEL)
    notebook.run("loss = model(torch.randn(8, 128, 512, device='cuda')).square().mean()")
    blocks = _list_blocks(hardware)

    names = take_block_account(notebook.shell, hardware, budget_s=10.0)[1]["cuda:0"]

    assert names.keys() == blocks.keys()
    assert sum(blocks.values()) == torch.cuda.memory_allocated(0)
    for address, (kind, path) in names.items():
        # What an earlier test has left behind in C++ has none.
        assert path or kind == "cuBLAS workspace" or address in before
    weight = notebook.ip.user_ns["model"].layers[3].linear1.weight
    assert names[weight.data_ptr()] == ("parameter", "model.layers[3].linear1.weight")
    assert names[weight.grad.data_ptr()] == ("gradient", "model.layers[3].linear1.weight.grad")
