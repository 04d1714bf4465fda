"""Moving in place, proved on the host: a copy of the memory in the stead of the old one.

Where the old memory lies makes no difference to the moving, so it is tested without a GPU; that a
GPU's memory goes is tested in ``tests/gpu/test_release.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpumemwidget.owners.account import Account, take_account
from gpumemwidget.owners.moves import Move, carry_out, find_move, find_outside
from tests.owners.notebook import Notebook, Tracker


def _find(notebook: Notebook, *, dropped: str = "") -> tuple[Account, list[Move]]:
    account = take_account(notebook.shell, budget_s=10.0)
    assert account is not None
    places = sorted(account.graph.storages)
    outside = find_outside(account, places)
    marks = account.rows[dropped].frees_marks if dropped else 0
    return account, [find_move(account, each, dropped=marks, outside=outside) for each in places]


def _move_all(notebook: Notebook) -> None:
    account, moves = _find(notebook)
    assert [move.obstacle for move in moves] == [None] * len(moves)
    carry_out(account, moves)


def test_views_and_ties_stay(notebook: Notebook) -> None:
    """Views still show the base, tied weights are one storage, and the old storages are gone."""
    tracker = Tracker()
    base = tracker.track(torch.arange(12.0).reshape(3, 4))
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[1].weight = model[0].weight
    for parameter in model.parameters():
        tracker.track(parameter)
    notebook.put(base=base, part=base[1:, ::2], flipped=base.t(), model=model)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    parameters = list(model.parameters())

    _move_all(notebook)

    part, flipped = notebook.ip.user_ns["part"], notebook.ip.user_ns["flipped"]
    assert tracker.count_bytes() == 0
    assert part.tolist() == [[4.0, 6.0], [8.0, 10.0]]
    base[2, 2] = 100.0
    assert (part[1, 1].item(), flipped[2, 2].item()) == (100.0, 100.0)
    assert part.stride() == (4, 2)
    assert flipped.stride() == (1, 4)
    assert model[1].weight is model[0].weight
    assert [a is b for a, b in zip(parameters, model.parameters(), strict=True)] == [True] * 3
    assert all(torch.equal(before[name], value) for name, value in model.named_parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_an_optimizer_goes_on_after_the_move(notebook: Notebook) -> None:
    """Gradients, moments and parameters move together: the next step is what it would have been."""

    def train(model: torch.nn.Module, optimizer: Any, n_steps: int) -> None:
        for _ in range(n_steps):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()

    models = []
    for _ in range(2):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3)
        optimizer = torch.optim.AdamW(model.parameters())
        train(model, optimizer, 2)
        models.append((model, optimizer))
    tracker = Tracker()
    for state in models[0][1].state.values():
        for value in state.values():
            tracker.track(value)
    for parameter in models[0][0].parameters():
        tracker.track(parameter)
        tracker.track(parameter.grad)
    notebook.put(model=models[0][0], opt=models[0][1])

    _move_all(notebook)
    left = tracker.count_bytes()
    for model, optimizer in models:
        train(model, optimizer, 2)

    assert left == 0
    for mine, others in zip(models[0][0].parameters(), models[1][0].parameters(), strict=True):
        assert torch.equal(mine, others)


def test_lazily_conjugated_and_negated_tensors_keep_their_values(notebook: Notebook) -> None:
    """A conjugate that was never computed is a bit on the tensor, and the bit goes along."""
    base = torch.tensor([1 + 2j, 3 - 4j])
    negated = torch._neg_view(base)
    notebook.put(base=base, conj=base.conj(), neg=negated)
    del negated

    _move_all(notebook)

    assert notebook.ip.user_ns["conj"].tolist() == [1 - 2j, 3 + 4j]
    assert notebook.ip.user_ns["neg"].tolist() == [-1 - 2j, -3 + 4j]
    assert base.tolist() == [1 + 2j, 3 - 4j]


def test_tensors_that_no_name_leads_to_are_found(notebook: Notebook) -> None:
    """A view that only a library's table holds is moved along, or the old memory would stay."""
    tracker = Tracker()
    tensor = tracker.make(10)
    notebook.elsewhere.append(tensor[5:])
    notebook.put(x=tensor)

    _move_all(notebook)
    tensor[5] = 7.0

    assert tracker.count_bytes() == 0
    assert notebook.elsewhere[0][0].item() == 7.0  # type: ignore[index]


def test_what_dies_with_the_names_is_not_moved(notebook: Notebook) -> None:
    """Of two tensors on a storage only the one that somebody keeps gets the copy."""
    tensor = torch.ones(10)
    notebook.put(x=tensor, y=tensor.detach())
    del tensor

    _, (move,) = _find(notebook, dropped="x")

    assert [id(each) for each in move.tensors] == [id(notebook.ip.user_ns["y"])]


@pytest.mark.parametrize(
    ("source", "obstacle"),
    [
        ("x = torch.ones(5, requires_grad=True) * 2", "it is part of a computation"),
        (
            "x = torch.ones(5, requires_grad=True); y = x * x; del x",
            "a computation saved it for backward",
        ),
        ("x = torch.ones(5).to_sparse()", "a sparse, quantised, nested or named tensor"),
        (
            "from torch.testing._internal.two_tensor import TwoTensor\n"
            "x = TwoTensor(torch.ones(5), torch.ones(5)).view(5)",
            None,
        ),
    ],
)
def test_what_cannot_be_moved_says_why(
    notebook: Notebook, source: str, obstacle: str | None
) -> None:
    """A tensor in a live graph would break it, and a sparse one has no storage to swap."""
    notebook.run(f"import torch\n{source}")

    _, moves = _find(notebook)

    found = [move.obstacle for move in moves if move.obstacle]
    if obstacle is None:
        assert found == []
    else:
        assert any(each.startswith(obstacle) for each in found)


def test_a_failed_move_is_undone(notebook: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the second storage can't be copied the first is back where it was."""
    first, second = torch.ones(10), torch.zeros(20)
    addresses = [first.data_ptr(), second.data_ptr()]
    notebook.put(a=first, b=second)
    account, moves = _find(notebook)
    clone = torch.UntypedStorage.clone

    def clone_small(storage: Any) -> Any:
        if storage.nbytes() > 50:
            raise RuntimeError("out of memory")
        return clone(storage)

    monkeypatch.setattr(torch.UntypedStorage, "clone", clone_small)

    with pytest.raises(RuntimeError, match="out of memory"):
        carry_out(account, moves)

    assert [first.data_ptr(), second.data_ptr()] == addresses
