"""Shells and kernels to load the extension into."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from gpumemwidget.jupyter import outputs
from gpumemwidget.model.ooms import OomCard
from gpumemwidget.session import oom_watch
from tests.jupyter.machine import Machine
from tests.shell import open_shell

if TYPE_CHECKING:
    from tests.jupyter.notebook import Notebook


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[InteractiveShell]:
    """The process's shell, new for each test, without a history file."""
    with open_shell(tmp_path / "ipython") as shell:
        yield shell
        if "gpumemwidget" in shell.extension_manager.loaded:
            shell.extension_manager.unload_extension("gpumemwidget")
    gc.collect()


@pytest.fixture
def loaded(shell: InteractiveShell) -> InteractiveShell:
    """The shell with the extension, and no output of its loading."""
    with capture_output():
        shell.run_cell("%load_ext gpumemwidget", store_history=True)
    return shell


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> list[OomCard]:
    """The cards that were shown, however busy the machine is."""
    cards: list[OomCard] = []
    monkeypatch.setattr(oom_watch, "_ACCOUNT_BUDGET_S", 60.0)
    monkeypatch.setattr(oom_watch, "_CARD_BUDGET_S", 120.0)
    monkeypatch.setattr(outputs, "show_card", lambda card, _extension: cards.append(card))
    return cards


@pytest.fixture
def make_machine(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Machine]:
    """Put simulated GPUs in the machine's place, for an extension that is still to be loaded."""
    return partial(Machine, shell, monkeypatch, capsys)


@pytest.fixture
def cells(make_machine: Callable[..., Machine]) -> Machine:
    """A shell with the extension, on a simulated GPU that is in use."""
    cells = make_machine()
    cells.allocator.touch(0)
    cells.run("%load_ext gpumemwidget\nimport gpumemwidget")
    return cells


@pytest.fixture(scope="session")
def session_notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    # A Jupyter client may be missing where no test wants a kernel, as on a machine for GPU tests.
    from tests.jupyter.notebook import open_notebook

    with open_notebook(tmp_path_factory.mktemp("kernel")) as notebook:
        yield notebook


@pytest.fixture
def notebook(session_notebook: Notebook) -> Iterator[Notebook]:
    """A kernel in which the extension has just been loaded; the kernel itself is shared."""
    loading = session_notebook.run("%load_ext gpumemwidget\nimport gpumemwidget")
    assert loading.status == "ok", loading.text

    yield session_notebook

    assert session_notebook.run("%unload_ext gpumemwidget\n%reset -f").status == "ok"
