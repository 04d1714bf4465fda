"""The account of owners: every byte once, under the path that a person would type."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from gpumemwidget.model.devices import HOST, Block, Segment
from gpumemwidget.model.ownership import BlockNames, MemoryAccount, Owned
from gpumemwidget.ownership.account import take_block_account, take_memory_account
from gpumemwidget.ownership.graph.walk import Graph
from tests.ownership.notebook import Notebook

#: Each test's tensors have their own number of elements, so that a line is found by its bytes.
_MODEL = """
import torch
from torch import nn
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(31, 41)
        self.register_buffer("mask", torch.ones(43))
model = nn.Module()
model.layers = nn.ModuleList([Block(), Block()])
model.heads = nn.ModuleDict({"out": nn.Linear(37, 47)})
"""


def _take(notebook: Notebook) -> MemoryAccount:
    return take_memory_account(notebook.shell, notebook.hardware)


def _list_lines(notebook: Notebook, n_elements: int) -> list[Owned]:
    """The account's lines of float32 tensors with so many elements."""
    (device,) = _take(notebook).devices
    return [
        each for each in device.owned if each.n_bytes == 4 * n_elements and each.kind != "other"
    ]


def _find_owner(notebook: Notebook, n_elements: int) -> str:
    (line,) = _list_lines(notebook, n_elements)
    return line.owner


def test_the_account_holds_nothing(notebook: Notebook) -> None:
    """After the account nothing of the walk is left, without a collection."""
    notebook.run("import torch; x = torch.ones(1001)")
    watch = weakref.ref(notebook.ip.user_ns["x"])
    gc.collect()
    gc.disable()
    try:
        account = _take(notebook)

        notebook.ip.user_ns["x"] = None
        graphs = [each for each in gc.get_objects() if type(each) is Graph]

        assert watch() is None
        assert graphs == []
        assert account.is_complete
    finally:
        gc.enable()


class TestModels:
    """Parameters, buffers, gradients and the state of optimizers."""

    def test_parameters_and_buffers(self, notebook: Notebook) -> None:
        """A parameter's path goes through the attributes, indices and keys of its modules."""
        notebook.run(_MODEL)

        owners = {each.owner: each.kind for n in (31 * 41, 43) for each in _list_lines(notebook, n)}

        assert owners == {
            "model.layers[0].fc.weight": "parameter",
            "model.layers[1].fc.weight": "parameter",
            "model.layers[0].mask": "buffer",
            "model.layers[1].mask": "buffer",
        }
        assert _find_owner(notebook, 37 * 47) == 'model.heads["out"].weight'

    def test_a_state_dict_does_not_take_the_parameters(self, notebook: Notebook) -> None:
        """A parameter is its module's, though a state dict or a name of its own leads to it."""
        notebook.run(_MODEL)
        notebook.run("a_state = model.state_dict(); w = model.layers[0].fc.weight")

        owners = {each.owner for each in _list_lines(notebook, 31 * 41)}

        assert owners == {"model.layers[0].fc.weight", "model.layers[1].fc.weight"}

    def test_tensors_as_keys(self, notebook: Notebook) -> None:
        """A dictionary whose keys are the only holders of tensors."""
        notebook.run("import torch; names = {torch.ones(3011): 'a'}")

        assert _find_owner(notebook, 3011) == "names's key"


class TestGraphs:
    """What autograd saved."""

    def test_a_named_tensor_is_its_own_although_it_was_saved(self, notebook: Notebook) -> None:
        """A name comes before the graph that saved the same tensor."""
        notebook.run("import torch; w = torch.ones(2011, requires_grad=True); loss = (w * w).sum()")

        (line,) = _list_lines(notebook, 2011)

        assert (line.owner, line.kind, set(line.rows)) == ("w", "tensor", {"w", "loss"})


#: What the zoo and the hostile objects have not.
_HOLDERS = {
    "attribute of a tensor": ("h = torch.ones(3); h.extra = torch.ones(N)", "h.extra"),
    "keyword default": ("def h(*, y=torch.ones(N)): pass", "h's default: y"),
    "generator with a cell": (
        "def gen():\n    batch = torch.ones(N)\n    f = lambda: batch\n    yield 1\n"
        "h = gen(); next(h)",
        "h: gen() line 4: batch",
    ),
    "results of an operation": ("h = (5, torch.rand(N).sort())", "h[1][0]"),
}


class TestPaths:
    """What a person would type."""

    @pytest.mark.parametrize("case", _HOLDERS)
    def test_what_a_person_would_type(self, notebook: Notebook, case: str) -> None:
        """Each way of holding a tensor has a path of its own."""
        source, path = _HOLDERS[case]
        notebook.run("import torch")

        notebook.run(source.replace("N", "4001"))

        assert _find_owner(notebook, 4001) == path

    def test_an_exceptions_own_traceback_comes_before_its_cause(
        self, notebook: Notebook, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A frame of both is told by the exception's own line; others by the cause."""
        notebook.run(
            "import torch\n"
            "def inner():\n    deep = torch.ones(4013)\n    raise ValueError\n"
            "def train():\n    batch = torch.ones(4019)\n    try:\n        inner()\n"
            "    except ValueError as error:\n        raise RuntimeError from error\n"
            "train()"
        )
        capsys.readouterr()

        assert _find_owner(notebook, 4019) == "last exception: train() line 10: batch"
        assert _find_owner(notebook, 4013) == "last exception (its cause): inner() line 4: deep"


class TestNoName:
    """What no name leads to."""

    def test_rubbish(self, notebook: Notebook) -> None:
        """A cycle that nobody holds is called what it is."""
        notebook.run("import torch, gc; gc.collect(); gc.disable()")
        notebook.run("class C: pass\nc = C(); c.me = c; c.t = torch.ones(5011); del c")
        try:
            (line,) = _list_lines(notebook, 5011)
        finally:
            gc.enable()

        assert line.owner == "rubbish (gc.collect() frees it): C"
        assert line.root == "nowhere"


# -- The names of the allocator's blocks -----------------------------------------------------------

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
