"""The line of the user's that allocated a block, as a person would say it.

A recorded stack begins in PyTorch and ends in IPython; in between are the user's own lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath

from gpumemwidget.libraries import is_library
from gpumemwidget.records import Frame

__all__ = ["format_allocation", "format_frame"]


def format_frame(frame: Frame, cells: Mapping[str, int]) -> str:
    """``In[7], line 3``; of a file ``train.py, line 12``.

    Args:
        frame: where it was.
        cells: the numbers of cells by the names of their compiled files.
    """
    number = cells.get(frame.filename)
    name = PurePath(frame.filename).name if number is None else f"In[{number}]"
    return f"{name}, line {frame.line}"


def format_allocation(frames: Sequence[Frame], cells: Mapping[str, int]) -> str | None:
    """The innermost line that is no library's, else the innermost; ``None`` without a stack."""
    for frame in frames:
        if frame.filename in cells or not is_library(frame.filename):
            return format_frame(frame, cells)
    return format_frame(frames[0], cells) if frames else None
