"""What a plan promises on a real GPU is what the allocator and the host's counter show."""

from __future__ import annotations

import gc

import pytest
import torch

from gpumemwidget.model.devices import DeviceInfo, DeviceState
from gpumemwidget.model.ooms import OomEvent
from gpumemwidget.model.releases import ReasonKind
from gpumemwidget.oom.remedies import find_remedies
from gpumemwidget.ownership.account import take_memory_account
from gpumemwidget.ownership.why import explain
from tests.gpu.processes import MIB, run_program
from tests.ownership.notebook import Notebook

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]


_CUPY = "import cupy; array = cupy.zeros(4 << 20, dtype=cupy.float32)\n"


@pytest.mark.parametrize(
    "source",
    [
        f"{_CUPY}t = torch.from_dlpack(array)",
        f"{_CUPY}t = torch.as_tensor(array, device='cuda')",
        f"{_CUPY}t = torch.from_dlpack(array); view = [t[1:]]",
        "import os; os.environ['XLA_PYTHON_CLIENT_PREALLOCATE'] = 'false'\n"
        "import jax; array = jax.numpy.zeros(4 << 20).block_until_ready()\n"
        "t = torch.from_dlpack(array)",
    ],
    ids=["CuPy by DLPack", "CuPy by its interface", "CuPy, a view", "JAX"],
)
def test_another_librarys_memory_is_not_promised(notebook: Notebook, source: str) -> None:
    """No plan, row, remedy or explanation counts it, and its release moves nothing."""
    pytest.importorskip("jax" if "jax" in source else "cupy")
    notebook.run("import torch; torch.ones(1, device='cuda')")
    notebook.drop("Out[1]", "_")
    notebook.run(source)
    assert "t" in notebook.ip.user_ns
    event = OomEvent(DeviceState(DeviceInfo("cuda:0", "", None), None, None))

    explanation = explain(notebook.shell, "t")
    account = take_memory_account(notebook.shell, notebook.hardware)
    _, remedies = find_remedies(
        notebook.shell, notebook.hardware, event, None, mentions=(), budget_s=60.0
    )
    before = torch.cuda.memory_allocated()
    report = notebook.release("t")
    freed = before - torch.cuda.memory_allocated()

    plan = report.plan
    assert (plan.frees_bytes.on("cuda:0"), plan.frees_bytes.is_at_least, freed) == (0, False, 0)
    assert plan.moves == ()
    assert [stay.reason.kind for stay in plan.stays] == [ReasonKind.LENT]
    assert explanation.frees_bytes.on("cuda:0") == 0
    assert not [each for each in remedies if "t" in each.names]
    gpu = next(each for each in account.devices if each.device == "cuda:0")
    assert not [line for line in gpu.owned if line.owner in ("t", "array")]
    assert [line for line in gpu.owned if line.kind == "unknown"] == []


_PINNED = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance(colors="nocolor")
shell.run_cell("%load_ext gpumemwidget\\nimport torch")
import json, torch, gpumemwidget
if {is_initialized}:
    torch.ones(1, device="cuda")
shell.run_cell("q = torch.empty(70 << 20, dtype=torch.uint8, pin_memory=True); q.fill_(1);")
initialized = torch.cuda.is_initialized()
account = gpumemwidget.owners()
host = next(each for each in account.devices if each.device == "host")
plan = gpumemwidget.plan_release("q")
report = gpumemwidget.release("q")
print(json.dumps({{
    "initialized": initialized,
    "mallocs": [line.n_bytes for line in host.owned if line.owner == "q"],
    "notes": [(note.device, note.n_bytes, note.source.name) for note in account.notes],
    "planned": plan.frees_bytes.total_bytes,
    "reasons": [stay.reason.kind.name for stay in plan.stays],
    "freed": dict(report.allocated_freed_bytes)["host"],
}}))
"""


@pytest.mark.parametrize("is_initialized", [False, True])
def test_pinned_memory_is_not_promised(is_initialized: bool) -> None:
    """Malloc does not count it and PyTorch keeps it, whether or not CUDA is in use by then."""
    found = run_program(_PINNED.format(is_initialized=is_initialized))

    assert found["initialized"] is is_initialized
    assert found["mallocs"] == []
    assert ["host", 70 * MIB, "PINNED"] in found["notes"]
    assert (found["planned"], found["reasons"]) == (0, ["PINNED"])
    assert abs(found["freed"]) < MIB


_COMPLEX = "z = torch.randn(1016, 1016, dtype=torch.complex64, device='cuda')"


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("x = torch.ones(1130 * 10486, dtype=torch.uint8, device='cuda')", "x"),
        ("x = [torch.ones(21_390_950 + 9 * n, device='cuda') for n in range(3)]", "x"),
        (f"{_COMPLEX}; v = z.conj().T.resolve_conj()", "z v"),
        (f"{_COMPLEX}; c = z.conj(); v = c.T.resolve_conj()", "z c v"),
        (f"{_COMPLEX}; v = z.conj().T.resolve_conj(); y = v @ z", "z v y"),
        (f"{_COMPLEX}.requires_grad_(); v = z.conj().T.resolve_conj(); y = v @ z", "z v y"),
        (f"{_COMPLEX}; v = z.conj().T.resolve_conj(); y = torch.linalg.solve(z, v)", "z v y"),
    ],
)
def test_the_promise_is_kept_to_the_byte(notebook: Notebook, source: str, names: str) -> None:
    """Blocks that the allocator did not split, conjugates and their copies."""
    # Workspaces of the libraries are there before.
    notebook.run("import torch; a = torch.ones(64, 64, dtype=torch.complex64, device='cuda')")
    notebook.run("b = torch.linalg.solve(a + torch.eye(64, device='cuda'), a @ a); del a, b")
    torch.cuda.empty_cache()
    gc.collect()
    notebook.run(source)

    before = torch.cuda.memory_allocated()
    report = notebook.release(*names.split())
    freed = before - torch.cuda.memory_allocated()

    assert report.plan.frees_bytes.on("cuda:0") == freed > 0
