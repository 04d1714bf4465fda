"""The Processes tab's kernel side, in a real shell, on recordings of simulated ranks."""

from __future__ import annotations

import shutil
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

import gpumemwidget
from gpumemwidget.errors import FileError, NotLoadedError, RecordingError
from gpumemwidget.model.devices import Reading, Sample
from gpumemwidget.model.processes import DevicePeak, ProcessInfo, ProcessState
from gpumemwidget.recording.history import History
from gpumemwidget.remote.messages import Began, encode
from gpumemwidget.remote.reader.recordings import Processes
from gpumemwidget.report.processes import choose_processes
from gpumemwidget.widgets.processes_panel import ProcessLines, describe_processes
from tests.jupyter.page import Message, Page
from tests.ranks import DRIVER_BYTES, GIB, MIB, Rank, write_ranks


@pytest.fixture
def page(loaded: InteractiveShell) -> Iterator[Page]:
    page = Page(loaded)
    yield page
    page.see(visible=False)


def _wait_for(page: Page, kind: str, is_wanted: Callable[[Message], bool] = bool) -> Message:
    """The first message of a kind that is as wanted; they come from another thread."""
    deadline_s = time.monotonic() + 20
    while time.monotonic() < deadline_s:
        for message in page.list(kind):
            if is_wanted(message):
                return message
        time.sleep(0.01)
    raise AssertionError(f"waited in vain for {kind}: {[each['kind'] for each in page.sent]}")


def _list_rows(message: Message) -> dict[str, Message]:
    """The rows of all hosts by the name of their process."""
    groups = [group for host in message["hosts"] for group in (*host["gpus"], host)]
    return {row["name"]: row for group in groups for row in group["rows"]}


def _look(page: Page, folder: Path, n_processes: int) -> Message:
    """What a page is sent that opens the tab."""
    gpumemwidget.watch(folder)
    page.see(processes=True)
    return _wait_for(page, "processes", lambda told: told["n_processes"] == n_processes)


# -- The tab ---------------------------------------------------------------------------------------


def test_tab_is_there_while_something_is_watched(page: Page, tmp_path: Path) -> None:
    """A page that joins is told with the state, the others when that changes."""
    assert page.dashboard.take_snapshot()["watches"] is False

    watched = gpumemwidget.watch(tmp_path)
    assert page.list("watching")[-1]["watches"] is True
    assert page.dashboard.take_snapshot()["watches"] is True
    assert repr(watched) == f"<watching {tmp_path}>"

    watched.close()
    watched.close()
    assert [each["watches"] for each in page.list("watching")] == [True, False]
    assert page.dashboard.take_snapshot()["watches"] is False


def test_watching_needs_the_extension_and_a_place(loaded: InteractiveShell, tmp_path: Path) -> None:
    """What is missing is said at once, with the next step."""
    other = tmp_path / "table.csv"
    other.write_text("1, 2")
    for path, words in (
        (tmp_path / "missing", "missing is not there: .* create the folder first"),
        ("/dev/null", "is no regular file"),
    ):
        with pytest.raises(FileError, match=words):
            gpumemwidget.watch(path)
    with pytest.raises(RecordingError, match="is no recording"):
        gpumemwidget.watch(other)
    loaded.run_line_magic("unload_ext", "gpumemwidget")

    with pytest.raises(NotLoadedError, match="%load_ext gpumemwidget"):
        gpumemwidget.watch(tmp_path)


def test_what_can_not_be_read_is_in_the_report_of_all(
    page: Page, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file each time that the report is asked for, and the folder once it is gone; no bug is."""
    folder = tmp_path / "runs"
    for number in range(2):
        Rank(folder, number).sample()
    began = Began(ProcessInfo("1", "node1", 1, "python train.py", 1.0), version=2)
    (folder / "newer.jsonl").write_bytes(encode(began))
    for _ in range(2):
        gpumemwidget.watch(folder)
    processes = page.session.attach(Processes)

    texts = [" ".join(processes.report().text.split()) for _ in range(2)]
    page.see(processes=True)
    told_in_tab = _wait_for(page, "processes", lambda told: bool(told["unread"]))
    shutil.rmtree(folder)
    gone = " ".join(processes.report().text.split())

    for text in texts:
        assert text.count(f"{folder}/newer.jsonl was written by a newer gpumemwidget") == 1
        assert "rank 0" in text
    [why] = told_in_tab["unread"]
    assert why.startswith(f"{folder}/newer.jsonl was written by a newer gpumemwidget")
    assert told_in_tab["n_more_unread"] == 0
    assert "rank 0" in gone
    assert f"{folder} is not there" in gone
    told = capsys.readouterr().err
    assert "newer.jsonl" in told
    assert "is not there" in told
    assert "bug report" not in told


def test_an_export_says_that_spans_are_not_in_it(
    loaded: InteractiveShell, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where ``--all`` was asked for and other processes are watched."""
    line = f"--export {tmp_path / 'cells.csv'} --force"
    words = "The spans of the processes that are watched are not in it."
    loaded.run_line_magic("memledger", f"--all {line}")
    assert words not in capsys.readouterr().out
    gpumemwidget.watch(tmp_path)

    loaded.run_line_magic("memledger", line)
    assert words not in capsys.readouterr().out
    loaded.run_line_magic("memledger", f"--all {line}")
    assert words in capsys.readouterr().out.splitlines()


def test_nothing_is_sent_while_the_tab_is_closed(page: Page, tmp_path: Path) -> None:
    """Nor for a view that can't be seen."""
    gpumemwidget.watch(tmp_path)
    processes = page.session.attach(Processes)
    for view in ({}, {"visible": False, "processes": True}):
        page.see(**view)

        processes.collector.read()
        processes.gathered.call(None)

        assert page.list("processes") == []


# -- What is told ----------------------------------------------------------------------------------


def test_gpus_stand_once_and_their_parts_add_up(page: Page, tmp_path: Path) -> None:
    """Host by host in the order of the ranks; two recorded processes share a GPU's bar."""
    write_ranks(tmp_path)

    told = _look(page, tmp_path, 10)

    assert [host["host"] for host in told["hosts"]] == ["node1", "node2"]
    for host in told["hosts"]:
        assert [gpu["uuid"] for gpu in host["gpus"]] == [f"GPU-simulated-{n}" for n in range(4)]
        assert host["gpu_name"] == "NVIDIA H100 80GB HBM3"
        for gpu in host["gpus"]:
            parts = sum(row["taken"] for row in gpu["rows"])
            if gpu["used"] is not None:
                assert parts + gpu["others"] + gpu["unlisted"] == gpu["used"]
                assert gpu["used"] + DRIVER_BYTES + gpu["free"] == gpu["total"]
    first, shared = told["hosts"][0]["gpus"][0], told["hosts"][1]["gpus"][3]
    assert first["others"] == 6 * GIB
    assert [row["name"] for row in shared["rows"]] == ["rank 7", "python evaluate.py"]
    assert [row["name"] for row in told["hosts"][0]["rows"]] == ["loader 0"]
    assert told["n_hosts"] == 2
    assert told["n_unlisted"] == 0


def test_row_has_the_figures_of_its_process(page: Page, tmp_path: Path) -> None:
    """What it has now, its peak and the span of that, what it does, and two minutes as a line."""
    rank = Rank(tmp_path, 3, gpu=1)
    rank.take(10 * GIB)
    rank.train(20, n_bytes=8 * GIB, step_s=8.0)
    rank.begin("epoch", 2)
    rank.sample(1.5)

    row = _list_rows(_look(page, tmp_path, 1))["rank 3"]

    assert (row["allocated"], row["reserved"]) == (10 * GIB, 18 * GIB)
    assert (row["peak"], row["peak_is"], row["peak_in"]) == (18 * GIB, "exact", "step 1")
    assert (row["words"], row["running_s"]) == ("in epoch 2", 1.5)
    assert (row["device"], row["pid"], row["status"]) == ("cuda:1", 4003, "running")
    # A step takes four points: 12, 16, 18 and 14 GiB at most, of 18.
    assert row["line"][-9:-1] == [67, 89, 100, 78, 67, 89, 100, 78]
    assert len(row["line"]) == 60


def test_what_ended_keeps_its_row(page: Page, tmp_path: Path) -> None:
    """With its last figures; it takes nothing of its GPU any more, whose use nobody tells now."""
    write_ranks(tmp_path)

    told = _look(page, tmp_path, 10)

    rows = _list_rows(told)
    failed, lost = rows["rank 5"], rows["rank 6"]
    assert (failed["status"], failed["n_ooms"], failed["allocated"]) == ("failed", 1, 22 * GIB)
    assert failed["error"].startswith("OutOfMemoryError")
    assert (lost["status"], lost["allocated"], lost["taken"]) == ("lost", 22 * GIB, 0)
    assert time.time() - 60 < lost["silent_since"] < time.time()
    _, node2 = told["hosts"]
    assert (node2["n_lost"], node2["n_failed"], node2["n_ooms"]) == (1, 0, 1)
    assert [gpu["used"] for gpu in node2["gpus"]][1:3] == [None, None]


def test_the_rank_that_stands_out_is_named(page: Page, tmp_path: Path) -> None:
    """In a sentence, and in its row."""
    write_ranks(tmp_path)

    told = _look(page, tmp_path, 10)

    [skew] = told["skews"]
    assert skew["words"] == (
        "rank 3 is 5.91 GiB above the median of the 8 processes; its peak is in step 1."
    )
    assert [name for name, row in _list_rows(told).items() if row["is_skewed"]] == ["rank 3"]


def test_what_is_written_now_is_told(page: Page, tmp_path: Path) -> None:
    """New samples, and a process whose recording begins later."""
    first = Rank(tmp_path, 0)
    _look(page, tmp_path, 1)

    first.take(3 * GIB)
    first.sample()
    Rank(tmp_path, 1, gpu=1).sample()

    told = _wait_for(page, "processes", lambda told: told["n_processes"] == 2)
    assert _list_rows(told)["rank 0"]["allocated"] == 3 * GIB


# -- What a click asks for -------------------------------------------------------------------------


def test_report_of_a_process_is_made_when_it_is_asked_for(page: Page, tmp_path: Path) -> None:
    """With its spans and the card of its OOM."""
    write_ranks(tmp_path)
    row = _list_rows(_look(page, tmp_path, 10))["rank 5"]

    page.say("process", id=row["id"])

    told = _wait_for(page, "process")
    assert (told["id"], told["state"]) == (row["id"], "done")
    for words in ("Spans", "epoch", "Out of memory on cuda:0", "OutOfMemoryError"):
        assert words in told["html"]


def test_names_from_elsewhere_are_data(page: Page, tmp_path: Path) -> None:
    """Markup is escaped in the report, marks that turn letters are gone, and length is bounded."""
    name = "<img src=x onerror=alert(1)>\u202e" + "x" * 100_000
    rank = Rank(tmp_path, None, role="worker", name=name, process_id="hostile" + "y" * 200)
    rank.begin(name)
    rank.sample()
    told = _look(page, tmp_path, 1)

    [row] = told["hosts"][0]["gpus"][0]["rows"]
    page.say("process", id=row["id"])

    assert len(row["name"]) <= 60
    assert "\u202e" not in row["words"]
    assert len(row["id"]) <= 60
    html = _wait_for(page, "process")["html"]
    assert "&lt;img" in html
    assert "<img" not in html


def test_of_a_long_text_no_more_is_kept_than_is_shown() -> None:
    """Another one each second, of a megabyte each, takes no room that stays."""
    tracemalloc.start()
    try:
        for number in range(8):
            state = replace(_make_state(0, "failed"), error=f"{number}" + "x" * MIB)
            describe_processes([state], find_line=lambda *_: [], wall_s=0.0)
        del state
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert kept_bytes < MIB


# -- Many of them ----------------------------------------------------------------------------------


def _make_state(number: int, status: Any = "running", *, peak_bytes: int = GIB) -> ProcessState:
    info = ProcessInfo(f"{status} {number}", "node", number, "train", float(number), "rank", number)
    peak = DevicePeak("cuda:0", peak_bytes, peak_bytes)
    return ProcessState(info, status, heard_s=1.0, peaks=(peak,))


def test_of_too_many_those_that_matter_are_listed() -> None:
    """Of those that run what stands out and is big; of the others failures, then the newest."""
    running = [_make_state(number, peak_bytes=number * MIB) for number in range(300)]
    ended = [_make_state(number, "ended") for number in range(300)]
    lost = replace(_make_state(0, "lost"))

    chosen = choose_processes([*running, *ended, lost], {"running 7"}, 200)

    assert len(chosen) == 200
    assert {"running 7", "running 299", "ended 299", "lost 0"} <= chosen
    assert sum(key.startswith("running") for key in chosen) == 100
    assert "running 1" not in chosen
    few = choose_processes([*running[:150], *ended], (), 200)
    assert sum(key.startswith("running") for key in few) == 100


def test_line_has_the_highest_of_each_two_seconds() -> None:
    """Of the last two minutes; a stretch without a sample is a gap."""
    history = History()
    lines = ProcessLines(history)
    for time_s, n_bytes in ((1.0, 900), (200.1, 10), (201.9, 40), (204.1, 100), (204.2, 80)):
        history.append(Sample(time_s, (Reading("cuda:0", n_bytes, n_bytes),)))

    lines.update(205.0)
    lines.update(206.0)

    assert lines.list_points("cuda:0") == [40, None, 100]
    assert lines.list_points("cuda:1") == []
