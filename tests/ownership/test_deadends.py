"""What a walk leaves out leads nowhere, and what leads to memory is marked so."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpumemwidget.ownership.graph.hidden_holders import HiddenHolders
from gpumemwidget.ownership.graph.kinds import KindFinder
from gpumemwidget.ownership.graph.torch_reader import TorchReader
from gpumemwidget.ownership.graph.walk import DeadEnds, flag_reaching


@pytest.fixture
def finder() -> KindFinder:
    return KindFinder(TorchReader(torch), HiddenHolders(torch))


@pytest.fixture
def dead_ends(finder: KindFinder) -> DeadEnds:
    return DeadEnds(finder, HiddenHolders(torch))


def _nest(value: object, n_levels: int) -> object:
    for _ in range(n_levels):
        value = [value]
    return value


_LEADS: dict[str, Callable[[], object]] = {
    "a tensor": lambda: {"logits": torch.ones(1)},
    "a tensor below": lambda: [{"a": [torch.ones(1)]}],
    "an array": lambda: [np.empty(1, dtype=object)],
    "a function": lambda: [lambda: 0],
    "a module": lambda: [torch.nn.Identity()],
    "more levels than are asked about": lambda: _nest([], 10),
}


@pytest.mark.parametrize("case", _LEADS)
def test_what_may_lead_on_is_never_left_out(dead_ends: DeadEnds, case: str) -> None:
    """Whatever stands beside it; that is still found."""
    target = _LEADS[case]()
    first: list[object] = [[number] for number in range(7)]
    last: list[object] = [{} for _ in range(5)]

    found = dead_ends.find([*first, target, *last])

    assert found == {id(each) for each in (*first, *last)}


@given(
    st.integers(1, 30).flatmap(
        lambda n: st.tuples(
            st.lists(st.lists(st.integers(0, n - 1), max_size=4), min_size=n, max_size=n),
            st.sets(st.integers(0, n - 1)),
        )
    )
)
def test_what_leads_to_an_end_is_marked(graph: tuple[list[list[int]], set[int]]) -> None:
    """As if each place were followed by itself, in any order and with any cycles."""
    edges, ends = graph

    marked = flag_reaching(edges, ends)

    assert [bool(each) for each in marked] == [
        not ends.isdisjoint(_reach(edges, place)) for place in range(len(edges))
    ]


def _reach(edges: list[list[int]], place: int) -> set[int]:
    reached, pending = {place}, [place]
    while pending:
        new = set(edges[pending.pop()]) - reached
        reached |= new
        pending.extend(new)
    return reached
