"""What the documents list must be what there is: modules, public functions, commands."""

from __future__ import annotations

import re
from pathlib import Path

import gpumemwidget

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "gpumemwidget"


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
