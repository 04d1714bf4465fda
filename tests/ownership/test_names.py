"""Which name leads to each of the allocator's blocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gpumemwidget.model.devices import HOST, Block, Segment
from gpumemwidget.model.ownership import BlockNames
from gpumemwidget.ownership.account import take_block_account
from tests.ownership.notebook import Notebook

_STEP = """
import torch
model = torch.nn.Linear(64, 32)
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
x = torch.ones(16, 64)
model(x).sum().backward()
opt.step()
hidden = torch.ones(16, 16, requires_grad=True)
loss = hidden.exp().sum()
"""


def _make_hardware(*addresses: int, is_private: bool = False) -> Any:
    """An allocator whose blocks begin at these addresses of the host's memory, 64 bytes each."""
    segments = [
        Segment(
            device=HOST,
            address=address,
            n_bytes=128,
            is_private=is_private,
            pool_id=(3, 0) if is_private else (0, 0),
            blocks=(
                Block(address, 64, 64, "active_allocated"),
                Block(address + 64, 64, None, "inactive"),
            ),
        )
        for address in addresses
    ]
    return SimpleNamespace(read_segments=lambda: tuple(segments), read_exact=tuple)


def _name(notebook: Notebook, *addresses: int, budget_s: float = 10.0) -> BlockNames:
    hardware = _make_hardware(*addresses)
    return take_block_account(notebook.shell, hardware, budget_s=budget_s)[1][HOST]


@pytest.mark.saved_tensors
def test_a_step_of_training(notebook: Notebook) -> None:
    """Each block has what it is for, and the path that a person would type."""
    notebook.run(_STEP)
    names = notebook.ip.user_ns
    weight = names["model"].weight
    blocks = {
        "weight": weight.data_ptr(),
        "grad": weight.grad.data_ptr(),
        "state": names["opt"].state[weight]["momentum_buffer"].data_ptr(),
        "x": names["x"].data_ptr(),
        "saved": names["loss"].grad_fn.next_functions[0][0]._raw_saved_result.data.data_ptr(),
    }

    named = _name(notebook, *blocks.values())

    assert {word: named[address] for word, address in blocks.items()} == {
        "weight": ("parameter", "model.weight"),
        "grad": ("gradient", "model.weight.grad"),
        "state": ("optimizer state", 'opt.state[model.weight]["momentum_buffer"]'),
        "x": ("tensor", "x"),
        "saved": ("saved for backward", "loss's graph: saved by ExpBackward0"),
    }
    assert set(named) == set(blocks.values())


def test_blocks_that_no_storage_claims(notebook: Notebook) -> None:
    """They are told by their pool; what is free has no entry."""
    notebook.run("import torch")
    address = 1 << 45

    common = _name(notebook, address)
    hardware = _make_hardware(address, is_private=True)
    private = take_block_account(notebook.shell, hardware, budget_s=1.0)[1][HOST]

    assert common == {address: ("unknown", "")}
    assert private == {address: ("CUDA-graph pool", "")}
