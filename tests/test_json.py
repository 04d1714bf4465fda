"""The records as JSON: whole, by their schema, and for each command that has ``--json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from gpumemwidget.model.encoding import make_schema
from gpumemwidget.testing import simulate_gpus
from tests.remote.programs import run_python, write_script

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
    shell = InteractiveShell()
    with simulate_gpus(total_bytes=16 << 30) as gpus, capture_output() as captured:
        shell.user_ns["gpus"] = gpus
        shell.run_line_magic("load_ext", "gpumemwidget")
        shell.run_cell("import torch; held = [torch.ones(1 << 20)]; gpus.allocate(1 << 28)")
        for _ in range(3):
            shell.run_cell("held.append(torch.ones(1 << 20))", store_history=True)
        captured._stdout.truncate(0)
        captured._stdout.seek(0)
        shell.run_cell(line)
        shell.run_line_magic("unload_ext", "gpumemwidget")

    records = _check_line(captured.stdout.strip())
    assert records or line == "%memleak --json"
    assert "MiB" not in captured.stdout


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
