"""The dashboard outside of JupyterLab: with jupyter-widgets' own managers, also held as Colab is.

Neither Colab nor VS Code runs here: ``docs/front-ends.md`` says what was read in their sources.
``front_end.js`` is the page. ``npm ci --prefix tests/browser/manager`` gets the manager of
ipywidgets 8 and what else the page needs, ``npm ci --prefix tests/browser/manager7`` that of
ipywidgets 7.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import BrowserContext, Page

from tests.browser.lab import BUSY, Lab
from tools.notebooks import execute
from tools.pictures import HOST_CARD, LOAD_CARDS

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

_FOLDER = Path(__file__).parent
_PATIENCE_S = 60.0
LOAD = "%load_ext gpumemwidget\nimport pathlib, torch"
BIG = "big = torch.ones(64, 1024, 1024)"
#: Colab's kernels have these modules, and anywidget asks them for a manager.
AS_COLAB = """
import sys, types
output = types.ModuleType("google.colab.output")
output.enable_custom_widget_manager = lambda: None
output._widgets = types.SimpleNamespace(_installed_url=None)
sys.modules.update({"google.colab": types.ModuleType("google.colab"), output.__name__: output})
"""
#: Notes that a view is made: it then watches whether it can be seen.
NOTE_VIEWS = """() => {
    window.IntersectionObserver = class extends IntersectionObserver {
        observe(element) {
            window.watched = element.className;
            super.observe(element);
        }
    };
}"""
#: Tells the page what background threads send.
MARK_THREADS = """
import threading
session = get_ipython().kernel.session
def mark_thread(*arguments, send=session.send, metadata=None, **named):
    is_background = threading.current_thread() is not threading.main_thread()
    metadata = {**(metadata or {}), "is_background": is_background}
    return send(*arguments, metadata=metadata, **named)
session.send = mark_thread
"""


class FrontEnd:
    """A bare page with a widget manager and a kernel of its own."""

    def __init__(self, page: Page, *, is_colab: bool) -> None:
        self.page = page
        self.is_colab = is_colab
        self.problems: list[str] = []
        page.on("pageerror", lambda error: self.problems.append(str(error)))

    def start(self, code: str) -> None:
        """Run a cell and do not wait for its end."""
        self.page.evaluate(
            """code => {
                window.status = "";
                window.held.run(code).then((status) => { window.status = status; });
            }""",
            code,
        )

    def wait_for_end(self) -> str:
        """Wait until the cell has ended; its status."""
        self.page.wait_for_function("() => window.status !== ''")
        return str(self.page.evaluate("() => window.status"))

    def run(self, *cells: str) -> None:
        """Run cells that must not fail, one after the other."""
        for code in cells:
            self.start(code)
            assert self.wait_for_end() == "ok", code

    def read_last_time(self) -> float:
        """Return the time of the newest reading that the dashboard has drawn."""
        return float(self.page.locator(".gmd").get_attribute("data-last-time") or "nan")

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until something is so, and fail with ``what`` if it never is."""
        end = time.monotonic() + _PATIENCE_S
        while not condition():
            if time.monotonic() > end:
                raise AssertionError(f"waited {_PATIENCE_S:g} s in vain: {what}")
            self.page.wait_for_timeout(50)

    def wait_for_news(self) -> None:
        """Wait until a newer reading is drawn."""
        before = self.read_last_time()
        self.wait_until(lambda: self.read_last_time() > before, "a newer reading is drawn")

    def count_dropped(self) -> int:
        """Return the number of a widget's messages that Colab would not have shown."""
        return int(self.page.evaluate("() => window.held.dropped"))


@pytest.fixture(scope="module", params=["manager", "manager7"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page with the manager of ipywidgets 8, and with that of ipywidgets 7."""
    modules = _FOLDER / request.param / "node_modules"
    esbuild = modules / ".bin" / "esbuild"
    if not esbuild.exists():
        pytest.skip(f"no widget manager: npm ci --prefix tests/browser/{request.param} gets it")
    out = tmp_path_factory.mktemp(request.param) / "page.js"
    subprocess.run(
        [
            *(esbuild, "front_end.js", "--bundle", "--format=iife", "--global-name=frontEnd"),
            *("--loader:.css=empty", "--loader:.svg=text", '--define:__webpack_public_path__=""'),
            *("--log-level=error", f"--outfile={out}"),
            *(f"--inject:{path}" for path in (_FOLDER / request.param).glob("*.js")),
        ],
        cwd=_FOLDER,
        env={**os.environ, "NODE_PATH": str(modules)},
        check=True,
    )
    return out


@pytest.fixture(params=["as it is", "as Colab"])
def front_end(request: pytest.FixtureRequest, lab: Lab, bundle: Path) -> Iterator[FrontEnd]:
    """A page with a kernel; in the second form it is held as Colab is."""
    is_colab = request.param == "as Colab"
    context = lab.browser.new_context(viewport={"width": 1280, "height": 1000})
    try:
        page = _open_page(context, lab, bundle)
        page.evaluate(
            "async given => { window.held = await frontEnd.start(given); }",
            {"anywidget": _read_anywidget(), "isColab": is_colab},
        )
        front_end = FrontEnd(page, is_colab=is_colab)
        if is_colab:
            front_end.run(AS_COLAB, MARK_THREADS)
        yield front_end
        assert front_end.problems == []
    finally:
        context.close()
        for kernel in lab.request("/api/kernels"):
            lab.request(f"/api/kernels/{kernel['id']}", "DELETE")
        (lab.folder / "enough").unlink(missing_ok=True)


def _open_page(context: BrowserContext, lab: Lab, bundle: Path) -> Page:
    page = context.new_page()
    page.set_default_timeout(1000 * _PATIENCE_S)
    # There is no such page: what comes is of the server's own address, and says so.
    page.goto(f"{lab.url}/front-end")
    page.evaluate("() => { document.documentElement.innerHTML = ''; }")
    page.add_script_tag(path=bundle)
    return page


def _read_anywidget() -> str:
    package = importlib.util.find_spec("anywidget")
    assert package is not None
    assert package.origin is not None
    path = Path(package.origin).parent / "nbextension" / "index.js"
    return path.read_text(encoding="utf-8")


def test_dashboard_is_live(front_end: FrontEnd, lab: Lab) -> None:
    """The plot gets points, between cells too, and the cells come into their list.

    In Colab the cell's own thread says that it runs, and its readings follow when it has ended. A
    click releases a variable.
    """
    front_end.run(LOAD, "%memdash")
    page = front_end.page
    page.wait_for_selector(".gmd[data-drawn]")
    for _ in range(3):
        front_end.wait_for_news()
    front_end.run("first = 1")
    page.locator(".gmd-cells", has_text="first = 1").wait_for()
    page.locator(".gmd[data-state=live]").wait_for()

    before = front_end.read_last_time()
    front_end.start(f"held = 1\n{BUSY}")
    page.locator(".gmd[data-state=running]").wait_for()
    if front_end.is_colab:
        page.locator(".gmd-state", has_text="running, no news for").wait_for()
        assert not page.locator(".gmd-banner").is_visible()
    else:
        front_end.wait_for_news()
    (lab.folder / "enough").touch()
    assert front_end.wait_for_end() == "ok"
    page.locator(".gmd[data-state=live]").wait_for()
    page.locator(".gmd-cells", has_text="held = 1").wait_for()
    front_end.wait_until(lambda: front_end.read_last_time() > before, "the cell's readings")

    page.locator("[data-tab=variables]").click()
    front_end.run(BIG)
    page.locator(".gmd-variables input[value=big]").check()
    page.locator(".gmd-sum", has_text="releases 256.00 MiB on host").wait_for()
    page.locator(".gmd-release").click()
    page.locator(".gmd-answer[data-state=done]").wait_for()
    assert "Release big" in page.locator(".gmd-answer").inner_text()
    front_end.run("assert big is None")
    assert front_end.count_dropped() == 0


def test_reports_are_static_html(front_end: FrontEnd) -> None:
    """That of a traced cell needs no widget; an OOM's card has buttons, which act and say it.

    The dashboard's view hides its copy for a page without a kernel; where there is no view, the
    copy is what is shown.
    """
    front_end.run(LOAD_CARDS, HOST_CARD)
    front_end.run("%%memtrace\nkept = torch.ones(8, 1024, 1024)")
    front_end.page.locator(".cell .gmw", has_text="kept = torch.ones").wait_for()
    front_end.start("failing.append(card)\nfail()")
    assert front_end.wait_for_end() == "error"
    row = front_end.page.locator(".gmw-card .gmw-out tr", has_text="%memrelease big")

    row.locator("button").click()

    row.locator("button[data-state=done]").wait_for()
    assert "256.00 MiB" in row.locator(".gmw-said").inner_text()
    front_end.run("assert big is None")

    front_end.run("%memdash")
    front_end.page.wait_for_selector(".gmd[data-drawn]")
    copy = front_end.page.get_by_text("Snapshot of the dashboard")
    assert not copy.is_visible()
    # With the element that the view fills: a late message puts what it draws into it again.
    front_end.page.evaluate("() => document.querySelector('.gmd').parentElement.remove()")
    copy.wait_for()
    assert front_end.count_dropped() == 0


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> NotebookNode:
    """A notebook with a dashboard, as nbclient saves it."""
    folder = tmp_path_factory.mktemp("executed")
    source = new_notebook(cells=[new_code_cell(LOAD), new_code_cell("%memdash")])
    nbformat.write(source, folder / "source.ipynb")
    return execute(folder / "source.ipynb", folder)


def test_saved_widget_without_a_kernel_leaves_its_copy(
    lab: Lab, bundle: Path, executed: NotebookNode
) -> None:
    """A page that makes widgets from what nbclient has saved shows the copy, as any other does."""
    state = executed.metadata["widgets"]["application/vnd.jupyter.widget-state+json"]
    context = lab.browser.new_context()
    try:
        page = _open_page(context, lab, bundle)
        page.evaluate(NOTE_VIEWS)

        page.evaluate(
            """async ({ outputs, ...saved }) => {
                const frontEnd = await window.frontEnd.openSaved(saved);
                for (const output of outputs) {
                    const element = document.createElement("div");
                    document.body.append(element);
                    await frontEnd.show(output, element);
                }
            }""",
            {
                "anywidget": _read_anywidget(),
                "state": state,
                "outputs": executed.cells[1].outputs,
            },
        )

        page.wait_for_function("() => window.watched === 'gmd'")
        page.get_by_text("Snapshot of the dashboard").wait_for()
        assert page.locator(".gmd").count() == 0
    finally:
        context.close()
