"""Recognise an error that says that memory ran out, and describe the device that it is about.

An error may be of a class of the user's, whose ``str``, ``==`` or ``args`` is their code, which is
not run: classes are compared by identity, and what an error was made with is read from its slots.
"""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType, TracebackType
from typing import Any, Literal

from gpumemwidget.backends.cuda.oom_observer import OomMoment
from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.device_parts import build_breakdown, divide_unallocated
from gpumemwidget.model.breakdowns import Breakdown
from gpumemwidget.model.devices import DeviceInfo, DeviceState, DeviceUse, Frame
from gpumemwidget.model.ooms import OomEvent
from gpumemwidget.model.ownership import DeviceAccount, Owned
from gpumemwidget.ownership.graph.objects import (
    is_a,
    is_one_of,
    list_bases,
    read_class_attribute,
    read_namespace,
)

_SLOTS: Any = vars(BaseException)

#: Errors of the CUDA libraries' own allocations, and of the driver's.
_DEVICE_TEXT = re.compile(
    r"\b(?:CU|HIP|ROC|MIOPEN)[A-Z_]*ALLOC[A-Z]*_FAILED\b"
    r"|\b(?:CUDA|HIP)(?: driver)?(?: error:)? out of memory\b"
    r"|\b(?:cuda|hip)ErrorMemoryAllocation\b|\bCUDA_ERROR_OUT_OF_MEMORY\b"
)

#: PyTorch's names of device types, by the names in its errors.
_KINDS = {"CUDA": "cuda", "HIP": "cuda", "XPU": "xpu"}


@dataclass(frozen=True, slots=True)
class OomSign:
    """A copy of what an error says of memory that ran out; holds no object of the error's."""

    where: Literal["device", "host"]
    #: True for an error of PyTorch's own allocator, and not of a library that asked the driver.
    is_allocators: bool = False
    #: The request, as exact as the error has it (two decimals); ``None`` if it does not.
    requested_bytes: int | None = None
    #: The stack where the error was raised, innermost first.
    frames: tuple[Frame, ...] = ()
    #: The device that the error names, as PyTorch does: ``cuda:1``; ``""`` where it names none.
    device: str = ""


def find_oom(error: BaseException | None) -> OomSign | None:
    """Return the sign of an OOM in an error, or in those that its traceback shows with it.

    These are its cause, what it was raised in the handling of (unless ``from None`` hides that) and
    the members of a group.
    """
    for shown in _list_shown(error):
        sign = _read(shown)
        if sign is not None:
            return sign
    return None


def _list_shown(error: BaseException | None) -> Iterator[BaseException]:
    met: set[int] = set()
    pending = [error]
    while pending and len(met) < 64:
        shown = pending.pop(0)
        if shown is None or id(shown) in met:
            continue
        met.add(id(shown))
        yield shown
        cause = _SLOTS["__cause__"].__get__(shown)
        if cause is None and not _SLOTS["__suppress_context__"].__get__(shown):
            cause = _SLOTS["__context__"].__get__(shown)
        pending.append(cause)
        if is_one_of(type(shown), BaseExceptionGroup):
            pending.extend(vars(BaseExceptionGroup)["exceptions"].__get__(shown))


def _read(error: BaseException) -> OomSign | None:
    cls = type(error)
    args = _SLOTS["args"].__get__(error)
    text = args[0] if type(args) is tuple and args and type(args[0]) is str else ""
    is_runtime_error = is_one_of(cls, RuntimeError)
    is_memory_error = is_one_of(cls, MemoryError)
    # Errors of MPS's allocator have no class of their own in most releases.
    of_mps = r"\bMPS backend out of memory\b|\bMPS allocated: "
    is_mps = is_runtime_error and re.search(of_mps, text) is not None
    is_allocators = is_mps or is_one_of(cls, *_list_torch_classes())
    is_devices = (is_memory_error or is_runtime_error) and _DEVICE_TEXT.search(text)
    # Libraries whose own class of ``MemoryError`` is a device's.
    if is_allocators or is_devices or (is_memory_error and _is_from(cls, ("cupy", "rmm"))):
        request = re.search(r"Tried to allocate (\d+(?:\.\d+)?) (bytes|[KMG]iB)", text)
        # ``CUDA out of memory. … GPU 1 has a total capacity``.
        named_gpu = r"\b(CUDA|HIP|XPU) out of memory\. .*?\bGPU (\d+) has a total"
        named = re.search(named_gpu, text, re.DOTALL)
        units = {"bytes": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}
        return OomSign(
            "device",
            is_allocators=is_allocators,
            requested_bytes=round(float(request[1]) * units[request[2]]) if request else None,
            frames=_list_frames(error),
            device="mps:0" if is_mps else f"{_KINDS[named[1]]}:{named[2]}" if named else "",
        )
    if is_memory_error:
        return OomSign("host", frames=_list_frames(error))
    of_host = r"DefaultCPUAllocator: .*?you tried to allocate (\d+) bytes"
    if is_runtime_error and (host := re.search(of_host, text, re.DOTALL)):
        return OomSign("host", requested_bytes=int(host[1]), frames=_list_frames(error))
    return None


def _is_from(cls: type, packages: tuple[str, ...]) -> bool:
    modules = (read_class_attribute(base, "__module__") for base in list_bases(cls))
    return any(type(name) is str and name.partition(".")[0] in packages for name in modules)


def _list_torch_classes() -> list[type]:
    found: list[type] = []
    for name in ("torch", "torch.cuda"):
        module = sys.modules.get(name)
        if is_a(module, ModuleType):
            cls = read_namespace(module).get("OutOfMemoryError")
            if type(cls) is type:
                found.append(cls)
    return found


def _list_frames(error: BaseException) -> tuple[Frame, ...]:
    traceback: TracebackType | None = _SLOTS["__traceback__"].__get__(error)
    # The frame that raised the error comes last.
    frames: deque[Frame] = deque(maxlen=512)
    while traceback is not None:
        code = traceback.tb_frame.f_code
        frames.append(Frame(code.co_filename, traceback.tb_lineno, code.co_qualname))
        traceback = traceback.tb_next
    return tuple(reversed(frames))


# -- The device ------------------------------------------------------------------------------------


def describe_oom(
    hardware: Hardware,
    device: str,
    *,
    requested_bytes: int | None = None,
    frames: tuple[Frame, ...] = (),
    moment: OomMoment | None = None,
) -> OomEvent:
    """Return the present state of a device, which may be the host, as an event.

    The ``moment`` is that of an allocation that fails now: it has the limit and what is free.
    """
    states = {state.info.device: state for state in hardware.take_device_states()}
    state = states.get(device) or DeviceState(DeviceInfo(device, device, None), None, None)
    largest = cached = None
    if state.segments:
        parts = divide_unallocated(state.segments)
        largest, cached = parts.largest_free_block_bytes, parts.releasable_bytes
    info, use = state.info, state.use
    if moment is not None:
        # PyTorch's own total, as the driver's has what the driver keeps for itself.
        totals = {known.device: known.total_bytes for known in hardware.list_devices()}
        total_bytes = totals.get(device)
        is_limited = total_bytes is None or moment.allowed_bytes < total_bytes
        info = replace(info, limit_bytes=moment.allowed_bytes if is_limited else None)
        use = use or DeviceUse(device, None, None, total_bytes)
        # CUDA counts as used what the system would drop for it.
        if not use.is_shared:
            use = replace(use, free_bytes=moment.free_bytes)
    # The card shows what is free, and not beside it what is in use.
    use = None if use is None else replace(use, used_bytes=None)
    return OomEvent(
        replace(state, info=info, use=use, segments=()),
        requested_bytes=requested_bytes,
        largest_free_block_bytes=largest,
        cached_bytes=cached,
        frames=frames,
    )


def divide_device(event: OomEvent, account: DeviceAccount | None) -> Breakdown | None:
    """Return the device at the OOM in parts; ``None`` where not even its total is known."""
    if account is None or not account.owned:
        return build_breakdown(event.state)
    missing = (event.allocated_bytes or 0) - sum(owned.n_bytes for owned in account.owned)
    if missing > 0:
        rest = Owned(event.device, missing, "unknown", (), "nowhere")
        account = replace(account, owned=(*account.owned, rest))
    return build_breakdown(event.state, account)
