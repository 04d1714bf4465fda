"""Importing and loading must cost the user nothing that they did not ask for."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

#: What takes long to import, or may not be imported before the user does it.
HEAVY = ("torch", "plotly", "ipywidgets", "anywidget", "pandas", "numpy", "IPython", "pynvml")


def _list_loaded(code: str) -> set[str]:
    """The top-level modules that a fresh interpreter holds after it ran ``code``."""
    report = (
        "import json, sys; print(json.dumps(sorted({m.partition('.')[0] for m in sys.modules})))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"], capture_output=True, text=True, check=True
    )
    return set(json.loads(answer.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "module",
    ["gpumemwidget", "gpumemwidget.checks.pytest_plugin"],
)
def test_import_loads_nothing_heavy(module: str) -> None:
    """``import gpumemwidget`` brings the names, and no framework with them."""
    loaded = _list_loaded(f"import {module}")

    assert "gpumemwidget" in loaded
    assert loaded.isdisjoint(HEAVY)
