"""Checks of growth and of peaks on a real GPU, in tests as a user writes them."""

from __future__ import annotations

import pytest
import torch

import gpumemwidget

# Imported here, they stay: what an inner run imports goes with it.
import gpumemwidget.leaks.survey
import gpumemwidget.report.leaks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]

_STEPS = 8


def train(model: torch.nn.Module, kept: list[torch.Tensor] | None) -> None:
    """Make steps, and keep their losses with their graphs if asked to."""
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(_STEPS):
        loss = model(torch.ones(1024, 1024, device="cuda")).relu().sum()
        optimizer.zero_grad()
        loss.backward(retain_graph=kept is not None)
        optimizer.step()
        if kept is not None:
            kept.append(loss)


def test_a_training_does_not_grow() -> None:
    """Workspaces, gradients and the optimizer's state come with the warm-ups."""
    model = torch.nn.Linear(1024, 1024, device="cuda")

    with gpumemwidget.assert_no_growth(0):
        train(model, None)


def test_kept_losses_are_told_with_their_graph() -> None:
    """The bytes of each step are the allocator's own, and the holder is the list."""
    model = torch.nn.Linear(1024, 1024, device="cuda")
    losses: list[torch.Tensor] = []

    with pytest.raises(AssertionError) as caught:  # noqa: SIM117
        with gpumemwidget.assert_no_growth("1MiB"):
            train(model, losses)

    lines = str(caught.value).splitlines()
    # The input and what relu saves are 4 MiB each, the loss takes 512 B.
    assert lines[0] == "cuda:0 grew by 48.00 MiB, and the limit is 1.00 MiB."
    assert lines[1].startswith("cuda:0 grows 8.00 MiB a step since step 2, for 6 steps: ")
    assert lines[1].endswith("losses[…]'s graph.")
    assert lines[2].startswith("Keep .item() or .detach() of it")
