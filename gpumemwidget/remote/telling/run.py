"""``python -m gpumemwidget run train.py``: record a program without a change to it."""

from __future__ import annotations

import argparse
import atexit
import builtins
import contextlib
import importlib.util
import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from gpumemwidget.errors import FileError, GpuMemError, describe_exception
from gpumemwidget.model.devices import HOST
from gpumemwidget.model.processes import ProcessState
from gpumemwidget.remote.telling.recorder import FileRecording, describe_end
from gpumemwidget.report.processes import name_process, report_processes
from gpumemwidget.units import format_bytes

#: Seconds between two states of ``--live``.
_LIVE_EVERY_S = 0.5


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit status."""
    options = _parse(sys.argv[1:] if arguments is None else arguments)
    sys.argv = [options.target, *options.arguments]
    try:
        recording = FileRecording(options.to, maker="run")
        shown_path = os.path.relpath(recording.path)
    except (GpuMemError, OSError) as exc:
        print(f"gpumemwidget: {exc}", file=sys.stderr)
        return 2
    ending = _Ending(recording, shown_path)
    # After the program's other threads, and after what it registered itself.
    atexit.register(ending.end)
    with _show_live(recording) if options.live else contextlib.nullcontext():
        return _run(options, recording, ending)


class _Ending:
    """Ends a recording with its program, and sums it up on stderr.

    Attributes:
        error: the line of the error that ended the program.
    """

    def __init__(self, recording: FileRecording, shown_path: str) -> None:
        self._recording = recording
        self._shown_path = shown_path
        self._pid = os.getpid()
        self.error = ""

    def end(self) -> None:
        """End the recording, unless this is a forked child."""
        # The program may have closed stderr.
        if os.getpid() == self._pid:
            self._recording.close(self.error)
            with contextlib.suppress(OSError, ValueError, AttributeError):
                sys.stderr.write(_summarize(self._recording, self._shown_path))


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


def _run(options: argparse.Namespace, recording: FileRecording, ending: _Ending) -> int:
    """Run the program as ``python`` would; return its exit status."""
    status = 1
    try:
        code, main = (_load_module if options.is_module else _load_script)(options.target)
        # The module stays, as threads and an OOM's card need it to the end.
        sys.modules["__main__"] = main
        exec(code, vars(main))
    except SystemExit as exc:
        ending.error = describe_end(exc)
        return _read_status(exc)
    except _CantRunError as exc:
        ending.error = str(exc)
        print(f"gpumemwidget: {exc}", file=sys.stderr)
        return 2
    except BaseException as exc:
        ending.error = describe_exception(exc)
        recording.recorder.note_error(exc, is_last=True)
        _show_error(exc)
        if isinstance(exc, KeyboardInterrupt):
            # Python ends by the signal itself, once it has shown the error; that is done.
            sys.excepthook = lambda *_: None
            raise
        return status
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
    path = str(Path(given).absolute())
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as exc:
        raise _CantRunError(f"can't open {given}: {exc.strerror or exc}") from None
    if not _is_path_safe():
        # Python itself goes through links here.
        sys.path[0] = str(Path(path).resolve().parent)
    code = compile(source, path, "exec", dont_inherit=True)
    main = _make_main(path, None, SourceFileLoader("__main__", path))
    return code, main


def _load_module(name: str) -> tuple[CodeType, ModuleType]:
    if not _is_path_safe():
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
    sys.argv[0] = spec.origin or name
    return code, main


def _make_main(path: str | None, spec: ModuleSpec | None, loader: Any) -> ModuleType:
    main = ModuleType("__main__")
    # Children that are spawned import it: a script by its file, a module by its spec.
    main.__file__, main.__spec__, main.__loader__ = path, spec, loader
    vars(main).update(__builtins__=builtins, __cached__=getattr(spec, "cached", None))
    return main


def _is_path_safe() -> bool:
    """Return whether Python was told to keep the working directory from ``sys.path``."""
    return bool(getattr(sys.flags, "safe_path", False))


def _read_status(exc: SystemExit) -> int:
    if exc.code is None:
        return 0
    if isinstance(exc.code, int):
        return exc.code
    print(exc.code, file=sys.stderr)
    return 1


# -- What is shown ---------------------------------------------------------------------------------


def _summarize(recording: FileRecording, shown_path: str) -> str:
    """Return the report and how to open the file; of a rank one line, as every rank has one."""
    state = recording.recorder.outlet.log.describe(is_alive=False)
    if state is None:
        return ""
    if state.info.role == "rank":
        return f"{_name_peaks(state)}. gpumemwidget.load({str(Path(shown_path).parent)!r})\n"
    return f"\n{report_processes([state]).text}\ngpumemwidget.load({shown_path!r}) opens it.\n"


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


@contextmanager
def _show_live(recording: FileRecording) -> Iterator[None]:
    try:
        from rich.console import Console  # noqa: PLC0415 - an extra
        from rich.file_proxy import FileProxy  # noqa: PLC0415
        from rich.live import Live  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415
    except ModuleNotFoundError:
        print('gpumemwidget: --live needs rich: pip install "gpumemwidget[live]"', file=sys.stderr)
        yield
        return

    pid = os.getpid()

    class Above(FileProxy):
        """Shows what the program prints above the display, and leaves a forked child alone."""

        def write(self, text: str) -> int:
            return super().write(text) if os.getpid() == pid else self.rich_proxied_file.write(text)

        def flush(self) -> None:
            if os.getpid() == pid:
                super().flush()
            self.rich_proxied_file.flush()

    def render() -> Any:
        try:
            state = recording.recorder.outlet.log.describe(is_alive=True)
            return Text("" if state is None else report_processes([state]).text)
        except Exception as exc:  # noqa: BLE001 - it would end rich's thread with a traceback
            return Text(describe_exception(exc))

    console = Console(stderr=True)
    live = Live(
        get_renderable=render,
        console=console,
        refresh_per_second=1 / _LIVE_EVERY_S,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    # Output into a file or a pipe is left as it is.
    names = [name for name in ("stdout", "stderr") if _is_terminal(getattr(sys, name))]
    before = {name: getattr(sys, name) for name in names if console.is_terminal}
    with live:
        for name, stream in before.items():
            setattr(sys, name, Above(console, stream))
        try:
            yield
        finally:
            for name, stream in before.items():
                getattr(sys, name).flush()
                setattr(sys, name, stream)


def _is_terminal(stream: Any) -> bool:
    return stream is not None and stream.isatty()
