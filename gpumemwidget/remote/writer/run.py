"""``gpumemwidget run train.py``: record a program without a change to it."""

from __future__ import annotations

import argparse
import atexit
import builtins
import contextlib
import importlib.util
import io
import os
import sys
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from gpumemwidget.errors import FileError, GpuMemError
from gpumemwidget.model.devices import HOST
from gpumemwidget.model.processes import ProcessState
from gpumemwidget.remote.writer.recorder import FileRecording, describe_end
from gpumemwidget.report.processes import name_process, report_processes
from gpumemwidget.units import format_bytes


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
    except GpuMemError as exc:
        print(f"gpumemwidget: {exc}", file=sys.stderr)
        return 2
    shown_path = os.path.relpath(recording.path)
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
    path = str(Path(given).absolute())
    try:
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
