"""An IPython of this process to run cells in, fresh for each test."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from gpumemwidget.testing import simulate_gpus

__all__ = ["open_loaded_shell", "open_shell"]

_SYS_NAMES = ("last_type", "last_value", "last_traceback", "last_exc")


@contextmanager
def open_shell(folder: Path) -> Iterator[InteractiveShell]:
    """Make the process's shell, whose files go to ``folder``, and put back what it changed.

    The collector is not run: what the shell held goes with the last reference.
    """
    main = sys.modules["__main__"]
    displayhook, excepthook = sys.displayhook, sys.excepthook
    home = os.environ.get("IPYTHONDIR")
    os.environ["IPYTHONDIR"] = str(folder)
    config = Config()
    config.HistoryManager.enabled = False
    shell = InteractiveShell.instance(config=config, colors="nocolor")
    shell.user_ns["__name__"] = "__main__"
    try:
        yield shell
    finally:
        for namespace in (shell.user_ns, shell.user_ns_hidden):
            namespace.clear()
        for name in ("_", "__", "___"):
            setattr(shell.displayhook, name, None)
        shell.history_manager.output_hist.clear()
        shell.last_execution_result = shell.InteractiveTB.tb = None
        atexit.unregister(shell.atexit_operations)
        InteractiveShell.clear_instance()
        for name in _SYS_NAMES:
            vars(sys).pop(name, None)
        sys.modules["__main__"] = main
        sys.displayhook, sys.excepthook = displayhook, excepthook
        if home is None:
            del os.environ["IPYTHONDIR"]
        else:
            os.environ["IPYTHONDIR"] = home


@contextmanager
def open_loaded_shell() -> Iterator[InteractiveShell]:
    """A shell with the extension and a simulated GPU of 16 GiB, which cells have as ``gpus``."""
    main = sys.modules["__main__"]
    shell = InteractiveShell()
    try:
        with simulate_gpus(total_bytes=16 << 30) as gpus:
            shell.run_line_magic("load_ext", "gpumemwidget")
            shell.user_ns["gpus"] = gpus
            yield shell
            shell.run_line_magic("unload_ext", "gpumemwidget")
    finally:
        sys.modules["__main__"] = main
