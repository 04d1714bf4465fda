"""Budgets in a shell, on a simulated GPU: what is said and what is marked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import gpumemwidget
from gpumemwidget.errors import BadInputError
from gpumemwidget.session.session import current_session
from tests.jupyter.machine import Machine

# -- What is said ----------------------------------------------------------------------------------


def test_a_budget_is_set_shown_and_taken_away(cells: Machine) -> None:
    assert cells.run("%membudget") == "membudget: no budget is set\n"
    marked = "From the next cell on, cells that exceed it are marked.\n"
    assert cells.run("%membudget 10 GiB") == f"membudget: every GPU 10.00 GiB\n{marked}"
    assert cells.run("%membudget 5GiB --device cuda:0") == (
        f"membudget: every GPU 10.00 GiB; cuda:0 5.00 GiB\n{marked}"
    )
    assert cells.run("%membudget --device cuda:0") == ("membudget: cuda:0 5.00 GiB\n")
    assert cells.run("%membudget off --device cuda:0") == "membudget: every GPU 10.00 GiB\n"
    assert cells.run("%membudget off") == "membudget: no budget is set\n"
    assert cells.run("%membudget") == "membudget: no budget is set\n"


@pytest.mark.parametrize(
    ("line", "refusal"),
    [
        ("0.8", "'0.8' has no unit"),
        ("10 B", "a budget is from 1MiB to a million TiB"),
        ("much", "'much' is not an amount of memory"),
        ("10GiB --device cuda:9", "no device 'cuda:9' here: choose from cuda:0, host"),
        ("9999GiB", "the largest GPU has 80.00 GiB, and 9.76 TiB is more: give less, or off"),
    ],
)
def test_bad_input_is_refused_in_one_line(cells: Machine, line: str, refusal: str) -> None:
    said = cells.run(f"%membudget {line}")

    assert said.startswith(f"UsageError: {refusal}")
    assert len(said.splitlines()) == 1
    assert current_session().monitor.budgets.list() == ()


class Hostile(str):
    """Does not let itself be looked at."""

    def _refuse(self, *_: object) -> Any:
        raise SystemExit

    __class__ = property(_refuse)  # type: ignore[assignment]
    __eq__ = __repr__ = _refuse
    __hash__ = None  # type: ignore[assignment]


def test_objects_of_the_users_are_not_asked_what_they_are(cells: Machine) -> None:
    """Neither for an amount nor for a device, and the same holds for whole devices."""
    with pytest.raises(
        BadInputError, match="an amount can't be of type Hostile: give bytes as an int"
    ):
        gpumemwidget.budget(Hostile("10GiB"))
    calls: list[Callable[[], object]] = [
        lambda: gpumemwidget.budget("10GiB", device=Hostile("cuda:0")),
        lambda: gpumemwidget.breakdown(device=Hostile("cuda:0")),
        lambda: gpumemwidget.breakdown().record(Hostile("cuda:0")),
    ]
    for call in calls:
        with pytest.raises(BadInputError) as refusal:
            call()
        assert str(refusal.value) == (
            "a device's name can't be of type Hostile: give text such as 'cuda:0'; "
            "%memstat lists them"
        )


# -- What is marked --------------------------------------------------------------------------------


def test_the_cell_that_crosses_it_is_told_by_its_peak(cells: Machine) -> None:
    """One clear line; not for the cells before it and after it, which stay within."""
    cells.run("%membudget 100MiB")
    before = cells.run("a = gpu.allocate(60 << 20)")
    crossing = cells.run("b = gpu.allocate(60 << 20)\ngpu.free(b)")
    after = cells.run("c = gpu.allocate(1 << 20)")

    assert (before, after) == ("", "")
    assert " ".join(crossing.split()) == (
        "cuda:0 exceeded its budget of 100.00 MiB: 120.00 MiB allocated at the peak. "
        "%%memtrace above the cell shows which line took it; %membudget off ends the budget."
    )
    over = [record.devices[0].is_over_budget for record in current_session().monitor.ledger]
    assert over == [False, False, False, True, False]


@pytest.mark.parametrize("options", ["", " --device host"])
def test_a_traced_cell_tells_it_once(cells: Machine, options: str) -> None:
    """In its report, or below that of another device."""
    cells.run("%membudget 100MiB")

    said = cells.run(f"%%memtrace{options}\nb = gpu.allocate(120 << 20)")

    assert said.count("cuda:0 exceeded its budget") == 1
