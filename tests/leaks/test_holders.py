"""What holds the memory that grows, in a shell: several places, modules, parts, slices."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from tests.leaks.conftest import say

Run = Callable[..., str]


@pytest.fixture
def run(loaded: InteractiveShell) -> Iterator[Run]:
    """Run cells; what the last one displayed and printed, as one line."""

    def run(*cells: str) -> str:
        said = [say(loaded, cell) for cell in cells]
        assert "Traceback" not in " ".join(said)
        return said[-1]

    run("import torch")
    yield run
    run("%reset -f")


@pytest.fixture
def keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module of the user's with a list."""
    (tmp_path / "keeper.py").write_text("KEPT = []\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("keeper", None)


def test_growth_in_two_places_is_one_leak_with_the_whole_amount(run: Run) -> None:
    """Each place with its part; what is left is counted by the whole."""
    cell = "x = torch.ones(1 << 20)\na.append(x + 1); b.append(x + 2)"
    said = run("a, b = [], []", cell, cell, cell)

    assert said.count("host memory") == 1
    assert said.startswith("host memory: +8.00 MiB in each of the last 3 runs of this cell")
    assert "2 tensors a run, the largest float32[1048576], from line 2" in said
    assert "held by a[…] (4.00 MiB) and b[…] (4.00 MiB). Memory runs out in about" in said
    assert "%memrelease a b" in said


def test_ignoring_one_of_two_places_leaves_the_other_with_its_own_amount(run: Run) -> None:
    """The list and the next run say the same."""
    cell = "x = torch.ones(1 << 20)\na.append(x + 1); b.append(x + 2)"
    run("a, b = [], []", cell, cell, cell)

    listed = run("%memleak ignore a")
    said = run(cell)

    assert "+4.00 MiB a run 3 runs b[…]" in listed
    assert said.startswith("host memory: +4.00 MiB in each of the last 4 runs")
    assert "held by b[…]. " in said


def test_a_loop_variable_is_an_element_of_what_the_loop_went_through(run: Run) -> None:
    """The variable that is left over does not split the growth."""
    cell = "for block in blocks: block['cache'].append(torch.ones(1 << 18))"
    said = run("blocks = [{'cache': []} for _ in range(4)]", cell, cell, cell)

    assert said.startswith("host memory: +4.00 MiB in each of the last 3 runs of this cell")
    assert 'held by blocks[…]["cache"][…]. ' in said
    assert "%memrelease blocks" in said


@pytest.mark.usefixtures("keeper")
def test_growth_that_an_imported_module_keeps_is_reported_from_the_third_run_on(run: Run) -> None:
    """With what empties the module's container; then its memory is free."""
    cell = "keeper.KEPT.append(torch.ones(1 << 20))"
    first, second, third = run("import keeper", cell), run(cell), run(cell)

    assert (first, second) == ("", "")
    assert third.startswith("host memory: +4.00 MiB in each of the last 3 runs of this cell")
    assert "held by keeper.KEPT[…]. " in third
    assert "keeper.KEPT keeps what each run adds" in third
    assert " keeper.KEPT.clear() " in third
    assert "%memleak ignore keeper.KEPT[…]" in third


def test_an_object_whose_class_has_no_hash_does_not_stop_the_search(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A metaclass that compares classes without a hash leaves them without one."""
    meta = type("Meta", (type,), {"__hash__": None})
    library = ModuleType("library")
    library.__dict__["strange"] = meta("Strange", (), {})()
    monkeypatch.setitem(sys.modules, "library", library)

    cell = "kept.append(torch.ones(1 << 20))"
    said = run("kept = []", cell, cell, cell)

    assert said.startswith("host memory: +4.00 MiB in each of the last 3 runs of this cell")


@pytest.mark.usefixtures("keeper")
def test_a_module_that_the_notebook_does_not_name_is_imported_first(run: Run) -> None:
    """It defines the function that the notebook calls."""
    Path(sys.path[0], "keeper.py").write_text(
        "KEPT = {}\ndef keep(x): KEPT[len(KEPT)] = x\n", encoding="utf-8"
    )
    cell = "keep(torch.ones(1 << 20))"
    said = run("from keeper import keep", cell, cell, cell)

    assert "import keeper; keeper.KEPT.clear()" in said


@pytest.mark.usefixtures("keeper")
def test_what_a_module_replaces_is_no_leak(run: Run) -> None:
    """Nor what it clears each time."""
    cell = "keeper.KEPT[:] = [torch.ones(1 << 20) for _ in range(3)]"

    assert [run("import keeper", cell), *(run(cell) for _ in range(4))] == [""] * 5


def test_widgets_that_stay_registered_are_closed(run: Run) -> None:
    """Ipywidgets keeps each button until it is closed, and what its callback refers to."""
    cell = (
        "out = torch.randn(1024, 512); b = w.Button()\nb.on_click(lambda b, kept=out: None); del b"
    )
    said = run("import ipywidgets as w", cell, cell, cell)

    assert said.startswith("host memory: +2.00 MiB in each of the last 3 runs of this cell")
    assert "held by ipywidgets.widgets.widget._instances[…]. " in said
    assert "ipywidgets.Widget.close_all()" in said
    run("w.Widget.close_all()")


@pytest.mark.saved_tensors
def test_places_under_one_index_are_named_with_their_attributes(run: Run) -> None:
    """A tensor counts with its graph."""
    cell = (
        "items[k].out = lin(torch.randn(1024, 512)); items[k].src = torch.randn(1024, 512)\nk += 1"
    )
    said = run(
        "class Item: pass",
        "items = [Item() for _ in range(9)]; lin = torch.nn.Linear(512, 512); k = 0",
        *[cell] * 3,
    )

    assert said.startswith("host memory: +6.00 MiB in each of the last 3 runs of this cell")
    assert "held by items[…].out's graph (4.00 MiB) and items[…].src (2.00 MiB). " in said


def test_many_places_under_one_index_are_counted(run: Run) -> None:
    """The largest is named: the others are like it."""
    names = [f"adapter_{letter}" for letter in "abcdef"]
    cell = "\n".join(f"layers[k].{name} = torch.ones(1 << 16)" for name in names) + "\nk += 1"
    said = run("class Layer: pass", "layers = [Layer() for _ in range(9)]; k = 0", *[cell] * 3)

    assert re.search(r"held by layers\[…\]\.adapter_a \(256\.00 KiB\) and 5 like it\. ", said)


def test_slices_of_large_storages_are_called_so(run: Run) -> None:
    """With what a copy of the slice would keep; the whole tensor is no slice."""
    cell = "x = torch.randn(1024, 512); first.append(x[:1])"
    slices = run("first = []", cell, cell, cell)
    whole = run("first = []", *[cell.replace("[:1]", "[:]")] * 4)

    assert "These are slices of 2.00 MiB storages: .clone() of a slice keeps 2.00 KiB" in slices
    assert "held by first[…]. " in whole
    assert "slices" not in whole


def test_a_list_without_leaks_says_which_loops_are_not_followed(run: Run) -> None:
    """And what shows all that is held."""
    assert run("%memleak") == (
        "No growing memory was found. Loops without an optimizer are followed on GPUs only; "
        "%memvars shows what is held."
    )


@pytest.mark.saved_tensors
def test_the_card_of_a_loop_is_updated_at_the_end_of_its_cell(loaded: InteractiveShell) -> None:
    """It was displayed while the loop ran, and has the number of all its steps then."""
    with capture_output():
        loaded.run_cell(
            "import torch; lin = torch.nn.Linear(512, 512); kept = []\n"
            "sgd = torch.optim.SGD(lin.parameters(), 0.1)"
        )
    with capture_output() as captured:
        loaded.run_cell(
            "for _ in range(60):\n"
            "    sgd.zero_grad(); lin(torch.randn(512, 512)).mean().backward(); sgd.step()\n"
            "    kept.append(lin(torch.randn(512, 512)))",
            store_history=True,
        ).raise_error()

    shown, *_, updated = captured.outputs
    assert re.search(r"for \d\d steps", shown.data["text/plain"])
    assert "since step 2, for 58 steps" in " ".join(updated.data["text/plain"].split())
    assert updated.update
    assert updated.transient["display_id"] == shown.transient["display_id"]
    with capture_output():
        loaded.run_cell("%reset -f")


def test_the_card_of_a_leak_is_greyed_once_its_variable_is_released(
    loaded: InteractiveShell,
) -> None:
    """It says so, and what it was; a release of something else changes nothing."""
    cell = "kept.append(torch.ones(1 << 20))"
    with capture_output():
        loaded.run_cell("import torch; kept, other = [], torch.ones(1 << 20)")
        loaded.run_cell(cell, store_history=True)
        loaded.run_cell(cell, store_history=True)
    with capture_output() as shown:
        loaded.run_cell(cell, store_history=True)
    with capture_output() as others:
        loaded.run_cell("%memrelease other", store_history=True)
    with capture_output() as released:
        loaded.run_cell("%memrelease kept", store_history=True)

    (card,) = shown.outputs
    assert not any(output.update for output in others.outputs)
    (update,) = [output for output in released.outputs if output.update]
    assert update.transient["display_id"] == card.transient["display_id"]
    assert "kept no longer holds it. It was: One float32[1048576] a run" in " ".join(
        update.data["text/plain"].split()
    )
    assert 'class="gmw-warn"' in card.data["text/html"]
    assert 'class="gmw-warn"' not in update.data["text/html"]
