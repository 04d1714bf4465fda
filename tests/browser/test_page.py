"""The page of a session in Chromium: without network, in a frame, narrow, dark and printed."""

from __future__ import annotations

from html import escape
from pathlib import Path

import pytest

from gpumemwidget.report.page import Redaction, render_story
from gpumemwidget.report.trace import report_trace
from tests.browser.lab import Lab
from tests.report.every_report import make_every_report
from tests.report.trace_examples import make_trace

pytestmark = [pytest.mark.browser, pytest.mark.timeout(120)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A redacted page with a report that has a chart."""
    report = report_trace(Redaction().redact(make_trace()), [])
    path = tmp_path / "page.html"
    path.write_text(render_story("GPU memory", [("Lines", report)], is_redacted=True), "utf-8")
    return path


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_needs_nothing_and_follows_the_theme(lab: Lab, path: Path, scheme: str) -> None:
    """At 320 pixels it does not scroll sideways, and prints in black."""
    context = lab.browser.new_context(
        viewport={"width": 320, "height": 800},
        color_scheme="dark" if scheme == "dark" else "light",
        offline=True,
    )
    page = context.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))

    page.goto(path.as_uri())
    shown = page.evaluate("getComputedStyle(document.body).color")
    width = page.evaluate("document.documentElement.scrollWidth")
    page.emulate_media(media="print")
    printed = page.evaluate("getComputedStyle(document.body).color")
    context.close()

    black, white = "rgb(0, 0, 0)", "rgb(255, 255, 255)"
    assert (shown, printed) == (white if scheme == "dark" else black, black)
    assert (width, said) == (320, [])


@pytest.mark.parametrize("width", [700, 640, 530])
def test_tables_fit_beside_a_panel(lab: Lab, tmp_path: Path, width: int) -> None:
    """No report's table scrolls."""
    path = tmp_path / "every.html"
    reports = list(make_every_report().items())
    path.write_text(render_story("GPU memory", reports, is_redacted=False), "utf-8")
    page = lab.browser.new_page(viewport={"width": width, "height": 800})

    page.goto(path.as_uri())
    cut = page.evaluate(
        "[...document.querySelectorAll('.gmw-w')].filter(e => e.scrollWidth > e.clientWidth)"
        ".map(e => e.innerText)"
    )
    page.close()

    assert cut == []


def test_a_page_in_a_sandboxed_frame(lab: Lab, path: Path) -> None:
    """Nothing of it is blocked, as it has no script."""
    page = lab.browser.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))

    page.set_content(f'<iframe sandbox srcdoc="{escape(path.read_text("utf-8"))}"></iframe>')
    frame = page.frame_locator("iframe")
    frame.locator("svg").first.wait_for(state="attached")
    heading = frame.locator("h2").inner_text()
    page.close()

    assert (heading, said) == ("Lines", [])
