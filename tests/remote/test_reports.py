"""What the report of recordings says."""

from __future__ import annotations

import socket
import time
from dataclasses import replace
from pathlib import Path

import gpumemwidget
from gpumemwidget.model.processes import ProcessInfo, SpanRecord
from gpumemwidget.remote.messages import Began, Counters, Ended, Figures, SpanEnded, encode
from gpumemwidget.report.processes import report_processes
from tests.ranks import GIB, Rank


def _read(path: Path) -> str:
    """The report, without the ends of its lines."""
    return " ".join(str(gpumemwidget.load(path)).split())


def test_how_each_process_ended(tmp_path: Path) -> None:
    """In which span; of several also at what time of day, which shows who was first."""
    began_at = time.mktime((2026, 11, 23, 3, 15, 0, 0, 0, -1))
    states = []
    for number, host in enumerate((socket.gethostname(), "node1", socket.gethostname())):
        rank = Rank(tmp_path, number, host=host, pid=2**31 - 7)
        rank.begin("step", 7 + number)
        rank.sample(12.0 + number)
        if number == 2:
            rank.close("ValueError: no")
        else:
            rank.die()
        state = gpumemwidget.load(rank.path).processes[0]
        states.append(replace(state, info=replace(state.info, started_at=began_at)))

    alone, failed, several = (
        " ".join(report_processes(shown).text.split()) for shown in (states[:1], states[2:], states)
    )

    assert (
        "The program: the recording stops at 12.00 s, in step 7, without an end. The process was "
        "killed, its host or cluster can't be reached, or the recording could not be written."
    ) in alone
    assert "The program ended with ValueError: no" in failed
    assert "rank 0: the recording stops at 12.00 s (03:15:12.0), in step 7, without" in several
    assert "(03:15:13.0), in step 8, without an end" in several
    assert "rank 2 ended at 03:15:14.0 with ValueError: no" in several


def test_spans_that_matter_are_listed_however_short(tmp_path: Path) -> None:
    """Those that failed and the one with the peak; how many other names there are is said."""
    rank = Rank(tmp_path, 0)
    for number in range(20):
        span = rank.begin(f"part {chr(97 + number)}")
        is_highest = number == 18
        if is_highest:
            rank.take(GIB)
        rank.sample(20.0 - number)
        if is_highest:
            rank.drop()
        rank.end(span, "error" if number == 17 else "ok")
    rank.close()

    lines = str(gpumemwidget.load(rank.path)).splitlines()

    listed = {line.split()[1]: line for line in lines if line.startswith("part ")}
    assert "".join(listed) == "abcdefghijklrs"
    assert "1 failed" in listed["r"]
    assert "failed" not in listed["s"]
    words = " ".join(lines)
    assert "6 more span names, which took less time." in words


def test_names_that_occur_twice_have_the_pid(tmp_path: Path) -> None:
    """In the tables, the notes and what stands out; of several hosts also the host."""
    for number in range(5):
        rank = Rank(tmp_path, number)
        rank.take((20 if number == 3 else 4) * GIB)
        rank.sample(9.0)
        rank.close()
    again = Rank(tmp_path, 3, pid=52, process_id="again")
    again.sample(9.0)
    again.close("ValueError: no")
    for pid in (61, 62):
        child = Rank(
            tmp_path, None, role="program", name="python mp.py", pid=pid, process_id=f"{pid}"
        )
        child.sample(1.0)
        child.close()
    for host in ("node1", "node2"):
        Rank(tmp_path, 9, host=host, pid=7, process_id=host).close()

    text = _read(tmp_path)

    assert "rank 0 ended" in text
    assert "rank 3 (pid 4003) is 16.00 GiB above the median" in text
    assert "rank 3 (pid 52) ended at" in text
    # In text, the table cuts a long name in its middle.
    assert text.count("pid 61) ended") == text.count("pid 62) ended") == 1
    html = gpumemwidget.load(tmp_path).report().html
    for where in ("pid 7 on node1", "pid 7 on node2"):
        assert f"rank 9 ({where})" in html


def test_a_figure_that_is_unknown_at_the_end(tmp_path: Path) -> None:
    """It stays as it was known last; the sample has none."""
    messages = [
        Began(ProcessInfo("1", "node1", 1, "python train.py", 1795404911.0)),
        Counters(0, {"cuda:0": Figures(5, 7), "host": Figures(None, 9)}),
        Counters(100, {"cuda:0": Figures(None, 8), "host": Figures(None, 10)}),
        Counters(200, {"cuda:0": Figures(7, None), "host": Figures(None, 11)}),
        Counters(300, {"cuda:0": Figures(None, None), "host": Figures(None, None)}),
        Ended(0.4),
    ]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"".join(map(encode, messages)))

    recordings = gpumemwidget.load(path)

    (state,) = recordings.processes
    figures = [(each.allocated_bytes, each.reserved_bytes) for each in state.readings]
    assert figures == [(7, 8), (None, 11)]
    samples = recordings.find_history(state).samples()
    assert [sample.readings[0].allocated_bytes for sample in samples] == [5, None, 7, None]


def test_many_failed_spans_are_bounded(tmp_path: Path) -> None:
    """50 rows, and how many names have none."""
    rank = Rank(tmp_path, 0)
    messages = [
        SpanEnded(SpanRecord(f"sample {number}", float(number), 1.0, "error", ()))
        for number in range(10_000)
    ]
    rank.close()
    lines = b"".join(map(encode, messages))
    rank.path.write_bytes(rank.path.read_bytes() + lines)

    report = gpumemwidget.load(rank.path).report()

    assert "9,950 more span names, which took less time" in " ".join(report.text.split())
    assert len(report.text.splitlines()) < 80
    assert len(report.html) < 100_000


def test_many_devices_are_bounded(tmp_path: Path) -> None:
    """50 rows and 16 charts, and how many devices have none."""
    path = tmp_path / "a.jsonl"
    devices = [f"cuda:{number}" for number in range(512)]
    messages = [
        Began(ProcessInfo("1", "node1", 1, "python train.py", 1795404911.0)),
        *(Counters(n, {name: Figures(n, n) for name in devices}) for n in range(4)),
        Ended(0.4),
    ]
    path.write_bytes(b"".join(map(encode, messages)))

    report = gpumemwidget.load(path).report()

    assert "\n462 more\n" in report.text
    assert report.html.count("<svg") <= 2 * 16
    assert len(report.text.splitlines()) < 200
