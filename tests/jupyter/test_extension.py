"""Loading and unloading: whatever load adds, unload takes away."""

from __future__ import annotations

import gc
import re
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from IPython.core import extensions
from IPython.core.interactiveshell import InteractiveShell

import gpumemwidget
from gpumemwidget.errors import NotLoadedError
from gpumemwidget.jupyter import extension
from gpumemwidget.jupyter.extension import Extension
from gpumemwidget.session.session import current_session
from gpumemwidget.testing import simulate_gpus


def _take_stock(shell: InteractiveShell) -> dict[str, Any]:
    """Everything that an extension may add to a shell and its process."""
    manager = shell.magics_manager
    return {
        "callbacks": {name: list(each) for name, each in shell.events.callbacks.items()},
        "line magics": dict(manager.magics["line"]),
        "cell magics": dict(manager.magics["cell"]),
        "registry": dict(manager.registry),
        "cleanup": list(shell.input_transformers_cleanup),
        "transformers": list(shell.input_transformers_post),
        "ast": list(shell.ast_transformers),
        # The inputs are IPython's own: _i, _ii, _i1.
        "namespace": {name for name in shell.user_ns if not name.startswith("_i")},
        "meta path": list(sys.meta_path),
        "threads": {thread.name for thread in threading.enumerate()},
        "configurables": list(shell.configurables),
    }


@pytest.mark.parametrize(
    "steps",
    [
        ["load", "unload"],
        ["load", "unload", "unload"],
        ["load", "load", "unload"],
        ["load", "reload", "unload"],
        ["reload", "reload", "unload", "load", "unload", "unload"],
        ["unload"],
    ],
    ids=" ".join,
)
def test_unload_leaves_the_shell_as_it_was(shell: InteractiveShell, steps: list[str]) -> None:
    """In whatever order it is loaded and unloaded, also in the same cells."""
    shell.run_cell("%unload_ext none_such")  # IPython 9 brings its own magics at their first use.
    before = _take_stock(shell)

    for step in steps:
        assert shell.run_cell(f"%{step}_ext gpumemwidget", store_history=True).success

    after = _take_stock(shell)
    for what, things in before.items():
        assert after[what] == things, what


@pytest.mark.parametrize("failing", ["Session.open", "LeakCards.open", "CellEvents.register"])
def test_a_load_that_fails_leaves_nothing_and_the_next_one_works(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """The user sees why, and can try again."""
    shell.run_cell("%unload_ext none_such")
    before = _take_stock(shell)

    def fail(*_: object) -> None:
        raise RuntimeError("made to fail")

    name, _, method = failing.partition(".")
    with monkeypatch.context() as patch:
        patch.setattr(getattr(extension, name), method, fail)
        failed = shell.run_cell("%load_ext gpumemwidget", store_history=True)
    after = _take_stock(shell)
    again = shell.run_cell("%load_ext gpumemwidget\n%memstat", store_history=True)

    assert str(failed.error_in_exec) == "made to fail"
    assert after == before
    assert again.success


def test_a_ctrl_c_in_a_reload_says_what_is_loaded(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that arrives while the extension is taken away ends the cell behind that."""
    shell.run_cell("%load_ext gpumemwidget", store_history=True)
    close, reload = Extension.close, extensions.reload

    def close_interrupted(extension: Extension) -> None:
        signal.raise_signal(signal.SIGINT)
        close(extension)

    def reload_slowly(module: ModuleType) -> ModuleType:
        threading.Event().wait(10)  # The Ctrl-C ends this.
        return reload(module)

    monkeypatch.setattr(Extension, "close", close_interrupted)
    monkeypatch.setattr(extensions, "reload", reload_slowly)
    capsys.readouterr()
    reloaded = shell.run_cell("%reload_ext gpumemwidget", store_history=True)
    told = capsys.readouterr().out
    monkeypatch.undo()
    loaded = shell.run_cell("%load_ext gpumemwidget\n%memstat", store_history=True)

    assert isinstance(reloaded.error_in_exec, KeyboardInterrupt)
    assert "gpumemwidget is not loaded." in told
    assert loaded.success
    assert "gpumemwidget records every cell: " in capsys.readouterr().out


def test_a_ctrl_c_in_a_load_leaves_it_loaded(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends the cell behind that."""
    describe = Extension.describe

    def describe_interrupted(extension: Extension) -> str:
        signal.raise_signal(signal.SIGINT)
        return describe(extension)

    monkeypatch.setattr(Extension, "describe", describe_interrupted)
    done = shell.run_cell(
        "%load_ext gpumemwidget\nimport threading; threading.Event().wait(10)", store_history=True
    )

    assert isinstance(done.error_in_exec, KeyboardInterrupt)
    assert shell.run_cell("%memstat", store_history=True).success


def test_nothing_keeps_the_extension_alive_after_unload(shell: InteractiveShell) -> None:
    """Nor what it holds: the ledger, the history, the hardware."""
    shell.run_cell("%load_ext gpumemwidget", store_history=True)
    shell.run_cell("%%memtrace\n1", store_history=True)
    extension = weakref.ref(current_session())

    shell.run_cell("%unload_ext gpumemwidget", store_history=True)
    shell.run_cell("1", store_history=True)
    gc.collect()

    assert extension() is None


def test_a_magic_of_the_users_own_comes_back(shell: InteractiveShell) -> None:
    def memstat(line: str) -> str:
        return line

    shell.register_magic_function(memstat, "line")
    shell.run_cell("%load_ext gpumemwidget")

    shell.run_cell("%unload_ext gpumemwidget")

    assert shell.magics_manager.magics["line"]["memstat"] is memstat


@pytest.mark.parametrize(
    "call",
    [
        gpumemwidget.monitor,
        gpumemwidget.dashboard,
        lambda: gpumemwidget.release("x"),
    ],
)
def test_without_it_every_function_says_what_to_do(call: Callable[[], object]) -> None:
    with pytest.raises(NotLoadedError, match=r"^gpumemwidget is not loaded: run %load_ext gpum"):
        call()


def test_the_public_names_are_listed_and_nothing_else_is_found() -> None:
    assert set(gpumemwidget.__all__) <= set(dir(gpumemwidget))
    for name in gpumemwidget.__all__:
        assert callable(getattr(gpumemwidget, name))
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        gpumemwidget.nonsense  # noqa: B018


def test_loading_says_what_was_found(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, and none when there was nothing to do."""
    shell.run_cell("%load_ext gpumemwidget")
    first = capsys.readouterr().out
    gpumemwidget.load_ipython_extension(shell)
    second = capsys.readouterr().out

    assert re.fullmatch(
        r"gpumemwidget records every cell: host memory \([\d.]+ GiB\); no GPU was found( yet)?\. "
        r"%memstat shows the memory now, %memhelp lists all commands\.\n",
        first,
    )
    assert len(first.splitlines()) == 1
    assert second == ""


def test_loading_names_the_gpus_and_what_is_watched_later(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    """Alike GPUs once, with their number."""
    with simulate_gpus(2):
        shell.run_cell("%load_ext gpumemwidget")
    said = capsys.readouterr().out

    gpus = "2 × Simulated GPU (80.00 GiB, from first use on)"
    begin = f"gpumemwidget records every cell: {gpus} and host "
    assert said.startswith(begin)
    assert "no GPU" not in said


def test_loading_is_quick_and_brings_nothing_heavy(tmp_path: Path) -> None:
    """Neither torch, plotly, pandas nor the widgets, until something needs them."""
    code = (
        "import sys\n"
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "shell = InteractiveShell.instance()\n"
        "shell.run_cell('%load_ext gpumemwidget', store_history=True)\n"
        "shell.run_cell('%%memtrace\\n1', store_history=True)\n"
        "heavy = {'torch', 'plotly', 'pandas', 'numpy', 'ipywidgets', 'anywidget'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )

    answer = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"IPYTHONDIR": str(tmp_path), "PATH": ""},
    )

    assert answer.stdout.splitlines()[-1] == "[]"
