"""Run a script and record its memory: ``python -m tools.record OUT.json.gz -- SCRIPT.py …``.

The recording has the host, the GPUs that the script uses, the whole devices, and the processes on
them. ``tools.recordings`` plays it anywhere.
"""

from __future__ import annotations

import argparse
import contextvars
import platform
import runpy
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from gpumemwidget.backends.hardware import detect_hardware
from gpumemwidget.errors import GpuMemError
from gpumemwidget.report.render.wording import word_hardware_note
from tools.recordings import Recorder, save_recording

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: without the program's name; those of the process, if not given.

    Returns:
        The exit status: 0, or 1 where the recording could not be written.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tools.record",
        description="Runs a Python script and records the memory of its devices.",
    )
    parser.add_argument("out", help="the file to write, which must not be there yet")
    parser.add_argument("script", help="the script to run, with its own arguments behind it")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.add_argument(
        "--interval-s", type=float, default=0.05, help="seconds between readings (0.05)"
    )
    parser.add_argument(
        "--snapshot", action="store_true", help="take the allocator's blocks when the script ends"
    )
    parser.add_argument(
        "--trace", action="store_true", help="write down each allocation, with its lines"
    )
    parser.add_argument("--about", default="", help="what is recorded, for the file")
    options = parser.parse_args(arguments)
    if Path(options.out).exists():
        print(f"{options.out} is there already: choose another name", file=sys.stderr)
        return 1
    about = options.about or f"{Path(options.script).name} on {platform.platform()}"
    hardware = detect_hardware()
    recorder = Recorder(hardware, about=about)
    if options.trace:
        for note in recorder.start_trace():
            print(word_hardware_note(note), file=sys.stderr)
    else:
        recorder.tick()
    stop = _start_ticking(recorder, options.interval_s)
    script: dict[str, object] = {}
    try:
        sys.argv = [options.script, *options.rest]
        sys.path.insert(0, str(Path(options.script).resolve().parent))
        script = runpy.run_path(options.script, run_name="__main__")
    finally:
        # A script that fails is worth its recording too.
        stop()
        recorder.tick(with_segments=options.snapshot)
        if options.trace:
            recorder.end_trace()
        # What the script's names hold was to be recorded until here.
        script.clear()
        status = _save(recorder, options.out)
        hardware.close()
    return status


def _save(recorder: Recorder, out: str) -> int:
    try:
        save_recording(recorder.to_recording(), out)
    except GpuMemError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{recorder.n_events} events written to {out}", file=sys.stderr)
    return 0


def _start_ticking(recorder: Recorder, interval_s: float) -> Callable[[], None]:
    """Tick in a thread until the function that is returned is called."""
    stopped = threading.Event()

    def run() -> None:
        while not stopped.wait(interval_s):
            recorder.tick()

    context = contextvars.copy_context()
    thread = threading.Thread(
        target=context.run, args=(run,), name="gpumemwidget-record", daemon=True
    )
    thread.start()

    def stop() -> None:
        stopped.set()
        thread.join()

    return stop


if __name__ == "__main__":
    sys.exit(main())
