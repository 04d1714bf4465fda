"""torch joins when the user imports it, and not before."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.backends.children import run_python

PREAMBLE = """
import sys
from gpumemwidget.backends.cuda.torch_hooks import TorchImportHook, find_torch
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
