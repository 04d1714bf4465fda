"""JupyterLab's panel as it is kept, built."""

from __future__ import annotations

import json
from pathlib import Path

import gpumemwidget
from tools.labextension import HASH_FILE, hash_sources

_LABEXTENSION = Path(__file__).parents[1] / "labextension"
_PREBUILT = _LABEXTENSION / "prebuilt"


def test_the_panel_is_built_of_its_sources() -> None:
    """Otherwise: python -m tools.labextension."""
    assert HASH_FILE.read_text(encoding="ascii").strip() == hash_sources()


def test_what_the_lab_loads_is_there() -> None:
    """The name of the file that is loaded first has the build's hash in it."""
    package = json.loads((_PREBUILT / "package.json").read_text(encoding="utf-8"))

    assert (_PREBUILT / package["jupyterlab"]["_build"]["load"]).is_file()


def test_the_panel_has_the_packages_version() -> None:
    """In its sources and as it is built; and JupyterLab's extension manager finds its keywords."""
    for folder in (_LABEXTENSION, _PREBUILT):
        package = json.loads((folder / "package.json").read_text(encoding="utf-8"))

        assert package["version"] == gpumemwidget.__version__
        assert "jupyterlab-extension" in package["keywords"]
        assert package["author"]
