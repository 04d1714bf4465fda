"""What counts as growth with the steps of a loop."""

from __future__ import annotations

import weakref

import pytest
import torch

from gpumemwidget.growth.levels import Levels
from gpumemwidget.growth.steps import Loop
from gpumemwidget.growth.survey import Group, Survey

_MIB = 1 << 20


def _survey(n_losses: int, state_mib: int, leaves: frozenset[int]) -> Survey:
    """Losses that wait with their graphs, two storages of a MiB each, and an optimizer's state."""
    losses = Group(
        "host", "waiting[…]", True, False, n_losses * 2 * _MIB, 2 * n_losses, _MIB, leaves=leaves
    )
    state = Group("host", "optimizer.state[…]", False, False, state_mib * _MIB, 8, _MIB)
    groups = {(each.device, each.holder): each for each in (losses, state)}
    return Survey(groups, is_complete=True)


@pytest.mark.parametrize(("n_first", "is_told"), [(10, False), (38, True)])
def test_growth_is_compared_with_what_was_held_since_it_began(n_first: int, is_told: bool) -> None:
    """Losses wait for the optimizer's next step: those before the last one are gone.

    An optimizer's state came with that step, and would count as growth since an earlier survey.
    """
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight])
    leaves = frozenset({id(weight)})
    levels = Levels()
    for step in range(1, 51):
        levels.add(step, 2 * _MIB * (step if step < 33 else step - 32))
    loop = Loop(
        optimizers={id(optimizer): weakref.ref(optimizer)},
        n_steps=50,
        levels={"host": levels},
        first=_survey(10 if n_first < 33 else n_first - 32, 0 if n_first < 33 else 12, leaves),
        n_first=n_first,
    )

    found = loop.compare(_survey(18, 12, leaves), lambda _: None)

    assert [gain.group.holder for _, gain in found] == ["waiting[…]"] * is_told
