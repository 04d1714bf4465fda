"""A real IPython in this process, its namespace empty and its caches its own."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Iterator

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.backends.host import HostBackend
from gpumemwidget.jupyter.references import IPythonShell
from tests.owners.notebook import Notebook, Tracker

_SYS_NAMES = ("last_type", "last_value", "last_traceback", "last_exc")


@pytest.fixture(scope="session", autouse=True)
def heap_put_aside() -> Iterator[None]:
    """Put aside what was imported for the tests: half a million objects.

    Else each collection and each look at the whole process goes through them, and there are some
    ten of these in a test of the owners.
    """
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def hardware() -> Iterator[Hardware]:
    """This machine's host memory, and nothing else."""
    hardware = Hardware([HostBackend()])
    yield hardware
    hardware.close()


@pytest.fixture
def notebook(
    hardware: Hardware, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Notebook]:
    """Cells that run in a fresh IPython, and the shell as the owners see it."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path_factory.mktemp("ipython")))
    main = sys.modules["__main__"]
    displayhook, excepthook = sys.displayhook, sys.excepthook
    config = Config()
    config.HistoryManager.enabled = False
    ip = InteractiveShell.instance(config=config, colors="nocolor")
    ip.user_ns["__name__"] = "__main__"

    yield Notebook(ip=ip, shell=IPythonShell(ip), hardware=hardware)

    ip.reset(new_session=False)
    atexit.unregister(ip.atexit_operations)
    ip.atexit_operations()
    InteractiveShell.clear_instance()
    for name in _SYS_NAMES:
        vars(sys).pop(name, None)
    sys.modules["__main__"] = main
    sys.displayhook, sys.excepthook = displayhook, excepthook
    gc.collect()


@pytest.fixture
def tracker(notebook: Notebook) -> Tracker:
    """Watches what the notebook makes with ``make(n_elements)``."""
    tracker = Tracker()
    notebook.put(make=tracker.make)
    return tracker


@pytest.fixture
def movable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the plan take the host for a device that memory can be moved away from.

    What is moved is then copied from host to host: the old storages must go all the same.
    """
    monkeypatch.setattr("gpumemwidget.owners.sorting.HOST", "no device")
