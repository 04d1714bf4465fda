"""Recordings that are opened: whole, growing, cut off, foreign, newer, hostile."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path
from types import ModuleType

import pytest

import gpumemwidget
from gpumemwidget.errors import FileError, RecordingError
from gpumemwidget.model.processes import ProcessInfo
from gpumemwidget.progress import Progress, Stage, listen
from gpumemwidget.remote import messages as file_format
from gpumemwidget.remote.messages import Began, Counters, Ended, Figures, _Rare, decode, encode
from gpumemwidget.remote.reader import collector
from tests.remote.programs import (
    ROOT,
    end_group,
    list_spans,
    load_one,
    start_python,
    wait_for,
    write_script,
)


def make_file(path: Path, *, number: int | None = None) -> bytes:
    """Record something, and return the file's content."""
    with gpumemwidget.record(path), gpumemwidget.span("epoch", number):
        pass
    return path.read_bytes()


def test_while_it_is_written(tmp_path: Path) -> None:
    """All whole lines are there at any time; the rest of a line comes with the next look."""
    lines = make_file(tmp_path / "whole.jsonl", number=3).splitlines(keepends=True)
    path = tmp_path / "growing.jsonl"
    path.write_bytes(lines[0])
    recordings = gpumemwidget.load(path)

    for line in lines[1:]:
        with path.open("ab") as file:
            file.write(line[: len(line) // 2])
        recordings.update()
        with path.open("ab") as file:
            file.write(line[len(line) // 2 :])

    (state,) = recordings.update().processes
    assert state.status == "ended"
    assert state.n_unread == 0
    assert ("epoch", 3, 1) in list_spans(state)


KILLED = """
import os, time
import gpumemwidget
gpumemwidget.record("killed.jsonl")
with gpumemwidget.span("epoch 1"):
    held = bytearray(64 << 20)
    for place in range(0, len(held), 4096):
        held[place] = 1
with gpumemwidget.span("epoch 2"):
    del held
    time.sleep(60)
"""


def test_after_sigkill(tmp_path: Path) -> None:
    """What was recorded until then is there: spans, exact peaks, where it was.

    Nobody has waited for the process: a zombie has ended.
    """
    process = start_python(tmp_path, write_script(tmp_path, KILLED))
    path = tmp_path / "killed.jsonl"
    try:
        wait_for(lambda: path.exists() and b'"name":"epoch","start_s"' in path.read_bytes())
        recordings = gpumemwidget.load(path)
        wait_for(lambda: ("epoch", 1, 1) in list_spans(recordings.update()))
        wait_for(lambda: getattr(recordings.update().processes[0].running, "number", None) == 2)
        (running,) = recordings.processes
        os.kill(process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        wait_for(lambda: recordings.update().processes[0].status == "lost")
    finally:
        end_group(process)

    (state,) = recordings.processes
    assert running.status == "running"
    assert running.info.pid == process.pid
    assert state.running is not None
    assert (state.running.name, state.running.number) == ("epoch", 2)
    assert state.peaks[0].peak_is == "exact"
    assert (state.peaks[0].span, state.peaks[0].number) in {("epoch", 1), (None, None)}
    assert (state.peaks[0].reserved_bytes or 0) > 64 << 20
    assert "without an end" in str(recordings)
    assert re.search(r"host +last [\d.]+ MiB +last [\d.]+ MiB", str(recordings))


def test_a_ranks_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks get the same name and add their number; one that is restarted, another one."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    for rank in (0, 1, 3, 3, 3):
        monkeypatch.setenv("RANK", str(rank))
        gpumemwidget.record(tmp_path / "a.jsonl").close()

    states = gpumemwidget.load(tmp_path).processes
    assert [(state.info.role, state.info.number) for state in states] == [
        ("rank", rank) for rank in (0, 1, 3, 3, 3)
    ]
    assert {path.name for path in tmp_path.iterdir()} > {
        "a-rank3-2.jsonl",
        "a-rank3-3.jsonl",
        "a-rank3.jsonl",
    }


def test_a_file_that_is_written_anew(tmp_path: Path) -> None:
    """Shorter or longer, in its place or as another file: it is the new process, and that alone."""
    path = tmp_path / "a.jsonl"
    longer = make_file(tmp_path / "longer.jsonl") + b"no message\n"
    shorter = make_file(path, number=3)
    recordings = gpumemwidget.load(path)
    (first,) = recordings.processes
    path.write_bytes(longer)
    (second,) = recordings.update().processes
    path.unlink()
    path.write_bytes(shorter)
    (third,) = recordings.update().processes

    assert (first.status, first.n_unread) == ("ended", 0)
    assert second.info.id != first.info.id
    assert (second.status, second.n_unread) == ("ended", 1)
    assert ("epoch", 3, 1) not in list_spans(second)
    assert third == first


def test_a_file_that_can_not_be_read_hides_no_other(tmp_path: Path) -> None:
    """The report names it each time; without any other there is nothing but its error."""
    make_file(tmp_path / "good.jsonl", number=3)
    newer = make_file(tmp_path / "newer.jsonl").replace(b'"version":1', b'"version":2')
    (tmp_path / "newer.jsonl").write_bytes(newer)
    (tmp_path / "loop.jsonl").symlink_to(tmp_path / "loop.jsonl")
    recordings = gpumemwidget.load(tmp_path)

    texts = [" ".join(str(each).split()) for each in (recordings, recordings.update())]

    (state,) = recordings.processes
    assert state.status == "ended"
    assert ("epoch", 3, 1) in list_spans(state)
    for text in texts:
        assert f"{tmp_path}/loop.jsonl can't be read: " in text
        assert f"{tmp_path}/newer.jsonl was written by a newer gpumemwidget" in text
    (tmp_path / "good.jsonl").unlink()
    with pytest.raises(FileError, match=r"loop.jsonl can't be read"):
        gpumemwidget.load(tmp_path)
    with pytest.raises(RecordingError, match=r"newer.jsonl .* upgrade gpumemwidget"):
        gpumemwidget.load(tmp_path / "newer.jsonl")


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    """What was read of it stays, and the report says that it is gone, until it is back."""
    folder = tmp_path / "runs"
    folder.mkdir()
    content = make_file(folder / "a.jsonl")
    recordings = gpumemwidget.load(folder)
    shutil.rmtree(folder)

    gone = str(recordings.update())
    folder.mkdir()
    (folder / "b.jsonl").write_bytes(content)
    back = str(recordings.update())

    assert len(recordings.processes) == 1
    assert f"{folder} is not there" in " ".join(gone.split())
    assert "is not there" not in back


def test_a_folder(tmp_path: Path) -> None:
    """Its recordings, also those that come later; what others keep there is left alone."""
    make_file(tmp_path / "a.jsonl")
    (tmp_path / "data.jsonl").write_bytes(b'{"text": "of a data set"}\n' * 1000)
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "notes.txt").write_text("no recording")
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    recordings = gpumemwidget.load(tmp_path)
    make_file(tmp_path / "b.jsonl")

    assert len(recordings.processes) == 1
    assert len(recordings.update().processes) == 2
    assert [state.n_unread for state in recordings.processes] == [0, 0]


RUBBISH = {
    "empty": b"",
    "text": b"epoch 1: loss 0.3\n",
    "other JSON": b'{"text": "of a data set"}\n' * 10,
    "zeros": bytes(1 << 20),
    "one line": b"x" * (9 << 20),
    "pickle": b"\x80\x04\x95\x0f\x00\x00\x00\n",
    "a list": b"[" * 1000 + b"\n",
    "no beginning": b'{"type":"ended","time_s":1}\n',
}


@pytest.mark.parametrize("content", RUBBISH.values(), ids=RUBBISH)
def test_rubbish(content: bytes, tmp_path: Path) -> None:
    """It is refused in one line that names the file and the next step."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)

    with pytest.raises(RecordingError, match="is no recording: choose") as caught:
        gpumemwidget.load(path)

    assert str(path) in str(caught.value)


def test_what_is_foreign_is_not_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A data set of gigabytes beside recordings costs a look at its first lines."""
    monkeypatch.setattr(file_format, "_MAX_READ_BYTES", 100)
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"text": "of a data set"}\n' * 10_000)
    reader = file_format.MessageReader(path)

    for _ in range(3):
        assert list(reader.read()) == []

    assert reader._offset == 100


def test_new_messages_and_fields_of_the_same_version(tmp_path: Path) -> None:
    """They are passed over and counted; all else is read."""
    path = tmp_path / "a.jsonl"
    content = make_file(path)
    first, rest = content.split(b"\n", 1)
    first = first.replace(b'"version":1', b'"version":1,"new":[1]')
    path.write_bytes(first + b'\n{"type":"weather","is":"fine"}\n' + rest)

    state = load_one(path)

    assert state.status == "ended"
    assert state.n_unread == 1


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("nothing", "is not there: name a recording"),
        ("a pipe", "is no regular file: name a recording"),
        ("no permission", "can't be read"),
        (7, "give text such as 'runs/first.jsonl'"),
    ],
)
def test_what_can_not_be_opened(what: object, words: str, tmp_path: Path) -> None:
    """It is refused, and nobody waits."""
    path = tmp_path / "a.jsonl"
    if what == "a pipe":
        os.mkfifo(path)
    if what == "no permission":
        if os.geteuid() == 0:
            pytest.skip("root may read everything")
        path.touch(mode=0)

    for call in (gpumemwidget.load, gpumemwidget.record) if what == 7 else (gpumemwidget.load,):
        with pytest.raises(FileError, match=words):
            call(what if what == 7 else path)  # type: ignore[arg-type]


def test_hostile_text_is_shown_as_text(tmp_path: Path) -> None:
    """Names, errors and devices that would be HTML are escaped; absurd figures are shown."""
    path = tmp_path / "a.jsonl"
    evil = b"<script>alert(1)</script>"
    make_file(path)
    device = b'{"device":"%s","name":"%s","total_bytes":-1}' % (evil, evil)
    lines = [
        b'{"type":"began","process":{"id":"1","host":"%s","pid":-7,"name":"%s",'
        b'"started_at":-9e15,"label":"%s"}}' % (evil, evil, evil),
        b'{"type":"devices","devices":[%s]}' % device,
        b'["sample",-9007199254740992,{"%s":[9007199254740992,-9007199254740992]}]' % evil,
        b'["sample",9007199254740992,{"%s":[0,0]}]' % evil,
        b'{"type":"use","time_s":-1,"uses":[{"device":"%s","used_bytes":-5,"free_bytes":null,'
        b'"total_bytes":0,"failure":"%s"}],"own_bytes":[["%s",-9]]}' % (evil, evil, evil),
        b'{"type":"span","span":{"name":"%s","start_s":9e15,"duration_s":-9e15,"status":"ok",'
        b'"devices":[{"device":"%s","allocated":{"before_bytes":null,"after_bytes":-1,'
        b'"peak_bytes":-9},"reserved":{"before_bytes":0,"after_bytes":0,"peak_bytes":0},'
        b'"peak_is":null,"num_alloc_retries":-1,"num_ooms":null}],"number":-9,"n_spans":-4}}'
        % (evil, evil),
        b'{"type":"ended","time_s":-1,"error":"%s"}' % evil,
    ]
    for name, text in (("one", b"\n".join(lines)), ("two", b"\n".join(lines[:-1]))):
        (tmp_path / f"{name}.jsonl").write_bytes(text + b"\n")
    path.unlink()

    for where in (tmp_path / "one.jsonl", tmp_path):
        recordings = gpumemwidget.load(where)
        html = recordings._repr_html_()
        assert "<script>alert" not in html
        assert "&lt;script&gt;alert" in html
        assert "<script>alert" in str(recordings)


def test_the_documented_lines() -> None:
    """The lines of docs/recording-format.md are messages that the code writes just so."""
    page = (ROOT / "docs" / "recording-format.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```json\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]

    read = [decode(line.encode()) for line in lines]
    assert [encode(message).decode().rstrip("\n") for message in read] == lines
    kinds = {type(message) for message in read}
    assert {kind.__name__ for kind in kinds} == {
        "Counters",
        *(kind.__name__ for kind in _Rare.__args__),  # type: ignore[attr-defined]
    }


# -- Many recordings, and large ones ---------------------------------------------------------------


def write_many(folder: Path, number: int, *, process_id: str = "", first: int = 0) -> None:
    """Write recordings that have ended, the later ones newer."""
    for n in range(first, first + number):
        path = folder / f"{(n * 7919) % number:05}-{n}.jsonl"
        info = ProcessInfo(process_id or str(n), "node1", n, f"python part{n}.py", 1000.0 + n)
        path.write_bytes(encode(Began(info)) + encode(Ended(float(n))))
        os.utime(path, (1000 + n, 1000 + n))


@pytest.mark.parametrize("module", [file_format, collector])
def test_the_newest_of_too_many_are_shown(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a folder, and of several sources; the report says how many older ones are left out."""
    monkeypatch.setattr(module, "MAX_PROCESSES", 30)
    write_many(tmp_path, 90)

    recordings = gpumemwidget.load(tmp_path)

    assert sorted(state.info.pid for state in recordings.processes) == list(range(60, 90))
    text = " ".join(str(recordings).split())
    assert "60 older recordings are not shown: open them one by one." in text


def test_a_copy_is_no_process_of_its_own(tmp_path: Path) -> None:
    """Files with the same recording are one process, as far as the longest one goes."""
    write_many(tmp_path, 3, process_id="one")

    recordings = gpumemwidget.load(tmp_path)

    assert [state.heard_s for state in recordings.processes] == [2.0]


def test_a_report_of_many_processes_is_bounded(tmp_path: Path) -> None:
    """50 rows, and how many processes have none."""
    write_many(tmp_path, 400)

    text = str(gpumemwidget.load(tmp_path))

    assert "400 processes" in text
    assert "350 more processes are not shown." in text
    assert len(text.splitlines()) < 120


def test_how_far_the_reading_of_a_long_recording_has_got(tmp_path: Path) -> None:
    """It is reported all the time, and samples are kept within bounds, with their extremes."""
    path = tmp_path / "a.jsonl"
    samples = [Counters(n, {"cuda:0": Figures(n * 7919 % 40_009, n)}) for n in range(40_009)]
    info = ProcessInfo("1", "node1", 1, "python train.py", 1.0)
    path.write_bytes(encode(Began(info)) + b"".join(map(encode, samples)))
    reports: list[Progress] = []

    with listen(reports.append):
        recordings = gpumemwidget.load(path)

    size = path.stat().st_size
    assert [report.stage for report in reports] == [Stage.READ_BYTES] * len(reports)
    assert reports[-1].done == reports[-1].total == size
    assert len(reports) >= size // (1 << 20)
    (state,) = recordings.processes
    kept = recordings.find_history(state).samples()
    figures = [sample.readings[0].allocated_bytes for sample in kept]
    assert len(kept) <= 10_000
    assert (min(figures), max(figures)) == (0, 40_008)
    assert state.peaks[0].allocated_bytes == 40_008
    assert (kept[-1].time_s, state.heard_s) == (40.008, 40.008)
