"""The magics in a shell without a kernel: what they show, and what they refuse."""

from __future__ import annotations

import csv
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import RichOutput, capture_output

import gpumemwidget
from gpumemwidget.errors import ReleaseInterrupt
from gpumemwidget.model.ownership import DeviceBytes
from gpumemwidget.model.releases import ReleaseReport, ReleaseStepKind, StopKind
from gpumemwidget.recording.running_cell import has_only_own_magics
from gpumemwidget.report.cell import report_cell_line, report_ledger
from gpumemwidget.report.release import report_explanation, report_plan, report_release
from gpumemwidget.report.render.output import Report

MEMTRACE_TAKES = (
    "%memtrace takes on, off, or --load FILE with --lines; other options go above a cell, with "
    "%%memtrace"
)
MEMWHY_TAKES = (
    "give either a variable or a part of one, such as model.layers[0].weight, or --unnamed for "
    "what no variable leads to"
)


def _run(shell: InteractiveShell, code: str) -> list[RichOutput]:
    """What a cell displays."""
    with capture_output() as captured:
        shell.run_cell(code, store_history=True)
    outputs: list[RichOutput] = captured.outputs
    return outputs


def _get_text(output: RichOutput) -> str:
    data: dict[str, Any] = output.data
    return str(data["text/plain"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("memstat now", "%memstat: unrecognized arguments: now; %memstat? shows what it takes"),
        (
            "memrelease --dryrun x",
            "%memrelease: unrecognized arguments: --dryrun; %memrelease? shows what it takes",
        ),
        (
            "memrelease whole.T",
            "'.T' of whole was not found, or holds no memory: it may be computed by code, which "
            "is not run; bind it to a name, or take a path from %memvars whole",
        ),
        ("memrelease 'open", "%memrelease: No closing quotation; %memrelease? shows what it takes"),
        ("memvars --device cuda:77", "no device 'cuda:77' here: choose from host"),
        ("memstat --device cuda:77", "no device 'cuda:77' here: choose from host"),
        (
            "memvars number",
            "'number' is neither a variable nor a row of the account: %memvars lists what there is",
        ),
        (
            "memvars whole --json",
            "a name has no effect beside --json: leave one of them out",
        ),
        (
            "memledger --sort peak --json",
            "--sort has no effect beside --json: leave one of them out",
        ),
        *(
            (
                f"memledger --export cells.csv {option}",
                f"{option.split()[0]} has no effect beside --export: leave one of them out",
            )
            for option in ("--json", "--sort peak")
        ),
        (
            "memledger --force",
            "--force has no effect without --export: give both, or neither",
        ),
        ("memstat --all --json", "--all has no effect beside --json: leave one of them out"),
        (
            "memstat --device host --all",
            "--all has no effect beside --device: leave one of them out",
        ),
        ("memwhy", MEMWHY_TAKES),
        ("memwhy x --unnamed", MEMWHY_TAKES),
        ("memtrace of", MEMTRACE_TAKES),
        ("memtrace on --force", MEMTRACE_TAKES),
        ("memtrace --lines 1", MEMTRACE_TAKES),
        ("memtrace on --load x.pickle", MEMTRACE_TAKES),
        (
            "memtrace --load /none/such.pickle",
            "/none/such.pickle can't be read: No such file or directory; choose another file",
        ),
    ],
)
def test_bad_input_is_refused_in_one_line(
    loaded: InteractiveShell, line: str, message: str
) -> None:
    """With IPython's own error, which it shows without a traceback."""
    loaded.user_ns["whole"] = torch.ones(1000)
    name, _, rest = line.partition(" ")

    with pytest.raises(UsageError) as caught:
        loaded.run_line_magic(name, rest)

    assert type(caught.value) is UsageError
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("name", "line", "why"),
    [
        ("memtrace", "--force", "--force has no effect without --snapshot: give both"),
        ("memfit", "--dim 1", "--dim has no effect without --batch: give both"),
        ("memfit", "--batch x --remedies", "--remedies has no effect beside --batch: leave one"),
    ],
)
def test_an_option_without_effect_is_refused_above_a_cell(
    loaded: InteractiveShell, name: str, line: str, why: str
) -> None:
    """The cell does not run."""
    with pytest.raises(UsageError, match=why):
        loaded.run_cell_magic(name, line, "ran = 1")

    assert "ran" not in loaded.user_ns


def test_a_refusal_names_the_magic_as_it_was_typed(loaded: InteractiveShell) -> None:
    """One that goes above a cell and on a line of its own, too."""
    for call in (("run_line_magic", ""), ("run_cell_magic", "", "x = 1")):
        with pytest.raises(UsageError) as caught:
            getattr(loaded, call[0])("memtrace", "--nope", *call[2:])
        sign = "%%" if "cell" in call[0] else "%"
        assert str(caught.value).startswith(f"{sign}memtrace: unrecognized arguments: --nope; ")


def test_a_part_is_refused_with_the_command_that_frees_it(loaded: InteractiveShell) -> None:
    """As ``%memwhy`` gives it: the whole variable, which may be a model, stays out of it."""
    loaded.run_cell(
        "import torch\nmodel = torch.nn.Linear(3, 3); model.past = {'k': torch.zeros(1 << 20)}"
    )

    for line in ("model.past", "model.past --dry-run"):
        with pytest.raises(UsageError) as caught:
            loaded.run_line_magic("memrelease", line)
        assert str(caught.value) == (
            "'model.past' is a part of a variable, and only whole variables are released. "
            "To free it: `del model.past` (4.00 MiB on host). Nothing was changed."
        )


def test_memvars_says_where_a_name_without_a_row_is(loaded: InteractiveShell) -> None:
    """The row that has all of its memory names it."""
    _run(loaded, "import torch\ninputs = torch.ones(512, 512); first_rows = inputs[:8]")

    (report,) = _run(loaded, "%memvars")

    text = " ".join(_get_text(report).split())
    assert "shared with first_rows" in text


def test_memvars_shows_who_owns_what_is_allocated(loaded: InteractiveShell) -> None:
    """What ``account()`` gives, row by row; a name opens its own."""
    loaded.run_cell(
        "import torch\nmodel = torch.nn.Linear(300, 300)\nx = torch.ones(500, 500)",
        store_history=True,
    )

    (rows,) = _run(loaded, "%memvars")
    (opened,) = _run(loaded, "%memvars model, x --device host")

    assert re.search(r"^x +976\.56 KiB .* tensor float32\[500, 500\]$", _get_text(rows), re.M)
    assert re.search(r"^  \.weight +351\.56 KiB", _get_text(opened), re.M)
    assert re.search(r"^x +976\.56 KiB", _get_text(opened), re.M)
    assert "  .weight" not in _get_text(rows)
    account = gpumemwidget.owners()
    owned = {each.owner: each for each in account.devices[-1].owned}
    assert owned["model.weight"].n_bytes == 300 * 300 * 4
    assert owned["model.weight"].kind == "parameter"
    assert {each.name for each in account.variables} == {"model", "x"}


def test_memwhy_shows_each_holder_and_how_to_cut_it(loaded: InteractiveShell) -> None:
    """Of a variable and of a part of one, as ``why()`` gives it."""
    loaded.run_cell(
        "import torch\nx = torch.ones(500, 500)\nhistory = [{'a': x}]", store_history=True
    )

    (whole,) = _run(loaded, "%memwhy x")
    (part,) = _run(loaded, "%memwhy history[0]['a']")

    assert _get_text(whole) == report_explanation(gpumemwidget.why("x")).text
    assert 'history[0]["a"]: holds 976.56 KiB on host' in _get_text(whole)
    assert re.search(r"^1\. x: holds 976\.56 KiB on host", _get_text(part), re.M)
    assert "2. " not in _get_text(part)
    assert gpumemwidget.why("x").held_bytes == DeviceBytes((("host", 1_000_000),))


def test_memledger_shows_the_recorded_cells(loaded: InteractiveShell) -> None:
    """The one that asks is not among them: it has not ended."""
    loaded.run_cell("x = 1", store_history=True)
    loaded.run_cell("y = 2", store_history=True)

    (shown,) = _run(loaded, "%memledger")
    (with_ours,) = _run(loaded, "%memledger --all")

    records = gpumemwidget.monitor().ledger.records
    assert [record.first_line for record in records] == [
        "%load_ext gpumemwidget",
        "x = 1",
        "y = 2",
        "%memledger",
        "%memledger --all",
    ]
    assert _get_text(shown) == report_ledger(records[:3]).text
    assert "1 gpumemwidget cell hidden" in _get_text(shown)
    assert _get_text(with_ours) == report_ledger(records[:4], n_shown=None).text


@pytest.mark.parametrize("quote", ["", "'"])
def test_memledger_writes_a_file_and_overwrites_it_only_if_told(
    loaded: InteractiveShell, tmp_path: Path, capsys: pytest.CaptureFixture[str], quote: str
) -> None:
    path = tmp_path / ("my cells.csv" if quote else "cells.csv")
    line = f"--export {quote}{path}{quote}"
    loaded.run_cell("x = 1", store_history=True)

    loaded.run_line_magic("memledger", line)
    said = capsys.readouterr().out
    with pytest.raises(UsageError, match="--force"):
        loaded.run_line_magic("memledger", line)
    loaded.run_line_magic("memledger", f"{line} --force")

    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert said == f"2 cells written to {path}\n"
    assert [row["first_line"] for row in rows] == ["%load_ext gpumemwidget", "x = 1"]


def test_memrelease_shows_a_plan_and_changes_nothing(loaded: InteractiveShell) -> None:
    loaded.run_cell("x = bytearray(10)\ny = x", store_history=True)

    (output,) = _run(loaded, "%memrelease --dry-run x, y")

    assert _get_text(output) == report_plan(gpumemwidget.plan_release("x", "y")).text
    assert loaded.user_ns["x"] is loaded.user_ns["y"] is not None


@pytest.mark.parametrize("code", ["%memrelease x", "gpumemwidget.release('x')"])
def test_ctrl_c_in_a_release_ends_the_cell_behind_its_report(
    loaded: InteractiveShell, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    """What was done is shown, and the lines behind it do not run."""
    loaded.run_cell("import gpumemwidget; x = bytearray(10)", store_history=True)
    hardware = gpumemwidget.monitor().hardware
    monkeypatch.setattr(hardware, "empty_cache", lambda: signal.raise_signal(signal.SIGINT))

    with capture_output() as captured:
        result = loaded.run_cell(f"{code}\nafter = 1", store_history=True)

    (output,) = captured.outputs
    assert 'Interrupted at "empty_cache".' in _get_text(output)
    assert isinstance(result.error_in_exec, ReleaseInterrupt)
    assert isinstance(result.error_in_exec, KeyboardInterrupt)
    stopped = result.error_in_exec.report.stopped
    assert stopped.kind is StopKind.INTERRUPTED
    assert stopped.step is ReleaseStepKind.EMPTY_CACHE
    assert gpumemwidget.monitor().ledger[-1].status == "interrupted"
    assert "after" not in loaded.user_ns
    assert loaded.user_ns["x"] is None


def test_ctrl_c_while_the_report_is_made_ends_the_cell_behind_it(
    loaded: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names are set to None by then, so nothing else could tell what was freed."""
    loaded.run_cell("x = bytearray(10)", store_history=True)

    def report(outcome: ReleaseReport) -> Report:
        signal.raise_signal(signal.SIGINT)
        return report_release(outcome)

    monkeypatch.setattr("gpumemwidget.jupyter.magics.report_release", report)

    with capture_output() as captured:
        result = loaded.run_cell("%memrelease x\nafter = 1", store_history=True)

    (output,) = captured.outputs
    assert _get_text(output).startswith("Release x · done")
    assert isinstance(result.error_in_exec, ReleaseInterrupt)
    assert "after" not in loaded.user_ns


@pytest.mark.parametrize("code", ["%memrestore x", "gpumemwidget.restore('x')"])
def test_ctrl_c_while_restoring_ends_the_cell_with_all_where_it_was(
    loaded: InteractiveShell, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    """All of it or nothing; the report says which, and the lines behind it do not run."""
    monkeypatch.setattr("gpumemwidget.ownership.partition.HOST", "no device")
    loaded.run_cell(
        "import gpumemwidget, torch; x = torch.ones(10); kept = [x]; gpumemwidget.release('x')\n"
        "x = kept[0]",
        store_history=True,
    )
    address = loaded.user_ns["x"].data_ptr()

    def interrupt(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("gpumemwidget.releasing.storages._copy_storage", interrupt)
    with capture_output() as captured:
        result = loaded.run_cell(f"{code}\nafter = 1", store_history=True)

    (output,) = captured.outputs
    assert "\n\nInterrupted. Everything is where it was." in _get_text(output)
    assert isinstance(result.error_in_exec, ReleaseInterrupt)
    assert gpumemwidget.monitor().ledger[-1].status == "interrupted"
    assert "after" not in loaded.user_ns
    assert loaded.user_ns["x"].data_ptr() == address


def test_memrestore_brings_back_what_a_release_moved(
    loaded: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plan, then the move; unloading forgets what was where."""
    from gpumemwidget.releasing.storages import original_devices

    monkeypatch.setattr("gpumemwidget.ownership.partition.HOST", "no device")
    loaded.run_cell("import torch\nx = torch.ones(10)\ny = torch.ones(10)", store_history=True)
    x = loaded.user_ns["x"]
    _run(loaded, "%memrelease --keep x y")
    address = x.data_ptr()

    (plan,) = _run(loaded, "%memrestore --dry-run x")
    unmoved = x.data_ptr()
    (report,) = _run(loaded, "%memrestore x")
    (again,) = _run(loaded, "%memrestore x")
    _run(loaded, "%unload_ext gpumemwidget")

    assert "Restore x · plan, nothing is changed yet" in _get_text(plan)
    assert unmoved == address != x.data_ptr()
    assert "Restore x · done, 1 tensor, 40 B brought back" in _get_text(report)
    assert "Nothing to restore: x holds nothing that a release moved" in _get_text(again)
    assert len(original_devices) == 0


def test_memtrace_on_adds_a_line_to_every_cell_from_the_next_on(
    loaded: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    """``%memtrace`` alone says how it stands."""
    loaded.run_line_magic("memtrace", "")
    shown = [_run(loaded, code) for code in ("%memtrace on", "x = 1", "%memtrace off", "x = 2")]
    loaded.run_line_magic("memtrace", "")

    assert capsys.readouterr().out == "memtrace is off\n" * 2
    records = gpumemwidget.monitor().ledger.records
    assert [len(outputs) for outputs in shown] == [0, 1, 0, 0]
    assert _get_text(shown[1][0]) == report_cell_line(records[2]).text


def test_memhelp_lists_every_magic_with_an_example_that_works(loaded: InteractiveShell) -> None:
    """Its own line, and one that the magic's own parser takes."""
    (output,) = _run(loaded, "%memhelp")
    text = _get_text(output)
    tables = loaded.magics_manager.magics
    ours = {
        name: magic
        for kind in ("line", "cell")
        for name, magic in tables[kind].items()
        if name.startswith("mem") and hasattr(magic, "parser")
    }

    assert len(ours) == 16
    documented = Path("docs/magics.md").read_text("utf-8")
    for name, magic in ours.items():
        [example] = re.findall(rf"^%%?{name} +%%?{name} ?(.*)$", text, re.M)
        magic.parser.parse_argstring(example)
        assert f"%{name} {example}".rstrip() + "` | " in documented
        # The lists of cells leave out those that only look.
        is_look = name not in ("memrelease", "memrestore") or "--dry-run" in example
        assert has_only_own_magics(f"%{name} {example}") is is_look
    assert "<table" in output.data["text/html"]
    assert max(map(len, text.splitlines())) <= 80
