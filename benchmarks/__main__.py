"""Runs the benchmarks: ``python -m benchmarks [GROUP ...] [--quick] [--json FILE] [--docs]``.

Prints the machine and a Markdown table with each target beside what was measured.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks.machine import describe_machine
from benchmarks.rows import Row, format_table, parse_rows

#: Each is a module of this package with a ``measure`` function.
GROUPS = (
    "cell",
    "sampler",
    "updates",
    "devices",
    "processes",
    "page",
    "startup",
    "day",
    "account",
    "trace",
    "traced",
    "loops",
    "oom",
)
#: What groups need beside the package, where a machine for GPUs may lack it.
_NEEDED = {
    **dict.fromkeys(("updates", "devices", "processes"), "jupyter_client"),
    "page": "playwright",
}
#: Groups that run only if they are named: they want a GPU and minutes. ``docs/figures.md`` is
#: without them.
NAMED_GROUPS = ("fit",)

_PAGE = Path(__file__).parents[1] / "docs" / "figures.md"
_START = "<!-- figures: python -m benchmarks --docs -->\n"
_END = "<!-- end of figures -->"


def main() -> int:
    """Measure the chosen groups, one process each."""
    options = _parse_options()
    machine = describe_machine()
    print(*(f"{what}: {is_}" for what, is_ in machine.items()), sep="  \n", end="\n\n", flush=True)
    rows: list[Row] = []
    for group in options.groups or GROUPS:
        print(f"measuring: {group}", file=sys.stderr, flush=True)
        rows += _run_group(group, quick=options.quick, folder=options.folder)
    print(format_table(rows))
    if options.json:
        figures = [{**asdict(row), "is_met": row.is_met} for row in rows]
        text = json.dumps({"machine": machine, "rows": figures}, indent=2, ensure_ascii=False)
        options.json.write_text(f"{text}\n", encoding="utf-8")
    if options.docs:
        _write_page(machine, rows)
    return 0


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "groups",
        nargs="*",
        metavar="GROUP",
        help=f"of {', '.join(GROUPS)}; all of these if none is named; or {', '.join(NAMED_GROUPS)}",
    )
    parser.add_argument("--quick", action="store_true", help="few runs: to see that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument(
        "--folder", type=Path, metavar="FOLDER", help="fit: write the allocator's histories there"
    )
    parser.add_argument("--docs", action="store_true", help="write the table into docs/figures.md")
    options = parser.parse_args()
    unknown = set(options.groups) - {*GROUPS, *NAMED_GROUPS}
    if unknown:
        parser.error(f"no such group: {', '.join(sorted(unknown))}")
    if options.docs and "fit" in options.groups:
        parser.error(
            "fit has a page of its own: give --json FILE, then "
            "python -m benchmarks.fit.table FILE > docs/prediction_figures.md"
        )
    return options


def _run_group(group: str, *, quick: bool, folder: Path | None) -> list[Row]:
    needed = _NEEDED.get(group)
    if needed and importlib.util.find_spec(needed) is None:
        return [Row(group, f"needs {needed}, which is not here")]
    code = f"from benchmarks import rows, {group}; rows.emit({group}.measure)"
    answer = subprocess.run(
        [
            *(sys.executable, "-c", code),
            *(["--quick"] if quick else []),
            *(["--folder", str(folder)] if folder else []),
        ],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return parse_rows(answer.stdout)


def _write_page(machine: dict[str, str], rows: list[Row]) -> None:
    """Replace the table between the two marks of the page."""
    versions = ", ".join(f"{what} {machine[what]}" for what in ("Python", "torch", "ipykernel"))
    where = f"On {machine['processor']}, GPU: {machine['GPU']}; {versions}."
    text = _PAGE.read_text(encoding="utf-8")
    before, start, rest = text.partition(_START)
    _, end, after = rest.partition(_END)
    table = f"\n{where}\n\n{format_table(rows)}\n"
    _PAGE.write_text("".join((before, start, table, end, after)), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
