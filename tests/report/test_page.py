"""A session in one page: all of it, nothing fetched, and redacted without a secret."""

from __future__ import annotations

import platform
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from gpumemwidget.report.page import render_story
from tests.remote.programs import run_python, write_script
from tests.report.every_report import make_every_report
from tests.shell import open_loaded_shell


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
        *("Devices", "Versions"),
    ]
    assert "<h1>Memory of a session, " in page
    assert str(tmp_path / "story.html") in said
    assert "is there already" in again
    assert "zebra_loader" in page
    assert not re.search(r"<script|https?://|src=|url\(", page)
    assert "--redact hides them" in page


def test_the_plot_has_the_peaks_of_the_tables(notebook: InteractiveShell, tmp_path: Path) -> None:
    """Also of what was freed between two samples; the host's is the resident one, and says so."""
    _run(notebook, "x = gpus.allocate(3 << 30); gpus.free(x)", "y = gpus.allocate(1 << 30)")

    _run(notebook, "%memsave story.html")

    page = (tmp_path / "story.html").read_text(encoding="utf-8")
    plot, cells = (re.split("<h2>.*?</h2>", page)[place] for place in (2, 3))
    assert re.findall(r"peak[^<]*", plot.replace("</span>", ""))[0] == "peak 3.00 GiB"
    assert "3.00 GiB" in cells
    assert re.findall(r"peak resident [\d.]+ [KMG]iB", plot)


#: Letters, digits and symbols that are nowhere but in what the user wrote.
_SECRET = re.compile(r"(?i)zebra|471147|€€|hunter2|gpus\b")
_CELLS = (
    "import torch, time, threading, gpumemwidget",
    "class Zebra(torch.nn.Module):\n  def __init__(self):\n    super().__init__()\n"
    "    self.zebra_layer = torch.nn.Linear(512, 512)\nzebra_471147 = Zebra()",
    "keys = {'zebra 471147': torch.ones(1 << 20), 471147471147: torch.ones(1 << 20), "
    "'€€': torch.ones(1 << 20), ('471147', 2): [torch.ones(1 << 20)]}",
    "globals()['%mem_zebra'] = torch.ones(1 << 20); globals()['€€'] = torch.ones(1 << 20)",
    "%%memtrace\ndef zebra_fn(n=471147):\n    return gpus.allocate(1 << 28)  # €€\n"
    "q = zebra_fn()\n471147; '€€'; '[[€€.€€]]'",
    *["keys['zebra'] = keys.get('zebra', []) + [torch.ones(1 << 20)]; time.sleep(0.2)"] * 4,
    "import gpumemwidget\nwith gpumemwidget.trace(): zebra = gpus.allocate(1 << 20)",
    "def zebra_f(arg):\n    zebra_local = torch.ones(1 << 20)\n    gpus.allocate(1 << 40)\n"
    "zebra_f('471147')",
    "zebra_out = torch.ones(1 << 20)\nzebra_out",
    "raise ValueError('zebra 471147 €€')",
    "%mem_zebra 471147",
    "%memleak ignore zebra_471147",
)


def test_a_redacted_page_has_no_secret(notebook: InteractiveShell, tmp_path: Path) -> None:
    """Neither in names, keys and arguments nor in code, errors and paths; amounts stay."""
    _run(notebook, *_CELLS)

    _run(notebook, "%memsave story.html", "%memsave redacted.html --redact")

    page = (tmp_path / "story.html").read_text(encoding="utf-8")
    redacted = (tmp_path / "redacted.html").read_text(encoding="utf-8")
    assert {match.lower() for match in _SECRET.findall(page)} == {
        *("zebra", "471147", "€€", "gpus"),
    }
    assert _SECRET.findall(redacted) == []
    assert str(tmp_path) not in redacted
    assert platform.node() not in redacted.replace(platform.platform(), "")
    headings = [re.findall(r"<h2>(.*?)</h2>", text) for text in (page, redacted)]
    assert headings[0] == headings[1]
    for words in ("Simulated GPU", "256.00 MiB", "Versions", platform.python_version(), "KiB"):
        assert words in redacted


def test_a_page_is_bounded() -> None:
    """What is beyond 3 MB is left out and named."""
    reports = make_every_report().items()
    sections = [(f"{name} {i}", report) for i in range(30) for name, report in reports]

    page = render_story("Many", sections)

    assert len(page.encode()) < 3_100_000
    assert "Left out, as the page would be too large: " in page
    assert f"{sections[-1][0]}." in page


def test_recordings_are_redacted(tmp_path: Path) -> None:
    """Command lines, spans, errors, hosts and files that can't be read."""
    source = (
        "import gpumemwidget\n"
        "with gpumemwidget.span('zebra 471147'): pass\n"
        "raise RuntimeError('zebra 471147 €€')"
    )
    script = write_script(tmp_path, source, "zebra.py")
    for name in ("a", "b"):
        to = f"zebra/{name}.jsonl"
        run_python(tmp_path, "-m", "gpumemwidget", "run", "--to", to, script, "--key=471147")
    (tmp_path / "zebra" / "c.jsonl").write_text('{"version": 999999}\n', encoding="utf-8")

    done = [
        run_python(tmp_path, "-m", "gpumemwidget", "load", "zebra", "--html", f"{name}.html", *more)
        for name, more in (("plain", ()), ("redacted", ("--redact",)))
    ]

    page, redacted = ((tmp_path / f"{n}.html").read_text("utf-8") for n in ("plain", "redacted"))
    assert [program.status for program in done] == [0, 0]
    assert {match.lower() for match in _SECRET.findall(page)} == {"zebra", "471147", "€€"}
    assert _SECRET.findall(redacted) == []
    assert socket.gethostname() in page
    assert f"on {socket.gethostname()}" not in redacted
    assert tmp_path.parent.name not in redacted
    assert page.count("<section>") == redacted.count("<section>") == 3
    assert page.count("<tr") == redacted.count("<tr")
    assert re.search(r">hidden \d+ \(pid \d+\) ended at [\d:.]+ with hidden \d+<", redacted)


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_only_a_page_is_redacted(options: list[str], tmp_path: Path) -> None:
    """What is printed would give names away, so that it is refused."""
    script = write_script(tmp_path, "pass", "acme.py")
    run_python(tmp_path, "-m", "gpumemwidget", "run", "--to", "a.jsonl", script)

    refused = run_python(*(tmp_path, "-m", "gpumemwidget", "load", "a.jsonl", "--redact", *options))

    assert (refused.status, refused.out) == (2, "")
    assert "give --redact together with --html FILE" in refused.err
    assert "acme" not in refused.err
