"""``python -m gpumemwidget run``: the program runs as with ``python``, and is recorded."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import sys
from pathlib import Path

import pytest
import torch

import gpumemwidget
from gpumemwidget.remote.telling.run import main
from tests.remote.programs import (
    RUN,
    SLACK_BYTES,
    end_group,
    find_peak,
    list_spans,
    load_one,
    run_python,
    start_python,
    wait_for,
    write_script,
)

PROGRAM = """
import json, sys, threading
from dataclasses import dataclass

@dataclass
class Config:
    rate: float = 0.1

if __name__ == "__main__":
    late = threading.Timer(0.1, lambda: print("a thread that ends last", flush=True))
    print(json.dumps([sys.argv, __file__, __name__, __package__, sys.path[0],
        str(__spec__ and __spec__.name), Config.__annotations__["rate"].__name__,
        type(__builtins__).__name__, __cached__ and "cached", "torch" in sys.modules,
        "IPython" in sys.modules, "plotly" in sys.modules]), flush=True)
    late.start()
    exec(sys.argv[1])
"""


@pytest.mark.parametrize("form", [["train.py"], ["-m", "train"], ["-m", "package"]])
@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("pass", 0),
        ("sys.exit(3)", 3),
        ("sys.exit('gone')", 1),
        ("def fail(): raise ValueError('no')\nfail()", 1),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("import broken", 1),
    ],
)
def test_as_python_runs_it(form: list[str], code: str, status: int, tmp_path: Path) -> None:
    """The same output, exit status and traceback; ``__main__`` and ``sys`` look the same."""
    write_script(tmp_path, PROGRAM)
    write_script(tmp_path, "def f(:", "broken.py")
    (tmp_path / "package").mkdir()
    write_script(tmp_path / "package", PROGRAM, "__main__.py")
    arguments = [*form, code, "--to", "x", "-m"]

    plain = run_python(tmp_path, *arguments)
    run = run_python(tmp_path, *RUN, "--to", "a.jsonl", *arguments)

    assert run.out == plain.out
    assert "a thread that ends last" in run.out
    assert (run.status, plain.status) == (status, status)
    # Below ``python -m`` there are frames of runpy, which is not used here.
    theirs = [
        line for line in plain.err.splitlines() if "runpy" not in line and "_run_" not in line
    ]
    ours = run.err.splitlines()[: len(theirs)]
    assert ours == theirs
    assert "gpumemwidget.load('a.jsonl') opens it." in run.err
    state = load_one(tmp_path / "a.jsonl")
    assert state.status == ("failed" if status else "ended")


@pytest.mark.parametrize("arguments", [["nosuch.py"], ["-m", "nosuch"], ["-m", "os.nosuch"], ["."]])
def test_what_can_not_be_run(arguments: list[str], tmp_path: Path) -> None:
    """It is said in one line, without a traceback."""
    ended = run_python(tmp_path, *RUN, *arguments)

    assert ended.status == 2
    assert ended.err.startswith("gpumemwidget: ")
    assert "Traceback" not in ended.err


def test_a_syntax_error(tmp_path: Path) -> None:
    """It is shown as Python shows it."""
    write_script(tmp_path, "def f(:\n")

    plain = run_python(tmp_path, "train.py")
    run = run_python(tmp_path, *RUN, "train.py")

    assert run.err.startswith(plain.err)
    assert run.status == plain.status == 1


def test_a_file_that_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused before the program begins."""
    (tmp_path / "a.jsonl").write_text("mine")
    monkeypatch.setattr(sys, "argv", sys.argv)

    status = main(["run", "--to", str(tmp_path / "a.jsonl"), "nosuch.py"])

    assert status == 2
    assert "is there already" in capsys.readouterr().err


CHILDREN = """
import multiprocessing, os, sys

def work(queue):
    queue.put([__name__, os.getpid() != PARENT, sum(bytearray(10))])

PARENT = int(os.environ.setdefault("PARENT", str(os.getpid())))
if __name__ == "__main__":
    for method in ("spawn", "fork", "forkserver"):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        child = context.Process(target=work, args=(queue,))
        child.start()
        print(method, queue.get(timeout=30), flush=True)
        child.join(30)
        print(child.exitcode)
    pid = os.fork()
    if pid == 0:
        sys.exit(0)
    print(os.waitpid(pid, 0)[1])
"""


@pytest.mark.parametrize("form", [["train.py"], ["-m", "train"]])
def test_children(form: list[str], tmp_path: Path) -> None:
    """However they are started they work as always, and nothing is written in their name."""
    write_script(tmp_path, CHILDREN)

    plain = run_python(tmp_path, *form)
    run = run_python(tmp_path, *RUN, "--to", "records", *form)

    assert run.out == plain.out
    assert run.err.count("opens it") == 1
    (state,) = gpumemwidget.load(tmp_path / "records").processes
    assert state.status == "ended"
    assert state.n_unread == 0


@pytest.mark.parametrize("call", ["with gpumemwidget.record('a.jsonl'):\n    ", "", "record = "])
def test_an_oom_on_the_host(call: str, tmp_path: Path) -> None:
    """Its card is in the file, with the line; of ``run``, of a block and of a plain call."""
    if call == "record = ":
        call = "gpumemwidget.record('a.jsonl')\n"
    write_script(
        tmp_path, f"import gpumemwidget\nweights = bytearray(8 << 20)\n{call}bytearray(1 << 60)\n"
    )
    run = [*RUN, "--to", "a.jsonl"] if not call else []

    ended = run_python(tmp_path, *run, "train.py")

    state = load_one(tmp_path / "a.jsonl")
    (card,) = state.ooms
    assert ended.status == 1
    assert ended.err.count("MemoryError") >= 1
    assert state.error == "MemoryError"
    assert card.event.device == "host"
    assert card.text == "bytearray(1 << 60)"
    assert (card.place or "").startswith("train.py, line")
    assert "train.py, line" in gpumemwidget.load(tmp_path / "a.jsonl").report().html


STEPS = """
import torch
layer = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
for step in range(5):
    optimizer.zero_grad()
    layer(torch.ones(4, 64)).sum().backward()
    if step == 3:
        spike = torch.zeros(32 << 20)
        del spike
    optimizer.step()
"""


def test_steps_are_counted(tmp_path: Path) -> None:
    """Each step of an optimizer ends one; the peak is in its step; the program goes on."""
    write_script(tmp_path, STEPS)

    ended = run_python(tmp_path, *RUN, "--to", "a.jsonl", "train.py")

    state = load_one(tmp_path / "a.jsonl")
    spans = list_spans(state)
    assert ended.status == 0, ended.err
    assert spans[0] == ("start to step", 1, 1)
    assert spans[-1] == ("after step 5", None, 1)
    assert sum(n_spans for name, _, n_spans in spans if name == "step") == 4
    peak = find_peak(state)
    assert peak.span == "step"
    assert peak.number is not None
    assert peak.number <= 4 < peak.number + peak.n_spans


def test_the_hook_is_taken_away(tmp_path: Path) -> None:
    """After ``close`` PyTorch calls nothing of ours."""
    hooks = sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks
    before = len(hooks)
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)])

    with gpumemwidget.record(tmp_path / "a.jsonl"):
        during = len(hooks)
        optimizer.step()
    optimizer.step()

    assert (during, len(hooks)) == (before + 1, before)
    assert [name for name, _, _ in list_spans(load_one(tmp_path / "a.jsonl"))] == [
        "start to step",
        "after step 1",
    ]


FIGURES = """
import re, gpumemwidget
with gpumemwidget.span("load"):
    held = bytearray(96 << 20)
    for place in range(0, len(held), 4096):
        held[place] = 1
    with open("/proc/self/status") as status:
        highest = re.search(r"VmHWM:\\s+(\\d+) kB", status.read())
    del held
print(int(highest[1]) * 1024)
"""


def test_the_figures_are_the_processs_own(tmp_path: Path) -> None:
    """The peak of the resident size is what the process itself reads of the kernel."""
    write_script(tmp_path, FIGURES)

    ended = run_python(tmp_path, *RUN, "--to", "a.jsonl", "train.py")

    peak = find_peak(load_one(tmp_path / "a.jsonl"))
    assert abs((peak.reserved_bytes or 0) - int(ended.out)) < SLACK_BYTES
    assert (peak.peak_is, peak.span) == ("exact", "load")


def test_ctrl_c(tmp_path: Path) -> None:
    """A real one ends the program as always, and the recording says so."""
    write_script(tmp_path, "import time\nprint('on', flush=True)\ntime.sleep(60)\n")
    process = start_python(tmp_path, *RUN, "--to", "a.jsonl", "train.py")
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "on\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    finally:
        end_group(process)

    state = load_one(tmp_path / "a.jsonl")
    assert process.returncode == -signal.SIGINT
    assert err.count("KeyboardInterrupt") == 2
    assert (state.status, state.error) == ("failed", "KeyboardInterrupt")


INTERRUPTED = """
import _thread, os, signal, threading, time
import gpumemwidget

def press():
    while not done:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.0007)

done, n = False, 0
recording = gpumemwidget.record("a.jsonl", steps=False)
thread = threading.Thread(target=press)
thread.start()
until = time.monotonic() + 1.5
while time.monotonic() < until:
    try:
        with gpumemwidget.span("epoch"):
            n += 1
    except KeyboardInterrupt:
        pass
try:
    done = True
    thread.join()
    time.sleep(0.1)
except KeyboardInterrupt:
    thread.join()
signal.signal(signal.SIGINT, signal.SIG_IGN)
recording.close()
print(n, len(recording.recorder._spans.open_spans), threading.active_count())
"""


def test_ctrl_c_in_our_own_code(tmp_path: Path) -> None:
    """Presses at any moment leave no lock held and the recording whole."""
    write_script(tmp_path, INTERRUPTED)

    ended = run_python(tmp_path, "train.py")

    assert ended.status in (0, -signal.SIGINT), ended.err
    state = load_one(tmp_path / "a.jsonl")
    assert "Traceback" not in ended.err or "KeyboardInterrupt" in ended.err
    assert state.n_unread == 0
    assert state.status != "lost"


def test_live(tmp_path: Path) -> None:
    """On a terminal the state is shown and goes again; what the program prints stays whole."""
    pytest.importorskip("rich")
    write_script(
        tmp_path,
        "import os, sys, time\nprint('printed')\ntime.sleep(1.2)\n"
        "if os.fork() == 0:\n    print('forked', flush=True)\n    os._exit(0)\n"
        "os.wait()\nprint('to stderr', file=sys.stderr)\n",
    )

    shown, status = run_on_terminal(tmp_path, *RUN, "--live", "--to", "a.jsonl", "train.py")

    assert status == 0
    assert all(word in shown for word in ("printed", "forked", "to stderr", "in start to step 1"))
    assert shown.rstrip().endswith("opens it.")


def test_live_with_a_pipe(tmp_path: Path) -> None:
    """What goes into a pipe is what the program printed."""
    write_script(tmp_path, "print('printed' * 50)\n")

    ended = run_python(tmp_path, *RUN, "--live", "train.py", env={"FORCE_COLOR": "1"})

    assert ended.out == "printed" * 50 + "\n"
    assert ended.status == 0


def run_on_terminal(folder: Path, *arguments: str) -> tuple[str, int]:
    """Run a Python whose standard streams are a terminal; return all it showed, and its status."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        root = str(Path(gpumemwidget.__file__).parents[1])
        environment = os.environ | {"PYTHONPATH": root, "TERM": "xterm", "COLUMNS": "120"}
        os.execve(sys.executable, [sys.executable, *arguments], environment)
    shown = b""
    try:
        while select.select([terminal], [], [], 30)[0]:
            with contextlib.suppress(OSError):
                data = os.read(terminal, 65536)
                shown += data
                if data:
                    continue
            break
        wait_for(lambda: os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        os.close(terminal)
    return shown.decode(errors="replace"), os.waitstatus_to_exitcode(status)


def test_a_program_that_closes_all_files(tmp_path: Path) -> None:
    """Its own next file, which may get the number of the recording's, has its own lines alone."""
    script = write_script(
        tmp_path,
        """
        import os, time, gpumemwidget
        os.closerange(3, 1000)
        files = [open(f"own{number}.txt", "w") for number in range(8)]
        with gpumemwidget.span("after"):
            time.sleep(0.3)
        """,
    )

    ended = run_python(tmp_path, *RUN, "--to", "a.jsonl", script)

    assert ended.status == 0, ended.err
    assert "failed" not in ended.err
    assert [path.read_text() for path in tmp_path.glob("own*.txt")] == [""] * 8
    state = load_one(tmp_path / "a.jsonl")
    assert (state.status, state.n_unread) == ("ended", 0)
    assert "after" in {span.name for span in state.spans}


def test_a_program_that_records_itself(tmp_path: Path) -> None:
    """It runs as it would without ``run``, and each of the two files has its own time."""
    script = write_script(
        tmp_path,
        """
        import gpumemwidget
        whole = gpumemwidget.span("whole")
        with whole:
            with gpumemwidget.record("inner.jsonl"), gpumemwidget.span("part"):
                print("ok")
        with whole:
            pass
        """,
    )

    ended = run_python(tmp_path, *RUN, "--to", "outer.jsonl", script)

    assert (ended.status, ended.out) == (0, "ok\n")
    inner, outer = (load_one(tmp_path / f"{name}.jsonl") for name in ("inner", "outer"))
    assert [span.name for span in inner.spans if span.name != "the program"] == ["part"]
    counts = {span.name: span.n_spans for span in outer.spans}
    assert (counts["part"], counts["whole"]) == (1, 2)
    assert inner.status == outer.status == "ended"
