"""The account and the explanations against hostile objects: they run no code of theirs.

Each object's own methods raise; a call is noted, and fails the test even where it was caught.
"""

from __future__ import annotations

import functools
import gc
import sys
import threading
import time
import types
import warnings
import weakref
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.two_tensor import TwoTensor

from gpumemwidget.errors import BadInputError, GpuMemError, UnknownNameError
from gpumemwidget.model.devices import HOST
from gpumemwidget.model.ownership import DeviceBytes, Explanation, Owned
from gpumemwidget.ownership.account import take_memory_account
from gpumemwidget.ownership.why import explain, explain_unnamed
from gpumemwidget.report.account import report_account
from gpumemwidget.report.release import report_explanation
from tests.ownership.graphs import Thing
from tests.ownership.hostile import (
    LIE,
    SPECIAL,
    Hostile,
    HostileMeta,
    boom,
)
from tests.ownership.notebook import Notebook

try:
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor
except ImportError:  # PyTorch 2.4
    from torch.distributed._tensor import DTensor, Shard, distribute_tensor

#: Of no other tensor's size, and enough to be listed without a name.
_N = 2_003
_BYTES = 4 * _N

pytestmark = pytest.mark.usefixtures("nothing_is_called")


def _derive(base: type, *more: str) -> Any:
    """A class whose instances answer nothing, though they are of a known kind."""
    names = [*SPECIAL, "items", "keys", "values", "get", "index", "count", *more]
    # What a dictionary or set does with its keys is no matter here.
    methods = {name: boom(f"{base.__name__}.{name}") for name in names if name != "__hash__"}
    return type(f"Hostile{base.__name__}", (base,), {**methods, "__class__": LIE})


def _make_tensor() -> torch.Tensor:
    return torch.ones(_N)


def _list_owned(notebook: Notebook, n_bytes: int = _BYTES) -> list[Owned]:
    """The lines of the account that are as big as the test's tensors; its reports can be drawn."""
    account = take_memory_account(notebook.shell, notebook.hardware)
    report_account(account, is_whole=True)
    (host,) = [each for each in account.devices if each.device == HOST]
    return [each for each in host.owned if each.n_bytes == n_bytes]


def _find_owner(notebook: Notebook, n_bytes: int = _BYTES) -> str:
    (owned,) = _list_owned(notebook, n_bytes)
    return owned.owner


def _explain(notebook: Notebook, expression: str) -> Explanation:
    explanation = explain(notebook.shell, expression)
    report_explanation(explanation)
    return explanation


def test_what_would_have_to_be_computed_is_refused(notebook: Notebook) -> None:
    """A property, a call, an operator, an index that is an expression: in one line, unrun."""
    hostile = object.__new__(Hostile)
    object.__setattr__(hostile, "t", [_make_tensor()])
    notebook.put(x=hostile, n=0)
    del hostile

    for expression in (
        "x.late",
        "x.never",
        "x()",
        "x.t[n]",
        "x.t[0].sum()",
        "x + 1",
        "x.t[0",
        "x..t",
        "x.t]",
    ):
        with pytest.raises(GpuMemError) as caught:
            _explain(notebook, expression)
        assert "\n" not in str(caught.value)
    for expression in ("", " ", "nothing", "nothing.t", "[]", "0", "'x'", "x\n.t"):
        with pytest.raises((BadInputError, UnknownNameError)):
            _explain(notebook, expression)


def _fill(container: Any) -> Any:
    dict.__setitem__(container, "a", _make_tensor())
    return container


def _bind(target: Any, **attributes: object) -> Any:
    for name, value in attributes.items():
        object.__setattr__(target, name, value)
    return target


class _Slotted:
    __slots__ = ("__weakref__", "never", "t")
    __getattr__ = boom("slots getattr")
    __dict__ = property(boom("slots dict"))  # type: ignore[assignment]


class _Fields(NamedTuple):
    t: torch.Tensor


class _Renamed(_Fields):
    _fields = property(boom("fields"))  # type: ignore[assignment]


class _Partial(functools.partial):  # type: ignore[type-arg]
    args = property(boom("partial args"))  # type: ignore[assignment]
    func = property(boom("partial func"))  # type: ignore[assignment]
    keywords = property(boom("partial keywords"))  # type: ignore[assignment]
    __repr__ = boom("partial repr")


#: What has a tensor, under the path by which it is found; a set's elements have no word.
_FOUND: dict[str, tuple[Callable[[], Any], str]] = {
    "object": (lambda: _bind(object.__new__(Hostile), t=_make_tensor()), "x.t"),
    "class": (
        lambda: HostileMeta("Made", (), {"__module__": "__main__", "t": _make_tensor()}),
        "x.t",
    ),
    "slots": (lambda: _bind(_Slotted(), t=[_make_tensor()]), "x.t[0]"),
    "dict": (lambda: _fill(_derive(dict)()), 'x["a"]'),
    "OrderedDict": (lambda: _fill(_derive(OrderedDict)()), 'x["a"]'),
    "defaultdict": (lambda: _fill(_derive(defaultdict)()), 'x["a"]'),
    "UserDict": (
        lambda: _bind(object.__new__(_derive(UserDict)), data={"a": _make_tensor()}),
        'x.data["a"]',
    ),
    "list": (lambda: _derive(list)([_make_tensor()]), "x[0]"),
    "tuple": (lambda: _derive(tuple)([_make_tensor()]), "x[0]"),
    "deque": (lambda: _derive(deque)([_make_tensor()]), "x[0]"),
    "set": (lambda: _derive(set)([_make_tensor()]), "x[…]"),
    "frozenset": (lambda: _derive(frozenset)([_make_tensor()]), "x[…]"),
    "named tuple without its fields": (lambda: _Renamed(_make_tensor()), "x[0]"),
    "partial": (lambda: _Partial(print, _make_tensor()), "x.args[0]"),
    "method": (
        lambda: types.MethodType(len, _bind(object.__new__(Hostile), t=_make_tensor())),
        "x.__self__.t",
    ),
}


@pytest.mark.parametrize("case", _FOUND)
def test_what_answers_nothing_is_read_where_it_lies(notebook: Notebook, case: str) -> None:
    """By the descriptors of the type that it is based on."""
    make, path = _FOUND[case]
    notebook.put(x=make())

    assert _find_owner(notebook) == path
    assert _explain(notebook, "x").held_bytes == DeviceBytes(((HOST, _BYTES),))
    assert _explain(notebook, path).held_bytes == DeviceBytes(((HOST, _BYTES),))


def test_an_instance_of_a_class_whose_metaclass_answers_nothing(notebook: Notebook) -> None:
    """It holds what its class holds."""
    notebook.put(x=HostileMeta("Made", (), {"__module__": "__main__", "t": _make_tensor()})())

    assert _list_owned(notebook)[0].rows == ("x",)


class _Key:
    """A key that answers nothing once it is in its place."""

    is_armed = False

    def __hash__(self) -> int:
        return boom("key hash")() if self.is_armed else 7  # type: ignore[no-any-return]

    __eq__ = boom("key eq")
    __repr__ = boom("key repr")
    __str__ = boom("key str")


class _Text(str):
    __slots__ = ()
    __repr__ = boom("text repr")
    __str__ = boom("text str")
    __eq__ = boom("text eq")
    __len__ = boom("text len")
    __hash__ = str.__hash__


def test_keys_that_answer_nothing(notebook: Notebook) -> None:
    """They are not asked for their text, and not compared to find one."""
    key = _Key()
    notebook.put(x={key: _make_tensor()}, y={_Text("a"): [torch.ones(_N + 1)]})
    _Key.is_armed = True
    try:
        assert _find_owner(notebook) == "x[…]"
        assert _find_owner(notebook, _BYTES + 4) == "y[…][0]"
        with pytest.raises(GpuMemError):
            _explain(notebook, 'y["a"]')
    finally:
        _Key.is_armed = False


class _Attributed:
    __dict__ = property(boom("attribute dict"))  # type: ignore[assignment]
    __getattr__ = boom("attribute getattr")


class _MetaOfKeys(type):
    """Made for keys: a class of such a one can't be looked up among others."""

    __hash__ = boom("meta hash of a key")
    __eq__ = boom("meta eq of a key")


def _nest(levels: int) -> object:
    key: object = ()
    for _ in range(levels):
        key = (key, key, key)
    return key


@pytest.mark.parametrize(
    ("key", "path"),
    [
        (_MetaOfKeys("Key", (), {})(), "x[…]"),
        (10**5000, "x[…]"),
        (-(2**70), "x[-1180591620717411303424]"),
        (_nest(6), "x[((…, …, …), (…, …, …), (…, …, …))]"),
        (("a",), 'x[("a",)]'),
        ("a" * 1000, 'x["' + 38 * "a" + "…]"),
        (b"\0" * 1000, "x[b'" + 9 * "\\x00" + "…]"),
    ],
    ids=["class", "big number", "number", "nested", "tuple of one", "text", "bytes"],
)
def test_keys_that_cant_be_written_out(notebook: Notebook, key: object, path: str) -> None:
    """What is too long for a path is left open, before it is written out."""
    notebook.put(x={key: _make_tensor()})
    del key

    found = _find_owner(notebook)

    assert found.replace("\\x0…", "…").replace("\\x…", "…").replace("\\…", "…") == path
    assert _explain(notebook, "x").held_bytes == DeviceBytes(((HOST, _BYTES),))


_HostileText: Any = type(
    "HostileText",
    (str,),
    {name: boom(f"text {name}") for name in ("__eq__", "__str__", "__format__", "__repr__")}
    | {"__hash__": lambda _: 7},
)


def test_names_of_attributes_and_parameters_that_are_no_plain_text(notebook: Notebook) -> None:
    """They are neither compared nor written out."""
    module = torch.nn.Module()
    module._parameters = {_HostileText("weight"): torch.nn.Parameter(_make_tensor())}
    vars(module).update({_HostileText("extra"): torch.ones(_N + 1)})
    notebook.put(x=module)
    del module

    assert _find_owner(notebook) == "x[…]"
    assert _find_owner(notebook, _BYTES + 4) == "x[…]"


def test_an_instance_whose_dictionary_answers_nothing(notebook: Notebook) -> None:
    """A module's tables are looked up in it as in any dictionary."""
    module = torch.nn.Linear(_N, 1, bias=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    answerless = _derive(dict, "__or__")
    vars(module)["extra"] = torch.ones(_N + 1)
    for each in (module, optimizer):
        object.__setattr__(each, "__dict__", answerless(vars(each)))
    notebook.put(x=module, y=optimizer)
    del module, optimizer, each

    assert _find_owner(notebook) == "x.weight"
    assert _find_owner(notebook, _BYTES + 4) == "x.extra"


def test_a_class_whose_name_answers_nothing(notebook: Notebook) -> None:
    """It is told as the text that it is."""
    made: Any = type("Made", (), {"__module__": "__main__"})
    made.__qualname__ = _HostileText("Made")
    instance = made()
    instance.t = _make_tensor()
    notebook.put(x=instance)
    del made, instance

    assert _find_owner(notebook) == "x.t"
    assert _explain(notebook, "x").type_name == "Made"


def test_a_modules_variable_whose_name_answers_nothing(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is left open in the path."""
    library = types.ModuleType("library")
    vars(library)[_HostileText("kept")] = [_make_tensor()]
    monkeypatch.setitem(sys.modules, "library", library)
    del library

    assert _find_owner(notebook) == "library[…][0]"


def test_what_locals_gave_to_a_function_is_left_to_it(notebook: Notebook) -> None:
    """Its dictionary is the frame's own before Python 3.13, which is emptied where it is ours."""
    notebook.put(look=lambda: _find_owner(notebook))
    notebook.run(
        "import torch\n"
        "def work():\n"
        f"    batch = torch.ones({_N})\n"
        "    seen = locals()\n"
        "    return look(), look(), list(seen)\n"
        "first, second, names = work()"
    )

    assert notebook.ip.user_ns["first"] == "running: work() line 5: batch"
    assert notebook.ip.user_ns["second"] == notebook.ip.user_ns["first"]
    # Python 3.11 and 3.12 write their own variables anew into it whenever a frame is looked at.
    assert "batch" in notebook.ip.user_ns["names"]


class _HostileModule(torch.nn.Module):
    __getattr__ = boom("module getattr")
    __repr__ = boom("module repr")
    __dir__ = boom("module dir")
    parameters = boom("module parameters")
    state_dict = boom("module state_dict")
    named_modules = boom("module named_modules")


def test_modules_that_answer_nothing_or_are_half_made(notebook: Notebook) -> None:
    """Tables that are missing, or are something else, are no tables."""
    full = _HostileModule.__new__(_HostileModule)
    torch.nn.Module.__init__(full)
    vars(full)["_parameters"]["w"] = torch.nn.Parameter(_make_tensor())
    empty = _HostileModule.__new__(_HostileModule)
    vars(empty)["early"] = torch.ones(_N + 1)
    odd = _HostileModule.__new__(_HostileModule)
    vars(odd).update(_parameters=None, _buffers=[torch.ones(_N + 2)], _modules=_derive(dict)())
    notebook.put(x=full, y=empty, z=odd)
    del full, empty, odd

    (parameter,) = _list_owned(notebook)

    assert (parameter.owner, parameter.kind) == ("x.w", "parameter")
    assert _find_owner(notebook, _BYTES + 4) == "y.early"
    assert _list_owned(notebook, _BYTES + 8)[0].rows == ("z",)
    assert _explain(notebook, "x.w").kind == "parameter"


class _HostileOptimizer(torch.optim.SGD):
    __getattr__ = boom("optimizer getattr")
    __getstate__ = boom("optimizer getstate")
    __repr__ = boom("optimizer repr")
    state_dict = boom("optimizer state_dict")


def test_optimizers_that_are_half_made(notebook: Notebook) -> None:
    """No state, no groups, or something else in their place."""
    made = []
    for attributes in ({}, {"state": None, "param_groups": 7}, {"param_groups": [{}, None]}):
        optimizer = _HostileOptimizer.__new__(_HostileOptimizer)
        vars(optimizer).update(attributes, extra=_make_tensor())
        made.append(optimizer)
    notebook.put(x=made[0], y=made[1], z=made[2])
    del made, optimizer

    assert {each.owner for each in _list_owned(notebook)} == {"x.extra", "y.extra", "z.extra"}


class _HostileError(Exception):
    args = property(boom("error args"))  # type: ignore[assignment]
    __traceback__ = property(boom("error traceback"))  # type: ignore[assignment]
    __cause__ = property(boom("error cause"))  # type: ignore[assignment]
    __context__ = property(boom("error context"))  # type: ignore[assignment]
    __str__ = boom("error str")
    __repr__ = boom("error repr")


def test_an_exception_that_answers_nothing(notebook: Notebook) -> None:
    """Its parts are read by the descriptors of the class that it is based on."""

    def fail() -> None:
        batch = _make_tensor()
        raise _HostileError(str(batch.shape))

    try:
        fail()
    except _HostileError as exc:
        notebook.put(x=exc)

    assert ": fail() line " in _find_owner(notebook)
    assert _find_owner(notebook).startswith("x")


def test_functions_and_generators_at_every_stage(notebook: Notebook) -> None:
    """A variable that is not bound yet, a generator that has not begun, has ended, is running."""

    def outer() -> Callable[[], object]:
        def inner() -> object:
            return later

        if inner is None:  # type: ignore[comparison-overlap]
            later = 1
        return inner

    def generate(held: object) -> Iterator[object]:
        yield notebook.elsewhere.append(_find_owner(notebook))
        yield held

    fresh, begun, ended = generate(torch.ones(_N + 1)), generate(_make_tensor()), generate(None)
    notebook.put(a=outer(), b=fresh, c=begun, d=ended)
    del fresh
    for _ in ended:
        pass
    next(begun)

    # Of a generator that is running, the frame belongs to nobody but the thread.
    assert str(notebook.elsewhere[-1]).endswith(": held")
    assert _find_owner(notebook).startswith("c: generate() line ")
    assert _find_owner(notebook, _BYTES + 4).startswith("b: generate()")


def test_weak_references_hold_nothing(notebook: Notebook) -> None:
    """Proxies to the living and to the dead, and tables of weak references."""
    kept, dead = _Attributed(), _Attributed()
    tensor = _make_tensor()
    notebook.put(
        x=[weakref.proxy(kept), weakref.proxy(dead), weakref.ref(tensor)],
        y=weakref.WeakValueDictionary({"a": tensor}),
        z=weakref.WeakKeyDictionary({kept: [torch.ones(_N + 1)]}),
        t=tensor,
    )
    notebook.elsewhere.append(kept)
    del dead, tensor, kept

    (owned,) = _list_owned(notebook)

    assert (owned.owner, owned.rows) == ("t", ("t",))
    assert _find_owner(notebook, _BYTES + 4).startswith("z")
    assert _explain(notebook, "t").frees_bytes == DeviceBytes(((HOST, _BYTES),))


def test_objects_that_die_meanwhile(notebook: Notebook) -> None:
    """Another thread makes and drops tensors, cycles and objects that raise at their end."""
    stop = threading.Event()

    class Dying:
        def __init__(self) -> None:
            self.held = [torch.ones(_N + 5), self]

        def __del__(self) -> None:
            self.again = self.held

    def churn() -> None:
        while not stop.wait(1e-3):
            changing[len(changing) % 50] = Dying()
            changing.pop(17, None)
            listed.append([torch.ones(_N + 7)])
            if len(listed) > 300:
                listed.clear()

    changing: dict[int, object] = {}
    listed: list[object] = []
    notebook.put(x=changing, y=listed, z=[_make_tensor()])
    thread = threading.Thread(target=churn, name="churn")
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread.start()
    try:
        for _ in range(2):
            assert _find_owner(notebook) == "z[0]"
            assert _explain(notebook, "x").name == "x"
        explain_unnamed(notebook.shell, notebook.hardware)
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)
        changing.clear()
        listed.clear()
        gc.collect()


def test_modules_of_the_process_that_answer_nothing(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lazy modules, and what is no module at all, stand in ``sys.modules``."""
    cls = type(
        "Lazy",
        (types.ModuleType,),
        {name: boom(f"lazy {name}") for name in ("__getattr__", "__dir__", "__repr__", "__eq__")},
    )
    lazy = cls("lazy_zoo")
    vars(lazy)["_cache"] = {"a": _make_tensor()}
    monkeypatch.setitem(sys.modules, "lazy_zoo", lazy)
    monkeypatch.setitem(sys.modules, "hostile_zoo", object.__new__(Hostile))
    monkeypatch.setitem(sys.modules, "empty_zoo", None)  # type: ignore[arg-type]

    assert _find_owner(notebook) == 'lazy_zoo._cache["a"]'
    holders = explain_unnamed(notebook.shell, notebook.hardware).holders
    assert 'lazy_zoo._cache["a"]' in [holder.path for holder in holders]


def test_hostile_variables_of_a_running_thread(notebook: Notebook) -> None:
    """They are passed over; what stands beside them is found."""
    entered, leave = threading.Event(), threading.Event()

    def work() -> None:
        hostile = object.__new__(Hostile)
        batch = [_make_tensor()]
        entered.set()
        leave.wait(30)
        del hostile, batch

    thread = threading.Thread(target=work, name="worker")
    thread.start()
    entered.wait(30)
    try:
        (owned,) = _list_owned(notebook)
        explained = explain_unnamed(notebook.shell, notebook.hardware)
    finally:
        leave.set()
        thread.join()

    assert owned.root == "thread"
    assert owned.owner.startswith("thread worker: work() line ")
    assert owned.owner.endswith(": batch[0]")
    assert owned.owner in [holder.path for holder in explained.holders]


def test_nesting_without_an_end(notebook: Notebook) -> None:
    """A path of twenty thousand steps is cut, or told in full, and takes no recursion."""
    nested: list[Any] = [_make_tensor()]
    for _ in range(20_000):
        nested = [nested]
    itself: list[Any] = [torch.ones(_N + 1)]
    itself.append(itself)
    notebook.put(x=nested, y=itself)
    del nested, itself

    assert _find_owner(notebook).startswith("x[0]")
    assert _find_owner(notebook, _BYTES + 4) == "y[0]"
    assert _explain(notebook, "x").frees_bytes == DeviceBytes(((HOST, _BYTES),))
    # Taken apart level by level: an old interpreter's own end of it would recurse.
    nested = notebook.ip.user_ns.pop("x")
    while isinstance(nested, list):
        nested = nested.pop()


def test_a_long_list_of_links(notebook: Notebook) -> None:
    """Two thousand objects, each with a tensor and the next: no path is longer than one reads."""
    head: Any = None
    for _ in range(2_000):
        link = Thing()
        vars(link).update(t=torch.ones(3), next=head)
        head = link
    vars(head)["big"] = _make_tensor()
    notebook.put(x=head)
    del head, link

    owned = _list_owned(notebook, 12)

    assert sum(each.owner.startswith("x") for each in owned) == 2_000
    assert max(len(each.steps) for each in owned) <= 64
    assert {each.steps[-1] for each in owned if each.rows == ("x",)} == {".t"}
    assert _find_owner(notebook) == "x.big"
    # Taken apart link by link: an old interpreter's own end of it would recurse.
    link = notebook.ip.user_ns.pop("x")
    while link is not None:
        link = vars(link).pop("next")


def _make_nested() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parts = [torch.ones(_N - 3), torch.ones(3)]
        return torch.nested.as_nested_tensor(parts, layout=torch.strided)


def _make_jagged() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parts = [torch.ones(_N - 3, 1), torch.ones(3, 1)]
        return torch.nested.as_nested_tensor(parts, layout=torch.jagged)


def _make_quantised() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(_BYTES), 1.0, 0, torch.qint8)


def _make_fake() -> Any:
    with FakeTensorMode():
        return torch.ones(_N)


def _make_empty_storage() -> Any:
    tensor = torch.ones(_N)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("make", "n_lines"),
    [
        (lambda: torch.ones(_N, device="meta"), 0),
        (_make_fake, 0),
        (_make_empty_storage, 0),
        (torch.nn.parameter.UninitializedParameter, 0),
        (lambda: torch.ones(_N).to_mkldnn(), 0),
        (lambda: torch.eye(_N)[:1].to_sparse().coalesce(), 0),
        (_make_quantised, 1),
        (_make_nested, 1),
        (_make_jagged, 1),
        (lambda: torch.ones(_N // 2 + 1, dtype=torch.complex64).conj()[:-1], 0),
        (lambda: TwoTensor(torch.ones(_N), torch.ones(_N)), 2),
        (lambda: torch.ones(_N).as_subclass(torch.nn.Parameter), 1),
    ],
    ids=[
        *("meta", "fake", "storage resized to 0", "uninitialised", "mkldnn", "sparse"),
        *("quantised", "nested", "jagged", "conjugated", "wrapper", "parameter"),
    ],
)
def test_tensors_of_every_sort(notebook: Notebook, make: Callable[[], Any], n_lines: int) -> None:
    """Those without a storage have no line, the others one for each storage; none raises."""
    notebook.put(x=[make()])

    owned = _list_owned(notebook)
    explanation = _explain(notebook, "x")

    assert len(owned) == n_lines
    assert all(each.rows == ("x",) for each in owned)
    assert explanation.held_bytes.total_bytes >= n_lines * _BYTES


def test_a_wrapper_that_hides_what_it_wraps(notebook: Notebook) -> None:
    """What only C++ can follow is in the account all the same, as held out of sight."""
    inner = _make_tensor()
    notebook.put(x=torch._to_functional_tensor(inner))
    del inner

    (owned,) = _list_owned(notebook)

    assert owned.held_elsewhere or owned.rows == ("x",)


def test_within_a_transform_of_functorch(notebook: Notebook) -> None:
    """A batched or traced tensor has no storage that could be asked for."""
    looked: list[int] = []

    def look(tensor: torch.Tensor) -> torch.Tensor:
        notebook.put(x=tensor)
        looked.append(len(_list_owned(notebook)))
        notebook.put(x=None)
        return tensor.square().sum()

    torch.vmap(look)(torch.ones(3, 5))
    torch.func.grad(look)(torch.ones(7))

    assert len(looked) == 2


def test_a_tensor_of_several_processes(
    notebook: Notebook, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A DTensor's memory is that of its local part."""
    store = tmp_path_factory.mktemp("store") / "file"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{store}", rank=0, world_size=1
        )
        try:
            mesh = init_device_mesh("cpu", (1,))
            notebook.put(x=distribute_tensor(_make_tensor(), mesh, [Shard(0)]))
            assert type(notebook.ip.user_ns["x"]) is DTensor
            gc.collect()
            # A thread of gloo's may hold what it has sent for a moment longer.
            until_s = time.monotonic() + 10
            while len(_list_owned(notebook)) > 1 and time.monotonic() < until_s:
                time.sleep(0.05)

            (owned,) = _list_owned(notebook)
            explanation = _explain(notebook, "x")

            assert owned.rows == ("x",)
            # The mesh has a small tensor of its own.
            assert dict(explanation.held_bytes.by_device)[HOST] - _BYTES in {0, 4, 8}
            notebook.ip.user_ns.pop("x")
            del mesh
        finally:
            torch.distributed.destroy_process_group()


def test_a_walk_allocates_nothing_and_saves_nothing(notebook: Notebook) -> None:
    """As many storages before as after, with hooks that would compute on every unpacking."""
    unpacked: list[int] = []

    def unpack(packed: torch.Tensor) -> torch.Tensor:
        unpacked.append(1)
        return packed.clone()

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), unpack):
        loss = torch.ones(_N, requires_grad=True).exp().exp().sum()
    notebook.put(x=loss)
    del loss
    gc.collect()
    before = sorted(each.n_bytes for each in _list_owned(notebook))

    _explain(notebook, "x")
    explain_unnamed(notebook.shell, notebook.hardware)
    after = sorted(each.n_bytes for each in _list_owned(notebook))

    assert unpacked == []
    assert before == after
    # What the hooks packed (two results of exp), and the leaf.
    assert len(after) == 3
