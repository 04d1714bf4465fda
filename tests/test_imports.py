"""Importing and loading must cost the user nothing that they did not ask for."""

from __future__ import annotations

import json
import subprocess
import sys

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


def test_import_loads_nothing_heavy() -> None:
    """``import gpumemwidget`` brings the names and nothing behind them."""
    loaded = _list_loaded("import gpumemwidget")

    assert "gpumemwidget" in loaded
    assert loaded.isdisjoint(HEAVY)


def test_loading_the_extension_imports_neither_torch_nor_plotly() -> None:
    """The extension watches for torch, but whether it is imported is the user's business."""
    code = "\n".join(
        [
            "from IPython.core.interactiveshell import InteractiveShell",
            "shell = InteractiveShell.instance()",
            "assert shell.run_cell('%load_ext gpumemwidget', store_history=True).success",
            "assert shell.run_cell('x = 1', store_history=True).success",
            "import gpumemwidget; assert len(gpumemwidget.monitor().ledger) == 2",
        ]
    )

    loaded = _list_loaded(code)

    assert "IPython" in loaded
    assert loaded.isdisjoint({"torch", "plotly", "pandas"})
