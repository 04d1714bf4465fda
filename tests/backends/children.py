"""Run something in another process: in a fork of this one, or in a fresh Python."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

_PATIENCE_S = 30


def run_in_fork(action: Callable[[], object]) -> object:
    """What an action returns in a forked child, or its error as text."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        # A child that hangs is ended, and has no answer.
        signal.alarm(_PATIENCE_S)
        try:
            answer = json.dumps(action())
        except BaseException as error:  # noqa: BLE001 - the child must not run pytest's own code
            answer = json.dumps(f"{type(error).__name__}: {error}")
        os.write(write_end, answer.encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        answer = pipe.read()
    os.waitpid(pid, 0)
    return json.loads(answer)


def run_python(source: str, cwd: Path) -> None:
    """Run a script in a new process that finds modules in ``cwd`` first."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(source)],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
    )
    assert done.returncode == 0, done.stderr
