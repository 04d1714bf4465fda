"""JupyterLab and Chromium for the tests: a server of its own, and notebooks to press keys in.

Nothing of the machine's own Jupyter takes part: all of its folders are temporary ones. What is
asked of a cell or a kernel is read where a person would see it, in the page.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Error, Locator, Page, sync_playwright

from tools.chromium import find_chromium

__all__ = ["BUSY", "Lab", "Notebook", "start_browser", "start_lab"]

_FLAGS = (
    "--no-browser",
    "--ServerApp.ip=127.0.0.1",
    "--IdentityProvider.token=",
    "--ServerApp.password=",
    "--ServerApp.allow_root=True",
    "--ServerApp.disable_check_xsrf=True",
    "--ServerApp.terminals_enabled=False",
    "--LabApp.expose_app_in_browser=True",
    "--JupyterNotebookApp.expose_app_in_browser=True",
)
_SETTINGS = {
    "apputils-extension/notification.jupyterlab-settings": {"fetchNews": "false"},
    "docmanager-extension/plugin.jupyterlab-settings": {"autosave": False},
    "notebook-extension/tracker.jupyterlab-settings": {"windowingMode": "none"},
}
_PANEL = Path(__file__).parents[2] / "labextension" / "prebuilt"
_START_S = 180.0
#: Patience with a busy machine: what is waited for is a state, and it is there sooner as a rule.
_PATIENCE_S = 60.0

#: Computes until the test says that it is enough (``Notebook.finish``).
BUSY = "import pathlib\nwhile not pathlib.Path('enough').exists(): sum(range(100_000))"


class Lab:
    """A running server and a browser.

    Args:
        url: the server's.
        folder: where its notebooks are.
        browser: the browser that opens them.
        keeps_page: whether the next notebook is opened in the page of one that was closed.
    """

    def __init__(
        self, url: str, folder: Path, browser: Browser, *, keeps_page: bool = False
    ) -> None:
        self.url = url
        self.folder = folder
        self.browser = browser
        self._keeps_page = keeps_page
        #: A page of JupyterLab without a notebook: to load one anew takes seconds.
        self._kept_page: Page | None = None
        self._n_notebooks = 0

    @contextlib.contextmanager
    def open(self, cells: Sequence[str], **options: Any) -> Iterator[Notebook]:
        """A new notebook with these cells, none of them run; its kernel ends with it."""
        with self.open_file(self.write(cells), **options) as opened:
            yield opened

    def write(self, cells: Sequence[str]) -> str:
        """Write a new notebook with these cells; its name in the server's folder."""
        self._n_notebooks += 1
        name = f"notebook{self._n_notebooks}.ipynb"
        _write_notebook(self.folder / name, cells)
        return name

    @contextlib.contextmanager
    def open_dashboard(self, load: str, *cells: str, **options: Any) -> Iterator[Notebook]:
        """A new notebook whose first two cells have run: what loads, and the dashboard."""
        with self.open([load, "%memdash", *cells], **options) as notebook:
            notebook.wait_for_kernel()
            notebook.run(0, timeout_s=60)
            notebook.run(1)
            notebook.page.wait_for_selector(".gmd[data-drawn]")
            yield notebook
            assert notebook.problems == []

    @contextlib.contextmanager
    def open_file(
        self,
        name: str,
        *,
        width: int = 1280,
        height: int = 1000,
        theme: str = "JupyterLab Light",
    ) -> Iterator[Notebook]:
        """A notebook of the server's folder, as it was saved; its kernel ends with it."""
        others = self._list_sessions()
        page, self._kept_page = self._kept_page, None
        is_new = page is None
        if page is None:
            page = self.browser.new_context(color_scheme="light").new_page()
            page.set_default_timeout(1000 * _PATIENCE_S)
        is_kept = False
        try:
            page.set_viewport_size({"width": width, "height": height})
            opened = Notebook(self, page, name)
            if is_new:
                opened.load()
            else:
                opened.open_here()
            opened.set_theme(theme)
            yield opened
            page.remove_listener("pageerror", opened.add_problem)
            is_kept = self._keeps_page and self._kept_page is None and opened.close_all()
        finally:
            if is_kept:
                self._kept_page = page
            else:
                page.context.close()
            for session in self._list_sessions() - others:
                with contextlib.suppress(OSError):
                    self.request(f"/api/sessions/{session}", "DELETE")
            (self.folder / "enough").unlink(missing_ok=True)

    def request(self, path: str, method: str = "GET") -> Any:
        """Ask the server's own interface."""
        request = urllib.request.Request(f"{self.url}{path}", method=method)
        with urllib.request.urlopen(request, timeout=10) as response:
            body = response.read()
        return json.loads(body) if body else None

    def _list_sessions(self) -> set[str]:
        return {session["id"] for session in self.request("/api/sessions") or ()}


class Notebook:
    """A notebook in a page.

    Attributes:
        page: the page itself.
        name: its file, in the server's folder.
    """

    def __init__(self, lab: Lab, page: Page, name: str) -> None:
        self._lab = lab
        self.name = name
        self.page = page
        self.problems: list[str] = []
        #: Whether its kernel has run a cell.
        self._has_run = False
        page.on("pageerror", self.add_problem)

    def add_problem(self, error: Error) -> None:
        """Note an error of the page's scripts."""
        self.problems.append(str(error))

    def load(self) -> None:
        """Open the notebook, or open it again: the page is new, the kernel stays."""
        self.page.goto(f"{self._lab.url}/lab/tree/{self.name}?reset")
        self.page.wait_for_selector(".jp-NotebookPanel .jp-Cell")
        if self.page.locator("#jp-left-stack").is_visible():
            self.command("application:toggle-left-area")

    def open_here(self) -> None:
        """Open the notebook in a page of JupyterLab in which none is open."""
        self.page.evaluate(
            """async path => {
                const { commands } = window.jupyterapp;
                const { context } = await commands.execute("docmanager:open", { path });
                await context.ready;
            }""",
            self.name,
        )
        self.page.wait_for_selector(".jp-NotebookPanel .jp-Cell")

    def close_all(self) -> bool:
        """Close all that is open; return whether the page is as a new one now."""
        is_clean = self.page.evaluate(
            """() => {
                for (const widget of [...window.jupyterapp.shell.widgets("main")]) {
                    widget.dispose();
                }
                const theme = document.body.dataset.jpThemeName;
                return theme === "JupyterLab Light" && !document.querySelector(".jp-Dialog");
            }"""
        )
        return bool(is_clean)

    def reopen(self) -> None:
        """Shut the kernel down, and open the notebook in a new page, where a new kernel starts."""
        self._end_session()
        self._has_run = False
        self.load()
        self.wait_for_kernel()

    def set_theme(self, theme: str) -> None:
        """Choose JupyterLab's theme: a setting of the server's, which the next notebook has too."""
        chosen = f'body[data-jp-theme-name="{theme}"]'
        if not self.page.locator(chosen).count():
            self.command("apputils:change-theme", {"theme": theme})
            self.page.wait_for_selector(chosen, state="attached")

    def load_in_notebook_7(self) -> None:
        """Open the notebook in Notebook 7's page."""
        self.page.goto(f"{self._lab.url}/notebooks/{self.name}")
        self.page.wait_for_selector(".jp-NotebookPanel .jp-Cell")

    def wait_for_kernel(self) -> None:
        """Wait until a kernel is connected and has answered once.

        A notebook of which nothing has run gets another kernel if the first one does not come: it
        never does if another program has taken a port that Jupyter had chosen for it.
        """
        if not self._has_run and not self._is_answered(30.0):
            self._end_session()
            self.load()
        if not self._is_answered(_PATIENCE_S):
            raise AssertionError(f"no kernel has answered {self.name}")
        # A narrow page keeps it in a menu.
        self.page.wait_for_selector(
            '.jp-Notebook-ExecutionIndicator[data-status="idle"]', state="attached"
        )

    def _is_answered(self, seconds: float) -> bool:
        answers = self.page.evaluate(
            """async (milliseconds) => {
                const ask = async () => {
                    const session = window.jupyterapp.shell.currentWidget.sessionContext;
                    await session.ready;
                    await session.session.kernel.info;
                    return true;
                };
                const giveUp = new Promise(done => setTimeout(done, milliseconds, false));
                return Promise.race([ask(), giveUp]);
            }""",
            1000 * seconds,
        )
        return bool(answers)

    def _end_session(self) -> None:
        for session in self._lab.request("/api/sessions"):
            if session["path"] == self.name:
                self._lab.request(f"/api/sessions/{session['id']}", "DELETE")

    @property
    def path(self) -> str:
        """The file that has the focus, of this notebook or of another that was opened since."""
        return str(
            self.page.evaluate("() => window.jupyterapp.shell.currentWidget?.context?.path ?? ''")
        )

    def command(self, command: str, options: dict[str, object] | None = None) -> None:
        """Run one of JupyterLab's commands."""
        self.page.evaluate(
            """async ([name, options]) => {
                await window.jupyterapp.commands.execute(name, options);
            }""",
            [command, options or {}],
        )

    def cell(self, number: int) -> Locator:
        """The cell at this place, from 0."""
        return self.page.locator(".jp-Notebook .jp-Cell").nth(number)

    def start(self, number: int) -> None:
        """Run a cell and do not wait for its end."""
        self._has_run = True
        self.select(number)
        self.page.evaluate(
            "() => { void window.jupyterapp.commands.execute('notebook:run-cell'); }"
        )

    def select(self, number: int) -> None:
        """Make a cell the active one."""
        self.page.evaluate(
            """number => {
                const notebook = window.jupyterapp.shell.currentWidget.content;
                notebook.activeCellIndex = number;
            }""",
            number,
        )

    def is_running(self, number: int) -> bool:
        """Whether the cell's prompt is ``[*]``."""
        return self.prompt(number) == "[*]:"

    def prompt(self, number: int) -> str:
        """The cell's input prompt."""
        return self.cell(number).locator(".jp-InputPrompt").inner_text()

    def wait_for_end(self, number: int, *, timeout_s: float = _PATIENCE_S) -> None:
        """Wait until the cell's prompt has a number."""
        self.wait_until(
            lambda: bool(re.fullmatch(r"\[\d+\]:", self.prompt(number))),
            f"cell {number} has ended",
            timeout_s=timeout_s,
        )

    def finish(self, number: int) -> str:
        """Let a cell with ``BUSY`` go on, to its end; the text of its output."""
        self.let_finish()
        self.wait_for_end(number)
        (self._lab.folder / "enough").unlink()
        return self.output(number)

    def let_finish(self) -> None:
        """Let a cell with ``BUSY`` go on: a page that was loaded anew can't see its end."""
        (self._lab.folder / "enough").touch()

    def run(self, number: int, *, timeout_s: float = _PATIENCE_S) -> str:
        """Run a cell to its end; the text of its output."""
        self.start(number)
        self.page.wait_for_timeout(100)
        self.wait_for_end(number, timeout_s=timeout_s)
        return self.output(number)

    def run_here(self, number: int) -> None:
        """Run a cell of the notebook that has the focus to its end, also of another one."""
        self.page.evaluate(
            """async number => {
                const { shell, commands } = window.jupyterapp;
                const { sessionContext, content } = shell.currentWidget;
                await sessionContext.ready;
                content.activeCellIndex = number;
                await commands.execute("notebook:run-cell");
            }""",
            number,
        )

    def output(self, number: int) -> str:
        """The text that stands under a cell."""
        return self.cell(number).locator(".jp-OutputArea").first.inner_text()

    def wait_until(
        self, condition: Callable[[], bool], what: str, *, timeout_s: float = _PATIENCE_S
    ) -> None:
        """Wait until something is so; fail with ``what``, and with what the page shows then."""
        end = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > end:
                shown = self.page.locator("body").inner_text()
                raise AssertionError(f"waited {timeout_s:g} s in vain: {what}\n{shown}")
            self.page.wait_for_timeout(50)

    def ask(self, expression: str) -> str:
        """Evaluate an expression in the idle kernel, beside the cells; the text of its value.

        From any page: it need not show the notebook.
        """
        [kernel] = {
            session["kernel"]["id"]: session["kernel"]
            for session in self._lab.request("/api/sessions")
            if session["path"] == self.name
        }.values()
        return str(
            self.page.evaluate(
                """async ([model, expression]) => {
                    const kernels = window.jupyterapp.serviceManager.kernels;
                    const kernel = kernels.connectTo({ model, handleComms: false });
                    const future = kernel.requestExecute({
                        code: "", silent: true, user_expressions: { value: `str(${expression})` },
                    });
                    const reply = await future.done;
                    kernel.dispose();
                    const { data, ename, evalue } = reply.content.user_expressions.value;
                    return data ? data["text/plain"] : `${ename}: ${evalue}`;
                }""",
                [kernel, expression],
            )
        ).strip("'")

    def read_resident_bytes(self) -> int:
        """What the system says of the kernel's process, from outside."""
        pid = self.ask("__import__('os').getpid()")
        status = Path(f"/proc/{pid}/status")
        resident = re.search(r"VmRSS:\s+(\d+) kB", status.read_text(encoding="ascii"))
        assert resident is not None
        return int(resident[1]) * 1024

    def dashboards(self) -> Locator:
        """The dashboards in the page."""
        return self.page.locator(".gmd")

    def show(self) -> None:
        """Bring the notebook's tab to the front."""
        self.page.evaluate(
            """() => {
                for (const widget of window.jupyterapp.shell.widgets("main")) {
                    if (widget.content && widget.content.activeCellIndex !== undefined) {
                        window.jupyterapp.shell.activateById(widget.id);
                    }
                }
            }"""
        )

    def save(self) -> None:
        """Save the notebook with its outputs, and wait until the server has it."""
        self.page.evaluate("() => window.jupyterapp.shell.currentWidget.context.save()")

    def restart_kernel(self) -> None:
        """Restart the kernel, as a person does who confirms it."""
        self.page.evaluate(
            "() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()"
        )


@contextlib.contextmanager
def start_browser() -> Iterator[Browser]:
    """The machine's Chromium, headless."""
    path = find_chromium()
    if path is None:
        raise RuntimeError("no Chromium on this machine: `python -m tools.chromium` installs one")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-background-networking"]
        )
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def start_lab(
    folder: Path,
    browser: Browser,
    *,
    has_panel: bool = False,
    keeps_page: bool = False,
    python: Path | None = None,
) -> Iterator[Lab]:
    """A server whose every folder is under ``folder``.

    Args:
        folder: an empty folder.
        browser: opens the notebooks.
        has_panel: whether gpumemwidget's panel is there: this checkout's own.
        keeps_page: whether the next notebook is opened in the page of one that was closed.
        python: of another environment, which then is as its own user finds it, panel and all.
    """
    notebooks = folder / "notebooks"
    notebooks.mkdir()
    environment = _isolate(folder, is_own=python is None)
    for name, settings in _SETTINGS.items():
        path = folder / "config" / "lab" / "user-settings" / "@jupyterlab" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings), encoding="utf-8")
    if python is None:
        _place_panel(folder, has_panel=has_panel)
    port = _find_port()
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(
            [python or sys.executable, "-m", "jupyterlab", *_FLAGS, f"--ServerApp.port={port}"],
            cwd=notebooks,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        lab = Lab(f"http://127.0.0.1:{port}", notebooks, browser, keeps_page=keeps_page)
        _wait_for_server(lab, server, folder / "server.log")
        yield lab
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _write_notebook(path: Path, cells: Sequence[str]) -> None:
    code: dict[str, object] = {"cell_type": "code", "metadata": {}, "outputs": []}
    notebook = {
        "nbformat": 4,
        "nbformat_minor": 5,
        "metadata": {"kernelspec": {"name": "python3", "display_name": "python3"}},
        "cells": [
            {**code, "id": f"cell{i}", "execution_count": None, "source": source}
            for i, source in enumerate(cells)
        ],
    }
    path.write_text(json.dumps(notebook), encoding="utf-8")


def _place_panel(folder: Path, *, has_panel: bool) -> None:
    """Let the server have this checkout's panel, or none, though the environment may have one."""
    if has_panel:
        extensions = folder / "data" / "labextensions"
        extensions.mkdir()
        (extensions / "gpumemwidget-lab").symlink_to(_PANEL)
    else:
        page_config = folder / "config" / "labconfig" / "page_config.json"
        page_config.parent.mkdir()
        page_config.write_text('{"disabledExtensions": {"gpumemwidget-lab": true}}')


def _isolate(folder: Path, *, is_own: bool) -> dict[str, str]:
    # Where the widgets' own front ends are is the environment's matter, nothing else of Jupyter is.
    environment = {
        name: value
        for name, value in os.environ.items()
        if (is_own and name in ("JUPYTER_PATH", "PYTHONPATH"))
        or not name.startswith(("JUPYTER", "IPYTHON", "PYTHONPATH"))
    }
    package = importlib.util.find_spec("jupyterlab")
    if package is None or package.origin is None:
        raise RuntimeError("JupyterLab is not installed: the browser tests need it")
    application = Path(package.origin).parents[4] / "share" / "jupyter" / "lab"
    if is_own and application.is_dir():
        # An environment that only sees another one's packages does not have it in its own folder.
        environment["JUPYTERLAB_DIR"] = str(application)
    for name in ("config", "data", "runtime", "ipython"):
        (folder / name).mkdir()
    return {
        **environment,
        "JUPYTER_CONFIG_DIR": str(folder / "config"),
        "JUPYTER_DATA_DIR": str(folder / "data"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        "JUPYTER_NO_CONFIG": "",
        # The panel that is placed in the data folder comes before one that is installed.
        "JUPYTER_PREFER_ENV_PATH": "0",
        "IPYTHONDIR": str(folder / "ipython"),
    }


def _find_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for_server(lab: Lab, server: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + _START_S
    while time.monotonic() < end:
        if server.poll() is not None:
            break
        with contextlib.suppress(OSError):
            lab.request("/api")
            return
        time.sleep(0.1)
    raise RuntimeError(f"JupyterLab did not start:\n{log.read_text()[-4000:]}")
