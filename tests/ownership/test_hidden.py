"""What several results of one operation hold: the collector does not know of such a tuple."""

from __future__ import annotations

import gc

import pytest

from gpumemwidget.model.ownership import DeviceBytes
from gpumemwidget.ownership.account import take_memory_account
from tests.ownership.notebook import Notebook, Tracker

N_BYTES = 1000 * 4 + 1000 * 8


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ("best = torch.rand(1000).sort()", "best[0]"),
        ("best = {'kept': torch.rand(1000).sort()}", "best['kept'][0]"),
        ("best = (5, torch.rand(1000).sort())", "best[1][0]"),
    ],
)
def test_results_are_held_by_their_name(notebook: Notebook, source: str, path: str) -> None:
    """Both tensors of ``sort()`` or ``max(0)``, alone or within containers, by their places."""
    notebook.run(f"import torch\n{source}")

    (row,) = notebook.list_rows().values()
    account = take_memory_account(notebook.shell, notebook.hardware)

    assert row.held_bytes == row.frees_bytes == DeviceBytes((("host", N_BYTES),))
    assert not row.held_elsewhere
    owners = [each.owner for each in account.devices[0].owned if each.rows == ("best",)]
    assert sorted(owners)[0].replace('"', "'") == path
    assert len(owners) == 2


def test_results_are_released_with_what_was_displayed(notebook: Notebook) -> None:
    """The name and ``Out`` have the same tuple: both let go of it."""
    tracker = Tracker()
    notebook.run("import torch\nbest = torch.rand(1000).sort()")
    notebook.run("best")
    for each in notebook.ip.user_ns["best"]:
        tracker.track(each)
    del each

    report = notebook.release("best")

    gc.collect()
    assert report.stopped is None
    assert dict(report.plan.frees_bytes.by_device) == {"host": N_BYTES}
    assert tracker.count_bytes() == 0
