"""The command line: ``gpumemwidget run`` and ``load``; ``python -m gpumemwidget`` is the same."""

from __future__ import annotations

import argparse
import io
import math
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

# Python loses what a signal's handler raises as an import ends: a program's first span must not be
# the first to import this.
import gpumemwidget.api  # noqa: F401
from gpumemwidget.errors import BadInputError, FileError, GpuMemError
from gpumemwidget.model.encoding import encode_records
from gpumemwidget.recording.files import find_target, refuse_target, write_whole
from gpumemwidget.remote.writer.run import run


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit status."""
    options = _parse(sys.argv[1:] if arguments is None else arguments)
    if options.command == "run":
        return run(options)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # JSON is UTF-8 everywhere; a report loses what a terminal's encoding has not.
        sys.stdout.reconfigure(encoding="utf-8" if options.json else None, errors="replace")
    # A program that is recorded must not find what only a report needs among its modules.
    try:
        return _load(options) if options.command == "load" else _compare(options)
    except GpuMemError as exc:
        print(f"gpumemwidget: {exc}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # The reader, such as ``head``, wants no more.
        return 2


def _print(output: object) -> None:
    """Print to the standard output now, not as Python ends.

    Raises:
        FileError: the system refuses.
        BrokenPipeError: nobody reads it.
    """
    try:
        print(output, flush=True)
    except OSError as exc:
        # Python writes the rest as it ends, and would fail once more:
        # https://docs.python.org/3/library/signal.html#note-on-sigpipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(exc, BrokenPipeError):
            raise
        raise FileError(f"can't write the output: {exc.strerror or exc}") from exc


def _load(options: argparse.Namespace) -> int:
    from gpumemwidget.remote.reader.recordings import Recordings  # noqa: PLC0415

    if options.redact and options.html is None:
        raise BadInputError("only a page is redacted: give --redact together with --html FILE")
    if options.force and options.html is None:
        raise BadInputError("--force has no effect without --html: give both, or neither")
    recordings = Recordings(options.recordings)
    if options.json:
        _print(encode_records("processes", recordings.processes))
        return 0
    if options.html is None:
        _print(recordings)
        return 0
    target = find_target(options.html, example="runs.html")
    refuse_target(target, force=options.force)
    write_whole(target, recordings.to_page(is_redacted=options.redact).encode("utf-8", "replace"))
    _print(target)
    return 0


def _compare(options: argparse.Namespace) -> int:
    """Print the comparison; return 1 if a peak has grown beyond the bound, or may have."""
    from gpumemwidget.comparing import compare, tabulate_comparison  # noqa: PLC0415

    found = compare(options.a, options.b)
    if options.json:
        _print(encode_records("comparison", found.totals))
    elif options.markdown:
        _print(tabulate_comparison(found.a_name, found.b_name, found.totals))
    else:
        _print(found)
    if options.fail_above is None:
        return 0
    grown = found.list_growth(options.fail_above)
    for line in grown:
        print(f"gpumemwidget: {line}", file=sys.stderr)
    return 1 if grown else 0


def _read_share(text: str) -> float:
    """Return the share that a text such as ``2%`` names: 0.02."""
    try:
        share = float(text.removesuffix("%")) / 100
    except ValueError:
        share = -1
    if not text.endswith("%") or not 0 <= share < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no percentage: write it as 2%")
    return share


class _Parser(argparse.ArgumentParser):
    """A parser that reports an error in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"gpumemwidget: {message} (see --help)\n")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(
        prog="gpumemwidget",
        description="Record the GPU memory of a program, and show what was recorded.",
        epilog="example: gpumemwidget run --to runs train.py, then gpumemwidget load runs. "
        "`gpumemwidget run --help` and `gpumemwidget load --help` show the options.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run_parser = commands.add_parser(
        "run",
        help="run a script or a module and record its memory",
        description="Run a script or a module, and record its memory into a file: samples, the "
        "exact peak of each optimizer step, out-of-memory errors.",
        epilog="example: gpumemwidget run --to runs train.py --epochs 3",
    )
    run_parser.add_argument(
        "--to",
        metavar="PATH",
        help="a file that ends in .jsonl, or a folder where each process has its own "
        "(default: a new name in the working directory)",
    )
    run_parser.add_argument("-m", dest="is_module", action="store_true", help="PROGRAM is a module")
    run_parser.add_argument(
        "target",
        metavar="PROGRAM",
        help="a script, a folder or zip file with __main__.py, or a module",
    )
    own = run_parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its own arguments")
    # Otherwise Python 3.11 also names the arguments as missing where only the program is.
    own.required = False
    load_parser = commands.add_parser(
        "load",
        help="show what was recorded",
        description="Print the report of recorded processes, also of those that still run.",
        epilog="example: gpumemwidget load runs",
    )
    load_parser.add_argument(
        "recordings", metavar="RUNS", help="a file that was recorded, or a folder that has some"
    )
    form = load_parser.add_mutually_exclusive_group()
    form.add_argument(
        "--html", metavar="FILE", help="write one page instead, which needs nothing else"
    )
    form.add_argument("--json", action="store_true", help="print the records as one line of JSON")
    load_parser.add_argument(
        "--redact", action="store_true", help="hide names, paths and code in that page"
    )
    load_parser.add_argument(
        "--force", action="store_true", help="let --html take the place of a file"
    )
    compare_parser = commands.add_parser(
        "compare",
        help="compare two recordings, or two memory snapshots",
        description="Print what has more memory in B than in A, and what has less: the peaks of "
        "processes and spans, or, of PyTorch's memory snapshots, the lines.",
        epilog="example: gpumemwidget compare runs/main runs/branch --fail-above 2%%",
    )
    compare_parser.add_argument("a", metavar="A", help="a recording, a folder of them, a .pickle")
    compare_parser.add_argument("b", metavar="B", help="another one of the same kind")
    compare_parser.add_argument(
        "--fail-above",
        type=_read_share,
        metavar="PERCENT",
        help="end with status 1 if a peak has grown by more, or if that can't be ruled out: 2%%",
    )
    form = compare_parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the records as one line of JSON")
    form.add_argument("--markdown", action="store_true", help="print a Markdown table")
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        hint = "; Python's own go in front: python -u -m gpumemwidget run"
        parser.error(
            f"no such options: {' '.join(unknown)}{hint if options.command == 'run' else ''}"
        )
    return options


if __name__ == "__main__":
    sys.exit(main())
