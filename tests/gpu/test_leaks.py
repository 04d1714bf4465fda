"""Growth on a GPU: both collections of programs, with the GPU's own counters."""

from __future__ import annotations

import textwrap

import pytest

from tests.leaks.play import play
from tests.leaks.programs import CLEAN, LEAKS, Leak, Program, order_cells
from tests.leaks.test_collections import UNSEEN, is_right

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

#: Leaks that are told without the right line, and why.
_INEXACT = {
    "adapters_wrapped_again_and_again": "the backward pass is told, which makes the gradients",
    "displayed_loss_keeps_the_old_model": "the line of the loss is told, not the model's",
    "history_of_losses_with_models_made_anew": "the line of the loss is told, not the model's",
}
_COLLECTS = Program(
    name="features_collected_without_a_limit",
    runs=order_cells(
        textwrap.dedent("""
        import torch
        from torch import nn

        model = nn.Linear(512, 512).to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        # %%
        features = []
        for step in range(200):
            x = torch.randn(1024, 512, device=DEVICE)
            out = model(x)
            loss = (out - x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            features.append(out.detach())
        """),
        "1 2",
    ),
)


@pytest.mark.parametrize("program", CLEAN, ids=lambda program: program.name)
def test_a_clean_program_is_not_told_of(program: Program) -> None:
    """Neither of the GPU nor of the host."""
    assert play(program, "cuda") == []


@pytest.mark.parametrize("leak", LEAKS, ids=lambda leak: leak.name)
def test_a_leak_is_told_with_its_line_and_its_holder(leak: Leak) -> None:
    """By the fourth run, or within the cell whose loop it is."""
    found = play(leak, "cuda")

    if leak.name in UNSEEN:
        assert found == []
    elif leak.name in _INEXACT:
        assert {f"{each.leak.unit}s" for each in found} == {leak.found_by}
    else:
        assert any(is_right(each, leak) and each.leak.device == "cuda:0" for each in found), found


@pytest.mark.parametrize(("limit", "holders"), [("", []), ("1GiB", ["features[…]"])])
def test_plain_tensors_of_a_loop_are_told_once_they_fill_a_tenth(
    limit: str, holders: list[str]
) -> None:
    """Of the GPU, or of its limit: 400 MiB are more than a tenth of 1 GiB, and of no GPU."""
    found = play(_COLLECTS, "cuda", limit=limit)

    assert [each.leak.holders[0].path for each in found] == holders
