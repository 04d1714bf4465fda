"""Hooks call back as torch is imported and as optimizers step, and change nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpumemwidget.backends.hooks import OptimizerStepHook
from tests.backends.children import run_python

PREAMBLE = """
import sys
from gpumemwidget.backends.hooks import TorchImportHook, find_torch
seen = []
arrival = TorchImportHook(lambda torch: seen.append(torch.value))
arrival.expect()
arrival.expect()
assert sys.meta_path.count(arrival) == 1
"""


@pytest.fixture
def own_torch(tmp_path: Path) -> Path:
    """A folder with a small package named torch."""
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("_C = None\nvalue = 1\n")
    return tmp_path


def test_arrives_once_after_the_module_was_executed(own_torch: Path) -> None:
    """The callback gets the finished module, which keeps its own loader; the finder is gone."""
    run_python(
        PREAMBLE
        + """
assert find_torch() is None
import torch
assert seen == [1]
assert arrival not in sys.meta_path
assert type(torch.__loader__).__name__ == "SourceFileLoader"
assert torch.__spec__.loader is torch.__loader__
assert find_torch() is torch
""",
        own_torch,
    )


def test_failing_import_fails_as_ever_and_is_awaited_still(own_torch: Path) -> None:
    """An import that raises is the user's own error; a later one that works is noticed."""
    (own_torch / "torch" / "__init__.py").write_text(
        "import sys\nif not hasattr(sys, 'second'): raise OSError('libcudart.so is missing')\n"
        "_C = None\nvalue = 2\n"
    )

    run_python(
        PREAMBLE
        + """
try:
    import torch
except OSError as exc:
    assert "libcudart" in str(exc)
else:
    raise AssertionError
assert seen == [] and find_torch() is None
sys.second = True
import torch
assert seen == [2]
""",
        own_torch,
    )


def test_cancelled_arrival_never_comes(own_torch: Path) -> None:
    """After cancel, twice too, the import is as without us."""
    run_python(
        PREAMBLE
        + """
arrival.cancel()
arrival.cancel()
import torch
assert seen == [] and torch.value == 1
""",
        own_torch,
    )


def test_looking_torch_up_finds_what_its_own_loader_can_do(own_torch: Path) -> None:
    """As ``pkgutil`` and ``runpy`` do, without an import; it is still awaited after that."""
    run_python(
        PREAMBLE
        + """
import importlib.util, pkgutil
loader = importlib.util.find_spec("torch").loader
assert loader.is_package("torch")
assert loader.get_source("torch") == "_C = None\\nvalue = 1\\n"
assert not hasattr(loader, "nonsense")
assert "torch" not in sys.modules
assert pkgutil.get_data("torch", "__init__.py") == b"_C = None\\nvalue = 1\\n"
assert seen == [1]
""",
        own_torch,
    )


def test_each_step_tells_which_optimizer_made_it() -> None:
    """Until the hook is closed."""
    told: list[object] = []
    hook = OptimizerStepHook(told.append)
    first, second = (torch.optim.SGD([torch.zeros(1)], 0.1) for _ in range(2))

    hook.open()
    for optimizer in (first, second, first):
        optimizer.step()
    hook.close()
    first.step()

    assert told == [first, second, first]


def test_a_compiled_step_is_traced_as_without_the_hook(tmp_path: Path) -> None:
    """No frame is compiled for it, and nothing is warned of."""
    run_python(
        """
        import threading
        import warnings
        from gpumemwidget.backends.hooks import OptimizerStepHook

        def end_step(optimizer_id):
            threading.get_ident()
            told.append(optimizer_id)

        import torch
        import torch._dynamo

        def train():
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            layer = torch.nn.Linear(2, 2)
            optimizer = torch.optim.Adam(layer.parameters())
            step = torch.compile(optimizer.step, backend="eager")
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for _ in range(10):
                    layer(torch.ones(1, 2)).sum().backward()
                    step()
            counters = torch._dynamo.utils.counters
            return counters["frames"]["total"], {str(each.message) for each in caught}

        train()
        n_frames_without, _ = train()
        told = []
        OptimizerStepHook(end_step).open()
        n_frames, warned = train()
        # With a hook the code around the step may be compiled as one frame instead of two.
        assert 0 < n_frames <= n_frames_without, (n_frames, n_frames_without)
        assert not warned, warned
        assert not told, told
        """,
        tmp_path,
    )
