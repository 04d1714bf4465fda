"""Call back when the user imports torch, and when CUDA is first used, without doing either.

Loading the extension must not cost an import of torch, and a notebook often imports it in the same
cell that first touches the GPU. So a finder stands at the front of ``sys.meta_path`` until torch
comes by: it lets the other finders find it, and calls back once the module has been executed.
CUDA's own initialisation ends with the calls that PyTorch keeps in a queue for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, TypeGuard

_read_namespace: Any = vars(ModuleType)["__dict__"].__get__


def find_torch() -> ModuleType | None:
    """Return the module torch once the user has imported it to the end, else ``None``.

    Something else of that name (a placeholder, a module that loads itself when it is first used)
    is not torch, and none of its code runs.
    """
    torch = sys.modules.get("torch")
    if not _is_torch(torch):
        return None
    # In the middle of its own import it is there, but half of it is missing.
    spec = _read_namespace(torch).get("__spec__")
    return None if getattr(spec, "_initializing", False) else torch


def _is_torch(module: object) -> TypeGuard[ModuleType]:
    """Return whether a module has torch's bindings to C++, which a placeholder has not."""
    return issubclass(type(module), ModuleType) and "_C" in _read_namespace(module)


class CudaStartHook:
    """A call that PyTorch makes as the last step of CUDA's initialisation, on the user's thread.

    Where CUDA is initialised, the call is made at once. It must not raise: the first use would
    fail.
    """

    def __init__(self, torch: Any, on_start: Callable[[], None]) -> None:
        self._torch = torch
        # One object, by which it is found again.
        self._on_start = on_start

    def expect(self) -> None:
        """Begin to wait; nothing changes where it waits already."""
        if not any(call[0] is self._on_start for call in self._list_queued()):
            self._torch.cuda._lazy_call(self._on_start)  # noqa: SLF001 - has no public name

    def cancel(self) -> None:
        """Wait no longer. May be called twice."""
        queued = self._list_queued()
        queued[:] = [call for call in queued if call[0] is not self._on_start]

    def _list_queued(self) -> list[Any]:
        """Return PyTorch's own queue of calls, each with the stack that asked for it."""
        queued = getattr(self._torch.cuda, "_queued_calls", None)
        return queued if type(queued) is list else []


class TorchImportHook(MetaPathFinder):
    """A finder that calls back once, as soon as torch is imported, and then goes."""

    def __init__(self, on_import: Callable[[ModuleType], None]) -> None:
        self._on_import = on_import
        self._searching = False

    @property
    def is_waiting(self) -> bool:
        """True while torch is awaited."""
        return self in sys.meta_path

    def expect(self) -> None:
        """Call back now where torch is imported, else begin to wait."""
        torch = find_torch()
        if torch is not None:
            self._on_import(torch)
        elif self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def cancel(self) -> None:
        """Wait no longer. May be called twice."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002 - the finders' signature
        target: ModuleType | None = None,  # noqa: ARG002 - the finders' signature
    ) -> ModuleSpec | None:
        """Return the spec that the other finders give for torch, with a loader that calls back."""
        if fullname != "torch" or self._searching:
            return None
        self._searching = True
        try:
            spec = find_spec(fullname)
        finally:
            self._searching = False
        if spec is None or not hasattr(spec.loader, "__dict__"):
            return None
        self._call_back_after(spec.loader)
        return spec

    def _call_back_after(self, loader: Any) -> None:
        """Let a loader call back once it has run the module; nothing else of it changes."""
        run = loader.exec_module

        def exec_module(torch: ModuleType) -> None:
            vars(loader).pop("exec_module", None)
            run(torch)
            if self.is_waiting and _is_torch(torch):
                self.cancel()
                self._on_import(torch)

        loader.exec_module = exec_module
