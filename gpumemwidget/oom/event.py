"""Describe the state of a device when memory runs out."""

from __future__ import annotations

from dataclasses import replace

from gpumemwidget.backends.cuda.oom_observer import OomMoment
from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.breakdowns import build_breakdown, divide_unallocated
from gpumemwidget.model.breakdowns import Breakdown
from gpumemwidget.model.devices import DeviceInfo, DeviceState, DeviceUse, Frame
from gpumemwidget.model.ooms import OomEvent
from gpumemwidget.model.ownership import DeviceAccount, Owned


def describe_moment(hardware: Hardware, moment: OomMoment) -> OomEvent:
    """Return the state of the device on which an allocation is failing now."""
    event = describe_oom(
        hardware,
        moment.device,
        requested_bytes=moment.requested_bytes,
        frames=moment.read_stack(),
    )
    state = event.state
    # PyTorch's own total, as the driver's has what the driver keeps for itself.
    totals = {info.device: info.total_bytes for info in hardware.list_devices()}
    total_bytes = totals.get(moment.device)
    is_limited = total_bytes is None or moment.allowed_bytes < total_bytes
    limit_bytes = moment.allowed_bytes if is_limited else None
    use = state.use or DeviceUse(moment.device, None, None, total_bytes)
    return replace(
        event,
        state=replace(
            state,
            info=replace(state.info, limit_bytes=limit_bytes),
            use=replace(use, free_bytes=moment.free_bytes),
        ),
    )


def describe_oom(
    hardware: Hardware,
    device: str,
    *,
    requested_bytes: int | None = None,
    frames: tuple[Frame, ...] = (),
) -> OomEvent:
    """Return the present state of a device, which may be the host, as an event.

    Args:
        hardware: reads the state.
        device: the device that ran out of memory.
        requested_bytes: the bytes that were asked for, where they are known.
        frames: the stack that asked for memory.
    """
    states = {state.info.device: state for state in hardware.take_device_states()}
    state = states.get(device) or DeviceState(DeviceInfo(device, device, None), None, None)
    largest = cached = None
    if state.segments:
        parts = divide_unallocated(state.segments)
        largest, cached = parts.largest_free_block_bytes, parts.releasable_bytes
    # The card tells what is free, and not beside it what is in use.
    use = None if state.use is None else replace(state.use, used_bytes=None)
    return OomEvent(
        replace(state, use=use, segments=()),
        requested_bytes=requested_bytes,
        largest_free_block_bytes=largest,
        cached_bytes=cached,
        frames=frames,
    )


def divide_device(event: OomEvent, account: DeviceAccount | None) -> Breakdown | None:
    """Return the device at the OOM in parts; ``None`` where not even its total is known.

    Args:
        event: the state of the device.
        account: who owned what there, maybe of a later moment: what it does not find of the
            allocated memory is a part without a name.
    """
    if account is None or not account.owned:
        return build_breakdown(event.state)
    missing = (event.allocated_bytes or 0) - sum(owned.n_bytes for owned in account.owned)
    if missing > 0:
        rest = Owned(event.device, missing, "unknown", (), "nowhere")
        account = replace(account, owned=(*account.owned, rest))
    return build_breakdown(event.state, account)
