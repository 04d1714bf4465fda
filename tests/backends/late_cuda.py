"""CUDA that is not initialised yet, in a simulated torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def delay_cuda(torch: Any) -> None:
    """Have CUDA begin with ``torch.cuda.init()``, which makes the calls that were queued before."""
    queued: list[tuple[Callable[[], object], list[str]]] = []
    started: list[bool] = []

    def init() -> None:
        """No GPU is in use afterwards."""
        if not started:
            for action, _ in tuple(queued):
                action()
            started.append(True)

    def call(action: Callable[[], object]) -> None:
        if started:
            action()
        else:
            queued.append((action, []))

    torch.cuda.init = init
    torch.cuda.is_initialized = lambda: bool(started)
    torch.cuda._queued_calls = queued
    torch.cuda._lazy_call = call
