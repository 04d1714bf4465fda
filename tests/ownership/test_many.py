"""Many names and big columns: the panel is filled after every cell, however many there are."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from gpumemwidget.model.devices import HOST
from gpumemwidget.model.ownership import DeviceBytes
from gpumemwidget.ownership.account import describe_rows
from gpumemwidget.ownership.graph import walk
from gpumemwidget.ownership.holdings import take_account
from gpumemwidget.ownership.why import explain
from tests.ownership.notebook import Notebook


def test_many_names_that_share_many_tensors(notebook: Notebook) -> None:
    """The time does not grow with the names times the tensors times the names."""
    shared = [torch.ones(1) for _ in range(3000)]
    notebook.put(**{f"v{number}": [shared] for number in range(1000)})
    del shared

    started_s = time.process_time()
    rows = notebook.list_rows()
    taken_s = time.process_time() - started_s

    assert len(rows) == 1000
    assert rows["v7"].held_bytes == DeviceBytes(((HOST, 12_000),))
    assert rows["v7"].frees_bytes == DeviceBytes()
    assert rows["v7"].shared_with == tuple(f"v{number}" for number in range(1000) if number != 7)
    assert taken_s < 1


@pytest.mark.usefixtures("movable")
def test_when_there_is_no_time_to_find_out_what_would_be_moved(notebook: Notebook) -> None:
    """A row then frees what goes with its name alone, or more; others are exact."""
    notebook.run(
        "import torch\n"
        "model = torch.nn.Linear(10, 1); model.own = torch.ones(7)\n"
        "kept = model.weight; alone = torch.ones(11)"
    )
    account = take_account(notebook.shell, budget_s=10.0, depth="rows")
    assert account is not None

    exact = {row.name: row for row in describe_rows(account)}
    late = {row.name: row for row in describe_rows(account, deadline_s=0.0)}

    assert exact["model"].frees_bytes == DeviceBytes(((HOST, 4 * (10 + 1 + 7)),))
    assert late["model"].frees_bytes == DeviceBytes(((HOST, 4 * (1 + 7)),), is_at_least=True)
    assert late["model"].held_bytes == exact["model"].held_bytes
    assert late["alone"] == exact["alone"]


def test_a_big_column_of_text_and_a_tensor(notebook: Notebook) -> None:
    """An array of objects is looked through as fast as a list."""
    column = np.array([*["text"] * 2_000_000, None], dtype=object)
    column[-1] = torch.ones(500)
    notebook.put(column=column)
    del column

    started_s = time.process_time()
    rows = notebook.list_rows()
    taken_s = time.process_time() - started_s

    assert rows["column"].held_bytes == DeviceBytes(((HOST, 2000),))
    assert rows["column"].frees_bytes == DeviceBytes(((HOST, 2000),))
    assert taken_s < 2


def test_the_holder_of_many_is_found_by_a_few_of_them(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search for many takes several times as long as one for few."""
    notebook.run(
        "import builtins, torch\n"
        "def generate(tensors):\n    yield\n    tensors\n"
        "keep = [torch.zeros(4) for _ in range(200)]\n"
        "builtins.kept = generate(list(keep)); next(builtins.kept)"
    )
    numbers: list[int] = []
    search = walk.list_referrers

    def count(targets: Sequence[object]) -> list[object]:
        numbers.append(len(targets))
        return search(targets)

    monkeypatch.setattr(walk, "list_referrers", count)
    holders = {holder.path for holder in explain(notebook.shell, "keep").holders}
    notebook.run("del builtins.kept")

    # Later rounds look for what holds those that were found, of whatever else is there.
    assert numbers[0] <= 16
    assert any("generate" in path or "kept" in path for path in holders), holders
