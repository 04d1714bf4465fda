"""The account of owners as a page opens it, on accounts made by hand."""

from __future__ import annotations

import json
from typing import Any

from gpumemwidget.model.ownership import DeviceAccount, MemoryAccount, Owned, Variable
from gpumemwidget.widgets.panels import AccountTree

_MIB = 1024**2


def _own(path: str, mib: int, *, device: str = "cuda:0", **options: Any) -> Owned:
    """A line of the account; the steps of its path stand apart."""
    steps = tuple(path.split())
    given = {"kind": "tensor", "root": "name", "rows": (steps[0],), **options}
    return Owned(device=device, n_bytes=mib * _MIB, steps=steps, **given)


def _make_tree(*owned: Owned, variables: tuple[Variable, ...] = ()) -> AccountTree:
    devices = dict.fromkeys(each.device for each in owned)
    accounts = []
    for device in devices:
        own = tuple(each for each in owned if each.device == device)
        accounts.append(DeviceAccount(device, sum(each.n_bytes for each in own), own))
    return AccountTree(MemoryAccount(tuple(accounts), variables, is_complete=True, duration_s=0.1))


def _find_row(tree: AccountTree, label: str) -> dict[str, Any]:
    (row,) = [row for row in tree.describe()["rows"] if row["label"] == label]
    return dict(row)


def _list_labels(message: dict[str, Any]) -> list[str]:
    return [part["label"] for part in message["parts"]]


def test_rows_add_up_to_what_is_allocated() -> None:
    """Each byte stands in one row; what has no name and what is unknown have rows of their own."""
    tree = _make_tree(
        _own("model .weight", 30, kind="parameter"),
        _own("model .bias", 10, device="host", kind="parameter"),
        _own("workspaces", 32, kind="cuBLAS workspace", root="nowhere", rows=()),
        _own("unknown", 2, kind="unknown", root="nowhere", rows=()),
    )

    message = tree.describe()

    rows = {row["label"]: row for row in message["rows"]}
    assert list(rows) == ["model", "cuBLAS workspace", "unattributed"]
    assert rows["model"]["owns"] == [["cuda:0", 30 * _MIB], ["host", 10 * _MIB]]
    assert [row["is_variable"] for row in rows.values()] == [True, False, False]
    assert rows["cuBLAS workspace"]["hint"] == "%memrelease --cublas frees it"
    for each in message["devices"]:
        own = [
            n_bytes
            for row in rows.values()
            for name, n_bytes in row["owns"]
            if name == each["device"]
        ]
        assert sum(own) == each["sum"] == each["allocated"]
    json.dumps(message)


def test_a_row_is_opened_part_by_part() -> None:
    """By the steps of the paths, with kinds, whom it is shared with and the line that made it."""
    tree = _make_tree(
        _own(
            "model .fc .weight",
            8,
            kind="parameter",
            rows=("model", "optimizer"),
            allocated_at="In [3], line 2",
        ),
        _own("model .fc .weight .grad", 8, kind="gradient", rows=("model",)),
        _own("model .head .weight", 4, kind="parameter", held_elsewhere=True),
    )
    row = _find_row(tree, "model")
    assert row["has_parts"]

    message = tree.describe_parts(row["node"])

    fc, head = message["parts"]
    assert (fc["label"], fc["owns"]) == (".fc.weight", [["cuda:0", 16 * _MIB]])
    assert fc["kinds"] == ["gradient", "parameter"]
    assert fc["shared_with"] == ["optimizer"]
    assert fc["allocated_at"] == ["In [3], line 2"]
    assert (head["label"], head["has_parts"], head["held_elsewhere"]) == (
        ".head.weight",
        False,
        True,
    )
    inside = tree.describe_parts(fc["node"])
    assert _list_labels(inside) == ["itself", ".grad"]
    assert not any(part["has_parts"] for part in inside["parts"])


def test_parts_come_in_bounded_numbers() -> None:
    """The page asks for the rest; nothing is told twice and nothing is left out."""
    tree = _make_tree(*[_own(f"state .key_{'x' * n}", n + 1) for n in range(250)])
    node = _find_row(tree, "state")["node"]

    labels: list[str] = []
    left = []
    while True:
        message = tree.describe_parts(node, len(labels))
        labels += _list_labels(message)
        left.append((message["n_more"], message["more"]))
        if not message["n_more"]:
            break

    assert left == [
        (150, [["cuda:0", sum(range(1, 151)) * _MIB]]),
        (50, [["cuda:0", sum(range(1, 51)) * _MIB]]),
        (0, []),
    ]
    assert len(set(labels)) == 250


def test_a_single_storage_is_told_with_its_row() -> None:
    """Nobody has to open a row to find one line in it."""
    tree = _make_tree(
        _own('kept ["a"] [0]', 3),
        _own("Python's own objects", 5, kind="other", root="nowhere", rows=()),
    )

    assert _find_row(tree, "kept")["path"] == 'kept["a"][0]'
    assert _find_row(tree, "other")["path"] == "Python'sownobjects"
    assert not _find_row(tree, "kept")["has_parts"]


def test_many_rows_are_bounded_and_what_is_unknown_stays() -> None:
    """A thousand names of an imported notebook do not make a page of a thousand rows."""
    tree = _make_tree(*[_own(f"name_{n}", 1000 - n) for n in range(1000)])

    message = tree.describe()

    assert len(message["rows"]) == 501
    assert message["rows"][-1]["label"] == "unattributed"
    shown = sum(n_bytes for row in message["rows"] for _, n_bytes in row["owns"])
    ((_, more),) = message["more"]
    assert message["n_more"] == 500
    assert shown + more == message["devices"][0]["allocated"]


def test_paths_are_found_whatever_is_open() -> None:
    """By any piece of the whole path, the biggest first; the rest is told as a sum."""
    tree = _make_tree(
        _own("model .layers [0] .weight", 3),
        _own("model .layers [1] .Weight", 9),
        _own("model .layers [1] .bias", 1),
        *[_own(f"weights [{n}]", 1) for n in range(300)],
    )

    message = tree.find("weight")

    assert message["found"][0]["label"] == ".layers[1].Weight"
    assert message["found"][0]["row"] == _find_row(tree, "model")["node"]
    assert len(message["found"]) == 200
    assert (message["n_more"], message["more"]) == (102, [["cuda:0", 102 * _MIB]])
    assert [found["label"] for found in tree.find("model.layers[1].b")["found"]] == [
        ".layers[1].bias"
    ]
    assert tree.find("<script>")["found"] == []
