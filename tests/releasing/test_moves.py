"""Moving in place, proved on the host: a copy of the memory in the stead of the old one.

Where the old memory lies makes no difference to the moving, so it is tested without a GPU; that a
GPU's memory goes is tested in ``tests/gpu/test_release.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpumemwidget.model.releases import Reason, ReasonKind
from gpumemwidget.ownership.holdings import Holdings, take_holdings
from gpumemwidget.ownership.partition import Move, find_moves
from gpumemwidget.releasing import storages
from gpumemwidget.releasing.storages import carry_out
from tests.ownership.notebook import Notebook, refuse_to_clone


def _find(notebook: Notebook, *, dropped: str = "") -> tuple[Holdings, list[Move]]:
    holdings = take_holdings(notebook.shell, budget_s=10.0)
    assert holdings is not None
    places = sorted(holdings.graph.storages)
    marks = holdings.rows[dropped].frees_marks if dropped else 0
    moves, _ = find_moves(holdings, [], places, {}, dropped=marks)
    return holdings, list(moves.values())


def _move_all(notebook: Notebook) -> None:
    holdings, moves = _find(notebook)
    assert [move.obstacle for move in moves] == [None] * len(moves)
    carry_out(holdings, moves)


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


@pytest.mark.parametrize(
    ("source", "obstacle"),
    [
        ("x = torch.ones(5, requires_grad=True) * 2", ReasonKind.COMPUTED),
        ("x = torch.ones(5, requires_grad=True); y = x * x; del x", ReasonKind.SAVED),
        ("x = torch.ones(5).to_sparse()", ReasonKind.IMMOVABLE),
        (
            "from torch.testing._internal.two_tensor import TwoTensor\n"
            "x = TwoTensor(torch.ones(5), torch.ones(5)).view(5)",
            ReasonKind.IMMOVABLE,
        ),
        ("x = torch.ones(5); s = x.untyped_storage()", ReasonKind.STORAGE_HELD),
        ("x = torch.ones(5); s = [x.storage()]", ReasonKind.STORAGE_HELD),
    ],
)
def test_what_cannot_be_moved_says_why(
    notebook: Notebook, source: str, obstacle: ReasonKind
) -> None:
    """Whoever could not follow the memory would be broken: a graph, a wrapper, a bare storage."""
    notebook.run(f"import torch\n{source}")

    _, moves = _find(notebook)

    assert Reason(obstacle) in [move.obstacle for move in moves]


@pytest.mark.parametrize("is_within", [True, False])
def test_inference_tensors_stay_what_they_are(notebook: Notebook, is_within: bool) -> None:
    """Neither kind becomes the other, whatever the mode: weights must still learn."""
    weight = torch.ones(4, requires_grad=True)
    with torch.inference_mode():
        cache = torch.ones(8)
    notebook.put(weight=weight, cache=cache)

    with torch.inference_mode(is_within):
        _move_all(notebook)

    assert (weight.is_inference(), cache.is_inference()) == (False, True)
    (weight * 3).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [3.0] * 4
    with torch.inference_mode():
        assert cache.add_(1).tolist() == [2.0] * 8


def test_a_move_that_is_interrupted_twice_is_undone_all_the_same(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second Ctrl-C while tensors are put back leaves none of them half-way."""
    first, second, third = torch.ones(10), torch.zeros(15), torch.zeros(20)
    addresses = [each.data_ptr() for each in (first, second, third)]
    notebook.put(a=first, b=second, c=third)
    holdings, moves = _find(notebook)
    failed = refuse_to_clone(monkeypatch, n_bytes=80, make_error=KeyboardInterrupt)
    mode_of = storages._mode_of
    interrupts = iter([KeyboardInterrupt, KeyboardInterrupt])

    def interrupt(torch_module: Any, tensor: Any) -> Any:
        if failed:
            for error in interrupts:
                raise error
        return mode_of(torch_module, tensor)

    monkeypatch.setattr(storages, "_mode_of", interrupt)

    with pytest.raises(KeyboardInterrupt):
        carry_out(holdings, moves)

    assert [each.data_ptr() for each in (first, second, third)] == addresses
    assert next(interrupts, None) is None
