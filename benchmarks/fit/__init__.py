"""What is predicted of training steps beside what they take: peaks of 39 steps on a real GPU.

Each step has a process of its own, a few at a time. It is predicted before it runs; then it runs
three times, and PyTorch's own counters say what it took.
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
    with ThreadPoolExecutor(_N_PROCESSES) as pool:
        facts = pool.map(lambda case: _run_case(case[1], *saved), cases)
        return tabulate(
            [
                {"case": name, "kind": kind, **found}
                for (kind, name), found in zip(cases, facts, strict=True)
            ]
        )


def _run_case(*arguments: str) -> dict[str, Any]:
    """Measure a step in a process; return all the facts that it has printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "3", "TOKENIZERS_PARALLELISM": "false"}
    facts: dict[str, Any] = {}
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        try:
            subprocess.run(
                [sys.executable, "-m", "benchmarks.fit.one_case", *arguments],
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
    print(f"  {arguments[0]}", file=sys.stderr, flush=True)
    return facts
