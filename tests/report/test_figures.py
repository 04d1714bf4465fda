"""The plotly figures import plotly only when one is drawn."""

from __future__ import annotations

import subprocess
import sys


def test_reports_and_this_door_import_no_plotly() -> None:
    """It is loaded at the first figure, not with the extension."""
    program = (
        "import sys, gpumemwidget.report.trace, gpumemwidget.report.charts.figures\n"
        "print(sorted({'plotly', 'torch', 'IPython', 'numpy', 'pandas'} & set(sys.modules)))"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert done.stdout.strip() == "[]"
