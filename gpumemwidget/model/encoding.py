"""The records as JSON, for scripts and agents, with a schema that is made from them.

Amounts are bytes and times seconds, and ``null`` is unknown. What is added to a record later keeps
the version of the schema; what is renamed or taken away changes it.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from gpumemwidget.model.breakdowns import Breakdown
from gpumemwidget.model.cells import CellRecord
from gpumemwidget.model.comparisons import ComparedTotal
from gpumemwidget.model.devices import DeviceState
from gpumemwidget.model.leaks import FoundLeaks
from gpumemwidget.model.ownership import Explanation, MemoryAccount
from gpumemwidget.model.processes import ProcessState

SCHEMA_VERSION = 1
#: What is encoded, by the word that says so.
_KINDS: dict[str, Any] = {
    "devices": tuple[DeviceState, ...],
    "breakdowns": tuple[Breakdown, ...],
    "account": MemoryAccount,
    "cells": tuple[CellRecord, ...],
    "explanation": Explanation,
    "leaks": FoundLeaks,
    "processes": tuple[ProcessState, ...],
    "comparison": tuple[ComparedTotal, ...],
}


def encode_records(kind: str, records: object) -> str:
    """Return one line of JSON: the schema's version, the kind and the records as they are.

    Args:
        kind: ``devices``, ``breakdowns``, ``account``, ``cells``, ``explanation``, ``leaks``,
            ``processes`` or ``comparison``.
        records: what the schema has for the kind.
    """
    assert kind in _KINDS
    line = {"schema_version": SCHEMA_VERSION, "kind": kind, "records": records}
    return encode_json(line).decode()


def encode_json(value: object) -> bytes:
    """Return any records as JSON; a lone surrogate in their texts is a ``?``."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return msgspec.json.encode(make_readable(msgspec.to_builtins(value)))


def make_readable(value: Any, *, max_text: int | None = None, max_items: int | None = None) -> Any:
    """Return a value of JSON without halves of surrogate pairs, its texts and lists cut."""

    def clean(value: Any) -> Any:
        if isinstance(value, str):
            return value[:max_text].encode("utf-8", "replace").decode()
        if isinstance(value, dict):
            return {clean(key): clean(item) for key, item in value.items()}
        return list(map(clean, value[:max_items])) if isinstance(value, (list, tuple)) else value

    return clean(value)


def make_schema() -> str:
    """Return the JSON schema of all that ``encode_records`` returns."""
    schemas, components = msgspec.json.schema_components(
        _KINDS.values(), ref_template="#/$defs/{name}"
    )
    choices = [
        {
            "type": "object",
            "required": ["schema_version", "kind", "records"],
            "properties": {
                "schema_version": {"const": SCHEMA_VERSION},
                "kind": {"const": kind},
                "records": schema,
            },
        }
        for kind, schema in zip(_KINDS, schemas, strict=True)
    ]
    whole = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "gpumemwidget",
        "oneOf": choices,
        "$defs": components,
    }
    return json.dumps(whole, indent=1, sort_keys=True) + "\n"
