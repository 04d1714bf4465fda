"""``python -m gpumemwidget run train.py``: record a program without a change to it."""

from __future__ import annotations

import argparse
import builtins
import importlib.util
import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from gpumemwidget.errors import GpuMemError, describe_exception
from gpumemwidget.model.devices import HOST
from gpumemwidget.model.processes import ProcessState
from gpumemwidget.remote.files import read_rank
from gpumemwidget.remote.recorder import FileRecording
from gpumemwidget.report.processes import name_process, report_processes
from gpumemwidget.units import format_bytes

#: Seconds between two states of ``--live``.
_LIVE_EVERY_S = 0.5


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit status."""
    options = _parse(sys.argv[1:] if arguments is None else arguments)
    sys.argv = [options.target, *options.arguments]
    try:
        recording = FileRecording(options.to)
    except GpuMemError as exc:
        print(f"gpumemwidget: {exc}", file=sys.stderr)
        return 2
    with _show_live(recording) if options.live else _nothing():
        status = _run(recording, options)
    _summarize(recording)
    return status


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m gpumemwidget", description="Record the GPU memory of a program."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser(
        "run",
        help="run a script or a module and record its memory",
        description="Run a script or a module, and record its memory into a file: samples, the "
        "exact peak of each optimizer step, out-of-memory errors. "
        "gpumemwidget.load(FILE) opens it.",
    )
    run.add_argument(
        "--to",
        metavar="PATH",
        help="a file that ends in .jsonl, or a folder where each process has its own "
        "(default: a new name in the working directory)",
    )
    run.add_argument("--live", action="store_true", help="show the memory meanwhile (needs rich)")
    run.add_argument("-m", dest="is_module", action="store_true", help="TARGET is a module")
    run.add_argument("target", help="the script, or the module")
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="its own arguments")
    return parser.parse_args(arguments)


def _run(recording: FileRecording, options: argparse.Namespace) -> int:
    """Run the program as ``python`` would; return its exit status."""
    try:
        load = _load_module if options.is_module else _load_script
        code, main = load(options.target)
    except (OSError, SyntaxError, ImportError, ValueError) as exc:
        recording.recorder.close(describe_exception(exc))
        if isinstance(exc, SyntaxError):
            sys.excepthook(type(exc), exc, None)
        else:
            print(f"gpumemwidget: can't run {options.target}: {exc}", file=sys.stderr)
        return 1
    # It stays, as threads and an OOM's card need it to the end.
    sys.modules["__main__"] = main
    try:
        exec(code, vars(main))
    except SystemExit as exc:
        recording.close()
        return _read_status(exc)
    except BaseException as exc:  # noqa: BLE001 - shown as Python would
        recording.recorder.note_error(exc)
        recording.recorder.close(describe_exception(exc))
        # Without our own frames, which the program does not know.
        own = exc.__traceback__
        exc.__traceback__ = None if own is None else own.tb_next
        sys.excepthook(type(exc), exc, exc.__traceback__)
        return 130 if isinstance(exc, KeyboardInterrupt) else 1
    recording.close()
    return 0


def _load_script(path: str) -> tuple[CodeType, ModuleType]:
    main = ModuleType("__main__")
    main.__file__ = path
    # As for ``python train.py``: children that are spawned import it by its file.
    main.__spec__ = None
    vars(main)["__builtins__"] = builtins
    with io.open_code(str(Path(path).resolve())) as file:
        code = compile(file.read(), path, "exec")
    sys.path[0] = str(Path(path).resolve().parent)
    return code, main


def _load_module(name: str) -> tuple[CodeType, ModuleType]:
    sys.path[0] = str(Path.cwd())
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    code = None if spec is None else getattr(spec.loader, "get_code", lambda _: None)(spec.name)
    if spec is None or code is None:
        raise ImportError(f"no module named {name}, or none that can be run")
    main = ModuleType("__main__")
    main.__file__, main.__spec__, main.__loader__ = spec.origin, spec, spec.loader
    main.__package__ = spec.parent
    vars(main)["__builtins__"] = builtins
    sys.argv[0] = spec.origin or name
    return code, main


def _read_status(exc: SystemExit) -> int:
    if exc.code is None:
        return 0
    if isinstance(exc.code, int):
        return exc.code
    print(exc.code, file=sys.stderr)
    return 1


# -- What is shown ---------------------------------------------------------------------------------


def _summarize(recording: FileRecording) -> None:
    state = recording.recorder.log.describe(is_alive=False)
    if state is None:
        return
    words = report_processes([state]).text if read_rank() is None else _name_peaks(state)
    path = os.path.relpath(recording.path)
    print(f"\n{words}\ngpumemwidget.load({path!r}) opens it.", file=sys.stderr)


def _name_peaks(state: ProcessState) -> str:
    """Return the peaks of a rank in one line: every rank has one."""
    peaks = [
        f"{format_bytes(peak.allocated_bytes)} on {peak.device}"
        for peak in state.peaks
        if peak.device != HOST
    ] or [f"{format_bytes(peak.reserved_bytes)} resident" for peak in state.peaks]
    return f"{name_process(state.info)}: peak {', '.join(peaks)}"


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def _show_live(recording: FileRecording) -> Iterator[None]:
    try:
        from rich.console import Console  # noqa: PLC0415 - an extra
        from rich.live import Live  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415
    except ModuleNotFoundError:
        print('gpumemwidget: --live needs rich: pip install "gpumemwidget[live]"', file=sys.stderr)
        yield
        return

    def render() -> Any:
        state = recording.recorder.log.describe(is_alive=True)
        return Text("" if state is None else report_processes([state]).text)

    live = Live(
        get_renderable=render,
        console=Console(stderr=True),
        refresh_per_second=1 / _LIVE_EVERY_S,
        transient=True,
    )
    with live:
        yield
