"""What users do, in a kernel from which everything was taken that only Linux has.

Windows and macOS can't be tried here. What is taken away is what ``gpumemwidget`` would miss there:
forks, the module ``resource``, ``/proc`` and control groups, glibc's counters, and on Windows POSIX
signals, too. psutil keeps its files: on those systems it asks the system in another way.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jupyter.notebook import Notebook, open_notebook

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(180)]

#: Runs in the kernel before the extension is loaded. What chooses by the system when it is imported
#: is imported first.
_TAKE_AWAY = """
import asyncio, ctypes, multiprocessing, os, pathlib, signal, subprocess, sys, tempfile, time
import plotly, psutil, torch

def take_away(system):
    sys.platform = system
    psutil.LINUX = False
    sys.modules["resource"] = None
    for name in ("fork", "forkpty", "register_at_fork", "sched_getaffinity", "posix_fadvise"):
        delattr(os, name)
    names = ["sigtimedwait", "sigwaitinfo"]
    if system == "win32":
        del time.pthread_getcpuclockid, os.kill, os.killpg, os.getuid, os.uname
        names += ["pthread_kill", "pthread_sigmask", "setitimer", "getitimer", "SIGALRM", "SIGUSR1"]
    for name in names:
        delattr(signal, name)

    def refuse_linux_files(event, arguments):
        if event in ("open", "os.listdir", "os.scandir"):
            path = arguments[0]
            path = os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else ""
            if path.startswith(("/proc", "/sys/fs/cgroup", "/dev/shm")):
                frame = sys._getframe(1)
                while frame is not None and "pathlib" in frame.f_code.co_filename:
                    frame = frame.f_back
                if "gpumemwidget" in frame.f_code.co_filename:
                    refused.add(path)
                    raise FileNotFoundError(2, "No such file or directory", path)

    refused = set()
    sys.addaudithook(refuse_linux_files)
    for library in (ctypes.CDLL, ctypes.PyDLL):
        def __init__(self, name, *arguments, old=library.__init__, **options):
            if name is None and system == "win32":
                raise TypeError("argument of type 'NoneType' is not iterable")
            old(self, name, *arguments, **options)

        def __getattr__(self, name, old=library.__getattr__):
            if name in ("mallinfo", "mallinfo2", "malloc_trim"):
                raise AttributeError(f"dlsym(RTLD_DEFAULT, {name}): symbol not found")
            return old(self, name)

        library.__init__, library.__getattr__ = __init__, __getattr__
    return refused

"""


@pytest.fixture(params=["win32", "darwin"])
def bare_notebook(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Notebook]:
    """A kernel without what only Linux has."""
    with open_notebook(tmp_path) as notebook:
        taken = notebook.run(f"{_TAKE_AWAY}\nrefused = take_away({request.param!r})")
        assert taken.status == "ok", taken.text
        yield notebook


def test_the_main_flow_works_without_what_only_linux_has(bare_notebook: Notebook) -> None:
    """Each step has its result, and nothing of ours fails on the way."""

    def run(code: str) -> str:
        cell = bare_notebook.run(code)
        assert cell.status == "ok", cell.text
        assert "gpumemwidget failed" not in cell.text
        return cell.text

    assert "records every cell: host memory" in run("%load_ext gpumemwidget")
    traced = run("%%memtrace\nbig = torch.ones(16, 1024, 1024)\nholder = [big]")
    assert "resident" in traced
    run("model = torch.nn.Linear(1024, 1024)")
    assert "big" in run("%memvars")
    assert "holder" in run("%memwhy big")
    assert "64.00 MiB" in run("%memrelease big holder --dry-run")
    run("%memrelease big holder")
    assert bare_notebook.evaluate("(big, holder)") == (None, None)
    parts = run("%memstat --device")
    assert "host memory" in parts
    assert "Can be taken without swapping" in parts
    assert "Snapshot of the dashboard" in "".join(
        str(output) for output in bare_notebook.run("%memdash").outputs
    )
    run("import gpumemwidget")
    whole = bare_notebook.evaluate(
        "[(each.total_bytes, sum(part.n_bytes for part in each.parts))"
        " for each in gpumemwidget.breakdown().records]"
    )
    assert whole
    assert all(total == summed for total, summed in whole)
    assert bare_notebook.evaluate("gpumemwidget.last_failure()") is None
    # The files were asked for, and missed.
    assert bare_notebook.evaluate("'/proc/self/status' in refused")
    run("%unload_ext gpumemwidget")
