"""The records as JSON: whole, by their schema, and for each command that has ``--json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from IPython.utils.capture import capture_output

from gpumemwidget.model.encoding import make_schema
from tests.remote.programs import run_python, write_script
from tests.shell import open_loaded_shell

_SCHEMA = Path(__file__).parents[1] / "docs" / "static" / "records.schema.json"


def _check(value: Any, schema: Any, definitions: Any) -> None:
    """Check as much of a JSON schema as the records' one has in it."""
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        for choice in schema["anyOf"]:
            try:
                return _check(value, choice, definitions)
            except AssertionError:
                continue
        raise AssertionError(f"{value!r} is none of {schema}")
    if "enum" in schema:
        assert value in schema["enum"]
        return None
    kind = schema.get("type")
    types: dict[str, Any] = {
        "object": dict,
        "array": list,
        "string": str,
        "integer": int,
        "boolean": bool,
        "number": (int, float),
        "null": type(None),
    }
    if kind is not None:
        assert isinstance(value, types[kind]), (value, schema)
    if kind == "object":
        assert set(schema.get("required", ())) <= set(value)
        for name, inner in schema.get("properties", {}).items():
            if name in value:
                _check(value[name], inner, definitions)
    if kind == "array" and "items" in schema and schema["items"] is not False:
        for item in value:
            _check(item, schema["items"], definitions)
    return None


def _check_line(line: str) -> Any:
    found, schema = json.loads(line), json.loads(make_schema())
    assert found["schema_version"] == 1
    (choice,) = [
        choice
        for choice in schema["oneOf"]
        if choice["properties"]["kind"]["const"] == found["kind"]
    ]
    _check(found["records"], choice["properties"]["records"], schema["$defs"])
    return found["records"]


def test_the_documented_schema_is_that_of_the_records() -> None:
    """``python -m tools.schema`` writes it anew."""
    assert _SCHEMA.read_text(encoding="utf-8") == make_schema()


@pytest.mark.parametrize(
    "line",
    [
        "%memstat --json",
        "%memstat --device --json",
        "%memvars --json",
        "%memledger --json",
        "%memwhy held --json",
        "%memleak --json",
    ],
)
def test_magics_print_their_records(line: str) -> None:
    """One line that a script can read, with amounts in bytes."""
    printed = _run_cells(
        "import torch; held = [torch.ones(1 << 20)]; gpus.allocate(1 << 28)",
        *["held.append(torch.ones(1 << 20))"] * 3,
        line,
    )

    records = _check_line(printed)
    assert records
    assert "MiB" not in printed


def test_recordings_are_printed_in_a_terminal(tmp_path: Path) -> None:
    """Those that were loaded, and two that are compared."""
    script = write_script(tmp_path, "import gpumemwidget\nwith gpumemwidget.span('a'): pass")
    run_python(tmp_path, "-m", "gpumemwidget", "run", "--to", "a.jsonl", script)

    loaded = run_python(tmp_path, "-m", "gpumemwidget", "load", "a.jsonl", "--json")
    compared = run_python(
        *(tmp_path, "-m", "gpumemwidget", "compare"), "a.jsonl", "a.jsonl", "--json"
    )

    (process,) = _check_line(loaded.out)
    assert process["spans"][0]["name"] == "a"
    assert _check_line(compared.out)


def _run_cells(*cells: str) -> str:
    """Return what the last cell printed."""
    with open_loaded_shell() as shell:
        for cell in cells:
            with capture_output() as captured:
                shell.run_cell(cell, store_history=True)
        shell.user_ns.clear()
    return str(captured.stdout + captured.stderr).strip()


def test_growth_without_tensors_is_among_the_leaks() -> None:
    """As the report has it, with what is ignored."""
    # After a cell of an instant the driver is not asked.
    printed = _run_cells(
        "n = 0; gpus.allocate(1 << 20)",
        *["sum(range(10**6)); n += 1; gpus.driver.library.set_use(n << 26)"] * 5,
        "%memleak ignore n",
        "%memleak --json",
    )

    found = _check_line(printed)
    assert [(growth["device"], growth["is_outside"]) for growth in found["unexplained"]] == [
        ("cuda:0", True)
    ]
    assert found["unexplained"][0]["each_bytes"] == 1 << 26
    assert found["ignored"] == ["n"]


@pytest.mark.parametrize("line", ["%memvars --json", "%memwhy d --json"])
def test_half_of_a_surrogate_pair_is_no_error(line: str) -> None:
    """In a name or a key, which JSON can't have."""
    printed = _run_cells(
        r"import torch; d = {'k\udcff': torch.ones(1 << 20)}",
        r"globals()['v\udcff'] = d['k\udcff']",
        line,
    )

    _check_line(printed)
    assert "v?" in printed


def test_a_terminal_of_few_characters(tmp_path: Path) -> None:
    """JSON is UTF-8 there too, and a report loses what can't be shown."""
    script = write_script(tmp_path, "import gpumemwidget\nwith gpumemwidget.span('模'): pass")
    run_python(tmp_path, "-m", "gpumemwidget", "run", "--to", "a.jsonl", script)
    load = ("-X", "utf8=0", "-m", "gpumemwidget", "load", "a.jsonl")
    ascii_only = {"PYTHONIOENCODING": "ascii"}

    report = run_python(tmp_path, *load, env=ascii_only)
    printed = run_python(tmp_path, *load, "--json", env=ascii_only)

    assert (report.status, printed.status) == (0, 0)
    assert "Spans" in report.out
    assert _check_line(printed.out)[0]["spans"][0]["name"] == "模"
