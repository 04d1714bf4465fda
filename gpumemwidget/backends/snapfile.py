"""How a recording's file holds snapshots: small, and refused where they are not whole.

Blocks lie side by side, so that their sizes tell where they are. Frames and stacks are written
once, in two tables at the head of the file, and blocks name theirs by number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args, get_type_hints

from gpumemwidget.records import Block, Frame, Segment

__all__ = ["BLOCK_COLUMNS", "SEGMENT_COLUMNS", "BadSnapshotError", "RowReader", "StackTable"]

SEGMENT_COLUMNS = ("device", "address", "pool_id", "blocks", "is_small", "is_expandable")
#: What a segment has in files from before the last two were told.
_N_FIRST_COLUMNS = 4
BLOCK_COLUMNS = ("n_bytes", "requested_bytes", "state", "stack")
_STATES = get_args(get_type_hints(Block)["state"])


class BadSnapshotError(Exception):
    """What is wrong with a snapshot, as part of a sentence."""


class StackTable:
    """Collects the frames and stacks of a file that is written."""

    def __init__(self) -> None:
        self.frames: dict[Frame, int] = {}
        self.stacks: dict[tuple[int, ...], int] = {}

    def to_rows(self, segments: Sequence[Segment]) -> list[list[Any]]:
        """Segments as rows of the file."""
        return [
            [
                segment.device,
                segment.address,
                list(segment.pool_id),
                [
                    [block.n_bytes, block.requested_bytes, block.state, self.note(block.frames)]
                    for block in segment.blocks
                ],
                segment.is_small,
                segment.is_expandable,
            ]
            for segment in segments
        ]

    def to_head(self) -> dict[str, list[Any]]:
        """The two tables, once all rows are written."""
        return {
            "frames": [[frame.filename, frame.line, frame.function] for frame in self.frames],
            "stacks": [list(stack) for stack in self.stacks],
        }

    def note(self, frames: tuple[Frame, ...]) -> int | None:
        """A stack's number; ``None`` of the empty one."""
        if not frames:
            return None
        stack = tuple(self.frames.setdefault(frame, len(self.frames)) for frame in frames)
        return self.stacks.setdefault(stack, len(self.stacks))


class RowReader:
    """Reads the snapshots of a file.

    Args:
        head: the file's head, with its two tables; a file without stacks has none.

    Raises:
        BadSnapshotError: a table is not what it should be.
    """

    def __init__(self, head: dict[str, Any]) -> None:
        frames = [_to_frame(row) for row in _to_list(head.get("frames", []), "the frames")]
        self._stacks = [
            tuple(_pick(frames, number, "frame") for number in _to_list(row, "a stack"))
            for row in _to_list(head.get("stacks", []), "the stacks")
        ]

    def parse(self, rows: Any) -> tuple[Segment, ...]:
        """Segments out of rows of the file.

        Raises:
            BadSnapshotError: a row is not what it should be.
        """
        return tuple(self._to_segment(row) for row in _to_list(rows, "the segments"))

    def get_stack(self, number: Any) -> tuple[Frame, ...]:
        """The stack of this number.

        Raises:
            BadSnapshotError: there is none.
        """
        stack: tuple[Frame, ...] = _pick(self._stacks, number, "stack")
        return stack

    def _to_segment(self, row: Any) -> Segment:
        if isinstance(row, list) and len(row) == _N_FIRST_COLUMNS:
            row = [*row, None, False]
        device, address, pool_id, rows, is_small, is_expandable = _to_list(
            row, "a segment", len(SEGMENT_COLUMNS)
        )
        first, second = _to_list(pool_id, "a segment's pool", 2)
        is_whole = all(map(_is_count, (address, first, second))) and rows
        is_told = is_small in (None, True, False) and is_expandable in (True, False)
        if not isinstance(device, str) or not is_whole or not is_told:
            raise BadSnapshotError("a segment is not whole")
        blocks: list[Block] = []
        end = address
        for each in _to_list(rows, "a segment's blocks"):
            blocks.append(self._to_block(each, end))
            end += blocks[-1].n_bytes
        return Segment(
            device=device,
            address=address,
            n_bytes=end - address,
            is_private=(first, second) != (0, 0),
            pool_id=(first, second),
            blocks=tuple(blocks),
            is_expandable=bool(is_expandable),
            is_small=None if is_small is None else bool(is_small),
        )

    def _to_block(self, row: Any, address: int) -> Block:
        n_bytes, requested_bytes, state, stack = _to_list(row, "a block", len(BLOCK_COLUMNS))
        is_whole = _is_count(n_bytes) and (requested_bytes is None or _is_count(requested_bytes))
        if not is_whole or n_bytes == 0 or state not in _STATES:
            raise BadSnapshotError("a block is not whole")
        return Block(
            address=address,
            n_bytes=n_bytes,
            requested_bytes=requested_bytes,
            state=state,
            frames=() if stack is None else self.get_stack(stack),
        )


def _to_frame(row: Any) -> Frame:
    filename, line, function = _to_list(row, "a frame", 3)
    if not isinstance(filename, str) or not isinstance(function, str) or not _is_count(line):
        raise BadSnapshotError("a frame is not whole")
    return Frame(filename, line, function)


def _to_list(value: Any, what: str, n_values: int | None = None) -> list[Any]:
    if not isinstance(value, list) or n_values not in (None, len(value)):
        raise BadSnapshotError(f"{what}: no list" + ("" if n_values is None else f" of {n_values}"))
    return value


def _pick(table: Sequence[Any], number: Any, what: str) -> Any:
    if not _is_count(number) or number >= len(table):
        raise BadSnapshotError(f"there is no {what} {number!r}")
    return table[number]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
