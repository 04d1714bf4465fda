"""Notice when the CUDA caching allocator runs out of memory, before anything is unwound.

PyTorch calls an observer within the allocation that fails, on the thread that asked for it. To
attach one before CUDA is initialised crashed older releases
(https://github.com/pytorch/pytorch/issues/102796), so that waits for CUDA; and none can be
detached, so one observer stays for the life of the process, and calls the handlers that are open.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from gpumemwidget.backends.hooks import CudaStartHook, TorchImportHook
from gpumemwidget.errors import is_from_signal_handler
from gpumemwidget.model.devices import Frame

#: Observers that are open.
_observers: list[OomObserver] = []
#: The bindings of torch that call ``_observe``.
_attached: list[object] = []


@dataclass(frozen=True, slots=True)
class OomMoment:
    """An allocation that is failing now. Only of use while the handler is called."""

    device: str
    requested_bytes: int
    #: The limit of this process: the whole device, or its share of it.
    allowed_bytes: int
    free_bytes: int

    def read_stack(self) -> tuple[Frame, ...]:
        """Return the stack of Python that asked for memory, innermost first.

        Autograd's own threads have no such stack, or only that of a ``torch.autograd.Function``;
        the stack of the thread which waits in ``backward`` follows behind it.
        """
        frame: FrameType | None = sys._getframe()  # noqa: SLF001 - public by its documentation
        try:
            while frame is not None and frame.f_code is not _observe.__code__:
                frame = frame.f_back
            frame = None if frame is None else frame.f_back
            found = tuple(_list_frames(frame))
            outermost = None
            while frame is not None:
                outermost = frame.f_code
                frame = frame.f_back
            # A thread of Python's begins there, and one of autograd's in C++.
            bootstrap = threading.Thread._bootstrap.__code__  # type: ignore[attr-defined]  # noqa: SLF001 - has no public name
            is_main = threading.get_ident() == threading.main_thread().ident
            return found if is_main or outermost is bootstrap else (*found, *_find_backward())
        finally:
            # A frame that is kept keeps all that its callers have.
            del frame


class OomObserver:
    """Calls a handler at each OOM on a CUDA device, as soon as CUDA is in use.

    Args:
        handler: is called within the allocation, on any thread, also on one that is no thread of
            Python's. It may keep nothing of what it sees.
        on_failure: called with what failed of ours, on any thread too.
    """

    def __init__(
        self, handler: Callable[[OomMoment], None], on_failure: Callable[[str, Exception], None]
    ) -> None:
        self._handler = handler
        self._on_failure = on_failure
        self._import_hook = TorchImportHook(self._join)
        self._cuda_start: CudaStartHook | None = None

    def open(self) -> None:
        """Begin: now where CUDA is in use, else once it is."""
        _observers.append(self)
        self._import_hook.expect()

    def close(self) -> None:
        """Call the handler no more. May be called twice."""
        self._import_hook.cancel()
        _observers[:] = [observer for observer in _observers if observer is not self]
        if self._cuda_start is not None:
            self._cuda_start.cancel()

    def call(self, moment: OomMoment) -> None:
        """Call the handler with an allocation that is failing."""
        try:
            self._handler(moment)
        except Exception as exc:
            if is_from_signal_handler(exc):
                raise
            self._fail("reading what stood at an OOM", exc)

    def _join(self, torch: Any) -> None:
        """Wait for CUDA's initialisation, now that torch is there."""
        try:
            # CUDA may not even be compiled in.
            if hasattr(torch._C, "_cuda_attach_out_of_memory_observer"):  # noqa: SLF001 - has no public name
                self._cuda_start = CudaStartHook(torch, lambda: self._attach(torch._C))  # noqa: SLF001 - as above
                self._cuda_start.expect()
        except Exception as exc:  # noqa: BLE001 - this runs within the user's `import torch`
            self._fail("watching for OOMs", exc)

    def _attach(self, bindings: Any) -> None:
        """Attach the process's one observer, in the last step of CUDA's initialisation or later."""
        if any(attached is bindings for attached in _attached):
            return
        try:
            bindings._cuda_attach_out_of_memory_observer(_observe)  # noqa: SLF001 - has no public name
        except RuntimeError:
            # Allocators other than PyTorch's own have no observers: the error itself is read then.
            return
        except Exception as exc:  # noqa: BLE001 - this runs within the user's first use of CUDA
            self._fail("watching for OOMs", exc)
            return
        _attached.append(bindings)

    def _fail(self, what: str, exc: Exception) -> None:
        # Within the user's allocation there is nobody left to report a second failure to.
        with contextlib.suppress(Exception):
            self._on_failure(what, exc)
        # Traceback and context lead through frames to all that the user's functions hold.
        exc.__traceback__ = exc.__context__ = None


def _observe(device: int, requested_bytes: int, allowed_bytes: int, free_bytes: int) -> None:
    """Call all open observers; called by PyTorch for the life of the process."""
    for observer in tuple(_observers):
        observer.call(OomMoment(f"cuda:{device}", requested_bytes, allowed_bytes, free_bytes))


def _find_backward() -> tuple[Frame, ...]:
    """Return the stack of a thread that waits for backward, preferably the main thread."""
    main = threading.main_thread().ident
    tops = sys._current_frames()  # noqa: SLF001 - the one way to see them
    frame: FrameType | None = None
    try:
        for ident in sorted(tops, key=lambda number: number != main):
            frame = tops[ident]
            found = tuple(_list_frames(frame))
            # The function in which a thread of Python's waits for a running backward.
            if any(entry.function == "_engine_run_backward" for entry in found):
                return found
        return ()
    finally:
        tops.clear()
        del frame


def _list_frames(frame: FrameType | None) -> Iterator[Frame]:
    try:
        # The innermost ones: a recursion may be deep.
        for _ in range(256):
            if frame is None:
                break
            code = frame.f_code
            # In the middle of its own prologue a frame is on no line.
            line = frame.f_lineno or code.co_firstlineno
            yield Frame(code.co_filename, line, code.co_qualname)
            frame = frame.f_back
    finally:
        del frame
