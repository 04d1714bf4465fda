"""Arrays of other libraries in variables. On a GPU: ``tests/gpu/test_libraries.py``."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from gpumemwidget.errors import BadInputError
from gpumemwidget.ownership.account import take_memory_account
from gpumemwidget.report.account import report_account
from gpumemwidget.session.session import check_rows
from tests.ownership.notebook import Notebook


class ndarray:  # noqa: N801 - CuPy's own name
    """As much of CuPy's array as is read: no machine without a GPU makes one."""

    dtype = SimpleNamespace(name="float32")

    def __init__(self, pointer: int, n_bytes: int, *, owner: str = "PooledMemory") -> None:
        memory = type(owner, (), {})()
        memory.ptr, memory.size, memory.device_id = pointer, n_bytes, 1
        self.data = SimpleNamespace(mem=memory)
        self.shape = (n_bytes // 4,)

    def __getattr__(self, name: str) -> object:
        raise AssertionError(f"{name} was read")


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of CuPy's name with that class."""
    module = ModuleType("cupy")
    vars(module)["ndarray"] = ndarray
    monkeypatch.setitem(sys.modules, "cupy", module)


@pytest.mark.usefixtures("cupy")
def test_arrays_are_listed_by_what_holds_them(notebook: Notebook) -> None:
    """Each memory once, the largest first, and nothing that another library lends."""
    small, large = ndarray(1, 1 << 20), ndarray(2, 1 << 22)
    notebook.put(small=small, view=ndarray(2, 1 << 22), lent=ndarray(3, 8, owner="UnownedMemory"))
    notebook.put(batches=[small, {"x": (large,)}], deep=[[[[ndarray(4, 4)]]]])
    notebook.run("batches.append(batches)")

    account = take_memory_account(notebook.shell, notebook.hardware)

    assert [(array.path, array.n_bytes) for array in account.library_arrays] == [
        ("view", 1 << 22),
        ("small", 1 << 20),
        ("deep[0][0][0][0]", 4),
    ]
    assert account.has_all_library_arrays
    assert {array.device for array in account.library_arrays} == {"cuda:1"}
    words = report_account(account).text
    assert "Arrays of other libraries, outside PyTorch: 5.00 MiB" in words
    assert "CuPy float32[1048576]" in words


@pytest.mark.usefixtures("cupy")
def test_a_name_shows_its_own_arrays(notebook: Notebook) -> None:
    """A variable that holds only those is no mistake; one that holds nothing is."""
    notebook.put(batches={"x": ndarray(1, 512), 2: [ndarray(2, 512)]}, other=ndarray(3, 512), n=1)
    account = take_memory_account(notebook.shell, notebook.hardware)

    check_rows(account, ["batches"], ["batches", "other", "n"])
    words = report_account(account, ["batches"]).text

    assert 'batches["x"]' in words
    assert "batches[2][0]" in words
    assert "other" not in words.replace("of other libraries", "")
    with pytest.raises(BadInputError, match="holds no tensor memory"):
        check_rows(account, ["n"], ["batches", "other", "n"])


_HOSTILE = """
ran = []
class Meta(type):
    @property
    def __name__(cls):
        ran.append("name"); raise SystemExit
    def __hash__(cls):
        ran.append("hash"); return 1
    def __eq__(cls, other):
        ran.append("eq"); return True
class ArrayImpl(metaclass=Meta):
    __module__ = property(lambda self: ran.append("module"))
    __class__ = property(lambda self: ran.append("class"))
    def __getattribute__(self, name):
        ran.append(name); raise SystemExit
class Key(str):
    def __repr__(self):
        ran.append("repr"); return "x"
    __hash__ = str.__hash__
class List(list):
    def __iter__(self):
        ran.append("iter"); raise SystemExit
hostile = ArrayImpl()
inner = [ArrayImpl(), List(), {Key("k"): [], 10**5000: [], ("a", 2): []}]
numbered = type("ArrayImpl", (), {"__module__": 3})()
ran.clear()
"""


@pytest.mark.usefixtures("cupy")
def test_no_code_of_a_users_class_runs(notebook: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a class answers of itself, and whatever its name is."""
    monkeypatch.setitem(sys.modules, "jax", ModuleType("jax"))
    notebook.run(_HOSTILE)

    account = take_memory_account(notebook.shell, notebook.hardware)

    assert notebook.shell.user_ns["ran"] == []
    assert account.library_arrays == ()
    assert account.unread_libraries == ()


def test_a_broken_library_costs_only_its_rows(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are listed, and the report says in one line whose are missing."""

    class ArrayImpl:
        def is_deleted(self) -> bool:
            raise RuntimeError("Array has been deleted")

    for name, held, cls in (("cupy", "ndarray", ndarray), ("jax._src.array", "ArrayImpl", None)):
        module = ModuleType(name)
        vars(module)[held] = cls or ArrayImpl
        monkeypatch.setitem(sys.modules, name, module)
    notebook.put(broken=[ArrayImpl(), ArrayImpl()], good=ndarray(1, 1 << 20))

    account = take_memory_account(notebook.shell, notebook.hardware)

    assert [array.path for array in account.library_arrays] == ["good"]
    assert account.unread_libraries == ("JAX",)
    words = report_account(account).text
    assert words.count("Arrays of JAX are missing here: JAX failed on some.") == 1


@pytest.mark.usefixtures("cupy")
def test_numbers_hide_no_array(notebook: Notebook) -> None:
    """Neither those in front of it, nor those of the variables before."""
    array = ndarray(1, 1 << 30)
    notebook.put(**{f"a{n}": [0] * 10_000 for n in range(11)}, later=[*range(200_000), array])

    account = take_memory_account(notebook.shell, notebook.hardware)

    assert [found.path for found in account.library_arrays] == ["later[200000]"]
    assert account.has_all_library_arrays


@pytest.mark.usefixtures("cupy")
@pytest.mark.parametrize(
    "code",
    [
        "big = [*range(500_000), array]",
        "big = [[0] * 500_000 for _ in range(4)] + [[array]]",
        "big = [[] for _ in range(100_000)] + [array]",
        "big = [array]\nfor _ in range(9): big = [big]",
    ],
)
def test_a_search_that_was_cut_is_reported(notebook: Notebook, code: str) -> None:
    """The sum is then a lower bound."""
    notebook.put(other=ndarray(2, 512), array=ndarray(1, 512))
    notebook.run(f"{code}\ndel array")

    account = take_memory_account(notebook.shell, notebook.hardware)

    assert [array.path for array in account.library_arrays] == ["other"]
    assert not account.has_all_library_arrays
    words = report_account(account).text
    assert "Arrays of other libraries, outside PyTorch: at least 512 B" in words
    assert words.count("Not all containers were looked through for arrays") == 1


@pytest.mark.usefixtures("cupy")
def test_the_search_ends_with_its_time(notebook: Notebook) -> None:
    """Without any left nothing is looked at, and the account says so."""
    notebook.put(arrays=[ndarray(1, 512)])

    account = take_memory_account(notebook.shell, notebook.hardware, budget_s=0)

    assert account.library_arrays == ()
    assert not account.has_all_library_arrays


def test_jax_on_the_host_is_not_on_a_gpu(notebook: Notebook) -> None:
    """Its arrays are looked at as they are; those of the host are malloc's."""
    jax = pytest.importorskip("jax")
    x = jax.numpy.ones((8, 8))
    notebook.put(x=x, gone=jax.numpy.ones(8))
    notebook.run("gone.delete()")

    account = take_memory_account(notebook.shell, notebook.hardware)

    assert account.library_arrays == ()
