"""What stands when the CUDA caching allocator runs out, read before anything is unwound.

PyTorch calls an observer within the allocation that fails, on the thread that asked for it. To
attach one before CUDA is initialised crashed older releases
(https://github.com/pytorch/pytorch/issues/102796), so that waits for CUDA; and none can be
detached, so there is one for the life of the process, which asks here whom to tell.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from gpumemwidget.backends.arrival import TorchArrival, find_torch
from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.backends.resident import read_addresses
from gpumemwidget.backends.unallocated import divide_unallocated
from gpumemwidget.devices import ProcessUse
from gpumemwidget.records import HOST, Frame, Reading
from gpumemwidget.traces import OomEvent

__all__ = ["OomMoment", "OomObserver", "describe_state"]

#: A recursion may be deep; what asked for memory is at the inner end.
_MOST_FRAMES = 256
#: Where Python's side of a running backward stands.
_BACKWARD = "_engine_run_backward"

#: Those who are told.
_observers: list[OomObserver] = []
#: The bindings of torch that call ``_observe``.
_attached: list[object] = []


@dataclass(frozen=True, slots=True)
class OomMoment:
    """An allocation that is failing now. Only of use while the handler is called."""

    hardware: Hardware
    device: str
    requested_bytes: int
    #: What the process may take: the whole device, or its share of it.
    allowed_bytes: int
    free_bytes: int

    def describe(self, *, is_thorough: bool) -> OomEvent:
        """What stands.

        Args:
            is_thorough: with the allocator's blocks and the driver's list of processes, which takes
                some milliseconds; else the counters alone.
        """
        return describe_state(
            self.hardware,
            self.device,
            requested_bytes=self.requested_bytes,
            allowed_bytes=self.allowed_bytes,
            free_bytes=self.free_bytes,
            frames=_read_stack(),
            is_thorough=is_thorough,
        )


class OomObserver:
    """Tells a handler of each OOM on a CUDA device, as soon as CUDA is in use.

    Args:
        hardware: reads what stands.
        handler: is called within the allocation, on any thread, one that is no thread of Python's
            included. It may hold nothing of what it sees.
        on_failure: is told what failed of ours, likewise on any thread.
    """

    def __init__(
        self,
        hardware: Hardware,
        handler: Callable[[OomMoment], None],
        on_failure: Callable[[str, Exception], None],
    ) -> None:
        self._hardware = hardware
        self._handler = handler
        self._on_failure = on_failure
        self._arrival = TorchArrival(self._join)
        self._torch: Any = None
        # One object for each asking would not be found again.
        self._queued = self._attach

    def open(self) -> None:
        """Begin: now where CUDA is in use, else once it is."""
        _observers.append(self)
        torch = find_torch()
        if torch is None:
            self._arrival.expect()
        else:
            self._join(torch)

    def close(self) -> None:
        """Be told nothing more. May be called twice."""
        self._arrival.cancel()
        _observers[:] = [each for each in _observers if each is not self]
        queued = getattr(getattr(self._torch, "cuda", None), "_queued_calls", None)
        if type(queued) is list:
            queued[:] = [call for call in queued if call[0] is not self._queued]

    def tell(self, device: int, requested_bytes: int, allowed_bytes: int, free_bytes: int) -> None:
        """An allocation is failing."""
        try:
            self._handler(
                OomMoment(
                    hardware=self._hardware,
                    device=f"cuda:{device}",
                    requested_bytes=requested_bytes,
                    allowed_bytes=allowed_bytes,
                    free_bytes=free_bytes,
                )
            )
        except Exception as exc:  # noqa: BLE001 - it would take the place of the user's OOM
            self._fail("reading what stood at an OOM", exc)

    def _join(self, torch: Any) -> None:
        """Torch is there; CUDA calls what is queued as the last step of its initialisation."""
        self._torch = torch
        try:
            # CUDA may not even be compiled in: then nothing would ever call.
            if hasattr(torch._C, "_cuda_attach_out_of_memory_observer"):  # noqa: SLF001 - has no public name
                torch.cuda._lazy_call(self._queued)  # noqa: SLF001 - as above
        except Exception as exc:  # noqa: BLE001 - this runs within the user's `import torch`
            self._fail("watching for OOMs", exc)

    def _attach(self) -> None:
        """CUDA is initialised, or in the last step of it."""
        bindings = self._torch._C  # noqa: SLF001 - has no public name
        if any(each is bindings for each in _attached):
            return
        try:
            bindings._cuda_attach_out_of_memory_observer(_observe)  # noqa: SLF001 - as above
        except RuntimeError:
            # Allocators other than PyTorch's own have no observers: the error itself tells then.
            return
        except Exception as exc:  # noqa: BLE001 - this runs within the user's first use of CUDA
            self._fail("watching for OOMs", exc)
            return
        _attached.append(bindings)

    def _fail(self, what: str, exc: Exception) -> None:
        # Within the user's allocation there is nobody left to tell of a second one.
        with contextlib.suppress(Exception):
            self._on_failure(what, exc)
        # They lead through frames to all that the user's functions hold.
        exc.__traceback__ = exc.__context__ = None


def _observe(device: int, requested_bytes: int, allowed_bytes: int, free_bytes: int) -> None:
    """What PyTorch calls, for the life of the process."""
    for each in tuple(_observers):
        each.tell(device, requested_bytes, allowed_bytes, free_bytes)


def describe_state(
    hardware: Hardware,
    device: str,
    *,
    requested_bytes: int | None = None,
    allowed_bytes: int | None = None,
    free_bytes: int | None = None,
    frames: tuple[Frame, ...] = (),
    is_thorough: bool = True,
) -> OomEvent:
    """What stands on a device now, the host included, as an event.

    Args:
        hardware: reads it.
        device: which one.
        requested_bytes: what was asked for, where that is known.
        allowed_bytes: what the process may take, where PyTorch says so.
        free_bytes: what the driver says is free, where it was asked already.
        frames: the stack that asked.
        is_thorough: see ``OomMoment.describe``.
    """
    reading = next((each for each in hardware.read() if each.device == device), None)
    info = next((each for each in hardware.list_devices() if each.device == device), None)
    total = 0 if info is None else info.total_bytes
    if allowed_bytes is None and info is not None:
        allowed_bytes = info.limit_bytes
    largest = cached = own = None
    listed: tuple[ProcessUse, ...] | None = None
    if is_thorough:
        segments = [each for each in hardware.read_segments() if each.device == device]
        if segments:
            parts = divide_unallocated(segments)
            largest, cached = parts.largest_free_block_bytes, parts.releasable_bytes
        own = hardware.read_own_use(device)
        if own is not None and reading is not None and own < (reading.reserved_bytes or 0):
            own = None  # Another process of this number, outside of our container.
        if own is not None and device != HOST:
            listed = _list_others(hardware, device)
    if device == HOST:
        free_bytes = hardware.available_host_bytes()
        own = None if reading is None else reading.reserved_bytes
        allowed_bytes = _read_address_limit()
    used = None if free_bytes is None or not total else total - free_bytes
    limits = allowed_bytes is not None and (not total or allowed_bytes < total)
    others = None if used is None or own is None else max(used - own, 0)
    unlisted = None
    if others is not None and listed is not None:
        # One whose bytes are not told may have all that is of no other.
        sizes = [each.n_bytes for each in listed if each.n_bytes is not None]
        if len(sizes) == len(listed) and sum(sizes) <= others:
            unlisted, others = others - sum(sizes), sum(sizes)
    return OomEvent(
        device=device,
        requested_bytes=requested_bytes,
        allocated_bytes=None if reading is None else reading.allocated_bytes,
        reserved_bytes=None if reading is None else reading.reserved_bytes,
        largest_free_block_bytes=largest,
        device_free_bytes=free_bytes,
        device_total_bytes=total or None,
        limit_bytes=allowed_bytes if limits else None,
        others_bytes=others,
        outside_bytes=None if device == HOST else _find_outside(own, reading),
        frames=frames,
        cached_bytes=cached,
        addresses_bytes=read_addresses() if device == HOST and limits else None,
        others=listed or (),
        unlisted_bytes=unlisted,
    )


def _find_outside(own: int | None, reading: Reading | None) -> int | None:
    if own is None or reading is None or reading.reserved_bytes is None:
        return None
    return own - reading.reserved_bytes


def _list_others(hardware: Hardware, device: str) -> tuple[ProcessUse, ...] | None:
    """Who else is on a GPU, the biggest first; ``None`` where the driver does not tell of us."""
    states = hardware.take_device_states(with_segments=False)
    processes = next((each.processes for each in states if each.info.device == device), None)
    if processes is None or all(each.relation != "own" for each in processes):
        return None
    others = [each for each in processes if each.relation != "own"]
    return tuple(sorted(others, key=lambda each: -(each.n_bytes or 0)))


def _read_address_limit() -> int | None:
    """``ulimit -v``: the cap on the process's addresses, where the system has such a thing."""
    try:
        import resource  # noqa: PLC0415 - not on Windows
    except ImportError:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else int(soft)


# -- The stack -------------------------------------------------------------------------------------


def _read_stack() -> tuple[Frame, ...]:
    """The stack of Python that asked for memory, innermost first.

    Autograd's own threads have none, or that of a ``torch.autograd.Function`` alone: behind it
    stands that of the thread which waits in ``backward``.
    """
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - public by its documentation
    try:
        while frame is not None and frame.f_code is not _observe.__code__:
            frame = frame.f_back
        frame = None if frame is None else frame.f_back
        found = [*_list_frames(frame)]
        outermost = None
        while frame is not None:
            outermost = frame.f_code
            frame = frame.f_back
        if _is_pythons_own(outermost):
            return tuple(found)
        return (*found, *_find_backward())
    finally:
        # A frame that is kept keeps all that its callers have.
        del frame


def _is_pythons_own(outermost: CodeType | None) -> bool:
    """Whether the calling thread began in Python, and not in autograd's C++."""
    is_main = threading.get_ident() == threading.main_thread().ident
    return is_main or outermost is threading.Thread._bootstrap.__code__  # type: ignore[attr-defined]  # noqa: SLF001 - where each of them begins


def _find_backward() -> tuple[Frame, ...]:
    """The stack of a thread that waits for autograd's; the main one, where it is among several."""
    main = threading.main_thread().ident
    tops = sys._current_frames()  # noqa: SLF001 - the one way to see them
    frame: FrameType | None = None
    try:
        for ident in sorted(tops, key=lambda each: each != main):
            frame = tops[ident]
            found = tuple(_list_frames(frame))
            if any(each.function == _BACKWARD for each in found):
                return found
        return ()
    finally:
        tops.clear()
        del frame


def _list_frames(frame: FrameType | None) -> Iterator[Frame]:
    try:
        for _ in range(_MOST_FRAMES):
            if frame is None:
                break
            code = frame.f_code
            # Python 3.10 has no qualified names of functions here.
            name = getattr(code, "co_qualname", code.co_name)
            # In the middle of its own prologue a frame is on no line.
            yield Frame(code.co_filename, frame.f_lineno or code.co_firstlineno, name)
            frame = frame.f_back
    finally:
        del frame
