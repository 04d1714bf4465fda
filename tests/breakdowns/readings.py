"""Devices as they may be read, for the tests of the breakdown."""

from __future__ import annotations

from typing import Any, Literal

from hypothesis import strategies as st

from gpumemwidget.model.devices import (
    HOST,
    Block,
    DeviceInfo,
    DeviceState,
    DeviceUse,
    ProcessUse,
    Reading,
    Segment,
)
from gpumemwidget.model.ownership import DeviceAccount, MemoryKind, Owned

MIB = 1024**2
GIB = 1024**3

State = Literal["active_allocated", "active_pending_free", "inactive"]
STATES: dict[str, State] = {"a": "active_allocated", "p": "active_pending_free", "i": "inactive"}


def make_segment(
    *blocks: tuple[str, int],
    device: str = "cuda:0",
    address: int = 1 << 40,
    pool_id: tuple[int, int] = (0, 0),
    page_bytes: int | None = None,
) -> Segment:
    """Blocks side by side: ``("a", n)`` is allocated, ``p`` pending, ``i`` inactive."""
    made = []
    end = address
    for state, n_bytes in blocks:
        asked = None if state == "i" else n_bytes
        made.append(Block(end, n_bytes, asked, STATES[state]))
        end += n_bytes
    return Segment(
        device=device,
        address=address,
        n_bytes=end - address,
        is_private=pool_id != (0, 0),
        pool_id=pool_id,
        blocks=tuple(made),
        page_bytes=page_bytes,
    )


def make_process(
    pid: int, relation: Literal["own", "child", "other"], n_bytes: int | None, name: str | None = ""
) -> ProcessUse:
    return ProcessUse(pid, f"python {pid}.py" if name == "" else name, relation, n_bytes)


def make_state(**changes: Any) -> DeviceState:
    """An H100 as it was read: PyTorch's, a child, two others, and 9 MiB that nobody is listed for.

    Of 80 GiB 13 are allocated and 16 reserved: 1 is releasable, 1.5 fragmented and 0.5 a pool's.
    """
    segments = (
        make_segment(("a", 12 * GIB), ("i", GIB), ("a", GIB), ("i", GIB // 2)),
        make_segment(("i", GIB), address=2 << 40),
        make_segment(("i", GIB // 2), address=3 << 40, pool_id=(1, 0)),
    )
    own = 16 * GIB + 500 * MIB
    used = own + 2 * GIB + 10 * GIB + GIB + 9 * MIB
    values: dict[str, Any] = {
        "info": DeviceInfo("cuda:0", "NVIDIA H100", 80 * GIB - 480 * MIB, None, "GPU-1"),
        "reading": Reading("cuda:0", 13 * GIB, 16 * GIB),
        "use": DeviceUse(
            "cuda:0", used, 80 * GIB - 480 * MIB - used, 80 * GIB, 40, driver_bytes=480 * MIB
        ),
        "processes": (
            make_process(10, "own", own),
            make_process(11, "child", 2 * GIB),
            make_process(20, "other", 10 * GIB),
            make_process(21, "other", GIB, None),
        ),
        "segments": segments,
    }
    return DeviceState(**{**values, **changes})


def make_account(*owned: Owned, allocated_bytes: int | None = 13 * GIB) -> DeviceAccount:
    return DeviceAccount("cuda:0", allocated_bytes, owned)


def make_owned(
    n_bytes: int,
    kind: MemoryKind = "tensor",
    root: Literal["name", "nowhere"] = "name",
    *,
    rounding: int | None = 0,
) -> Owned:
    return Owned("cuda:0", n_bytes, kind, ("x",), root, rounding_bytes=rounding)


def make_host_state(**changes: Any) -> DeviceState:
    """A machine of 64 GiB: 6 GiB resident, of which malloc has handed out 5; 40 are available."""
    values: dict[str, Any] = {
        "info": DeviceInfo(HOST, "host memory", 64 * GIB),
        "reading": Reading(HOST, 5 * GIB, 6 * GIB),
        "use": DeviceUse(HOST, 24 * GIB, 40 * GIB, 64 * GIB),
        "processes": (),
        "pinned_bytes": 2 * GIB,
    }
    return DeviceState(**{**values, **changes})


# -- Anything that may be read ---------------------------------------------------------------------

#: Figures that may be missing, or make no sense together.
_ANY = st.none() | st.integers(0, 100)
_BLOCKS = st.lists(st.tuples(st.sampled_from("api"), st.integers(1, 12)), min_size=1, max_size=5)


@st.composite
def segments(draw: st.DrawFn) -> tuple[Segment, ...]:
    """Segments of all sorts."""
    return tuple(
        make_segment(
            *draw(_BLOCKS),
            address=(number + 1) << 40,
            pool_id=draw(st.sampled_from([(0, 0), (0, 0), (1, 0)])),
            page_bytes=draw(st.sampled_from([None, 2 * MIB, 20 * MIB])),
        )
        for number in range(draw(st.integers(0, 3)))
    )


@st.composite
def states(draw: st.DrawFn) -> DeviceState:
    """A device as it may be read, with figures that fit together or don't."""
    device = draw(st.sampled_from(["cuda:0", "cuda:0", HOST]))
    found = draw(segments())
    allocated = sum(b.n_bytes for s in found for b in s.blocks if b.state == "active_allocated")
    reserved = sum(each.n_bytes for each in found)
    reading = draw(
        st.sampled_from([None, Reading(device, allocated, reserved)])
        | st.builds(Reading, st.just(device), _ANY, _ANY)
    )
    processes = draw(
        st.none()
        | st.lists(
            st.builds(
                ProcessUse,
                st.integers(1, 9),
                st.sampled_from([None, "python"]),
                st.sampled_from(["own", "child", "other"]),
                _ANY,
            ),
            max_size=5,
        ).map(tuple)
    )
    use = draw(
        st.none()
        | st.builds(DeviceUse, st.just(device), _ANY, _ANY, _ANY, st.none(), driver_bytes=_ANY)
    )
    return DeviceState(
        info=DeviceInfo(device, "a device", draw(st.none() | st.integers(0, 120))),
        reading=reading,
        use=use,
        processes=processes,
        segments=found,
        is_at_one_moment=draw(st.booleans()),
    )


@st.composite
def accounts(draw: st.DrawFn, state: DeviceState) -> DeviceAccount | None:
    """An account of a device; mostly of what is allocated there."""
    allocated = None if state.reading is None else state.reading.allocated_bytes
    if allocated is None or draw(st.booleans()):
        allocated = draw(st.integers(0, 60))
    owned = []
    left = allocated
    while left > 0:
        n_bytes = draw(st.integers(1, left))
        left -= n_bytes
        owned.append(
            Owned(
                state.info.device,
                n_bytes,
                draw(st.sampled_from(["parameter", "tensor", "unknown", "cuBLAS workspace"])),
                ("x",),
                draw(st.sampled_from(["name", "nowhere", "module"])),
                rounding_bytes=draw(st.none() | st.integers(0, n_bytes)),
            )
        )
    return draw(st.sampled_from([None, DeviceAccount(state.info.device, allocated, tuple(owned))]))
