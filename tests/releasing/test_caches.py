"""Torch's own caches are cleared on request, each on its own, and what it costs is said."""

from __future__ import annotations

import pytest
import torch

from gpumemwidget.errors import BackendError
from tests.ownership.notebook import Notebook, Tracker


def test_workspaces_that_must_stay_do_not_stop_the_rest(
    notebook: Notebook, tracker: Tracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why they stay is said, and what else was asked for goes."""

    def refuse() -> str:
        raise BackendError("cuBLAS's workspaces stay while a CUDA graph is alive")

    notebook.put(x=tracker.make(10))
    monkeypatch.setattr(notebook.hardware, "release_workspaces", refuse)

    report = notebook.release("x", cublas=True)

    assert report.steps[3].result.notes == ("cuBLAS's workspaces stay while a CUDA graph is alive",)
    assert report.stopped is None
    assert tracker.count_bytes() == 0


def test_what_was_compiled_is_forgotten(notebook: Notebook, tracker: Tracker) -> None:
    """The compiler's caches hold what a compiled function closed over; the next call compiles."""
    notebook.put(calls=[], make=tracker.make)
    notebook.run(
        "import torch, torch._dynamo\n"
        "def backend(graph, example_inputs):\n"
        "    calls.append(1)\n"
        "    constant = make(10)\n"
        "    return lambda *args: graph(*args)\n"
        "@torch.compile(backend=backend)\n"
        "def double(x):\n"
        "    return x * 2\n"
        "double(torch.ones(3))"
    )
    before = list(notebook.ip.user_ns["calls"])

    report = notebook.release(compile_caches=True)
    notebook.run("double(torch.ones(3))")

    assert before == [1]
    assert notebook.ip.user_ns["calls"] == [1, 1]
    assert report.steps[3].result.notes == ("torch._dynamo.reset(): the next call compiles anew",)


def test_the_compiler_is_not_imported_to_be_cleared(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing was compiled there is nothing to forget, and that is said before."""
    import sys

    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)

    report = notebook.release(compile_caches=True)

    assert report.steps[3].result.notes == ("nothing was compiled in this process",)
    assert "torch._dynamo" not in sys.modules
    assert torch.ones(1).item() == 1
