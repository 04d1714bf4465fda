"""The examples in the docstrings of the public functions do what they show."""

from __future__ import annotations

import builtins
import doctest
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

import gpumemwidget
from tests.jupyter.machine import Machine

#: IPython calls these, by its own protocol.
_HOOKS = ("load_ipython_extension", "unload_ipython_extension")
#: These record a program; cells are recorded already where the extension is loaded.
_OF_PROGRAMS = ("record", "load")
#: These need an engine: test_ipyparallel.py and test_ray.py in tests/remote run their examples.
_OF_CLUSTERS = ("watch_cluster", "ray_env")
_FUNCTIONS = [name for name in gpumemwidget.__all__ if name not in (*_HOOKS, *_OF_CLUSTERS)]


@pytest.fixture
def no_underscore_left() -> Iterator[None]:
    """Take away the ``_`` that doctest leaves in the builtins: with it, IPython binds none."""
    yield
    vars(builtins).pop("_", None)


@pytest.fixture
def loaded(
    shell: InteractiveShell,
    make_machine: Callable[..., Machine],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> InteractiveShell:
    """A shell with the extension, in which one cell was run; without a GPU, on a simulated one."""
    if not torch.cuda.is_available():
        make_machine().allocator.touch(0)
    monkeypatch.chdir(tmp_path)
    shell.run_cell("%load_ext gpumemwidget")
    shell.user_ns.update(gpumemwidget=gpumemwidget, torch=torch)
    shell.run_cell("weights = torch.zeros(1024, 1024)", store_history=True)
    return shell


@pytest.mark.usefixtures("no_underscore_left")
@pytest.mark.parametrize("name", _FUNCTIONS)
def test_example_gives_what_it_shows(name: str, loaded: InteractiveShell) -> None:
    """Every public function has an example, and it is true in a notebook."""
    function = getattr(gpumemwidget, name)
    [example] = doctest.DocTestFinder(recurse=False).find(function, name, module=False)
    example.globs = loaded.user_ns
    if name in _OF_PROGRAMS:
        loaded.run_cell("%unload_ext gpumemwidget")

    failed, attempted = doctest.DocTestRunner().run(example, clear_globs=False)

    assert attempted > 0, "no example"
    assert failed == 0
