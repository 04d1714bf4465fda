"""Two results of any kind: rows that add up, that are mirrored, and that lose nothing."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace
from typing import TypeAlias

import pytest
import torch
from hypothesis import given, reject
from hypothesis import strategies as st

import gpumemwidget
from gpumemwidget.comparing import Comparison, compare, compare_sides
from gpumemwidget.errors import BadInputError
from gpumemwidget.model.cells import CellDevice, CellRecord, Span
from gpumemwidget.model.devices import HOST
from gpumemwidget.model.ownership import DeviceAccount, MemoryAccount, MemoryKind, Owned
from gpumemwidget.model.predictions import Bytes
from gpumemwidget.model.processes import DevicePeak, ProcessInfo, ProcessState
from gpumemwidget.model.traces import CellTrace, HostLine, HostLines, Origin, PeakPart
from gpumemwidget.session.step_predictions import Prediction
from tests.report.examples import make_gpu_cell
from tests.report.trace_examples import make_lines_device, make_trace

_KINDS: list[MemoryKind] = ["parameter", "tensor", "optimizer state"]
#: Labels that repeat, and such as a second of the same label or another row could have.
_LABELS = st.sampled_from(
    ["w", "w (no. 2)", "w (no. 2) (no. 1)", "outside the lines", "before the cell", "line 1", "x|`"]
)
_NAMES = st.sampled_from(["w", "w (no. 2)"])
_GPUS = st.sampled_from([(), ("cuda:0",), ("cuda:1",), ("cuda:0", "cuda:1")])
_BYTES = st.integers(0, 50)
_MAYBE_BYTES = st.none() | _BYTES


@st.composite
def accounts(draw: st.DrawFn) -> MemoryAccount:
    """Accounts whose lines may leave some of the total."""
    devices = []
    for device in (*draw(_GPUS), HOST):
        owned = tuple(
            Owned(device, draw(_BYTES), draw(st.sampled_from(_KINDS)), (name,), "name")
            for name in draw(st.lists(_LABELS, max_size=4))
        )
        total = sum(line.n_bytes for line in owned) + draw(st.integers(0, 3))
        devices.append(DeviceAccount(device, draw(st.sampled_from([total, total, None])), owned))
    return MemoryAccount(tuple(devices), (), is_complete=True, duration_s=0.0)


@st.composite
def spans(draw: st.DrawFn) -> Span:
    """A counter over a cell, of which anything may be unknown."""
    return Span(draw(_MAYBE_BYTES), draw(_MAYBE_BYTES), draw(_MAYBE_BYTES))


@st.composite
def cells(draw: st.DrawFn) -> CellRecord:
    """Cells on any devices."""
    devices = [
        CellDevice(device, draw(spans()), draw(spans()), "exact", 0, 0, outside=draw(outside))
        for device in (*draw(_GPUS), HOST)
        for outside in [st.none() | spans()]
    ]
    return make_gpu_cell(devices=tuple(devices))


@st.composite
def traces(draw: st.DrawFn) -> CellTrace:
    """Traced cells with lines that read like others, or like places that are no lines."""
    devices = []
    for device in draw(_GPUS):
        lines = draw(st.lists(_LABELS, min_size=1, max_size=4))
        parts = [
            PeakPart(origin, line, kind, None, n_bytes, 1)
            for origin, line, kind, n_bytes in draw(
                st.lists(
                    st.tuples(
                        st.sampled_from([Origin.LINE, Origin.BEFORE_CELL, Origin.OUTSIDE_LINES]),
                        st.integers(1, len(lines)),
                        st.sampled_from(_KINDS),
                        _BYTES,
                    ),
                    max_size=4,
                )
            )
        ]
        peak_bytes = sum(part.n_bytes for part in parts) + draw(st.integers(0, 3))
        made = make_lines_device([(text, None) for text in lines], device)
        span = Span(0, 0, draw(st.sampled_from([peak_bytes, peak_bytes, None])))
        devices.append(replace(made, allocated=span, peak=tuple(parts)))
    changes = [
        HostLine(line, text, draw(st.integers(-50, 50)))
        for line, text in enumerate(draw(st.lists(_LABELS, max_size=4)), 1)
    ]
    outside, unread = draw(st.integers(-9, 9)), draw(st.integers(-9, 9))
    change = sum(line.net_bytes for line in changes) + outside + unread
    host = HostLines(tuple(changes), 1000, 1000 + change, outside, unread)
    return replace(make_trace(*devices), devices=tuple(devices), host=host)


@functools.cache
def _predict() -> Prediction:
    layer = torch.nn.Linear(8, 8)
    return gpumemwidget.predict(lambda x: layer(x).sum().backward(), torch.ones(2, 8), on="T4")


@st.composite
def predictions(draw: st.DrawFn) -> Prediction:
    """A prediction with other amounts."""
    made = _predict()
    owners = tuple(replace(owner, n_bytes=draw(_BYTES)) for owner in made.record.owners)
    total = sum(owner.n_bytes for owner in owners)
    record = replace(made.record, owners=owners, allocated=Bytes(total, total, total))
    return Prediction(record)


@st.composite
def recordings(draw: st.DrawFn) -> _Recorded:
    """Recorded processes with peaks on any devices."""
    states = []
    gpus = draw(_GPUS)
    for label in draw(st.lists(_NAMES, max_size=3)):
        devices = [*draw(st.sampled_from([gpus, gpus[:1]])), HOST]
        peaks = [DevicePeak(device, n := draw(_MAYBE_BYTES), n) for device in devices]
        info = ProcessInfo("id", "h", 1, "python t.py", 0.0, "actor", label=label)
        states.append(ProcessState(info, "ended", 1.0, peaks=tuple(peaks)))
    return tuple(states)


_Recorded: TypeAlias = "tuple[ProcessState, ...]"


def _compare(a: object, b: object) -> Comparison:
    try:
        if isinstance(a, tuple) and isinstance(b, tuple):
            return Comparison("a", "b", compare_sides(a, b), (a, b))
        return compare(a, b)
    except BadInputError:
        reject()  # One has a GPU alone, and the other the host.


_Rows = Counter[tuple[str, str, str, int | None, int | None]]


def _list_rows(comparison: Comparison, *, is_mirrored: bool = False) -> _Rows:
    """Return all rows without their devices: a side's only GPU may have another number."""
    rows: _Rows = Counter()
    for total in comparison.totals:
        rows[total.measure, "", "", *_swap(total.a_bytes, total.b_bytes, is_mirrored)] += 1
        for row in total.rows:
            sides = _swap(row.a_bytes, row.b_bytes, is_mirrored)
            rows[total.measure, row.what, row.where, *sides] += 1
    return rows


def _swap(a: int | None, b: int | None, is_mirrored: bool) -> tuple[int | None, int | None]:
    return (b, a) if is_mirrored else (a, b)


_KINDS_OF_PAIRS = {
    "accounts": (accounts(), accounts()),
    "cells": (cells(), cells()),
    "traces": (traces(), traces()),
    "a trace and a cell": (traces(), cells()),
    "predictions": (predictions(), predictions()),
    "a prediction and a trace": (predictions(), traces()),
    "a prediction and a cell": (predictions(), cells()),
    "recordings": (recordings(), recordings()),
}


@pytest.mark.parametrize("pair", _KINDS_OF_PAIRS.values(), ids=_KINDS_OF_PAIRS)
@given(data=st.data())
def test_rows_add_up_and_are_mirrored(
    pair: tuple[st.SearchStrategy[object], ...], data: st.DataObject
) -> None:
    """Rows are the change of their total, and of no figure that one side alone has."""
    a, b = map(data.draw, pair)

    found, mirrored = _compare(a, b), _compare(b, a)

    for total in found.totals:
        assert sum(row.change_bytes for row in total.rows) == (total.change_bytes or 0)
        assert not total.rows or None not in (total.a_bytes, total.b_bytes)
        assert all(row.a_bytes != row.b_bytes for row in total.rows)
        if total.measure == "kept by the cell":  # The host's lines leave nothing.
            assert "not attributed" not in [row.what for row in total.rows]
    assert _list_rows(found) == _list_rows(mirrored, is_mirrored=True)
    if any(total.change_bytes and total.device != HOST for total in found.totals):
        changes = [abs(t.change_bytes or 0) for t in found.totals if t.device != HOST]
        assert abs(found.change_bytes or 0) == max(changes)
    assert str(found)
    assert _compare(a, a).rows == ()


@given(a=recordings(), b=recordings())
def test_no_process_is_lost(a: _Recorded, b: _Recorded) -> None:
    """Totals are the sums of all known peaks.

    Where each side has one GPU these are one figure, whatever its number is.
    """
    found = _compare(a, b)

    for total in found.totals:
        for side, n_bytes in ((a, total.a_bytes), (b, total.b_bytes)):
            peaks = [
                peak.allocated_bytes
                for state in side
                for peak in state.peaks
                if peak.device == total.device
            ]
            if n_bytes and peaks:
                assert n_bytes == sum(peak or 0 for peak in peaks)
    sides = [
        {peak.device for state in side for peak in state.peaks if peak.device != HOST}
        for side in (a, b)
    ]
    if len(sides[0]) == len(sides[1]) == 1:
        assert {total.device for total in found.totals} - {HOST} == sides[1]
