"""What C++ holds, on a real GPU: what is planned is what the allocator gets back."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
import torch.distributed

from gpumemwidget.backends.hardware import Hardware, detect_hardware
from gpumemwidget.ownership.account import take_memory_account
from tests.ownership import test_unseen
from tests.ownership.conftest import notebook, process_group  # noqa: F401 - fixtures
from tests.ownership.notebook import Notebook

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

MIB = 1024**2
_PRELUDE = "import torch\nfrom torch import nn\ntorch.set_default_device('cuda:0')\n"
#: What is made in C++ on the host alone, and what PyTorch can't make on a GPU.
_ON_HOST = {"mkldnn"}


@pytest.fixture
def hardware() -> Iterator[Hardware]:
    """This machine's GPUs and its host memory."""
    hardware = detect_hardware()
    torch.zeros(1, device="cuda:0")
    yield hardware
    hardware.close()
    torch.set_default_device(None)
    gc.collect()
    torch.cuda.empty_cache()


def _release(
    notebook: Notebook,  # noqa: F811
    *names: str,
    may_lack: str = "",
) -> tuple[int, int, bool]:
    """Release; what was planned, what the allocator got back, and whether it was a lower bound.

    No memory may be without an owner, but what is described with the words ``may_lack``.
    """
    torch.set_default_device(None)
    for _ in range(3):
        gc.collect()
    before = torch.cuda.memory_allocated(0)
    account = take_memory_account(notebook.shell, notebook.hardware)
    device = next(each for each in account.devices if each.device == "cuda:0")
    unknown = [each.owner for each in device.owned if each.kind == "unknown"]
    assert all(may_lack and may_lack in owner for owner in unknown)
    plan = notebook.plan(*names)
    report = notebook.release(*names)
    gc.collect()
    assert report.stopped is None
    freed = before - torch.cuda.memory_allocated(0)
    return plan.frees_bytes.on("cuda:0"), freed, plan.frees_bytes.is_at_least


_FREED = test_unseen.EXACT | test_unseen.PARTLY_TOLD


@pytest.mark.parametrize("kind", test_unseen.mark_saved(_FREED))
def test_what_is_planned_is_freed(notebook: Notebook, kind: str) -> None:  # noqa: F811
    """To the allocator's rounding: no less than is promised, and nothing is unknown before."""
    notebook.run(_PRELUDE + _FREED[kind])

    planned, freed, is_at_least = _release(notebook, "x")

    assert is_at_least is (kind in test_unseen.PARTLY_TOLD)
    assert planned > MIB // 2
    assert 0 <= freed - planned < MIB // 2


@pytest.mark.parametrize("kind", sorted(set(test_unseen.AT_LEAST) - _ON_HOST))
def test_what_can_not_be_known_is_at_least(notebook: Notebook, kind: str) -> None:  # noqa: F811
    """More is freed than is promised, and the promise says so."""
    notebook.run(_PRELUDE + test_unseen.AT_LEAST[kind])
    torch.set_default_device(None)

    plan = notebook.plan("x")

    assert plan.frees_bytes.is_at_least


def test_a_frozen_module_says_at_least_or_all(notebook: Notebook) -> None:  # noqa: F811
    """Whether TorchScript keeps its constants is not told: what goes is never less than planned."""
    notebook.run(
        _PRELUDE + "x = torch.jit.freeze(torch.jit.script(nn.Linear(512, 512).eval()))\n"
        "for _ in range(3):\n    x(torch.ones(2, 512)).sum().item()"
    )

    planned, freed, is_at_least = _release(notebook, "x", may_lack="no Python object")

    assert is_at_least
    assert planned <= freed


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("n_steps", [0, 1, 3])
@pytest.mark.parametrize("options", ["", "gradient_as_bucket_view=True", "bucket_cap_mb=1"])
def test_what_a_reducer_holds_goes_with_it(
    notebook: Notebook,  # noqa: F811
    options: str,
    n_steps: int,
) -> None:
    """What is promised goes, and at most the buckets beside it, of which nothing is told."""
    notebook.run(_PRELUDE + test_unseen.WRAPPED.format(options=options, n_steps=n_steps))

    planned, freed, is_at_least = _release(notebook, "x", may_lack="DistributedDataParallel")

    n_bytes = 2 * (512 * 512 + 512) * 4
    assert is_at_least
    assert planned >= (2 if n_steps else 1) * n_bytes
    assert 0 <= freed - planned < n_bytes + MIB
