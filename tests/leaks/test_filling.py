"""Growth on a simulated GPU of 400 MiB: what is told as it fills, and how long there is room."""

from __future__ import annotations

import re
import sys

import pytest

from tests.jupyter.conftest import make_machine, shell  # noqa: F401 - fixtures
from tests.leaks.test_rebinds import Simulation, notebook  # noqa: F401 - a fixture

_COLLECTS = """\
import gpumemwidget
kept = []
for _ in gpumemwidget.watch_loop(range(30)):
    kept.append(take({mib} << 20))
"""


def test_a_short_loop_is_read_once_more_at_the_end(notebook: Simulation) -> None:  # noqa: F811
    """Of 60 quick steps the last ones are not read one by one: 32 MiB are no tenth."""
    *_, said = notebook.run(_COLLECTS.format(mib=1).replace("range(30)", "range(60)"))

    assert "cuda:0 grows 1.00 MiB a step" in said
    assert "held by kept[…]" in said


@pytest.mark.parametrize(
    ("mib", "limit", "is_told"), [(2, "off", True), (1, "off", False), (1, "200MiB", True)]
)
def test_what_a_loop_collects_is_told_once_it_fills_a_tenth(
    notebook: Simulation,  # noqa: F811
    mib: int,
    limit: str,
    is_told: bool,
) -> None:
    """Of the GPU, or of what a process may have of it."""
    *_, said = notebook.run(f"%memlimit {limit}", _COLLECTS.format(mib=mib))

    assert (f"cuda:0 grows {mib}.00 MiB a step" in said) is is_told
    assert ("held by kept[…]" in said) is is_told


@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python tells of loops from 3.12 on")
def test_a_slow_loop_without_an_optimizer_is_followed(
    notebook: Simulation,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a function of another cell, too."""
    monkeypatch.setattr("gpumemwidget.leaks.steps._MIN_TURN_S", 0)
    collect = "def collect():\n    for _ in range(30): kept.append(take(2 << 20))"

    *_, said = notebook.run("kept = []", collect, "collect()")

    assert "cuda:0 grows 2.00 MiB a step" in said
    assert "held by kept[…]" in said


def test_memory_runs_out_at_the_limit(notebook: Simulation) -> None:  # noqa: F811
    """Not at the GPU's size."""
    cell = "kept = globals().get('kept', []); kept.append(take(20 << 20))"

    *_, said = notebook.run("%memlimit 300MiB", cell, cell, cell)

    # The model at first, and three times 20 MiB.
    assert "+20.00 MiB in each of the last 3 runs" in said
    [n_left] = re.findall(r"runs out in about (\d+) runs", said)
    assert int(n_left) in range((300 - 50 - 60) // 20 - 1, (300 - 50 - 60) // 20 + 1)
