"""A refusal holds nothing of what was walked, though IPython keeps its traceback."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest

from gpumemwidget.errors import BadInputError, GpuMemError
from gpumemwidget.owners.holdings import sum_frees
from gpumemwidget.owners.plan import plan_release
from gpumemwidget.owners.restore import plan_restore
from gpumemwidget.owners.walk import Graph
from gpumemwidget.owners.why import explain
from tests.owners.notebook import Notebook

_REFUSED: dict[str, Callable[[Notebook], object]] = {
    "a function": lambda nb: plan_release(nb.shell, nb.hardware, ["step"]),
    "a part that code would make": lambda nb: explain(nb.shell, nb.hardware, "x.part"),
    "a row that is gone": lambda nb: sum_frees(nb.shell, ["Out[99]"]),
    "nothing to restore": lambda nb: plan_restore(nb.shell, nb.hardware, ["nothing"]),
}


@pytest.mark.parametrize("case", _REFUSED)
def test_a_refusal_holds_nothing(notebook: Notebook, case: str) -> None:
    """No graph of a walk is alive while the refusal's traceback is."""
    notebook.run("import torch; x = torch.ones(1001)\ndef step(): pass")
    gc.collect()

    with pytest.raises(GpuMemError) as caught:
        _REFUSED[case](notebook)

    assert isinstance(caught.value, BadInputError)
    assert caught.value.__traceback__ is not None
    assert [each for each in gc.get_objects() if type(each) is Graph] == []
