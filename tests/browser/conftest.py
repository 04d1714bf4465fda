"""One server and one browser for all browser tests; a missing browser is a failure."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.browser.lab import Lab, start_browser, start_lab


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A running JupyterLab and a browser."""
    with (
        start_browser() as browser,
        start_lab(tmp_path_factory.mktemp("lab"), browser) as running,
    ):
        yield running
