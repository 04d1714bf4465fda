"""A session in one page: all of it, nothing fetched, and redacted without a secret."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from gpumemwidget.report.page import render_story
from gpumemwidget.report.render.blocks import Cell, Column, Note, Table
from gpumemwidget.report.render.output import Report
from tests.remote.programs import run_python, write_script
from tests.report.every_report import make_every_report
from tests.shell import open_loaded_shell

GIB = 1 << 30
_SECRETS = ("acme", "hunter2", "zebra_loader", "gpus")


@pytest.fixture
def notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[InteractiveShell]:
    """A shell with a simulated GPU, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    with open_loaded_shell() as shell:
        yield shell


def _run(shell: InteractiveShell, *cells: str) -> str:
    with capture_output() as captured:
        for cell in cells:
            shell.run_cell(cell, store_history=True)
    return str(captured.stdout) + str(captured.stderr)


def _work(shell: InteractiveShell) -> None:
    """Cells that leave a trace, a leak, a card of an OOM and a variable with a secret's name."""
    _run(
        shell,
        "import torch, time; zebra_loader = []",
        "%%memtrace\nacme = gpus.allocate(1 << 28)  # hunter2",
        *["zebra_loader.append(torch.ones(1 << 20)); time.sleep(0.2)"] * 3,
        "gpus.allocate(1 << 40)",
    )


def test_a_session_is_one_page(notebook: InteractiveShell, tmp_path: Path) -> None:
    """With all that was recorded, and nothing that a browser would fetch or run."""
    _work(notebook)

    said = _run(notebook, "%memsave story.html")
    again = _run(notebook, "%memsave story.html")

    page = (tmp_path / "story.html").read_text(encoding="utf-8")
    headings = re.findall(r"<h2>(.*?)</h2>", page)
    assert headings == [
        *("Now", "The session", "Cells", "Out of memory", "Lines of In [2]", "Growth", "Owners"),
        "Devices",
    ]
    assert str(tmp_path / "story.html") in said
    assert "is there already" in again
    assert "zebra_loader" in page
    assert not re.search(r"<script|https?://|src=|url\(", page)
    assert "--redact hides them" in page


def test_a_redacted_page_has_no_secret(notebook: InteractiveShell, tmp_path: Path) -> None:
    """Neither names nor code, in text, titles and shapes; amounts and devices stay."""
    _work(notebook)

    _run(notebook, "%memsave story.html", "%memsave redacted.html --redact")

    page = (tmp_path / "story.html").read_text(encoding="utf-8")
    redacted = (tmp_path / "redacted.html").read_text(encoding="utf-8")
    assert all(secret in page for secret in _SECRETS)
    assert [secret for secret in _SECRETS if secret in redacted] == []
    assert str(tmp_path) not in redacted
    assert "Simulated GPU" in redacted
    assert "256.00 MiB" in redacted


def test_the_same_text_has_the_same_placeholder() -> None:
    """In each report of a page; a command of ours keeps its name."""
    columns = (Column("variable", "code"), Column("what", "words"))
    rows = [(Cell("acme"), Cell("held by acme")), (Cell("%memrelease acme"), Cell("zebra"))]
    report = Report((Table("acme's", columns, tuple((row,) for row in rows)), Note("acme, zebra")))

    page = render_story("T", [("a", report), ("b", report)], is_redacted=True)

    text = re.sub(r"<style>.*?</style>|<[^>]*>", " ", page)
    assert "acme" not in page
    assert "zebra" not in page
    assert text.count("%memrelease code 1") == 2
    assert len(re.findall(r"\bn1, n2\b|\bn2, n1\b", text)) == 2


def test_every_report_can_be_redacted() -> None:
    """Hostile names too: the page stays whole, and no markup of theirs gets in."""
    sections = list(make_every_report().items())

    page = render_story("All", sections, is_redacted=True)

    assert "alert" not in page
    assert page.count("<section>") == page.count("</section>")
    assert page.endswith("</body></html>\n")


def test_a_page_is_bounded() -> None:
    """What is beyond 3 MB is left out and named."""
    reports = make_every_report().items()
    sections = [(f"{name} {i}", report) for i in range(30) for name, report in reports]

    page = render_story("Many", sections)

    assert len(page.encode()) < 3_100_000
    assert "Left out, as the page would be too large: " in page
    assert f"{sections[-1][0]}." in page


def test_recordings_as_a_page(tmp_path: Path) -> None:
    """From the terminal, each process with its plot."""
    source = "import time\nx = bytearray(1 << 24); time.sleep(0.3)"
    script = write_script(tmp_path, source, "acme.py")
    for name in ("a", "b"):
        run_python(tmp_path, "-m", "gpumemwidget", "run", "--to", f"runs/{name}.jsonl", script)

    written = run_python(tmp_path, "-m", "gpumemwidget", "load", "runs", "--html", "runs.html")
    redacted = run_python(
        *(tmp_path, "-m", "gpumemwidget", "load", "runs", "--html", "secret.html", "--redact")
    )

    page = (tmp_path / "runs.html").read_text(encoding="utf-8")
    assert (written.status, redacted.status) == (0, 0)
    assert page.count("<section>") == 3
    assert "acme.py" in page
    secret = (tmp_path / "secret.html").read_text(encoding="utf-8")
    assert "acme" not in secret
    assert tmp_path.parent.name not in secret
