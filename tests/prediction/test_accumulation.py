"""Sums of gradients in dry runs, in place where autograd adds them up in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gpumemwidget.allocator.caching import CachingAllocator
from gpumemwidget.prediction.dry.dry_run import carry_out
from gpumemwidget.prediction.forecast import simulate
from gpumemwidget.prediction.operations import DryRun
from gpumemwidget.prediction.plans import H200
from gpumemwidget.prediction.workspaces import plan_operation


def _count_sums(run: DryRun) -> int:
    return sum(
        each.name == "aten::add.Tensor" and each.phase == "backward" for each in run.operations
    )


def _measure(run: DryRun) -> tuple[int, int]:
    """Return the peak of a run, and what is allocated at its end, in bytes."""
    allocator = CachingAllocator(1 << 40)
    plans = [plan_operation(each, H200) for each in run.operations]
    simulation = simulate(run, allocator, plans)
    return simulation.allocated_peak_bytes, allocator.allocated_bytes


def _add_gradients(x: torch.Tensor, weight: Any) -> None:
    y = x * weight
    (y.sigmoid() + y.tanh() + y.exp()).sum().backward()
    weight.grad = None


def test_a_sum_of_gradients_takes_the_memory_of_the_first() -> None:
    """Two products lead to one activation: their gradients take no third tensor."""
    weight = nn.Parameter(torch.randn(1024, 1024))

    def step(x: torch.Tensor) -> None:
        y = x * weight
        (y.exp() + y.exp()).sum().backward()

    run = carry_out(step, (torch.randn(1024, 1024),), steps=1)

    assert len(run.sums_in_place) == _count_sums(run) == 1


def test_what_sums_took_is_freed() -> None:
    """The memory of a sum is freed where the sum was, not where its first part was."""
    weight = nn.Parameter(torch.randn(64, 64))

    once, twice = [
        carry_out(_add_gradients, (torch.randn(64, 64), weight), steps=n_steps)
        for n_steps in (1, 2)
    ]

    assert len(once.sums_in_place) == 2
    assert len(twice.sums_in_place) == _count_sums(twice) == 4
    assert _measure(once) == _measure(twice)


def test_a_sum_that_begins_with_a_view_takes_new_memory() -> None:
    """The gradient of a tied weight is a transposed product first: autograd leaves it as it is."""
    weight = nn.Parameter(torch.randn(50, 8))

    def step(ids: torch.Tensor) -> None:
        hidden = nn.functional.embedding(ids, weight)
        nn.functional.linear(hidden, weight).sum().backward()

    run = carry_out(step, (torch.randint(50, (4,)),), steps=1)

    assert _count_sums(run) == 1
    assert run.sums_in_place == frozenset()


def test_a_sum_of_the_users_own_takes_new_memory() -> None:
    """What is added in forward is left as it is."""
    run = carry_out(lambda x: (x + 1) + (x + 2), (torch.randn(8),), steps=1)

    assert run.sums_in_place == frozenset()
