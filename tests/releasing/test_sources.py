"""Memory that is not simply torch's own: lent, mapped, rubbish, and what an allocator rounds up.

What a plan promises is what the device's counter shows afterwards, and no report says of memory
that was freed that it was not.
"""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from gpumemwidget.model.devices import Block, Segment
from gpumemwidget.model.ownership import AccountNote, DeviceBytes, MemorySource
from gpumemwidget.model.releases import ReasonKind
from gpumemwidget.ownership.account import sum_frees, take_memory_account
from gpumemwidget.ownership.graph import torch_reader
from gpumemwidget.report.release import report_plan, report_release
from tests.ownership.notebook import Notebook

MIB = 1 << 20
_FOUR = DeviceBytes((("host", 4 * MIB),))


def _freed(report: object) -> int:
    return dict(report.allocated_freed_bytes)["host"]  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def _collected() -> None:
    """No rubbish of earlier tests is in a plan."""
    gc.collect()


@pytest.mark.parametrize(
    "look", ["y.numpy().mean()", "np.asarray(y)", "y.detach().numpy()", "np.from_dlpack(y)"]
)
def test_a_look_by_numpy_changes_nothing(notebook: Notebook, look: str) -> None:
    """The tensor has its row, is promised whole and is freed, and no sentence denies it."""
    notebook.run(f"import torch, numpy as np\ny = torch.ones({MIB})\n{look};")
    notebook.drop("Out[1]", "_")

    row = notebook.list_rows()["y"]
    owned = take_memory_account(notebook.shell, notebook.hardware).devices[0].owned
    plan = notebook.plan("y")
    report = notebook.release("y")

    assert row.frees_bytes == row.held_bytes == _FOUR
    assert "y" in [line.owner for line in owned]
    assert (plan.frees_bytes, plan.stays) == (_FOUR, ())
    assert _freed(report) == pytest.approx(4 * MIB, abs=MIB)
    assert "not freed" not in report_release(report).text


def test_an_array_that_is_alive_shares_the_memory(notebook: Notebook) -> None:
    """Views of the array too; both names together free it."""
    notebook.run(f"import torch\nz = torch.ones({MIB})\narray = z.numpy()[2:].reshape(2, -1)")

    alone = notebook.plan("z")
    report = notebook.release("z", "array")

    assert alone.frees_bytes.total_bytes == 0
    assert alone.stays[0].reason.holders == ("array",)
    assert alone.joint is not None
    assert (alone.joint.names, alone.joint.frees_bytes) == (("z", "array"), _FOUR)
    assert report.plan.frees_bytes == _FOUR
    assert _freed(report) == pytest.approx(4 * MIB, abs=MIB)


def test_an_array_out_of_sight_is_no_promise(notebook: Notebook) -> None:
    """Something that no variable names has the array: nothing is promised, nothing freed."""
    notebook.run(f"import torch\nz = torch.ones({MIB})")
    notebook.elsewhere.append(notebook.ip.user_ns["z"].numpy())

    report = notebook.release("z")

    assert report.plan.frees_bytes.total_bytes == 0
    assert _freed(report) < MIB


def test_lent_memory_goes_with_its_lender(notebook: Notebook) -> None:
    """Whether the array has gone is not known before: at least nothing, and the words say why."""
    notebook.run(f"import torch, numpy as np\na = np.ones({MIB})\nt = torch.from_numpy(a)")
    notebook.run(f"alone = torch.from_numpy(np.ones({MIB}))")

    kept, gone = notebook.release("t"), notebook.release("alone")

    for report in (kept, gone):
        assert report.plan.frees_bytes == DeviceBytes((), is_at_least=True)
        assert [stay.reason.kind for stay in report.plan.stays] == [ReasonKind.LENT]
        assert "lent by NumPy" in report_plan(report.plan).text
        assert "not freed" not in report_release(report).text
    assert _freed(kept) < MIB
    assert _freed(gone) == pytest.approx(8 * MIB, abs=MIB)


@pytest.mark.parametrize(
    "source",
    [
        "x = torch.ones(1 << 20).share_memory_()",
        "x = torch.from_file(path, shared=True, size=1 << 20)",
        "x = torch.from_numpy(np.memmap(path, dtype='float32', mode='r+', shape=1 << 20))",
        "(x,) = next(iter(DataLoader(TensorDataset(torch.ones(1, 1 << 20)), num_workers=1)))",
    ],
)
def test_what_is_mapped_is_not_mallocs(notebook: Notebook, tmp_path: Path, source: str) -> None:
    """Shared memory, a worker's batch, a file: promised is what malloc's count shows, nothing."""
    path = tmp_path / "data"
    path.write_bytes(bytes(4 * MIB))
    notebook.put(path=str(path))
    notebook.run(
        "import torch, numpy as np\nfrom torch.utils.data import DataLoader, TensorDataset"
    )
    notebook.run(source)

    account = take_memory_account(notebook.shell, notebook.hardware)
    report = notebook.release("x")

    assert AccountNote("host", 4 * MIB, MemorySource.MAPPED) in account.notes
    assert report.plan.frees_bytes.total_bytes == 0
    assert [stay.reason.kind for stay in report.plan.stays] == [ReasonKind.MAPPED]
    assert "unmapped" in report_release(report).text
    assert _freed(report) < MIB


_RUBBISH = """
import torch, gc
gc.disable()
class Node: pass
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.itself, self.layer = [self], torch.nn.Linear(1024, 1024, bias=False)
def make():
    node = Node(); node.itself = node; node.t = torch.ones(1 << 20)
make(); make(); Net()
x = torch.ones(1 << 20)
"""


def test_a_plan_has_what_its_own_collection_frees(notebook: Notebook) -> None:
    """Rubbish in cycles is promised beside the names, and is what the counter shows."""
    try:
        notebook.run(_RUBBISH + "None")
        (host,) = take_memory_account(notebook.shell, notebook.hardware).devices
        only = notebook.plan(out=True)
        plan = notebook.plan("x")
        report = notebook.release("x")
    finally:
        gc.enable()

    rubbish = DeviceBytes((("host", 12 * MIB),))
    assert (only.frees_bytes, only.collects_bytes) == (rubbish, rubbish)
    assert (plan.frees_bytes.on("host"), plan.collects_bytes) == (16 * MIB, rubbish)
    assert _freed(report) == pytest.approx(16 * MIB, abs=MIB)
    assert (
        "Will free 4.00 MiB on host; gc.collect() frees 12.00 MiB on host more, held by no "
        "variable." in " ".join(report_plan(plan).text.split())
    )
    # Other tests of this process may have left tensors that are no rubbish.
    owners = sorted(line.owner for line in host.owned if line.owner.startswith("rubbish"))
    assert (
        owners
        == ["rubbish (gc.collect() frees it): Net"] + ["rubbish (gc.collect() frees it): Node"] * 2
    )


def test_what_went_with_a_holder_in_cpp_is_not_reported_as_kept(notebook: Notebook) -> None:
    """The plan can't see that only the capsule holds it; the report knows that it is gone."""
    notebook.run(
        f"import torch\nx = torch.ones({MIB}); kept = torch.ones({MIB}); y = kept\n"
        "capsule = torch.utils.dlpack.to_dlpack(x)"
    )

    plan = notebook.plan("x", "kept", "capsule")
    report = notebook.release("x", "kept", "capsule")

    assert [stay.name for stay in plan.stays] == ["x", "kept"]
    assert [stay.name for stay in report.plan.stays] == ["kept"]
    assert "of x on host was not freed" not in report_release(report).text
    assert _freed(report) == pytest.approx(4 * MIB, abs=MIB)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every tensor taken for one on a GPU."""
    monkeypatch.setattr(torch_reader, "_name_device", lambda _device: "cuda:0")


def _make_segments(tensors: list[torch.Tensor], block_bytes: int) -> tuple[Segment, ...]:
    blocks = [
        Block(tensor.data_ptr(), block_bytes, tensor.untyped_storage().nbytes(), "active_allocated")
        for tensor in tensors
    ]
    return tuple(
        Segment("cuda:0", block.address, block_bytes, False, (0, 0), (block,)) for block in blocks
    )


@pytest.mark.usefixtures("gpu")
def test_a_block_goes_whole(notebook: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the allocator did not split off is freed too; memory outside of its blocks is not."""
    foreign, own = sorted((torch.ones(3 * MIB), torch.ones(3 * MIB)), key=torch.Tensor.data_ptr)
    segments = _make_segments([own], 14 * MIB)
    notebook.put(own=own, foreign=foreign)
    del own, foreign
    monkeypatch.setattr(notebook.hardware, "read_segments", lambda: segments)

    plan = notebook.plan("own", "foreign")

    assert plan.frees_bytes == DeviceBytes((("cuda:0", 14 * MIB),))
    assert [(stay.name, stay.reason.kind) for stay in plan.stays] == [("foreign", ReasonKind.LENT)]
    words = " ".join(report_plan(plan).text.split())
    assert "another library (CuPy, JAX)" in words


@pytest.mark.usefixtures("gpu")
def test_lent_memory_of_a_device_is_neither_promised_nor_moved(notebook: Notebook) -> None:
    """It is another library's, also where the allocator does not list its blocks."""
    notebook.run(f"import torch, numpy as np\nt = torch.from_numpy(np.ones({MIB}))\nv = [t]")

    for names in (["t"], ["t", "v"]):
        plan = notebook.plan(*names)

        assert (plan.frees_bytes, plan.moves) == (DeviceBytes(), ())
        assert [stay.reason.kind for stay in plan.stays] == [ReasonKind.LENT]


@pytest.mark.usefixtures("gpu")
def test_copies_are_counted_by_what_leaves_the_device(notebook: Notebook) -> None:
    """With copies kept on the CPU only the moves free anything."""
    notebook.run(f"import torch\nx = torch.ones({MIB})\ny = [x]")

    kept = sum_frees(notebook.shell, ["x", "y"], keep=True, budget_s=60.0)

    assert kept.frees_bytes == DeviceBytes((("cuda:0", 4 * MIB),))


def test_an_array_in_an_instances_own_dictionary_is_found(notebook: Notebook) -> None:
    """The collector tracks no dictionary of arrays, which a look at the attributes makes."""
    notebook.run(
        "import torch\nclass Holder: pass\n"
        f"holder = Holder(); holder.array = torch.ones({MIB}).numpy(); vars(holder)\n"
        f"pairs = [(torch.ones({MIB}).numpy(), 'label')]"
    )
    notebook.drop("Out[1]", "_")

    plan = notebook.plan("holder", "pairs")

    assert plan.frees_bytes == DeviceBytes((("host", 8 * MIB),))
