"""The command line: ``gpumemwidget run``, ``load``, ``compare``; as ``python -m gpumemwidget``."""

from __future__ import annotations

import argparse
import atexit
import builtins
import contextlib
import importlib.util
import io
import math
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NoReturn

# Python loses what a signal's handler raises as an import ends: a program's first span must not be
# the first to import this.
import gpumemwidget.api  # noqa: F401
from gpumemwidget.errors import BadInputError, FileError, GpuMemError
from gpumemwidget.model.devices import HOST
from gpumemwidget.model.encoding import encode_records
from gpumemwidget.model.processes import ProcessState
from gpumemwidget.recording.files import find_target, refuse_target, write_whole
from gpumemwidget.remote.writer.recorder import FileRecording, describe_end
from gpumemwidget.report.processes import name_process, report_processes
from gpumemwidget.units import format_bytes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit status."""
    options = _parse(sys.argv[1:] if arguments is None else arguments)
    if options.command == "run":
        return run(options)
    # None without standard output (``>&-``): then nothing is printed.
    if isinstance(sys.stdout, io.TextIOWrapper):
        # JSON is UTF-8 everywhere; a report loses what a terminal's encoding has not.
        sys.stdout.reconfigure(encoding="utf-8" if options.json else None, errors="replace")
    try:
        status = _load(options) if options.command == "load" else _compare(options)
        if sys.stdout is not None:
            sys.stdout.flush()  # Now, and not as Python ends.
        return status
    except GpuMemError as exc:
        print(f"gpumemwidget: {exc}", file=sys.stderr)
        return 2
    except OSError as exc:
        # Python writes the rest as it ends, and would fail once more:
        # https://docs.python.org/3/library/signal.html#note-on-sigpipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(exc, BrokenPipeError):  # The reader, such as ``head``, wants no more.
            print(f"gpumemwidget: can't write the output: {exc.strerror or exc}", file=sys.stderr)
        return 2


def _load(options: argparse.Namespace) -> int:
    # Here, as a program that is recorded must not find what only a report needs.
    from gpumemwidget.remote.reader.recordings import Recordings  # noqa: PLC0415

    if options.redact and options.html is None:
        raise BadInputError("only a page is redacted: give --redact together with --html FILE")
    if options.force and options.html is None:
        raise BadInputError("--force has no effect without --html: give both, or neither")
    recordings = Recordings(options.recordings)
    if options.json:
        print(encode_records("processes", recordings.processes))
        return 0
    if options.html is None:
        print(recordings)
        return 0
    target = find_target(options.html, example="runs.html")
    refuse_target(target, force=options.force)
    write_whole(target, recordings.to_page(is_redacted=options.redact).encode("utf-8", "replace"))
    print(target)
    return 0


def _compare(options: argparse.Namespace) -> int:
    """Print the comparison; return 1 if a peak has grown beyond the bound, or may have."""
    from gpumemwidget.comparing import compare  # noqa: PLC0415
    from gpumemwidget.report.comparison import tabulate_comparison  # noqa: PLC0415

    found = compare(options.a, options.b)
    if options.json:
        print(encode_records("comparison", found.totals))
    elif options.markdown:
        print(tabulate_comparison(found.a_name, found.b_name, found.totals))
    else:
        print(found)
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
    run_parser.add_argument("target", metavar="PROGRAM", help="a script, or a module")
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
        "processes, or, of PyTorch's memory snapshots, the lines.",
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


# -- Running a program -----------------------------------------------------------------------------


def run(options: argparse.Namespace) -> int:
    """Run and record the program that the command line names; return its exit status.

    ``runpy`` would put our own ``__main__`` back when the program's code has ended, but the
    program's threads, its exit handlers and the card of an OOM need its own to the end.

    Raises:
        SystemExit: of the program's own.
    """
    sys.argv = [f"-m {options.target}" if options.is_module else options.target, *options.arguments]
    try:
        recording = FileRecording(options.to, maker="run")
    except (GpuMemError, OSError) as exc:
        print(f"gpumemwidget: {exc}", file=sys.stderr)
        return 2
    shown_path = str(recording.path)
    with contextlib.suppress(OSError):  # The current folder may have been deleted.
        shown_path = os.path.relpath(shown_path)
    pid, line = os.getpid(), ""

    def end() -> None:
        # A forked child has the handler too, and the program may have closed stderr.
        if os.getpid() == pid:
            recording.close(line)
            with contextlib.suppress(OSError, ValueError, AttributeError):
                sys.stderr.write(_summarize(recording, shown_path))

    # After the program's other threads, and after what it registered itself.
    atexit.register(end)
    try:
        code, main = (_load_module if options.is_module else _load_script)(options.target)
        sys.modules["__main__"] = main
        exec(code, vars(main))
    except _CantRunError as exc:
        atexit.unregister(end)
        recording.close()
        with contextlib.suppress(OSError):
            recording.path.unlink()
        print(f"gpumemwidget: {exc}", file=sys.stderr)
        return 2
    except BaseException as exc:
        line = describe_end(exc)
        if isinstance(exc, SystemExit):
            raise
        recording.recorder.note_error(exc, is_last=True)
        _show_error(exc)
        if isinstance(exc, KeyboardInterrupt):
            # Python ends by the signal itself, once it has shown the error; that is done.
            sys.excepthook = lambda *_: None
            raise
        return 1
    return 0


class _CantRunError(FileError):
    """There is no such program."""


def _show_error(error: BaseException) -> None:
    """Show an error as Python would, without our own frames, which the program does not know."""
    traceback = error.__traceback__
    own = _show_error.__code__.co_filename
    while traceback is not None and traceback.tb_frame.f_code.co_filename == own:
        traceback = traceback.tb_next
    error.__traceback__ = traceback
    sys.excepthook(type(error), error, traceback)


def _load_script(given: str) -> tuple[CodeType, ModuleType]:
    try:
        path = str(Path(given).absolute())
        with io.open_code(path) as file:
            source = file.read()
    except OSError as exc:
        raise _CantRunError(f"can't open {given}: {exc.strerror or exc}") from None
    if not sys.flags.safe_path:
        # Python itself goes through links here.
        sys.path[0] = str(Path(path).resolve().parent)
    code = compile(source, path, "exec", dont_inherit=True)
    return code, _make_main(path, None, SourceFileLoader("__main__", path))


def _load_module(name: str) -> tuple[CodeType, ModuleType]:
    if not sys.flags.safe_path:
        with contextlib.suppress(OSError):
            sys.path[0] = str(Path.cwd())
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except (ModuleNotFoundError, ValueError) as exc:
        raise _CantRunError(f"can't find the module {name}: {exc}") from None
    code = None if spec is None else getattr(spec.loader, "get_code", lambda _: None)(spec.name)
    if spec is None or code is None:
        raise _CantRunError(f"there is no module {name}, or none that can be run")
    main = _make_main(spec.origin, spec, spec.loader)
    main.__package__ = spec.parent
    sys.argv[0] = main.__file__ or name
    return code, main


def _make_main(path: str | None, spec: ModuleSpec | None, loader: Any) -> ModuleType:
    main = ModuleType("__main__")
    # Children that are spawned import it: a script by its file, a module by its spec.
    main.__file__, main.__spec__, main.__loader__ = path, spec, loader
    cached = getattr(spec, "cached", None)
    vars(main).update(__annotations__={}, __builtins__=builtins, __cached__=cached)
    return main


def _summarize(recording: FileRecording, shown_path: str) -> str:
    """Return the report and how to open the file; of a rank one line, as every rank has one."""
    state = recording.recorder.writer.log.describe(is_alive=False)
    if state is None:
        return ""
    is_rank = state.info.role == "rank"
    to_open = str(Path(shown_path).parent) if is_rank else shown_path
    opening = f"gpumemwidget.load({to_open!r}) opens"
    where = f"{opening} it."
    if not recording.is_whole:
        where = f"The end of {shown_path} could not be written: {opening} what came before."
    if is_rank:
        return f"{_name_peaks(state)}. {where}\n"
    return f"\n{report_processes([state]).text}\n{where}\n"


def _name_peaks(state: ProcessState) -> str:
    """Return the peaks of a process in one line."""
    peaks = [
        f"{format_bytes(peak.allocated_bytes)} on {peak.device}"
        for peak in state.peaks
        # A context alone, as some libraries make one on the first GPU, is no peak.
        if peak.device != HOST and peak.allocated_bytes
    ] or [
        f"{format_bytes(peak.reserved_bytes)} resident"
        for peak in state.peaks
        if peak.device == HOST
    ]
    return f"{name_process(state.info)}: peak {', '.join(peaks)}"


if __name__ == "__main__":
    sys.exit(main())
