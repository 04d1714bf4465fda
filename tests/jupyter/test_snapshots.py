"""Snapshot files of PyTorch's as traces: files from anywhere, and files that nobody should read."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gpumemwidget
from gpumemwidget.errors import FileError

_BLOCK_BYTES = 64 << 20


def _write(path: Path, change: Callable[[dict[str, Any]], None], filename: str = "train.py") -> str:
    """A snapshot of one allocation, changed."""
    frames = [{"filename": filename, "line": 2, "name": "step"}]
    event = {"addr": 1 << 32, "size": _BLOCK_BYTES, "stream": 0, "frames": frames}
    snapshot = {
        "segments": [
            {
                "device": 0,
                "address": 1 << 32,
                "total_size": _BLOCK_BYTES,
                "allocated_size": _BLOCK_BYTES,
                "active_size": _BLOCK_BYTES,
                "stream": 0,
                "segment_type": "large",
                "segment_pool_id": (0, 0),
                "is_expandable": False,
                "blocks": [
                    {
                        "address": 1 << 32,
                        "size": _BLOCK_BYTES,
                        "requested_size": _BLOCK_BYTES,
                        "state": "active_allocated",
                        "frames": frames,
                    }
                ],
            }
        ],
        "device_traces": [
            [
                {**event, "action": "segment_alloc", "time_us": 1_000_000},
                {**event, "action": "alloc", "time_us": 1_000_001},
            ]
        ],
        "allocator_settings": {},
    }
    change(snapshot)
    path.write_bytes(pickle.dumps(snapshot))
    return str(path)


def test_what_it_is_of_is_its_heading(tmp_path: Path) -> None:
    """There is no cell to name."""
    (tmp_path / "train.py").write_text("def step():\n    return make()\n")
    path = _write(tmp_path / "run.pickle", lambda _: None, str(tmp_path / "train.py"))

    text = gpumemwidget.load_trace(path).to_text()

    assert text.startswith("run.pickle · ok")
    assert "64.00 MiB  2      return make()" in text


def _enlarge(snapshot: dict[str, Any]) -> None:
    [segment] = snapshot["segments"]
    segment["total_size"] = segment["blocks"][0]["size"] = 10**30


@pytest.mark.parametrize(
    "change",
    [
        _enlarge,
        lambda snapshot: snapshot["allocator_settings"].update(
            roundup_power2_divisions={"1": "many"}
        ),
    ],
)
def test_figures_of_no_device_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    """In one line, as all that is damaged."""
    path = _write(tmp_path / "odd.pickle", change)

    with pytest.raises(FileError, match=r"odd\.pickle is damaged") as caught:
        gpumemwidget.load_trace(path)

    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("filename", ["/dev/zero", "pipe", "\0", "\ud800", "/", "x" * 5000])
def test_a_name_of_no_source_file_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, filename: str
) -> None:
    """A device that never ends, a pipe that nobody writes to, a name that no system takes."""
    monkeypatch.chdir(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    path = _write(tmp_path / "run.pickle", lambda _: None, filename)

    trace = gpumemwidget.load_trace(path)

    [unit] = trace.devices[0].units
    [line] = [line for line in unit.lines if line.use is not None]
    assert (line.text, line.use and line.use.net_bytes) == ("", _BLOCK_BYTES)
    assert trace.to_html()
