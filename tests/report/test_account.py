"""The account of owners and the explanations: what their lines add up to, and what they say."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumemwidget.errors import BadInputError, UnknownNameError
from gpumemwidget.model.ownership import (
    DeviceAccount,
    MemoryAccount,
    Owned,
)
from gpumemwidget.report.account import Node, list_lines, report_account
from gpumemwidget.session.session import check_rows
from gpumemwidget.units import parse_bytes
from tests.report.account_examples import make_account
from tests.report.examples import KIB, own


def _own(*steps: str, **more: object) -> Owned:
    return own(steps, **more)  # type: ignore[arg-type]


def _make(*owned: Owned, allocated: int | None = -1, **more: object) -> MemoryAccount:
    total = sum(each.n_bytes for each in owned) if allocated == -1 else allocated
    devices = (DeviceAccount("cuda:0", total, owned),)
    values: dict[str, object] = {"variables": (), "is_complete": True, "duration_s": 0.1, **more}
    return MemoryAccount(devices, **values)  # type: ignore[arg-type]


def _read_lines(text: str) -> list[tuple[int, str, int]]:
    """Each line of a text's tables: its level, its owner, its bytes."""
    found = []
    for line in text.splitlines():
        match = re.match(r"( *)(\S.*?)  +(\d+(?:\.\d+)? [KMGT]?i?B)  +<?[\d.]+ %", line)
        if match:
            found.append((len(match[1]) // 2, match[2], parse_bytes(match[3])))
    return found


def _open(*owned: Owned, levels: int | None = None, most: int | None = None) -> list[str]:
    """The lines below one root, indented."""
    root = Node("x", [(each.steps[1:], each) for each in owned])
    return [
        "  " * line.level + (f"{line.node.label}" if line.node else f"{line.n_more} more")
        for line in list_lines(root, levels=levels, most=most)
    ][1:]


def test_the_lines_add_up_to_what_is_allocated() -> None:
    """On each device, whether a row is opened or not, whether all lines are shown or not."""
    owned = [_own(f"n{number}", "[0]", n_bytes=number * KIB) for number in range(1, 25)]
    owned += [_own("m", f".l{number}", ".w", n_bytes=number * KIB) for number in range(1, 25)]
    account = _make(*owned)

    for options in ({}, {"names": ["m", "n3"]}, {"is_whole": True}):
        lines = _read_lines(report_account(account, **options).text)

        (total,) = [n_bytes for _, owner, n_bytes in lines if owner == "allocated"]
        rows = [n_bytes for level, owner, n_bytes in lines if level == 0 and owner != "allocated"]
        assert total == sum(rows) == 600 * KIB


@given(
    st.lists(
        st.lists(st.sampled_from([".a", ".b", "[0]", "[1]", "[2]", '["k"]']), max_size=4),
        min_size=1,
        max_size=30,
    ),
    st.integers(1, 4) | st.none(),
    st.integers(1, 5) | st.none(),
)
def test_parts_add_up_to_their_whole(
    paths: list[list[str]], levels: int | None, most: int | None
) -> None:
    """However far it is opened, folded and cut: nothing is lost and nothing is counted twice."""
    owned = [_own("x", *path, n_bytes=3**number) for number, path in enumerate(paths)]
    root = Node("x", [(each.steps[1:], each) for each in owned])

    lines = list(list_lines(root, levels=levels, most=most))

    sums: dict[int, int] = {}
    for line in lines[1:]:
        amount = line.more_bytes if line.node is None else line.node.n_bytes
        sums[id(line.above)] = sums.get(id(line.above), 0) + amount
    for line in lines:
        if line.node is not None and id(line.node) in sums:
            assert sums[id(line.node)] == line.node.n_bytes
    assert root.n_bytes == sum(each.n_bytes for each in owned)


def test_alike_elements_are_one_line_with_their_count() -> None:
    """Twelve blocks of the same parts are a range; one with another part is its own line."""
    blocks = [_own("x", ".h", f"[{number}]", ".w") for number in range(12)]
    other = [_own("x", ".h", "[12]", ".w"), _own("x", ".h", "[12]", ".b", n_bytes=KIB)]

    assert _open(*blocks) == ["  .h[0…11].w"]
    assert _open(*blocks, *other) == ["  .h[0…11].w", "  .h[12]", "    .w", "    .b"]


def test_what_is_left_out_is_one_line() -> None:
    """With how many they are; one line alone is shown instead."""
    owned = [_own("x", f".p{number}", n_bytes=(9 - number) * KIB) for number in range(5)]

    assert _open(*owned, most=3) == ["  .p0", "  .p1", "  .p2", "  2 more"]
    assert _open(*owned, most=4) == [f"  .p{number}" for number in range(5)]


def test_unknown_names_are_refused_with_close_ones() -> None:
    """A variable that holds nothing is told from a name that is none."""
    account = make_account()

    with pytest.raises(UnknownNameError, match=r"did you mean model\?"):
        check_rows(account, ["modle"], [])
    with pytest.raises(BadInputError, match="'n' holds no tensor memory") as caught:
        check_rows(account, ["n"], ["n"])
    assert type(caught.value) is BadInputError
    check_rows(
        account, ["model", "Out[7]", "last exception", "no variable", "cuBLAS workspace"], []
    )
