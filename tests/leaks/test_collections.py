"""Both collections: no clean program is reported, each leak is, with its line and its holder."""

from __future__ import annotations

import textwrap
from collections import Counter

import pytest

from tests.leaks.play import Found, play
from tests.leaks.programs import CLEAN, LEAKS, Leak, Program, order_cells

pytestmark = pytest.mark.slow

_on_each_device = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
)
#: Leaks that are reported without the right line, or without the right holder, and why.
_INEXACT = {
    "cpu": {
        "displayed_loss_keeps_the_old_model": "the line that made the model is not reported",
    },
    "cuda": {
        "adapters_wrapped_again_and_again": "the backward pass is, which makes the gradients",
        "displayed_loss_keeps_the_old_model": "the line of the loss is, not the model's",
        "history_of_losses_with_models_made_anew": "the line of the loss is, not the model's",
    },
}
#: Leaks that may be reported without a line: several lines have added a part each.
_MAY_LACK_LINE = frozenset(
    {
        "adapters_wrapped_again_and_again",
        "contexts_of_a_custom_function",
        "dice_score_summed_up_with_its_graph",
        "exceptions_kept_with_tracebacks",
        "experiments_in_a_dict",
        "hook_registered_in_each_run",
        "losses_appended_with_their_graphs",
    }
)


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


def _is_right(found: Found, leak: Leak) -> bool:
    """Return whether a leak is what was seeded, in time, with its holder and its line."""
    told = found.leak
    return (
        f"{told.unit}s" == leak.found_by
        and (told.unit == "step" or found.run <= 4)
        and any(leak.holder in holder.path for holder in told.holders)
        and (leak.name in _MAY_LACK_LINE if told.line is None else told.line.text in leak.lines)
    )


def test_there_are_enough_of_each_kind() -> None:
    """28 clean programs, 10 leaks over runs and 12 within a loop, each of a name of its own."""
    names = [program.name for program in (*CLEAN, *LEAKS)]
    kinds = Counter(leak.found_by for leak in LEAKS)

    assert len(CLEAN) >= 28
    assert kinds["runs"] >= 10
    assert kinds["steps"] >= 12
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("leak", LEAKS, ids=lambda leak: leak.name)
def test_lines_of_leaks_stand_in_their_cells(leak: Leak) -> None:
    """Each is a whole line of a cell, without its indentation."""
    lines = {line.strip() for cell in leak.runs for line in cell.splitlines()}

    assert set(leak.lines) <= lines
    assert leak.runs.count(leak.grown) >= (4 if leak.found_by == "runs" else 1)


@_on_each_device
@pytest.mark.parametrize("program", CLEAN, ids=lambda program: program.name)
def test_a_clean_program_is_not_reported(program: Program, device: str) -> None:
    """Neither of the GPU nor of the host, whatever it looks like."""
    assert play(program, device) == []


@_on_each_device
@pytest.mark.parametrize("leak", LEAKS, ids=lambda leak: leak.name)
def test_a_leak_is_reported_with_its_line_and_its_holder(leak: Leak, device: str) -> None:
    """By the fourth run, or within the cell whose loop it is."""
    found = play(leak, device)

    if leak.unseen:
        assert found == []
    elif leak.name in _INEXACT[device]:
        assert {f"{each.leak.unit}s" for each in found} == {leak.found_by}
    else:
        name = "host" if device == "cpu" else "cuda:0"
        assert any(_is_right(each, leak) and each.leak.device == name for each in found), found


@pytest.mark.gpu
@pytest.mark.parametrize(("limit", "holders"), [("", []), ("1GiB", ["features[…]"])])
def test_plain_tensors_of_a_loop_are_reported_once_they_fill_a_tenth(
    limit: str, holders: list[str]
) -> None:
    """Of the GPU, or of its limit: 400 MiB are more than a tenth of 1 GiB, and of no GPU."""
    found = play(_COLLECTS, "cuda", limit=limit)

    assert [each.leak.holders[0].path for each in found] == holders
