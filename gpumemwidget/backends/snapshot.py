"""The caching allocator's snapshot as records: its segments, and the blocks they are cut into.

Torch gives dictionaries, and these end here. Only what stands now is asked for: the event trace of
a user's own history takes up to two seconds to fetch, and it is never fetched.
"""

from __future__ import annotations

import inspect
from collections.abc import Container, Iterable, Mapping
from typing import Any, Literal

from gpumemwidget.backends.stacks import StackTable
from gpumemwidget.records import Block, Segment

__all__ = ["SnapshotReader", "parse_segments"]

#: What torch calls a block's state, in any release.
_STATES: dict[str, Literal["active_allocated", "active_pending_free", "inactive"]] = {
    "active_allocated": "active_allocated",
    "active_pending_free": "active_pending_free",
    "active_awaiting_free": "active_pending_free",
    "inactive": "inactive",
}


class SnapshotReader:
    """Reads the snapshot of a torch that has CUDA.

    Args:
        torch: the imported module ``torch``.
    """

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._options: dict[str, bool] | None = None

    @property
    def is_costly(self) -> bool:
        """Whether a snapshot would fetch all events of a history that the user records.

        Releases of torch that can't leave them out: see ``include_traces`` in
        https://docs.pytorch.org/docs/stable/generated/torch.cuda.memory.memory_snapshot.html
        """
        is_recorded = getattr(self._torch._C, "_cuda_isHistoryEnabled", None)  # noqa: SLF001 - no public call tells
        return not self._find_options() and is_recorded is not None and bool(is_recorded())

    def read(self, touched: Container[int]) -> tuple[Segment, ...]:
        """The segments of these devices; CUDA must be initialised.

        Args:
            touched: indices of the devices that are in use.

        Raises:
            RuntimeError: CUDA refuses, or the allocator is one that keeps no blocks.
        """
        raw = self._torch.cuda.memory.memory_snapshot(**self._find_options())
        return parse_segments(each for each in raw if each["device"] in touched)

    def _find_options(self) -> dict[str, bool]:
        if self._options is None:
            known = inspect.signature(self._torch.cuda.memory.memory_snapshot).parameters
            self._options = {"include_traces": False} if "include_traces" in known else {}
        return self._options


def parse_segments(raw: Iterable[Mapping[str, Any]], *, kind: str = "cuda") -> tuple[Segment, ...]:
    """Segments out of torch's dictionaries, by device and address.

    Args:
        raw: what torch gives.
        kind: of the devices: what their names begin with.
    """
    stacks = StackTable()
    segments = [_parse_segment(each, stacks, kind) for each in raw]
    return tuple(sorted(segments, key=lambda each: (_index(each.device), each.address)))


def _parse_segment(raw: Mapping[str, Any], stacks: StackTable, kind: str) -> Segment:
    address = raw["address"]
    blocks = []
    for each in raw["blocks"]:
        n_bytes = each["size"]
        state = _STATES[each["state"]]
        blocks.append(
            Block(
                # Releases before 2.0 gave no addresses; the blocks stand in their order.
                address=each.get("address", address),
                n_bytes=n_bytes,
                requested_bytes=None if state == "inactive" else each.get("requested_size"),
                state=state,
                frames=stacks.find(each.get("frames", ())),
            )
        )
        address = blocks[-1].address + n_bytes
    first, second = raw.get("segment_pool_id", (0, 0))
    size_class = raw.get("segment_type")
    return Segment(
        device=f"{kind}:{raw['device']}",
        address=raw["address"],
        n_bytes=raw["total_size"],
        is_private=(first, second) != (0, 0),
        pool_id=(first, second),
        blocks=tuple(blocks),
        is_expandable=bool(raw.get("is_expandable", False)),
        is_small=None if size_class is None else size_class == "small",
    )


def _index(device: str) -> int:
    return int(device.partition(":")[2])
