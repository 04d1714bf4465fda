"""Sums of gradients in dry runs, in place where autograd adds them up in place."""

from __future__ import annotations

import torch
from torch import nn

from gpumemwidget.prediction.dry.dry_run import carry_out
from gpumemwidget.prediction.operations import DryRun, Operation


def _list_sums(run: DryRun) -> list[Operation]:
    return [
        each
        for each in run.operations
        if each.name == "aten::add.Tensor" and each.phase == "backward"
    ]


def test_a_sum_of_gradients_takes_the_memory_of_the_first() -> None:
    """Two products lead to one activation: their gradients take no third tensor."""
    weight = nn.Parameter(torch.randn(1024, 1024))

    def step(x: torch.Tensor) -> None:
        y = x * weight
        (y.exp() + y.exp()).sum().backward()

    run = carry_out(step, (torch.randn(1024, 1024),), steps=1)

    (total,) = _list_sums(run)
    assert total.allocated == ()
    assert total.results[0].storage == total.arguments[0].storage  # type: ignore[union-attr]


def test_every_storage_is_freed_once() -> None:
    """The storage of a sum is freed where the sum was, not where its first part was."""
    weight = nn.Parameter(torch.randn(64, 64))

    def step(x: torch.Tensor) -> None:
        y = x * weight
        (y.sigmoid() + y.tanh() + y.exp()).sum().backward()
        weight.grad = None

    run = carry_out(step, (torch.randn(64, 64),), steps=2)

    freed = [storage for each in run.operations for storage in each.freed] + list(run.freed_last)
    allocated = [use.storage for each in run.operations for use in each.allocated]
    assert len(_list_sums(run)) == 4
    assert len(freed) == len(set(freed))
    assert set(freed) <= set(allocated)


def test_a_sum_that_begins_with_a_view_takes_new_memory() -> None:
    """The gradient of a tied weight is a transposed product first: autograd leaves it as it is."""
    weight = nn.Parameter(torch.randn(50, 8))

    def step(ids: torch.Tensor) -> None:
        hidden = nn.functional.embedding(ids, weight)
        nn.functional.linear(hidden, weight).sum().backward()

    run = carry_out(step, (torch.randint(50, (4,)),), steps=1)

    (total,) = _list_sums(run)
    assert [use.n_bytes for use in total.allocated] == [50 * 8 * 4]


def test_a_sum_of_the_users_own_takes_new_memory() -> None:
    """What is added in forward is left as it is."""

    def step(x: torch.Tensor) -> None:
        del x
        torch.randn(8, device="cuda") + torch.randn(8, device="cuda")

    carry_out(step, (torch.randn(8),), steps=1)
