"""Be called after each step of an optimizer of PyTorch's, in the thread that makes it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from gpumemwidget.backends.cuda.torch_hooks import TorchImportHook


class OptimizerStepHook:
    """Calls back after each step of any optimizer, once torch is imported.

    Steps that ``torch.compile`` has compiled are left out. PyTorch keeps such hooks for all
    optimizers together:
    https://docs.pytorch.org/docs/stable/generated/torch.optim.Optimizer.register_step_post_hook.html

    The callback gets the optimizer, and must not raise.
    """

    def __init__(self, on_step: Callable[[object], None]) -> None:
        self._on_step = on_step
        self._import_hook = TorchImportHook(self._join)
        self._handle: Any = None

    def open(self) -> None:
        """Begin: now where torch is imported, else once it is."""
        self._import_hook.expect()

    def close(self) -> None:
        """Take the hook away. May be called twice."""
        self._import_hook.cancel()
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()

    def _join(self, _torch: object) -> None:
        optimizers: Any = sys.modules.get("torch.optim.optimizer")
        register = getattr(optimizers, "register_optimizer_step_post_hook", None)
        is_compiling = getattr(sys.modules.get("torch.compiler"), "is_compiling", None)
        if register is None or is_compiling is None:
            return

        def call(optimizer: object, *_: object) -> None:
            # ``torch.compile`` traces a step with its hooks; of this one nothing is to be left.
            if is_compiling():
                return
            self._on_step(optimizer)

        self._handle = register(call)
