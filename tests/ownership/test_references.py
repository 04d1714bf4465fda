"""What IPython holds, found and dropped."""

from __future__ import annotations

import gc

import pytest

from tests.ownership.notebook import Notebook, Tracker


def test_the_users_names(notebook: Notebook) -> None:
    """What a person bound is theirs, an underscore before it or not; the rest is IPython's."""
    notebook.run("import sys\nx = 1\n_y = 2\ndef f(): pass\n_, z = 3, 4")
    notebook.run("'shown'")

    assert sorted(notebook.shell.list_user_names()) == ["_", "_y", "f", "x", "z"]


def _list_values(notebook: Notebook) -> dict[str, object]:
    """Return the displayed values that IPython holds, by their rows."""
    references = notebook.shell.list_references()
    return {each.row: each.target for each in references if each.root == "out"}


def test_displayed_values_where_another_tool_has_bound_underscore(
    notebook: Notebook, tracker: Tracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a ``_`` in the builtins (gettext, doctest) IPython binds none and still holds values."""
    notebook.run("make(10)")
    monkeypatch.setattr("builtins._", None, raising=False)
    notebook.run("make(20)")
    notebook.run("7")

    dropped = notebook.drop("Out[1]", "Out[2]")

    assert "_" not in notebook.ip.user_ns
    places = {"Out[1]", "_1", "displayhook.___", "Out[2]", "_2", "displayhook.__"}
    assert places <= set(dropped)
    assert tracker.count_bytes() == 0
    assert _list_values(notebook) == {"Out[3]": 7}


def test_values_that_reset_out_leaves_behind_have_rows(
    notebook: Notebook, tracker: Tracker
) -> None:
    """``%reset -f out`` forgets the number of a value and still holds it."""
    notebook.run("make(10)")
    notebook.run("%reset -f out")

    rows = [row for row, value in _list_values(notebook).items() if value is not None]
    held = tracker.count_bytes()
    notebook.drop(*rows)

    assert (len(rows) > 0) == (held > 0)
    assert tracker.count_bytes() == 0


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ("def train():\n    batch = make(10)\n    1 / 0\ntrain()", "error_in_exec"),
        ("def", "error_before_exec"),
    ],
)
def test_the_failing_cells_own_result_is_a_holder(
    notebook: Notebook, tracker: Tracker, source: str, path: str
) -> None:
    """Right after the failing cell its result holds the exception as well."""
    notebook.run(source)

    dropped = notebook.drop("last exception")
    gc.collect()

    assert f"last_execution_result.{path}" in dropped
    assert tracker.count_bytes() == 0
    assert all(each.root == "out" for each in notebook.shell.list_references())
