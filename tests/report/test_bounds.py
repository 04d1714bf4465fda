"""No list of a record, however long, makes a report longer than a person can read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gpumemwidget.model.leaks import Rebinding
from gpumemwidget.model.ownership import DeviceAccount, Fix, FixKind
from gpumemwidget.report.account import report_account
from gpumemwidget.report.cell import report_ledger
from gpumemwidget.report.leaks import report_leaks, report_rebinding
from gpumemwidget.report.release import report_plan
from gpumemwidget.report.render.output import Report
from tests.report import account_examples as accounts
from tests.report import every_report, examples, growth_examples, process_examples
from tests.report.examples import MIB

#: Number of entries of a very long list.
_LENGTH = 1_000
#: Lines of text and characters of HTML that a report has at most: ten screens, 500 KB.
_MOST_LINES, _MOST_HTML = 700, 500_000


def _vary(value: Any, number: int) -> Any:
    """The value, with a number in its name."""
    if isinstance(value, str):
        return f"{value}{number}"
    if dataclasses.is_dataclass(value):
        field = dataclasses.fields(value)[0]
        first = getattr(value, field.name)
        if isinstance(first, str) or dataclasses.is_dataclass(first):
            return dataclasses.replace(value, **{field.name: _vary(first, number)})
    if isinstance(value, tuple) and value:
        return (_vary(value[0], number), *value[1:])
    return value


def _widen(value: Any) -> Iterator[tuple[str, Any]]:
    """The value once for each list in it, with that list very long."""
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            if field.init:
                for name, other in _widen(getattr(value, field.name)):
                    yield (
                        f".{field.name}{name}",
                        dataclasses.replace(value, **{field.name: other}),
                    )
    elif isinstance(value, list | tuple) and value and len({*map(type, value)}) == 1:
        many = [_vary(value[number % len(value)], number) for number in range(_LENGTH)]
        yield "[]", type(value)(many)
        for name, other in _widen(value[0]):
            yield f"[0]{name}", type(value)([other, *value[1:]])
    elif isinstance(value, dict) and value:
        (key, first), *others = value.items()
        for name, other in _widen(first):
            yield f"[{key}]{name}", {key: other, **dict(others)}


def _list_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Callable[..., Any], Any, Any]]:
    """The calls of report functions that make one of each report."""
    calls: list[tuple[Callable[..., Any], Any, Any]] = []

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            calls.append((function, args, options))
            return function(*args, **options)

        return call

    for module in (every_report, process_examples):
        for name, function in vars(module).copy().items():
            if name.startswith("report_") and function.__module__ != module.__name__:
                monkeypatch.setattr(module, name, wrap(function))
    every_report.make_every_report()
    return calls


#: Lists that are bounded before, that must fit to other parts of the record, or of which no machine
#: has so many entries.
_OTHER = (
    *(".units[]", ".lines[]", ".calls[]", ".ways[]", "timeline", "report_account(1", ".names["),
    *("report_processes(2[]", ".parts[]", ".devices[0].uses", "report_breakdown(0[]"),
    *("report_account(0.devices[]", "report_trace(0.devices[]"),
)


def _check(report: Report, words: str) -> None:
    assert len(report.text.splitlines()) <= _MOST_LINES, words
    assert len(report.html) <= _MOST_HTML, words
    assert max(map(len, report.text.splitlines())) <= 6_000, words


def test_each_list_of_each_report_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each list of each record is made very long, one at a time."""
    tried = set()
    for function, args, options in _list_calls(monkeypatch):
        named = {**dict(enumerate(args)), **options}
        for place, value in named.items():
            for path, wide in _widen(value):
                name = f"{function.__name__}({place}{path})"
                if name in tried or any(word in name for word in _OTHER):
                    continue
                tried.add(name)
                changed = {**named, place: wide}
                positional = [changed.pop(index) for index in range(len(args))]

                report = function(*positional, **changed)

                if report is not None:
                    _check(report, name)
    assert len(tried) > 100


def test_a_bounded_report_says_how_much_is_left_out() -> None:
    """In a table, in sentences and in a list of names, with the number of all that is not shown."""
    leaks = [growth_examples.RUN_LEAK] * 10_000
    names = tuple(f"x{number}" for number in range(10_000))
    plan = examples.make_plan(stays=examples.make_plan().stays[:1] * 10_000)

    tables = report_leaks(leaks, (), names).text
    sentences = report_plan(plan).text
    holders = tuple((name, Fix(FixKind.RELEASE_ROW, name)) for name in names)
    rebinding = report_rebinding(Rebinding("model", "cuda:0", 1 << 20, holders, 3)).text

    assert "\n9,950 more\n" in tables
    assert "x49, 9,950 more" in " ".join(tables.split())
    assert sentences.endswith("\n9,950 more.")
    assert "`x49` and 9,950 more" in " ".join(rebinding.split())


def test_the_account_of_many_variables_adds_up_however_much_is_shown() -> None:
    """What is left out is one row with its bytes, also where everything is asked for."""
    names = [f"x{number}" for number in range(10_000)]
    owned = tuple(examples.own((name,), n_bytes=MIB) for name in names)
    device = DeviceAccount("cuda:0", 10_000 * MIB, owned)
    account = accounts.make_account(devices=(device,), variables=())

    usual, whole = report_account(account), report_account(account, is_whole=True)

    assert "\n… 9,980 more  9.75 GiB " in usual.text
    assert "\n… 9,500 more  9.28 GiB " in whole.text
    _check(whole, "whole")


def test_all_of_a_long_ledger_is_its_last_part() -> None:
    """The newest 500 cells, and how many came before."""
    cell = examples.make_host_cell()
    cells = [dataclasses.replace(cell, execution_count=number) for number in range(10_000)]

    report = report_ledger(cells, n_shown=None)

    assert "The last 500 are shown; 9,500 came before." in report.text
    assert "In [9499]" not in report.text
    assert "In [9500]" in report.text
