"""A shell with the extension."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import CapturedIO, capture_output

from tests.shell import open_shell


@pytest.fixture
def loaded(tmp_path: Path) -> Iterator[InteractiveShell]:
    """The process's shell, new for each test, with the extension."""
    # Garbage of other tests that is freed while lines are read hides the line that grows.
    gc.collect()
    with open_shell(tmp_path / "ipython") as shell:
        with capture_output():
            shell.run_cell("%load_ext gpumemwidget", store_history=True)
        yield shell
        if "gpumemwidget" in shell.extension_manager.loaded:
            shell.extension_manager.unload_extension("gpumemwidget")
    gc.collect()


def list_shown(captured: CapturedIO) -> list[str]:
    """Return the texts that stand under a cell at its end: an update replaces what it updates."""
    shown: dict[object, str] = {}
    for number, output in enumerate(captured.outputs):
        place = output.transient.get("display_id", number) if output.transient else number
        shown[place] = output.data["text/plain"]
    return list(shown.values())


def say(shell: InteractiveShell, cell: str) -> str:
    """Run a cell, which may fail; return what it printed and displayed, as one line."""
    with capture_output() as captured:
        shell.run_cell(cell, store_history=True)
    shown = list_shown(captured)
    return " ".join(" ".join([captured.stdout, captured.stderr, *shown]).split())
