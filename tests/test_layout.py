"""The plan of the house in CONTRIBUTING.md must be that of the folders."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "gpumemwidget"


def _list_modules() -> set[str]:
    return {
        path.relative_to(PACKAGE).with_suffix("").as_posix()
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py" or path.parent == PACKAGE
    }


def _list_planned() -> set[str]:
    """The modules of the block below "The layout", by their paths in the package."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    [block] = re.findall(r"^```\ngpumemwidget/\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    planned = set()
    folder = ""
    for line in block.splitlines():
        indent, name = re.match(r"( +)(\S+)", line).groups()
        if name.endswith("/"):
            folder = name
        else:
            planned.add(f"{folder if len(indent) > 2 else ''}{name.removesuffix('.py')}")
    return planned


def test_contributing_names_every_module_and_no_other() -> None:
    """Who adds, moves or removes a module says so in the plan."""
    planned, there = _list_planned(), _list_modules()

    assert there - planned == set(), "not in CONTRIBUTING.md"
    assert planned - there == set(), "in CONTRIBUTING.md but not there"


def test_every_module_says_why_it_exists() -> None:
    """The first thing in a module is its docstring."""
    silent = [
        path.relative_to(ROOT)
        for path in PACKAGE.rglob("*.py")
        if path.read_text(encoding="utf-8").strip()
        and not path.read_text(encoding="utf-8").startswith('"""')
    ]

    assert silent == []
