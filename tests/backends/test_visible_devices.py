"""``CUDA_VISIBLE_DEVICES`` is read as CUDA reads it."""

from __future__ import annotations

import pytest

from gpumemwidget.backends.driver.visible_devices import parse_visible


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        (None, None),
        ("0", (0,)),
        ("2,0", (2, 0)),
        (" 1 , 3 ", (1, 3)),
        ("", ()),
        ("-1", ()),
        ("0,-1,2", (0,)),
        ("0,,2", (0,)),
        ("none", ()),
        ("NoDevFiles", ()),
        ("1gpu2,2ampere", (1, 2)),
        ("+1", (1,)),
        ("0,0", ()),
        ("1,0,1", ()),
        ("0,GPU-aa", (0,)),
        ("GPU-aa", ("GPU-aa",)),
        ("GPU-bb,GPU-aa", ("GPU-bb", "GPU-aa")),
        ("GPU-aa,0", ("GPU-aa",)),
        ("GPU-aa,GPU-aa", ()),
        ("MIG-aa,MIG-bb", ("MIG-aa", "MIG-bb")),
        ("MIG-aa,GPU-bb", ("MIG-aa",)),
        ("gpu-aa", ()),
    ],
)
def test_entries(text: str | None, entries: tuple[object, ...] | None) -> None:
    """The list ends at what can't be meant, and is empty where something comes twice."""
    assert parse_visible(text) == entries
