"""Records what the allocator's history says of small cells, with the true counters beside it.

    python -m tools.record_traces FOLDER

The cells are those of ``tests/data/h100-traces/cells.json``. Each becomes a recording,
``FOLDER/NAME.json.gz``; a new ``cells.json`` has what ran, and the counters of requested bytes,
which a recording has no place for.
"""

from __future__ import annotations

import gc
import json
import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gpumemwidget.backends.cuda.backend import CudaBackend
from gpumemwidget.backends.hardware import Hardware
from tools.recordings import Recorder, save_recording

_CELLS = Path(__file__).parents[1] / "tests" / "data" / "h100-traces" / "cells.json"
#: The allocator's settings, of those that need some; afterwards they are plain again.
_SETTINGS = {
    "expandable": "expandable_segments:True",
    "roundup": "roundup_power2_divisions:4",
    "max_split": "max_split_size_mb:40",
}
_PLAIN = "expandable_segments:False,roundup_power2_divisions:1,max_split_size_mb:10000000"
_N_EVENTS = {"ring": 400}


def record(name: str, cell: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run a cell and write its recording; what ran, and the counters that it does not hold."""
    names: dict[str, Any] = {"torch": torch, "__name__": "__main__"}
    _compile(cell["before"], cell["before_filename"])(names)
    run = _compile(cell["source"], cell["filename"])
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    hardware = Hardware([CudaBackend(torch)])
    about = f"{name}, on one {torch.cuda.get_device_name()}, torch {torch.__version__}"
    recorder = Recorder(hardware, about=about)
    recorder.start_trace(n_events=_N_EVENTS.get(name, 100_000))
    requested = [_read_requested()]
    error = None
    try:
        run(names)
    except Exception as exc:  # noqa: BLE001 - one of the cells runs out of memory, to be recorded
        error = type(exc).__name__
    requested.append(_read_requested())
    recorder.end_trace()
    save_recording(recorder.to_recording(), folder / f"{name}.json.gz")
    hardware.close()
    names.clear()
    gc.collect()
    torch.cuda.empty_cache()
    requested_bytes = dict(zip(("start", "end"), requested, strict=True))
    return {**cell, "requested_bytes": requested_bytes, "error": error}


def _compile(source: str, filename: str) -> Callable[[dict[str, Any]], None]:
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    code = compile(source, filename, "exec")

    def run(names: dict[str, Any]) -> None:
        exec(code, names)

    return run


def _read_requested() -> int:
    stats = torch.cuda.memory_stats_as_nested_dict()
    value: int = stats["requested_bytes"]["all"]["current"]
    return value


def main(folder: Path) -> None:
    """Record all cells."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.cuda.init()
    torch.ones(1, device="cuda")
    cells = json.loads(_CELLS.read_text(encoding="utf-8"))
    for name, cell in cells.items():
        if name in _SETTINGS:
            torch._C._accelerator_setAllocatorSettings(_SETTINGS[name])
        cells[name] = record(name, cell, folder)
        if name in _SETTINGS:
            torch._C._accelerator_setAllocatorSettings(_PLAIN)
    (folder / "cells.json").write_text(json.dumps(cells, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
