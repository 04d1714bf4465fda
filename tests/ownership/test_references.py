"""What IPython holds, found and dropped."""

from __future__ import annotations

import gc
import sys

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


def test_underscore_is_ipythons_until_the_user_binds_it(notebook: Notebook) -> None:
    """``_`` after a displayed value is IPython's own."""
    notebook.run("5")

    assert notebook.shell.list_user_names() == []
    assert _list_values(notebook) == {"Out[1]": 5}


def test_dropping_a_row_drops_exactly_its_entries(notebook: Notebook, tracker: Tracker) -> None:
    """All places that hold it are cleared, the others stay, and the value is gone."""
    notebook.run("x = make(10); x")
    notebook.run("make(20)")

    dropped = notebook.drop("Out[1]")
    notebook.put(x=None)

    assert dropped == [
        "Out[1]",
        "_1",
        "user_ns_hidden: _1",
        "__",
        "user_ns_hidden: __",
        "displayhook.__",
    ]
    assert tracker.count_bytes() == 80
    assert list(notebook.ip.user_ns["Out"]) == [2]
    assert list(_list_values(notebook)) == ["Out[2]"]


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


def test_dropping_the_last_exception(
    notebook: Notebook, tracker: Tracker, caplog: pytest.LogCaptureFixture
) -> None:
    """All its holders are cleared, and ``%debug`` says that there is nothing."""
    notebook.run("def train():\n    batch = make(10)\n    1 / 0\ntrain()")
    notebook.run("x = 1")
    # Python 3.12 and later have it, and IPython 7 does not set it.
    has_last_exc = hasattr(sys, "last_exc")

    dropped = notebook.drop("last exception")
    gc.collect()
    notebook.run("%debug")

    expected = ["sys.last_value", "sys.last_traceback", "InteractiveTB.tb"]
    if has_last_exc:
        expected.insert(1, "sys.last_exc")
    assert dropped[: len(expected)] == expected
    assert tracker.count_bytes() == 0
    assert all(each.root == "out" for each in notebook.shell.list_references())
    assert "nothing to debug" in caplog.text


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
