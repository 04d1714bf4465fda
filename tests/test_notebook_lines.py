"""The notebook on lines does what it tells: executed in full, and held to what its prose claims."""

from __future__ import annotations

import re

import pytest
from nbformat import NotebookNode

from gpumemwidget.units import parse_bytes
from tests.executed import find_cells, read_text, run_notebook

MIB = 1024**2


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> NotebookNode:
    """Executed now on this machine."""
    return run_notebook("which-line-took-it", tmp_path_factory)


def _read_line(text: str, line: str) -> list[int]:
    """Return the amounts beside a line of the listing, on the host its net change alone."""
    [row] = [row for row in text.split("\n") if re.search(rf"\d  +{re.escape(line)}", row)]
    return [parse_bytes(amount) for amount in re.findall(r"\d[\d.]* (?:B|KiB|MiB|GiB)", row)]


def _read_peak_rise(text: str) -> int:
    """Return how far resident memory rose above its amount before the cell."""
    [row] = [row for row in text.split("\n") if row.strip().startswith("resident")]
    return parse_bytes(re.findall(r"\d[\d.]* (?:B|KiB|MiB|GiB)", row)[-1])


@pytest.mark.notebook
def test_attention_written_out_needs_its_scores_and_weights(notebook: NotebookNode) -> None:
    """128 MiB a copy; the result is 4 MiB."""
    text = read_text(notebook, "attended = weights @ values")

    assert _read_line(text, "scores = queries")[0] >= 128 * MIB
    assert _read_line(text, "weights = scores.softmax(-1)")[0] == pytest.approx(128 * MIB, rel=0.02)
    # Other threads of the kernel allocate too.
    result_bytes = _read_line(text, "attended = weights @ values")[0]
    assert result_bytes == pytest.approx(4 * MIB, abs=MIB / 2)


@pytest.mark.notebook
def test_fused_attention_needs_neither(notebook: NotebookNode) -> None:
    """Its peak stands little above what was there before."""
    apart, fused = (
        _read_peak_rise(read_text(notebook, source))
        for source in ("attended = weights @ values", "attended = nn.functional")
    )

    assert apart - fused > 200 * MIB


@pytest.mark.notebook
def test_loop_keeps_its_outputs(notebook: NotebookNode) -> None:
    """8 MiB a step, at the line that allocated them; and who holds them is told."""
    text = read_text(notebook, "history.append(output)")

    assert _read_line(text, "output = model(batch)")[0] == pytest.approx(4 * 8 * MIB, rel=0.2)
    assert _read_line(text, "batch = torch.randn")[0] == pytest.approx(8 * MIB, rel=0.2)
    assert "history" in read_text(notebook, "%memwhy history")


@pytest.mark.notebook
def test_reports_are_saved_as_html_and_as_text(notebook: NotebookNode) -> None:
    """A front end without a kernel shows the one or the other."""
    for source in ("attended = weights @ values", "history.append(output)"):
        [cell] = find_cells(notebook, source)
        bundles = [output.data for output in cell.outputs if "data" in output]
        [report] = [bundle for bundle in bundles if "resident" in bundle.get("text/plain", "")]
        assert "<table" in report["text/html"]
