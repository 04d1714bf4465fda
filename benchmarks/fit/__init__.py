"""What is predicted of training steps beside what they take: peaks of 39 steps on a real GPU.

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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.fit import calibration, judged, learned
from benchmarks.rows import Row

#: Each kind of cases, kept apart: only the first says how good a prediction is.
KINDS = {"judged": judged.CASES, "learned": learned.CASES, "calibration": calibration.CASES}

_QUICK = ("unet", "gnn")
_FINDERS = ("gpt2", "resnet")
#: Number of processes at a time.
_N_PROCESSES = 5
_MOST_SECONDS = 240


def measure(quick: bool) -> list[Row]:
    """All steps, or two of them."""
    from benchmarks.fit.table import tabulate

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
        # The finders take longest, so they begin.
        of_finders = pool.map(lambda name: _run_task("finders", name), finders)
        of_cases = pool.map(lambda case: _run_task("one_case", case[1], *saved), cases)
        facts = [
            *(
                {"case": name, "kind": kind, **of_case}
                for (kind, name), of_case in zip(cases, of_cases, strict=True)
            ),
            *({"model": name, **found} for name, found in zip(finders, of_finders, strict=True)),
        ]
    return tabulate(facts)


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
