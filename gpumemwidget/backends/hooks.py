"""Hook into Python and torch: replace functions, trace with a tool number, be called back.

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


# -- Functions of other modules --------------------------------------------------------------------


class Patch:
    """Functions of other modules that were replaced, and are put back together."""

    def __init__(self) -> None:
        #: The owner, the name, the owner's own function (``None``: it has its class's), ours.
        self._replaced: list[tuple[Any, str, Callable[..., Any] | None, Callable[..., Any]]] = []

    @property
    def is_applied(self) -> bool:
        """True if any function is replaced."""
        return bool(self._replaced)

    def replace(
        self, owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        """Replace a function by what ``wrap`` makes of it; nothing is done where there is none.

        Args:
            owner: the module, or the object that replaces it.
            name: the function's name there, which the replacement gets too.
            wrap: takes the original function and returns its replacement.
        """
        original = getattr(owner, name, None)
        if original is not None:
            ours = wrap(original)
            ours.__name__ = ours.__qualname__ = name
            ours.__doc__ = original.__doc__
            own = original if name in vars(owner) else None
            setattr(owner, name, ours)
            self._replaced.append((owner, name, own, ours))

    def undo(self) -> None:
        """Put the originals back, save where somebody has replaced our function since.

        There ours stays beneath theirs. May be called twice.
        """
        for owner, name, own, ours in self._replaced:
            if getattr(owner, name, None) is not ours:
                continue
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)
        self._replaced.clear()


# -- Tool numbers of sys.monitoring ----------------------------------------------------------------

# What follows loops has a number for good; what reads lines, and what records calls of modules,
# each have one while they run. None is shared: an event is switched off for all of a number.


def find_monitoring() -> Any:
    """Return the module ``sys.monitoring``; ``None`` before Python 3.12."""
    return getattr(sys, "monitoring", None)


def take_tool_number(name: str) -> int | None:
    """Return a number for a tool of that name; ``None`` where others have them all."""
    monitoring = find_monitoring()
    if monitoring is None:
        return None
    # Python reserves 3 and 4 for no kind, and 5 for optimizers, of which there are none.
    for number in (3, 4, 5):
        try:
            monitoring.use_tool_id(number, name)
        except ValueError:
            continue
        return number
    return None


# -- torch is imported, CUDA starts ----------------------------------------------------------------


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


# -- An optimizer steps ----------------------------------------------------------------------------


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
