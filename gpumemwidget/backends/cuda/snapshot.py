"""Parse the caching allocator's snapshot: torch's segments, blocks and stacks become records."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from gpumemwidget.model.segments import Block, Frame, Segment

#: States of blocks by their names in any release of PyTorch.
_STATES: dict[str, Literal["active_allocated", "active_pending_free", "inactive"]] = {
    "active_allocated": "active_allocated",
    "active_pending_free": "active_pending_free",
    "active_awaiting_free": "active_pending_free",
    "inactive": "inactive",
}


#: The allocator's settings in the environment, the newest name first.
_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def parse_segments(
    raw: Iterable[Mapping[str, Any]], *, kind: str = "cuda", large_page_bytes: int | None = None
) -> tuple[Segment, ...]:
    """Return torch's dictionaries as segments, by device and address.

    ``large_page_bytes`` is the size of the pages of segments that grow and are for large requests,
    where it was set.
    """
    stacks = StackTable()
    segments = [_parse_segment(segment, stacks, kind, large_page_bytes) for segment in raw]
    return tuple(
        sorted(segments, key=lambda each: (int(each.device.partition(":")[2]), each.address))
    )


def read_large_page_bytes(torch: Any) -> int | None:
    """Return the setting ``large_segment_size_mb``, in bytes; ``None`` where it is not set.

    The last call that set it counts, else the environment at the start: see ``AllocatorConfig`` in
    https://github.com/pytorch/pytorch/blob/main/c10/core/AllocatorConfig.h
    """
    read_settings = getattr(torch._C, "_accelerator_getAllocatorSettings", None)  # noqa: SLF001 - no public call tells
    settings = "" if read_settings is None else read_settings()
    for text in (settings, *(os.environ.get(name, "") for name in _SETTINGS)):
        found = re.search(r"large_segment_size_mb\s*:\s*(\d+)", text)
        if found:
            return int(found[1]) << 20
    return None


def _parse_segment(
    raw: Mapping[str, Any], stacks: StackTable, kind: str, large_page_bytes: int | None
) -> Segment:
    blocks = []
    for block in raw["blocks"]:
        state = _STATES[block["state"]]
        blocks.append(
            Block(
                address=block["address"],
                n_bytes=block["size"],
                requested_bytes=None if state == "inactive" else block.get("requested_size"),
                state=state,
                frames=stacks.find(block.get("frames", ())),
            )
        )
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
        page_bytes=large_page_bytes if size_class == "large" else None,
    )


# -- Stacks ----------------------------------------------------------------------------------------

#: Endings of the file names of C++ frames, which a history may have too.
_FOREIGN_ENDINGS = ("??", ".c", ".cc", ".cpp", ".cu", ".h", ".hpp", ".cuh", ".so")
#: Maximum number of raw frames that are remembered: where torch shares none between stacks, no
#: identity is met twice.
_MAX_KNOWN = 200_000

RawStack = Sequence[Mapping[str, Any]]


class StackTable:
    """Stacks of Python frames, numbered in the order in which they come; 0 is the empty stack.

    A history of a million events has some hundred stacks. Torch gives the same dictionary for the
    same frame, so that most stacks are known by the identities of their frames, unread.
    """

    def __init__(self) -> None:
        self.stacks: list[tuple[Frame, ...]] = [()]
        self._places: dict[tuple[Frame, ...], int] = {(): 0}
        self._frames: dict[Frame, Frame] = {}
        #: Numbers by the identities of the frames' dictionaries, which are kept alive for that.
        self._known: dict[tuple[int, ...], int] = {(): 0}
        self._parsed: dict[int, tuple[object, Frame | None]] = {}

    def find(self, stack: RawStack) -> tuple[Frame, ...]:
        """Return the Python frames of a stack, innermost first."""
        return self.stacks[self.place([stack])[0]]

    def place(self, stacks: Iterable[RawStack]) -> list[int]:
        """Return the number of each stack."""
        known = self._known
        raw = list(stacks)
        keys = [tuple(map(id, stack)) for stack in raw]
        places = [known.get(key, -1) for key in keys]
        if -1 in places:
            for index, place in enumerate(places):
                if place < 0:
                    places[index] = self._add(keys[index], raw[index])
            if len(self._parsed) > _MAX_KNOWN:
                self._parsed.clear()
                known.clear()
                known[()] = 0
        return places

    def place_frames(self, frames: tuple[Frame, ...]) -> int:
        """Return the number of a stack that is made of records already."""
        place = self._places.get(frames)
        if place is None:
            place = self._places[frames] = len(self.stacks)
            self.stacks.append(frames)
        return place

    def _add(self, key: tuple[int, ...], raw: RawStack) -> int:
        place = self._known.get(key)
        if place is None:
            found = map(self._parse, raw)
            place = self.place_frames(tuple(entry for entry in found if entry is not None))
            self._known[key] = place
        return place

    def _parse(self, raw: Mapping[str, Any]) -> Frame | None:
        known = self._parsed.get(id(raw))
        if known is None:
            frame = None
            if not raw["filename"].endswith(_FOREIGN_ENDINGS):
                frame = Frame(raw["filename"], raw["line"], raw["name"])
                frame = self._frames.setdefault(frame, frame)
            known = self._parsed[id(raw)] = (raw, frame)
        return known[1]
