"""``python -m gpumemwidget run``: the program runs as with ``python``, and is recorded."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
import torch

import gpumemwidget
from gpumemwidget.__main__ import main
from tests.remote.programs import (
    ROOT,
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
        __annotations__, type(__builtins__).__name__, __cached__ and "cached",
        "torch" in sys.modules, "IPython" in sys.modules, "plotly" in sys.modules]), flush=True)
    late.start()
    exec(sys.argv[1])
"""


@pytest.mark.parametrize(
    ("form", "code", "status"),
    [
        (["train.py"], "pass", 0),
        (["train.py"], "sys.exit('gone')", 1),
        (["train.py"], "import broken", 1),
        (["-m", "train"], "sys.exit(300)", 44),
        (["-m", "package"], "def fail(): raise ValueError('no')\nfail()", 1),
    ],
)
def test_as_python_runs_it(form: list[str], code: str, status: int, tmp_path: Path) -> None:
    """The same output, exit status and traceback; ``__main__`` and ``sys`` look the same."""
    write_script(tmp_path, PROGRAM)
    (tmp_path / "package").mkdir()
    write_script(tmp_path / "package", PROGRAM, "__main__.py")
    for name in ("package", "."):
        write_script(tmp_path / name, "def f(:", "broken.py")
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
    assert state.info.name.startswith(f"python {' '.join(form)} ")
    assert (state.error == "exit status 44") == (status == 44)


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (["run", "nosuch.py"], "can't open nosuch.py"),
        (["run", "-m", "nosuch"], "there is no module nosuch"),
        (["run", "-m", "os.nosuch"], "can't find the module os.nosuch"),
        (["run", "."], "can't open .: Is a directory"),
        (["run"], "required: PROGRAM ("),
        (["run", "-u", "train.py"], "Python's own go in front: python -u"),
        (["run", "--to", "a.txt", "train.py"], "write a.txt/ for a new folder"),
        (["run", "--to", "mine.jsonl", "nosuch.py"], "is there already: choose another name"),
        (["run", "--to", "/proc/a.jsonl", "nosuch.py"], "can't write /proc/a.jsonl"),
        (["load", "nosuch"], "nosuch"),
        (["load", "mine.jsonl"], "is no recording: choose a file that"),
        (["load"], "required: RUNS (see --help)"),
        (["load", "--to", "x", "runs"], "no such options: --to"),
        (["compare", "a", "b", "--json", "--markdown"], "--markdown: not allowed with argument"),
    ],
)
def test_what_can_not_be_done(
    command: list[str],
    why: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is said in one line with exit status 2, and no recording is left."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "mine.jsonl").write_text("mine\n")

    try:
        status = main(command)
    except SystemExit as exc:
        status = exc.code

    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert err.startswith("gpumemwidget: ")
    assert why in err
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["mine.jsonl"]


#: Where a recording goes, whatever the current folder is.
_WHOLE_TO = ("--to", "{folder}/runs")


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        ([*_WHOLE_TO, "{folder}/train.py"], 0, "{folder}/runs/"),
        ([*_WHOLE_TO, "-m", "sample"], 0, "{folder}/runs/"),
        ([*_WHOLE_TO, "train.py"], 2, "gpumemwidget: can't open train.py: No such file"),
        (["--to", "runs", "{folder}/train.py"], 2, "'runs' leads nowhere"),
        (["{folder}/train.py"], 2, "'.' leads nowhere"),
        (["--to", "", "{folder}/train.py"], 2, "the path is empty: give one such as"),
    ],
)
def test_a_current_folder_that_was_deleted(
    arguments: list[str], status: int, said: str, tmp_path: Path
) -> None:
    """Whole paths work there, and others are refused in one line, without a recording."""
    for name in ("train.py", "sample.py"):
        write_script(tmp_path, "print('it ran')", name)
    (tmp_path / "gone").mkdir()
    code = f"""
import os, sys
os.chdir({str(tmp_path / "gone")!r})
os.rmdir(os.getcwd())
os.execv(sys.executable, [sys.executable, "-m", "gpumemwidget", "run", *sys.argv[1:]])
"""
    program = [argument.format(folder=tmp_path) for argument in arguments]

    ended = run_python(tmp_path, "-c", code, *program, env={"PYTHONPATH": f"{ROOT}:{tmp_path}"})

    assert (ended.status, ended.out) == (status, "" if status else "it ran\n")
    assert said.format(folder=tmp_path) in ended.err
    assert status == 0 or ended.err.count("\n") == 1
    assert len([*tmp_path.rglob("*.jsonl")]) == (status == 0)


def test_a_folder_with_a_dot(tmp_path: Path) -> None:
    """It is taken as one if it says so, and if it is there."""
    for to in ("v1.2/", "v1.2"):
        gpumemwidget.record(f"{tmp_path}/{to}").close()

    assert len(gpumemwidget.load(tmp_path / "v1.2").processes) == 2


def test_a_disk_that_fills_up(tmp_path: Path) -> None:
    """The summary says that the end is missing, and what came before can be opened."""
    write_script(
        tmp_path,
        """
        import resource, signal
        import gpumemwidget
        with gpumemwidget.span("first"):
            pass
        # Its end, not its beginning.
        while '"type":"span"' not in open("a.jsonl").read():
            pass
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1, 1))
        """,
    )

    ended = run_python(tmp_path, *RUN, "--to", "a.jsonl", "train.py")

    words = "The end of a.jsonl could not be written: gpumemwidget.load('a.jsonl') opens what came"
    assert words in ended.err
    assert "'a.jsonl') opens it" not in ended.err
    assert [span.name for span in load_one(tmp_path / "a.jsonl").spans] == ["first"]


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


def test_load_prints_the_report(tmp_path: Path) -> None:
    """The text is the report of ``gpumemwidget.load()``, of a file and of a folder."""
    write_script(tmp_path, "kept = bytearray(8 << 20)")
    run_python(tmp_path, *RUN, "--to", "runs", "train.py")
    [path] = (tmp_path / "runs").iterdir()

    for name in ("runs", path.relative_to(tmp_path)):
        shown = run_python(tmp_path, "-m", "gpumemwidget", "load", name)

        assert shown.status == 0, shown.err
        assert "python train.py" in shown.out
        assert shown.out == f"{gpumemwidget.load(path)}\n"


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
    assert peak.number == 4


@pytest.mark.parametrize("makes_step", [False, True])
def test_what_a_program_is_in_before_its_second_step(tmp_path: Path, *, makes_step: bool) -> None:
    """``the program`` until the first step, however it goes on; the end names what it was."""
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)])
    path = tmp_path / "a.jsonl"

    with gpumemwidget.record(path):
        wait_for(lambda: b'"span_began"' in path.read_bytes())
        before = load_one(path).running
        if makes_step:
            optimizer.step()

    assert before is not None
    assert (before.name, before.number) == ("the program", None)
    assert list_spans(load_one(tmp_path / "a.jsonl")) == (
        [("start to step", 1, 1), ("after step 1", None, 1)]
        if makes_step
        else [("the program", None, 1)]
    )


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
    # One long sleep may begin just after the signal, which any program with threads then misses.
    script = "import time\nprint('on', flush=True)\nfor _ in range(600):\n    time.sleep(0.1)\n"
    write_script(tmp_path, script)
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
    # The sampler or the writer may have had a file open at that moment.
    failures = [line for line in ended.err.splitlines() if "failed" in line]
    assert all("Bad file descriptor" in line for line in failures)
    assert [path.read_text() for path in tmp_path.glob("own*.txt")] == [""] * 8
    state = load_one(tmp_path / "a.jsonl")
    assert (state.status, state.n_unread) == ("ended", 0)
    assert "after" in {span.name for span in state.spans}
