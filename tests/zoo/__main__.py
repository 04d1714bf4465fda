"""Plays the zoo: ``python -m tests.zoo [ID ...] [--device cuda] [--docs] [--json FILE]``.

Prints the table of ``docs/zoo.md``, or what was planned, freed and named for some patterns.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.machine import describe_machine
from gpumemwidget.backends.hardware import Hardware, detect_hardware
from tests.zoo.measure import is_named, measure_ours
from tests.zoo.pattern import Pattern
from tests.zoo.patterns import PATTERNS
from tests.zoo.table import Row, format_table, measure_row, read_gpu_rows, write_rows, write_table

_MACHINE = ("GPU", "Python", "torch")


def main() -> int:
    """Measure, and write what was asked for."""
    options = _parse_options()
    hardware = detect_hardware() if options.device == "cuda" else None
    here = [pattern for pattern in PATTERNS if pattern.runs_here(options.device)]
    if options.ids:
        chosen = [pattern for pattern in here if pattern.id in options.ids]
        for pattern in chosen:
            _show(pattern, options.device, hardware)
        return len(chosen) != len(options.ids)
    rows = _measure(here, options.device, hardware)
    if options.json:
        machine = describe_machine()
        write_rows(options.json, {name: machine[name] for name in _MACHINE}, rows)
    if options.device == "cpu":
        table = format_table(PATTERNS, {**read_gpu_rows(PATTERNS), **{row.id: row for row in rows}})
        print(table)
        if options.docs:
            write_table(table)
    return 0


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument("ids", nargs="*", metavar="ID", help="only these, with what was seen")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--docs", action="store_true", help="write the table into docs/zoo.md")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    return parser.parse_args()


def _measure(patterns: Sequence[Pattern], device: str, hardware: Hardware | None) -> list[Row]:
    rows = []
    for pattern in patterns:
        print(pattern.id, file=sys.stderr, flush=True)
        ours = measure_ours(pattern, device=device, hardware=hardware)
        rows.append(measure_row(pattern, ours, device=device))
    return rows


def _show(pattern: Pattern, device: str, hardware: Hardware | None) -> None:
    ours = measure_ours(pattern, device=device, hardware=hardware)
    print(pattern.id)
    print(f"  must go {pattern.frees_on(device)}, planned {ours.planned_bytes}, ", end="")
    print(f"freed {ours.freed_bytes}; stopped: {ours.stopped}")
    for owner in pattern.owners:
        print(f"  {'named' if is_named(owner, ours.paths) else 'NOT NAMED'}: {owner}")
    for path in ours.paths:
        print(f"  path: {path}")
    for sentence in ours.remains:
        print(f"  remains: {sentence}")


if __name__ == "__main__":
    sys.exit(main())
