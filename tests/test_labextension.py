"""JupyterLab's panel as it is kept, built."""

from __future__ import annotations

import json
from pathlib import Path

from tools.labextension import HASH_FILE, hash_sources

_PREBUILT = Path(__file__).parents[1] / "labextension" / "prebuilt"


def test_the_panel_is_built_of_its_sources() -> None:
    """Otherwise: python -m tools.labextension."""
    assert HASH_FILE.read_text(encoding="ascii").strip() == hash_sources()


def test_what_the_lab_loads_is_there() -> None:
    """The name of the file that is loaded first has the build's hash in it."""
    package = json.loads((_PREBUILT / "package.json").read_text(encoding="utf-8"))

    assert (_PREBUILT / package["jupyterlab"]["_build"]["load"]).is_file()
