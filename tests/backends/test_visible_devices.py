"""``CUDA_VISIBLE_DEVICES`` is read as CUDA reads it."""

from __future__ import annotations

import pytest

from gpumemwidget.backends.driver.visible_devices import find_by_uuid, parse_visible, strip_uuid


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


@pytest.mark.parametrize(
    ("beginning", "place"), [("GPU-a1", 0), ("GPU-b", 2), ("GPU-a", None), ("GPU-c", None)]
)
def test_a_uuid_may_be_shortened_while_it_means_one(beginning: str, place: int | None) -> None:
    """The beginning of a UUID finds its GPU unless several begin so."""
    assert find_by_uuid(beginning, ["GPU-a1", "GPU-a2", "GPU-b3"]) == place


@pytest.mark.parametrize("uuid", ["GPU-AB-12", "ab-12", "MIG-ab-12"])
def test_uuids_compare_without_their_kind(uuid: str) -> None:
    """NVML writes the kind in front, torch does not."""
    assert strip_uuid(uuid) == "ab-12"
