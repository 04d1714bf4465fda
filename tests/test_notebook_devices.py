"""The notebooks on whole devices do what they tell: executed, and held to what their prose claims.

Where there are too few GPUs they play what others have said, and the claims are held to that.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from nbformat import NotebookNode

from gpumemwidget.model.ownership import (
    DeviceAccount,
    DeviceBytes,
    Fix,
    FixKind,
    JointRelease,
    MemoryAccount,
    Owned,
    Variable,
)
from gpumemwidget.units import parse_bytes
from tests.executed import read_text, run_notebook
from tools.notebooks import FOLDER
from tools.recordings.recording import decode_recording

MIB, GIB = 1024**2, 1024**3
SMI, OWN = "nvidia-smi, memory used", "nvidia-smi, this process"
DRIVER_USED = "torch.cuda.mem_get_info(), total - free"
RESERVED, ALLOCATED = "torch.cuda.memory_reserved()", "torch.cuda.memory_allocated()"
REQUESTED = "  of that requested"
SOURCES = (SMI, OWN, DRIVER_USED, RESERVED, ALLOCATED, REQUESTED)

#: The figures at a moment: source, device.
Figures = dict[str, list[int | None]]


@pytest.fixture(scope="module")
def why(tmp_path_factory: pytest.TempPathFactory) -> NotebookNode:
    """The one on nvidia-smi, executed now on this machine."""
    return run_notebook("why-nvidia-smi-disagrees", tmp_path_factory)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> NotebookNode:
    """The one on two GPUs, executed now on this machine."""
    return run_notebook("two-gpus", tmp_path_factory)


def _read_figures(notebook: NotebookNode, moment: str) -> Figures:
    """What the sources said at a moment, by device in their order."""
    text = read_text(notebook, f'gpus.show("{moment}")')
    [at] = [n for n, line in enumerate(text.splitlines()) if line.startswith(f"{moment} ")]
    return {
        source: [
            None if amount == "—" else parse_bytes(amount.replace(",", ""))
            for amount in re.findall(r"—|(?<![+\-\d,])\d[\d,]* (?:B|MiB)", line)
        ]
        for source, line in zip(SOURCES, text.splitlines()[at + 1 :], strict=False)
    }


def _tell(notebook: NotebookNode) -> Callable[..., int]:
    def tell(moment: str, source: str, index: int = 0) -> int:
        n_bytes = _read_figures(notebook, moment)[source][index]
        assert n_bytes is not None, (moment, source)
        return n_bytes

    return tell


@pytest.mark.notebook
def test_it_is_said_what_is_played(why: NotebookNode, two: NotebookNode) -> None:
    """Either all is this machine's, or it is played, and then what it is."""
    for notebook in (why, two):
        text = read_text(notebook, "gpus = Gpus(")
        assert ("What follows is this machine's" in text) != ("What follows is played" in text)


# -- Why nvidia-smi disagrees ----------------------------------------------------------------------


@pytest.mark.notebook
def test_before_anything_only_the_driver_tells(why: NotebookNode) -> None:
    """PyTorch's own figures are not known, for asking would touch the device."""
    figures = _read_figures(why, "nothing is in use")

    assert figures[SMI] != [None]
    assert [figures[each] for each in (DRIVER_USED, RESERVED, ALLOCATED)] == [[None]] * 3


@pytest.mark.notebook
def test_four_bytes_cost_a_context(why: NotebookNode) -> None:
    """4 bytes, 512, 2 MiB, and some hundred MiB."""
    tell = _tell(why)

    assert tell("one number", REQUESTED) == 4
    assert tell("one number", ALLOCATED) == 512
    assert tell("one number", RESERVED) == 2 * MIB
    assert tell("one number", SMI) - tell("nothing is in use", SMI) > 100 * MIB


@pytest.mark.notebook
def test_a_product_brings_a_workspace_and_a_library(why: NotebookNode) -> None:
    """More is allocated than the two matrices, and there is more outside of PyTorch."""
    tell = _tell(why)

    taken = tell("one matrix product", ALLOCATED) - tell("one number", ALLOCATED)
    outside = [
        tell(moment, OWN) - tell(moment, RESERVED)
        for moment in ("one number", "one matrix product")
    ]

    assert taken > 2 * 4 * MIB + MIB
    assert outside[1] - outside[0] > 10 * MIB


@pytest.mark.notebook
def test_what_is_freed_stays_reserved_until_the_cache_is_emptied(why: NotebookNode) -> None:
    """The gigabyte goes from PyTorch at once, and from nvidia-smi later."""
    tell = _tell(why)
    there, gone, emptied = "a gigabyte is there", "the gigabyte is gone", "the cache was emptied"

    assert tell(there, ALLOCATED) - tell(gone, ALLOCATED) == pytest.approx(GIB, rel=0.01)
    assert tell(there, SMI) == pytest.approx(tell(gone, SMI), abs=0.02 * GIB)
    assert tell(gone, RESERVED) - tell(emptied, RESERVED) == pytest.approx(GIB, rel=0.02)
    assert tell(gone, SMI) - tell(emptied, SMI) == pytest.approx(GIB, rel=0.02)


@pytest.mark.notebook
def test_fragments_outlast_the_cache(why: NotebookNode) -> None:
    """Three quarters of a gigabyte are reserved and not allocated, and the bar calls it so."""
    tell = _tell(why)
    moment = "three of four rows are gone"
    [cell] = [n for n, cell in enumerate(why.cells) if f'show("{moment}")' in cell.source]
    bar = why.cells[cell + 2].outputs[0].data

    kept = tell(moment, RESERVED) - tell(moment, ALLOCATED)
    told = re.findall(r"cached, fragmented +(\d[\d.]* \w+)", bar["text/plain"])

    assert 0.7 * GIB < kept < 0.8 * GIB
    assert [parse_bytes(each) for each in told] == [pytest.approx(kept, rel=0.03)]
    assert "<svg" in bar["text/html"]


@pytest.mark.notebook
def test_the_parts_are_the_whole_device(why: NotebookNode) -> None:
    """To the byte, and one of them is what the driver keeps."""
    parts, total = re.findall(r"\d{5,}", read_text(why, "all parts"))

    assert parts == total
    assert "reserved by the driver" in read_text(why, "%memstat --device cuda:0")


@pytest.mark.notebook
def test_the_forgotten_loss_is_in_the_bar(why: NotebookNode) -> None:
    """AdamW's moments are twice the parameters, the gradients as much, and activations are held."""
    text = read_text(why, "%memstat --device cuda:0")

    parameters, gradients, moments, saved = (
        parse_bytes(re.findall(rf"^ *{kind} +(\d[\d.]* \w+)", text, re.MULTILINE)[-1])
        for kind in ("parameters", "gradients", "optimizer state", "saved for backward")
    )

    assert moments == pytest.approx(2 * parameters, rel=0.02)
    assert gradients == pytest.approx(parameters, rel=0.02)
    assert saved > parameters


@pytest.mark.notebook
def test_another_process_is_seen_by_the_driver_alone(why: NotebookNode) -> None:
    """Its 2 GiB and its context are in nvidia-smi's figure, and in none of PyTorch's."""
    tell = _tell(why)
    before, there = "a model was trained", "another process has come"

    assert tell(there, SMI) - tell(before, SMI) > 2 * GIB + 100 * MIB
    assert tell(there, RESERVED) == tell(before, RESERVED)
    assert "this notebook's children" in read_text(why, "%memstat --device cuda:0")


@pytest.mark.notebook
def test_the_error_says_what_the_table_says(why: NotebookNode) -> None:
    """Its capacity is the device without what the driver keeps, its use is this process's."""
    tell = _tell(why)
    text = read_text(why, "gpus.hear(")
    moment = "after the error"

    def find(before: str, after: str) -> int:
        amount = re.search(rf"{before}(\d[\d.]* [KMG]iB){after}", text)
        assert amount is not None, (before, after)
        return parse_bytes(amount[1])

    capacity = find("total capacity of ", "")
    [total] = {int(each) for each in re.findall(r"\d{9,}", read_text(why, "all parts"))}
    bar = read_text(why, "%memstat --device cuda:0")
    [driver] = {
        parse_bytes(each) for each in re.findall(r"reserved by the driver +(\d[\d.]* \w+)", bar)
    }
    assert capacity == pytest.approx(total - driver, abs=0.02 * GIB)
    assert find("", " is free") == pytest.approx(
        capacity - tell(moment, DRIVER_USED), abs=0.02 * GIB
    )
    assert find("this process has ", " memory in use") == pytest.approx(
        tell(moment, OWN), abs=0.02 * GIB
    )
    assert find("", " is allocated by PyTorch") == pytest.approx(
        tell(moment, ALLOCATED), abs=0.02 * GIB
    )


# -- Two GPUs --------------------------------------------------------------------------------------


@pytest.mark.notebook
def test_an_untouched_device_is_left_alone(two: NotebookNode) -> None:
    """There is no context on the first one, and PyTorch's figures of it are not asked for."""
    tell = _tell(two)
    before, moment = "nothing is in use", "one number on the second"
    after = _read_figures(two, moment)

    # What the driver itself takes there.
    assert 0 <= tell(moment, SMI, 0) - tell(before, SMI, 0) < 16 * MIB
    assert tell(moment, SMI, 1) - tell(before, SMI, 1) > 100 * MIB
    assert after[OWN][0] is None
    assert [after[each][0] for each in (DRIVER_USED, RESERVED, ALLOCATED)] == [None] * 3
    assert after[RESERVED][1] == 2 * MIB


@pytest.mark.notebook
def test_devices_are_told_by_what_does_not_change(two: NotebookNode) -> None:
    """Under any order the same device has the same number of its own."""
    text = read_text(two, "CUDA_VISIBLE_DEVICES")
    shown = [
        re.findall(r"cuda:\d is (\S+)…, (in use|not in use)", part)
        for part in text.split("CUDA_VISIBLE_DEVICES=")[1:]
    ]

    first, second = (uuid for uuid, _ in shown[0])
    assert first != second
    assert shown == [
        [(first, "in use"), (second, "not in use")],
        [(second, "in use")],
        [(second, "in use"), (first, "not in use")],
    ]


@pytest.mark.notebook
def test_a_spread_model_is_told_on_both(two: NotebookNode) -> None:
    """The second has twice the layers; each cell's line tells both devices."""
    tell = _tell(two)
    weights = [tell("a model on both", ALLOCATED, index) for index in (0, 1)]
    shown = read_text(two, "%memvars")

    assert weights[1] == pytest.approx(2 * weights[0], rel=0.05)
    line = read_text(two, "def compute_loss")
    assert re.search(r"cuda:0 allocated .* cuda:1 allocated ", line)
    for device in ("cuda:0: ", "cuda:1: "):
        rows = shown[shown.index(device) :].split("\n\n")[0]
        assert all(name in rows for name in ("model", "optimizer", "validation_loss"))


@pytest.mark.notebook
def test_children_are_told_on_each(two: NotebookNode) -> None:
    """Each has what it took, and a context."""
    tell = _tell(two)

    for index, n_bytes in ((0, GIB), (1, 3 * GIB)):
        came = tell("a child on each", SMI, index) - tell("copied", SMI, index)
        assert n_bytes + 100 * MIB < came < n_bytes + 2 * GIB
    assert "this notebook's children" in read_text(two, "%memstat --device")


@pytest.mark.notebook
def test_limit_and_budget_are_two_things(two: NotebookNode) -> None:
    """Beyond the limit there is an error; beyond the budget a mark."""
    assert "allowed" in read_text(two, "gpus.hear(")
    ledger = read_text(two, "%memledger")
    [row] = [line for line in ledger.splitlines() if "# Eight" in line]
    assert "!" in row


@pytest.mark.notebook
def test_the_release_goes_through_both(two: NotebookNode) -> None:
    """What is left is less than what the model alone had."""
    tell = _tell(two)

    for index in (0, 1):
        assert tell("all was released", ALLOCATED, index) < 100 * MIB
        assert tell("all was released", RESERVED, index) < 500 * MIB


# -- What is played --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["why-nvidia-smi-disagrees", "two-gpus"])
def test_recordings_are_of_these_cells(name: str) -> None:
    """Every moment that the notebook shows is there, in that order; and the file is small."""
    path = Path(FOLDER / "recordings" / f"{name}.json.gz")
    told = json.loads(gzip.decompress(path.read_bytes()))
    notebook = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))
    source = "\n".join("".join(cell["source"]) for cell in notebook["cells"])

    recording = decode_recording(json.dumps(told["recording"]).encode())

    assert [each["name"] for each in told["moments"]] == re.findall(r'gpus\.show\("(.*?)"', source)
    assert [each["event"] for each in told["moments"]] == sorted(
        each["event"] for each in told["moments"]
    )
    assert told["moments"][-1]["event"] < len(recording.events)
    assert recording.about.startswith("What follows is played")
    assert path.stat().st_size < 300_000


def test_owners_are_recorded_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the way to make a holder let go, and the rows to release together."""
    monkeypatch.syspath_prepend(str(FOLDER))
    from story import describe_owners

    n_bytes = DeviceBytes((("cuda:0", 512),))
    owned = Owned("cuda:0", 512, "tensor", ("x",), "nowhere", fix=Fix(FixKind.COLLECT))
    row = Variable(
        *("x", "name", "tensor", "Tensor", (9,), "uint8"),
        held_bytes=n_bytes,
        frees_bytes=DeviceBytes(),
        joint=JointRelease(("x", "y"), n_bytes),
    )
    account = MemoryAccount((DeviceAccount("cuda:0", 512, (owned,)),), (row,), True, 0.1)

    told = json.loads(json.dumps(describe_owners(account, {})))

    assert msgspec.convert(told["accounts"], tuple[DeviceAccount, ...]) == account.devices
    assert msgspec.convert(told["variables"], tuple[Variable, ...]) == account.variables
