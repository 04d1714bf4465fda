"""Predict a step and run it: NAME [FOLDER].

Prints facts as JSON, a line as soon as each is known. The folder gets the allocator's history, in
the form of ``tests/prediction/recordings``.
"""

from __future__ import annotations

import gc
import gzip
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks.fit import KINDS

N_STEPS = 3


def main() -> None:
    """Measure the case that is named by the arguments."""
    name, *folders = sys.argv[1:]
    build = next(cases[name] for cases in KINDS.values() if name in cases)
    torch.manual_seed(0)
    torch.cuda.init()
    torch.cuda.memory._record_memory_history(context=None, max_entries=10**7)
    step, args = build("cuda")
    torch.cuda.synchronize()
    gc.collect()
    before = _read_bytes()
    _print(**_try_prediction(step, args), used_by_predicting=_subtract(_read_bytes(), before))
    n_built = _count_events()
    steps = list(_run(step, args))
    history = _read_history()
    highest = {
        each: max(one[f"{each}_peak_bytes"] for one in steps) for each in ("allocated", "reserved")
    }
    _print(
        gpu=torch.cuda.get_device_name(),
        torch=torch.__version__,
        real={f"{each}_bytes": n_bytes for each, n_bytes in highest.items()},
        steps=steps,
    )
    if folders:
        about = {"name": name, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        write_history(Path(folders[0]) / f"{name}.json.gz", about, history, n_built, steps)


def predict_peaks(step: Callable[..., object], args: tuple[Any, ...]) -> dict[str, Any]:
    """Return what is predicted: the one place that knows how."""
    import gpumemwidget

    prediction = gpumemwidget.predict(step, *args, steps=N_STEPS)
    return {
        "allocated_bytes": prediction.allocated_peak_bytes,
        "reserved_bytes": prediction.reserved_peak_bytes,
        "reserved_at_least_bytes": prediction.record.reserved.at_least,
        "reserved_at_most_bytes": prediction.record.reserved.at_most,
        "fits": prediction.fits,
        "runs": prediction.record.runs,
        "assumptions": prediction.record.assumptions,
    }


def _try_prediction(step: Callable[..., object], args: tuple[Any, ...]) -> dict[str, Any]:
    start = perf_counter()
    try:
        predicted = predict_peaks(step, args)
    except Exception as exc:  # noqa: BLE001 - what fails is told by name
        return {"prediction_error": f"{type(exc).__name__}: {exc}"}
    return {"predicted": {**predicted, "seconds": perf_counter() - start}}


def _run(step: Callable[..., object], args: tuple[Any, ...]) -> Iterator[dict[str, int]]:
    """Run the step; yield what PyTorch's counters say of each run."""
    for _ in range(N_STEPS):
        torch.cuda.reset_peak_memory_stats()
        start = perf_counter()
        result = step(*args)
        torch.cuda.synchronize()
        seconds = perf_counter() - start
        del result
        yield {
            "end": _count_events(),
            "allocated_peak_bytes": torch.cuda.max_memory_allocated(),
            "reserved_peak_bytes": torch.cuda.max_memory_reserved(),
            "allocated_bytes": torch.cuda.memory_allocated(),
            "reserved_bytes": torch.cuda.memory_reserved(),
            "milliseconds": round(seconds * 1e3),
        }


# -- The allocator's history -----------------------------------------------------------------------


def _read_history() -> list[dict[str, Any]]:
    history: list[dict[str, Any]] = torch.cuda.memory._snapshot()["device_traces"][0]
    return history


def _count_events() -> int:
    return len(_read_history())


def write_history(
    path: Path,
    about: dict[str, str],
    history: list[dict[str, Any]],
    n_built: int,
    steps: list[dict[str, int]],
) -> None:
    """Write requests and frees, as ``tests/prediction/recordings/README.md`` says."""
    places: dict[int, int] = {}
    segments: list[int] = []
    events: list[int] = []
    #: For each entry of the history, the number of events before it.
    counts = [0]
    n_requests = 0
    for entry in history:
        if entry["action"] == "alloc":
            places[entry["addr"]] = n_requests
            n_requests += 1
            events.append(entry["size"])
        elif entry["action"] == "free_completed" and entry["addr"] in places:
            events.append(places.pop(entry["addr"]) - n_requests)
        elif entry["action"] == "segment_alloc":
            segments.append(entry["addr"])
        counts.append(len(events))
    record = {
        "about": about,
        "built": counts[n_built],
        "steps": [{**step, "end": counts[step["end"]]} for step in steps],
        "segments": segments,
        "events": events,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", compresslevel=6) as file:
        json.dump(record, file, separators=(",", ":"))


def _read_bytes() -> tuple[int, int]:
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def _subtract(after: tuple[int, int], before: tuple[int, int]) -> list[int]:
    return [one - other for one, other in zip(after, before, strict=True)]


def _print(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
