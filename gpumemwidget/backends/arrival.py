"""Notices when the user imports torch, without importing it.

Loading the extension must not cost an import of torch, and a notebook often imports it in the same
cell that first touches the GPU. So a finder stands at the front of ``sys.meta_path`` until torch
comes by: it lets the other finders find it, and runs a callback once the module has been executed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

__all__ = ["TorchArrival", "find_torch"]


def find_torch() -> ModuleType | None:
    """The module torch, where the user has imported it to the end."""
    torch = sys.modules.get("torch")
    spec = getattr(torch, "__spec__", None)
    # In the middle of its own import it is there, but half of it is missing.
    return None if torch is None or getattr(spec, "_initializing", False) else torch


class TorchArrival(MetaPathFinder):
    """Calls back once, when torch has been imported; then, or when it is cancelled, it is gone."""

    def __init__(self, on_arrival: Callable[[ModuleType], None]) -> None:
        self._on_arrival = on_arrival
        self._searching = False

    @property
    def is_waiting(self) -> bool:
        """Whether torch may still come."""
        return self in sys.meta_path

    def expect(self) -> None:
        """Begin to wait."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def cancel(self) -> None:
        """Wait no longer. May be called twice."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002 - the finders' signature
        target: ModuleType | None = None,  # noqa: ARG002 - as above
    ) -> ModuleSpec | None:
        """The spec that the other finders give for torch, with a loader that calls back."""
        if fullname != "torch" or self._searching:
            return None
        self._searching = True
        try:
            spec = find_spec(fullname)
        finally:
            self._searching = False
        if spec is None or spec.loader is None:
            return None
        spec.loader = _CallingLoader(spec, spec.loader, self._arrive)
        return spec

    def _arrive(self, torch: ModuleType) -> None:
        self.cancel()
        self._on_arrival(torch)


class _CallingLoader(Loader):
    """The module's own loader, and a callback behind it. Leaves the module with its own loader."""

    def __init__(
        self, spec: ModuleSpec, loader: Loader, on_loaded: Callable[[ModuleType], None]
    ) -> None:
        self._spec = spec
        self._loader = loader
        self._on_loaded = on_loaded

    def __getattr__(self, name: str) -> Any:
        # Who only looks torch up (pkgutil, runpy) finds all that its own loader can do.
        if name == "_loader":  # Not set yet, as in a copy that is being made.
            raise AttributeError(name)
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._spec.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._on_loaded(module)
