"""The notebooks do what they tell: executed in full, and held to what their prose claims."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode

from gpumemwidget.recording.ledger import COLUMNS
from gpumemwidget.units import parse_bytes
from tests.executed import find_cells, read_text, run_notebook
from tools.notebooks import FOLDER, MOST_BYTES, find_notebooks, make_static

MIB = 1024**2


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> NotebookNode:
    """The quickstart, executed now on this machine."""
    return run_notebook("quickstart", tmp_path_factory)


def _read_amounts(text: str) -> list[int | None]:
    """The amounts of memory in a text, signs included; ``None`` where it is unknown."""
    amounts = re.findall(r"([+-]?)(\d+(?:\.\d+)? (?:B|KiB|MiB|GiB)|—)", text)
    return [
        None if amount == "—" else (-1 if sign == "-" else 1) * parse_bytes(amount)
        for sign, amount in amounts
    ]


def _read_row(report: str, device: str, counter: str) -> list[int | None]:
    """The amounts in the row of a device's counter, in the first table that has one."""
    current = ""
    for line in report.splitlines():
        words = line.split()
        if words and not line.startswith(" "):
            current = words[0]
        if current == device and counter in words[:2]:
            return _read_amounts(line)
    raise AssertionError(f"no row for {counter} of {device} in:\n{report}")


def _read_release(report: str, device: str) -> tuple[int, int]:
    """The bytes that a release was to free on a device, and those that it has freed."""
    [planned] = re.findall(rf"^{device}: planned (.*?)\. Now", report, flags=re.MULTILINE)
    [freed] = re.findall(rf"done, (.*?) on {device}", report)
    return parse_bytes(planned), parse_bytes(freed)


@pytest.fixture(scope="module")
def out_of_memory(tmp_path_factory: pytest.TempPathFactory) -> NotebookNode:
    """The notebook that runs out of memory, executed now on this machine."""
    return run_notebook("out-of-memory-what-now", tmp_path_factory)


@pytest.fixture(scope="module")
def device() -> str:
    """The device that the notebooks work on."""
    import torch

    return "cuda:0" if torch.cuda.is_available() else "host"


@pytest.mark.notebook
def test_quickstart_keeps_a_table_and_its_peak_held_more(
    quickstart: NotebookNode, device: str
) -> None:
    """64 MiB stay allocated, and the peak shows what stood beside them for a moment."""
    report = read_text(quickstart, "%%memtrace\ntable")

    before, after, change, *_ = _read_row(report, device, "allocated")
    *_, rise = _read_row(report, device, "resident" if device == "host" else "reserved")

    assert change == pytest.approx(after - before, abs=0.02 * MIB)
    assert 64 * MIB <= change < 80 * MIB
    assert rise >= 3 * 64 * MIB


@pytest.mark.notebook
def test_quickstart_frees_what_its_plan_promised(quickstart: NotebookNode, device: str) -> None:
    """The leak is larger than 100 MiB, the plan says by how much, and that much goes."""
    plan = read_text(quickstart, "%memrelease --dry-run")
    report = read_text(quickstart, "%memrelease validation_losses")

    [promised] = _read_amounts(re.findall(r"Will free (.*)", plan)[0])
    planned, freed = _read_release(report, device)

    assert promised > 100 * MIB
    assert planned == promised
    assert freed == pytest.approx(planned, rel=0.01)


@pytest.mark.notebook
def test_quickstart_mends_a_validation_that_keeps(quickstart: NotebookNode, device: str) -> None:
    """Under ``no_grad`` the same cell leaves no activation behind."""
    report = read_text(quickstart, "%%memtrace\nwith torch.no_grad():")

    _, _, change, *_ = _read_row(report, device, "allocated")

    assert abs(change) < MIB
    assert "mean loss" in report


@pytest.mark.notebook
def test_quickstart_releases_what_out_held(quickstart: NotebookNode, device: str) -> None:
    """The product that has no name goes with ``--out``."""
    report = read_text(quickstart, "%memrelease --out")

    planned, freed = _read_release(report, device)

    assert planned == 64 * MIB
    assert freed == pytest.approx(planned, rel=0.01)
    assert "Out[" in report


@pytest.mark.notebook
def test_quickstart_writes_the_ledger_with_every_cell(
    quickstart: NotebookNode, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """One row for each cell and device, under the columns that are promised."""
    executed = [cell for cell in quickstart.cells if cell.cell_type == "code"]
    n_before = [cell.source.startswith("%memledger --export") for cell in executed].index(True)

    path = tmp_path_factory.getbasetemp() / "quickstart" / "quickstart-ledger.csv"
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        rows = [row for row in reader if row["device"] == "host"]

    assert reader.fieldnames == list(COLUMNS)
    assert [int(row["execution_count"]) for row in rows] == list(range(1, n_before + 1))
    assert {row["status"] for row in rows} == {"ok"}


@pytest.mark.notebook
def test_the_failed_cell_has_its_card(out_of_memory: NotebookNode, device: str) -> None:
    """Below its own traceback: what was asked for, where, and the ways out with their commands."""
    [cell] = find_cells(out_of_memory, "def attend")
    error, shown = cell.outputs
    card = shown.data["text/plain"]

    assert error.output_type == "error"
    assert list(shown.data) == ["text/html", "text/plain"]
    name = "the host" if device == "host" else device
    assert f"Out of memory on {name} · 64.00 PiB requested · " in card
    assert "In [6], line 3 · mask = torch.ones(n_tokens, n_tokens, device=device)" in card
    assert "%memrelease --exceptions" in card
    assert "Out[5]" in card
    assert "validation_losses" in card


@pytest.mark.notebook
@pytest.mark.parametrize("option", ["--exceptions", "--out"])
def test_a_way_out_gives_what_its_card_promised(
    out_of_memory: NotebookNode, device: str, option: str
) -> None:
    """The command of the card, carried out, frees what stood beside it."""
    card = read_text(out_of_memory, "def attend")
    report = read_text(out_of_memory, f"%memrelease {option}")
    lines = card.splitlines()
    at = next(n for n, line in enumerate(lines) if line.strip() == f"%memrelease {option}")

    # The words beside the amount may go on in a second line.
    [promised] = next(filter(None, map(_read_amounts, reversed(lines[:at]))))
    planned, freed = _read_release(report, device)

    assert promised >= 128 * MIB
    assert planned == promised
    assert freed == pytest.approx(promised, rel=0.01)


@pytest.mark.notebook
def test_an_oom_that_is_caught_has_no_card(out_of_memory: NotebookNode) -> None:
    """A search for the biggest batch says what it says, and nothing of ours stands below it."""
    [cell] = find_cells(out_of_memory, "def find_n_tokens")

    assert [output.output_type for output in cell.outputs] == ["stream", "execute_result"]
    assert cell.outputs[0].text == "134,217,728 tokens do not fit\n"
    assert cell.outputs[1].data["text/plain"] == "512"


@pytest.mark.notebook
def test_four_ranks_stand_beside_the_notebook(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Each has its row and its steps, a killed one is lost, and one stands out."""
    notebook = run_notebook("many-processes", tmp_path_factory)

    live = read_text(notebook, "%memstat --all")
    ledger = read_text(notebook, "%memledger --all")
    killed = read_text(notebook, "worker.wait()")
    recorded = read_text(notebook, 'load("recordings/ranks")')

    for number in range(4):
        assert re.search(rf"rank {number} +ended", live)
        assert re.search(rf"rank {number}\nspan .*?\nstep +\d", ledger, flags=re.DOTALL)
    assert " · lost · " in killed
    assert re.search(r"host +last (19|2\d)\d\.\d\d MiB", killed)
    assert "rank 3 is 1.09 GiB above the median of the 4 processes" in recorded
    assert read_text(notebook, "for process in ranks.processes").count("exact") == 4


@pytest.mark.notebook
def test_a_step_is_predicted_on_any_machine(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whether it fits, what would need less and does when it is written, and nothing has run."""
    notebook = run_notebook("will-it-fit", tmp_path_factory)

    full = read_text(notebook, 'train, words, on="7GiB")').strip()
    # Above a prediction stood how far it had got.
    assert read_text(notebook, "prediction = gpumemwidget").strip().startswith("Fits on T4")
    assert full.startswith("Does not fit in 7.00 GiB")
    assert "checkpointing of model.layers" in full
    changed = read_text(notebook, "from torch.utils.checkpoint import").strip()
    assert changed.startswith("Fits in 7.00 GiB")
    assert read_text(notebook, "words.shape") == "torch.Size([16, 512])\n"


def test_quickstart_opens_the_dashboard_and_names_every_other_notebook() -> None:
    """Its second code cell opens the dashboard beside it, and its last cell has a line for each."""
    quickstart, others = FOLDER / "quickstart.ipynb", {path.name for path in find_notebooks()}
    cells = nbformat.read(quickstart, as_version=4).cells

    code = [cell.source for cell in cells if cell.cell_type == "code"]
    named = re.findall(r"^- \[(.*)\]\(\1\): ", cells[-1].source, re.MULTILINE)

    assert code[1] == "%memdash --side"
    assert not any(source.startswith("%unload_ext") for source in code)
    assert sorted(named) == sorted(others - {quickstart.name})


@pytest.mark.parametrize("path", find_notebooks(), ids=lambda path: path.name)
def test_saved_outputs_are_whole_static_and_small(path: Path) -> None:
    """What a reader on the web sees was really executed, in order, and needs no kernel."""
    notebook = nbformat.read(path, as_version=4)

    static = make_static(nbformat.from_dict(notebook), Path("/nowhere"))

    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert static == notebook
    assert path.stat().st_size <= MOST_BYTES
    failed = [
        "raises-exception" in cell.metadata.get("tags", ())
        for cell in code
        for output in cell.outputs
        if output.output_type == "error"
    ]
    assert all(failed)
