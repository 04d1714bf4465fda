"""What is said to cut a path does so when it is typed as it stands."""

from __future__ import annotations

import gc

import pytest
import torch

from gpumemwidget.ownership.why import explain
from gpumemwidget.report.why import word_fix
from tests.ownership.notebook import Notebook, Tracker

_SETUP = "import collections, dataclasses, functools, torch"
_NAMED = "x = collections.namedtuple('P', 'u v')(make(9), None)"
_FROZEN = "x = [dataclasses.make_dataclass('F', ['w'], frozen=True)(make(9))]"
_CACHE = "@functools.lru_cache\ndef x(n): return make(n)\ny = x(9); del y"
_GENERATOR = "def run():\n    held = make(9)\n    yield\nx = run(); next(x)"


@pytest.mark.parametrize(
    ("cell", "path", "cut"),
    [
        ("x = {'a': [make(9)]}", 'x["a"][0]', 'del x["a"][0]'),
        ("x = {'a': (1, (make(9),))}", 'x["a"][1][0]', 'del x["a"]'),
        ("x = [frozenset([make(9)])]", "x[0][…]", "del x[0]"),
        (_NAMED.replace("x =", "x = {}; x['k'] ="), 'x["k"].u', 'del x["k"]'),
        (_FROZEN, "x[0].w", "del x[0]"),
        ("x = [functools.partial(print, make(9))]", "x[0].args[0]", "del x[0]"),
        ("x = torch.nn.Linear(1, 1); x.kept = make(9)", "x.kept", "del x.kept"),
        (_CACHE, "x's cache", "x.cache_clear()"),
        (_GENERATOR, "x: run() line 3: held", "x.close()"),
    ],
)
def test_a_cut_that_is_typed(
    notebook: Notebook, tracker: Tracker, cell: str, path: str, cut: str
) -> None:
    """It goes through, and the memory goes."""
    notebook.run(_SETUP)
    notebook.run(cell)
    notebook.run("None")
    assert tracker.count_bytes() == 36

    explanation = explain(notebook.shell, path)
    told = {each.path: word_fix(each.fix).text for each in explanation.holders}
    result = notebook.ip.run_cell(told[path])
    gc.collect()

    assert told == {path: cut}
    assert result.success
    assert tracker.count_bytes() == 0


def test_a_tuple_under_a_name_goes_with_its_name(notebook: Notebook) -> None:
    """There is nothing smaller that can be taken away."""
    notebook.put(x=(torch.ones(9),))

    (holder,) = explain(notebook.shell, "x[0]").holders

    assert (holder.path, word_fix(holder.fix).text) == ("x[0]", "%memrelease x")
