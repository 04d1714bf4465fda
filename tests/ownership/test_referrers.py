"""Who refers to an object: what the search itself makes is no holder."""

from __future__ import annotations

import gc
import sys

from gpumemwidget.ownership.graph.objects import list_referrers


class _Box:
    def __init__(self, content: object) -> None:
        self.content = [content]


def test_the_searchs_own_arguments_are_no_holder() -> None:
    """Only what was there before is found, on every Python."""
    target = _Box(None)
    held = (target, 1)
    frame = sys._getframe()

    found = [each for each in list_referrers([target, target.content]) if each is not frame]

    assert [each for each in found if type(each) is tuple] == [held]


def test_a_tuple_that_something_holds_is_a_holder() -> None:
    """A tuple in a list is found like any other."""
    target = _Box(None)
    kept = [(target,), (target, 2)]
    gc.collect()

    found = list_referrers([target])

    assert {id(each) for each in kept} <= {id(each) for each in found}
