"""The hook after optimizers' steps: what it tells, and what ``torch.compile`` sees of it."""

from __future__ import annotations

from pathlib import Path

import torch

from gpumemwidget.backends.optimizer_steps import OptimizerStepHook
from tests.backends.children import run_python


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
        from gpumemwidget.backends.optimizer_steps import OptimizerStepHook

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
