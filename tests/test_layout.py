"""What is listed and what is kept, built, must be what there is: modules, functions, the panel."""

from __future__ import annotations

import json
import re
from pathlib import Path

import gpumemwidget
from tools.labextension import HASH_FILE, hash_sources

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "gpumemwidget"
PREBUILT = ROOT / "labextension" / "prebuilt"


def test_contributing_names_what_is_there() -> None:
    """Each module that it begins a change with exists, and it stays short."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    start, end = text.index("To change …"), text.index("## Dependencies")
    modules = re.findall(r"`((?:\w+/)*\w+\.(?:py|js))`", text[start:end])

    missing = [
        name for name in modules if not any((top / name).exists() for top in (PACKAGE, ROOT))
    ]

    assert len(modules) > 20
    assert missing == []
    assert len(text.split()) <= 1300


def test_the_python_api_has_every_public_function() -> None:
    """Its page groups them by hand, so a new one has to be put there."""
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")

    documented = re.findall(r"^\.\. autofunction:: gpumemwidget\.(\w+)$", page, re.MULTILINE)

    assert sorted(documented) == sorted(gpumemwidget.__all__)


def test_ci_runs_the_readmes_test_command() -> None:
    """CI begins with the README's command for the tests; the slow tests run after it."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")

    commands = re.findall(r"^```bash\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)

    assert commands[-1] == "python3 -m tools.test\n"
    _, slow = script.split(commands[-1])
    assert '-m "slow or hypothesis"' in slow


def test_the_panel_is_built_of_its_sources() -> None:
    """Otherwise: python -m tools.labextension."""
    assert HASH_FILE.read_text(encoding="ascii").strip() == hash_sources()


def test_what_the_lab_loads_is_there() -> None:
    """The name of the file that is loaded first has the build's hash in it."""
    package = json.loads((PREBUILT / "package.json").read_text(encoding="utf-8"))

    assert (PREBUILT / package["jupyterlab"]["_build"]["load"]).is_file()


def test_the_panel_has_the_packages_version() -> None:
    """In its sources and as it is built; and JupyterLab's extension manager finds its keywords."""
    for folder in (PREBUILT.parent, PREBUILT):
        package = json.loads((folder / "package.json").read_text(encoding="utf-8"))

        assert package["version"] == gpumemwidget.__version__
        assert "jupyterlab-extension" in package["keywords"]
        assert package["author"]
