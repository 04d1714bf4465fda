"""Whole devices as the plain dictionaries that the dashboard's Device tab reads.

``static/device.js`` and its neighbours are the other side. However many processes there are and
however finely memory is cut, a message stays small: what is cut off or put together is counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpumemwidget.devices import (
    MOST_CHILDREN,
    Bridge,
    BridgePart,
    ChildProcess,
    MapBlock,
    MapSegment,
    PinnedUse,
    SegmentMap,
)
from gpumemwidget.jupyter.messages import Message
from gpumemwidget.records import DeviceReport
from gpumemwidget.report.bridgetheme import PART_COLORS
from gpumemwidget.report.bridgewords import find_look, list_pinned, name_part, tell_part
from gpumemwidget.report.segmentchart import list_looks, name_look
from gpumemwidget.report.words import cut_words

__all__ = ["describe_bridge", "describe_children", "describe_map", "describe_use"]

#: Parts of one part, as processes of the others.
_MOST_PARTS = 12
_MOST_CHILDREN = 50
#: Blocks in one message, and of one segment.
_MOST_BLOCKS = 5000
_MOST_OF_SEGMENT = 600
#: Characters of an owner or a line: a path through the user's objects may be as long as it likes.
_MOST_WORDS = 200
#: Blocks narrower than this share of their segment can't be told apart: those alike are one.
_NARROW = 1 / 400


def describe_use(report: DeviceReport) -> Message:
    """What a device is, and what its driver says of it now."""
    use = report.use
    return {
        "device": report.info.device,
        "name": report.info.name,
        "total": report.info.total_bytes if use is None else use.total_bytes,
        "is_touched": report.reading is not None,
        "used": None if use is None else use.used_bytes,
        "busy": None if use is None else use.utilization_percent,
        "note": report.note or "",
    }


def describe_bridge(bridge: Bridge) -> Message:
    """A device's memory in parts, with the words that go with each."""
    return {
        "device": bridge.device,
        "name": bridge.name,
        "total": bridge.total_bytes,
        "parts": [_describe_part(part, bridge) for part in bridge.parts],
        "allocated": bridge.allocated_bytes,
        "reserved": bridge.reserved_bytes,
        "used": bridge.used_bytes,
        "limit": bridge.limit_bytes,
        "budget": bridge.budget_bytes,
        "largest_free": bridge.largest_free_block_bytes,
        "pinned": _describe_pinned(bridge.pinned),
        "notes": list(bridge.notes),
        # Then nobody knows which of this notebook's children are on it.
        "hides_children": bridge.may_hide_children,
    }


def _describe_part(part: BridgePart, bridge: Bridge, within: str = "") -> Message:
    shown, rest = part.parts[:_MOST_PARTS], part.parts[_MOST_PARTS:]
    # A process looks as those that it is one of.
    look = within if part.process is not None and within else find_look(part)
    return {
        "look": look,
        "label": name_part(part, bridge.device),
        "bytes": part.n_bytes,
        "tell": tell_part(part, bridge),
        "parts": [_describe_part(each, bridge, look) for each in shown],
        "n_more": len(rest),
        "more": sum(each.n_bytes for each in rest),
    }


def _describe_pinned(pinned: PinnedUse | None) -> list[Message]:
    rows = [] if pinned is None else list_pinned(pinned)
    return [{"label": name, "bytes": n_bytes, "tell": tell} for name, n_bytes, tell in rows]


def describe_children(children: Sequence[ChildProcess]) -> Message:
    """The processes below this one, those with the most memory first."""
    ordered = sorted(children, key=lambda child: (-_weigh(child), child.pid))
    return {
        "children": [
            {
                "pid": child.pid,
                "parent": child.parent_pid,
                "name": child.name,
                "resident": child.resident_bytes,
                "devices": [list(pair) for pair in child.devices],
            }
            for child in ordered[:_MOST_CHILDREN]
        ],
        "n_more_children": max(0, len(ordered) - _MOST_CHILDREN),
        "are_all_counted": len(children) < MOST_CHILDREN,
    }


def _weigh(child: ChildProcess) -> int:
    # In steps: of resident sizes that are nearly the same none is to overtake the other.
    n_bytes = sum(each or 0 for _, each in child.devices) + (child.resident_bytes or 0)
    return n_bytes.bit_length()


# -- The map ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Piece:
    """A block, or what of a free one is alike."""

    block: MapBlock
    n_bytes: int
    look: str


def describe_map(segment_map: SegmentMap) -> Message:
    """The segments with their blocks; what is too narrow to be seen alone is put together.

    A block is ``[bytes, requested, look, owner, place, number of blocks]``, look, owner and place
    as numbers of ``words``; the blocks stand side by side.
    """
    words = _Words()
    looks: dict[str, int] = {}
    segments: list[Message] = []
    n_blocks = 0
    rest: Sequence[MapSegment] = ()
    for at, segment in enumerate(segment_map.segments):
        groups = _narrow(segment)
        n_blocks += len(groups)
        if n_blocks > _MOST_BLOCKS and segments:
            rest = segment_map.segments[at:]
            break
        for piece in (piece for group in groups for piece in group):
            looks[piece.look] = looks.get(piece.look, 0) + piece.n_bytes
        segments.append(_describe_segment(segment, groups, words))
    return {
        "device": segment_map.device,
        "reserved": segment_map.reserved_bytes,
        "allocated": segment_map.allocated_bytes,
        "fragmented": segment_map.fragmented_bytes,
        "largest_free": segment_map.largest_free_block_bytes,
        "segments": segments,
        "words": words.list(),
        "looks": [[look, name_look(look), looks[look]] for look in PART_COLORS if look in looks],
        "n_more": len(rest),
        "more": sum(segment.n_bytes for segment in rest),
    }


def _describe_segment(
    segment: MapSegment, groups: Sequence[Sequence[_Piece]], words: _Words
) -> Message:
    return {
        # As text: JavaScript's numbers end at 2**53.
        "address": f"{segment.address:#x}",
        "bytes": segment.n_bytes,
        "is_private": segment.is_private,
        "is_expandable": segment.is_expandable,
        "is_small": segment.is_small,
        "blocks": [_describe_pieces(group, words) for group in groups],
    }


class _Words:
    """Texts that many blocks share, by number."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {"": 0}

    def find(self, texts: Iterable[str]) -> int:
        """The number of what they all are, or of the empty text."""
        different = set(texts)
        text = different.pop() if len(different) == 1 else ""
        return self._numbers.setdefault(text, len(self._numbers))

    def list(self) -> list[str]:
        return list(self._numbers)


def _narrow(segment: MapSegment) -> list[list[_Piece]]:
    pieces = [_Piece(block, end - start, look) for block, start, end, look in list_looks(segment)]
    least_bytes = segment.n_bytes * _NARROW
    groups = _group(pieces, least_bytes, by_look=True)
    if len(groups) > _MOST_OF_SEGMENT:
        groups = _group(pieces, least_bytes, by_look=False)
    return groups


def _group(pieces: Iterable[_Piece], least_bytes: float, *, by_look: bool) -> list[list[_Piece]]:
    """Neighbours that are narrow, together until they are wide enough."""
    groups: list[list[_Piece]] = []
    width = least_bytes
    for piece in pieces:
        is_alike = bool(groups) and (not by_look or groups[-1][-1].look == piece.look)
        if is_alike and piece.n_bytes < least_bytes and width < least_bytes:
            groups[-1].append(piece)
            width += piece.n_bytes
        else:
            groups.append([piece])
            width = piece.n_bytes
    return groups


def _describe_pieces(pieces: Sequence[_Piece], words: _Words) -> list[int | None]:
    # Of a free block that is several, none is what was asked for.
    requested = pieces[0].block.requested_bytes if len(pieces) == 1 else None
    return [
        sum(piece.n_bytes for piece in pieces),
        requested,
        words.find(piece.look for piece in pieces),
        words.find(cut_words(piece.block.owner, _MOST_WORDS) for piece in pieces),
        words.find(cut_words(piece.block.allocated_at, _MOST_WORDS) for piece in pieces),
        len(pieces),
    ]
