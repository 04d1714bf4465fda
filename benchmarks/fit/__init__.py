"""What is predicted of training steps beside what they take: peaks of 30 steps on a real GPU.

Each step has a process of its own, a few at a time. It is predicted before it runs; then it runs
three times, and PyTorch's own counters say what it took. Beside it stand the figure of PyTorch's
``MemTracker`` for the same step, and for two models the finders of batch sizes that try.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.fit import calibration, judged
from benchmarks.rows import Row, format_seconds, judge

#: Each kind of cases, kept apart: only the second says how good a prediction is.
KINDS = {"calibration": calibration.CASES, "judged": judged.CASES}

_QUICK = ("unet", "gnn")
_FINDERS = ("gpt2", "resnet")
#: Number of processes at a time.
_N_PROCESSES = 5
_MOST_SECONDS = 240
_LONGEST_PREDICTION_S = 10.0
_MOST_FAILED = 2


def measure(quick: bool) -> list[Row]:
    """All steps, or two of them."""
    options = argparse.ArgumentParser()
    options.add_argument("--folder", type=Path)
    folder = options.parse_known_args()[0].folder
    if not torch.cuda.is_available():
        return [Row("predicted peaks beside real ones", "no CUDA GPU here")]
    cases = [(kind, name) for kind, each in KINDS.items() for name in each]
    if quick:
        cases = [case for case in cases if case[1] in _QUICK]
    saved = [] if folder is None else [str(folder)]
    finders = () if quick else _FINDERS
    with ThreadPoolExecutor(_N_PROCESSES) as pool:
        of_cases = pool.map(lambda case: _run_task("one_case", case[1], *saved), cases)
        of_finders = pool.map(lambda name: _run_task("finders", name), finders)
        rows = [_describe_case(*case, facts) for case, facts in zip(cases, of_cases, strict=True)]
        summary = [row for kind in KINDS for row in _sum_up(kind, rows)]
        found = zip(finders, of_finders, strict=True)
        return [*summary, *rows, *(_describe_finders(name, facts) for name, facts in found)]


def _run_task(module: str, *arguments: str) -> dict[str, Any]:
    """Run a module of this package in a process; return all the facts that it has printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "3", "TOKENIZERS_PARALLELISM": "false"}
    facts: dict[str, Any] = {}
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        try:
            subprocess.run(
                [sys.executable, "-m", f"benchmarks.fit.{module}", *arguments],
                stdout=output,
                stderr=errors,
                env=environment,
                timeout=_MOST_SECONDS,
                check=True,
            )
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as exc:
            errors.seek(0)
            said = errors.read().strip().splitlines()
            why = f"longer than {_MOST_SECONDS} s"
            if isinstance(exc, subprocess.CalledProcessError):
                why = said[-1][:300] if said else f"exit {exc.returncode}"
            facts["process_error"] = why
        output.seek(0)
        for line in output:
            if line.startswith("{"):
                facts.update(json.loads(line))
    print(f"  {module} {arguments[0]}", file=sys.stderr, flush=True)
    return facts


# -- Rows ------------------------------------------------------------------------------------------


def _describe_case(kind: str, name: str, facts: dict[str, Any]) -> Row:
    real, predicted = facts.get("real"), facts.get("predicted")
    tracked = facts.get("tracked", {})
    columns = {
        "kind": kind,
        "real: allocated, reserved": _show_pair(real),
        "predicted": _show_pair(predicted) if predicted else f"fails: {_find_error(facts)}",
        "error": "",
        "takes": "" if predicted is None else format_seconds(predicted["seconds"]),
        "MemTracker: allocated": "",
        "it takes": "",
    }
    facts = {**facts, "case": name, "kind": kind}
    if real and predicted:
        facts["errors"] = [_compare(predicted[each], real[each]) for each in _FIGURES]
        columns["error"] = ", ".join(f"{error:+.2%}" for error in facts["errors"])
    if "error" in tracked:
        columns["MemTracker: allocated"] = f"fails: {tracked['error'][:80]}"
    elif tracked and real:
        error = _compare(tracked["allocated_bytes"], real["allocated_bytes"])
        columns["MemTracker: allocated"] = f"{tracked['allocated_bytes'] >> 20} MiB ({error:+.1%})"
        columns["it takes"] = format_seconds(tracked["seconds"])
        facts["tracked"] = {**tracked, "error_of_allocated": error}
    return Row(name, "", columns=columns, facts=facts)


_FIGURES = ("allocated_bytes", "reserved_bytes")


def _show_pair(figures: dict[str, Any] | None) -> str:
    if figures is None:
        return ""
    return ", ".join(f"{figures[each] / (1 << 20):.1f}" for each in _FIGURES) + " MiB"


def _compare(predicted: int, real: int) -> float:
    return predicted / real - 1


def _find_error(facts: dict[str, Any]) -> str:
    return str(facts.get("prediction_error") or facts.get("process_error") or "nothing was said")


def _sum_up(kind: str, rows: Sequence[Row]) -> Iterator[Row]:
    """Yield the errors of one kind of cases, and how long the predictions took."""
    chosen = [row.facts for row in rows if row.facts["kind"] == kind]
    known = [facts for facts in chosen if "errors" in facts]
    failed = [facts["case"] for facts in chosen if "errors" not in facts]
    names = f": {', '.join(failed)}" if failed else ""
    what = f"steps that can't be predicted or run, of {len(chosen)} {kind} ones"
    yield judge(what, len(failed), _MOST_FAILED, "{:.0f}".format, names)
    if not known:
        return
    for place, figure in enumerate(("allocated", "reserved")):
        errors = [abs(facts["errors"][place]) for facts in known]
        what = f"predicted {figure} peaks beside real ones, {kind} steps"
        measured = f"median {median(errors):.2%}, worst {max(errors):.2%}"
        yield Row(what, measured, median(errors))
    seconds = [facts["predicted"]["seconds"] for facts in known]
    what = f"the longest prediction of {len(known)} {kind} steps, {_N_PROCESSES} at a time"
    yield judge(what, max(seconds), _LONGEST_PREDICTION_S, format_seconds)
    yield from _sum_up_tracker(kind, known)


def _sum_up_tracker(kind: str, known: Iterable[dict[str, Any]]) -> Iterator[Row]:
    tracked = [facts.get("tracked", {}) for facts in known]
    errors = [abs(each["error_of_allocated"]) for each in tracked if "error_of_allocated" in each]
    if errors:
        yield Row(
            f"MemTracker's allocated peaks, {kind} steps",
            f"median {median(errors):.2%}, worst {max(errors):.2%}, "
            f"fails in {len(tracked) - len(errors)}",
            median(errors),
        )


def _describe_finders(name: str, facts: dict[str, Any]) -> Row:
    columns = {"limit": f"{facts.get('limit_bytes', 0) >> 30} GiB"}
    for finder in ("prediction", "doubling and bisecting", "accelerate"):
        result = facts.get(finder, {"error": facts.get("process_error", "nothing was said")})
        columns[finder] = (
            f"fails: {result['error'][:80]}"
            if "error" in result
            else f"{result['size']} in {format_seconds(result['seconds'])}"
        )
    columns["the predicted size runs"] = str(facts.get("runs", ""))
    return Row(f"largest batch: {name}", "", columns=columns, facts=facts)
