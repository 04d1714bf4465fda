"""What a person sees of a prediction, in JupyterLab."""

from __future__ import annotations

import pytest

from tests.browser.lab import Lab

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

_SHOW = """\
from IPython.display import display
from gpumemwidget.report.prediction import report_prediction, report_sizes
from tests.report import prediction_examples as predictions
display(report_prediction(predictions.make_large_prediction()))
display(report_sizes(131, 0, predictions.make_sizes()))
"""


@pytest.mark.parametrize("theme", ["JupyterLab Light", "JupyterLab Dark"])
@pytest.mark.parametrize("width", [600, 1400])
def test_a_prediction_fits_the_page(lab: Lab, theme: str, width: int) -> None:
    """No table is cut."""
    with lab.open([_SHOW], theme=theme, width=width, height=2500) as notebook:
        notebook.wait_for_kernel()
        notebook.run(0, timeout_s=60)
        page = notebook.page
        tables = page.locator(".gmw-w:visible")
        assert tables.count() == 3
        for table in tables.all():
            assert table.evaluate("e => e.scrollWidth <= e.clientWidth"), table.inner_text()
        assert notebook.problems == []
