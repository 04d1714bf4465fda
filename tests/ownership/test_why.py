"""What holds some memory: every path that has to be cut, and what is said to cut it."""

from __future__ import annotations

import gc

import pytest
import torch

from gpumemwidget.errors import BadInputError, UnknownNameError
from gpumemwidget.model.devices import HOST
from gpumemwidget.model.ownership import DeviceBytes, Explanation, JointRelease, Slices
from gpumemwidget.ownership.why import explain
from gpumemwidget.report.release import list_commands, report_explanation, report_plan, word_fix
from tests.ownership.notebook import Notebook, Tracker


def _explain(notebook: Notebook, expression: str) -> Explanation:
    return explain(notebook.shell, expression)


def _list_ways(explanation: Explanation) -> dict[str, str]:
    """The holders' paths, each with its cut."""
    return {holder.path: word_fix(holder.fix).text for holder in explanation.holders}


def _list_cure(explanation: Explanation) -> list[str]:
    """The lines to run that free it."""
    return [] if explanation.cure is None else list_commands(explanation.cure)


def _on_host(n_bytes: int) -> DeviceBytes:
    return DeviceBytes(((HOST, n_bytes),))


def test_every_other_holder_is_named(notebook: Notebook) -> None:
    """Aliases, containers, closures and views, each with what it holds and how it is cut."""
    notebook.run(
        "import torch\nx = torch.ones(1009)\nalias = x\nbox = {'k': [x]}\nview = x[:3]\n"
        "def make(t):\n    return lambda: t\n"
        "step = make(x)\nclass A: pass\na = A(); a.b = x"
    )

    explanation = _explain(notebook, "x")

    assert _list_ways(explanation) == {
        "x": "%memrelease x",
        "alias": "%memrelease alias",
        'box["k"][0]': 'del box["k"][0]',
        "view": "%memrelease view",
        "step's closure: t": "%memrelease step",
        "a.b": "del a.b",
    }
    assert {holder.held_bytes for holder in explanation.holders} == {DeviceBytes(((HOST, 4036),))}
    assert explanation.frees_bytes == DeviceBytes()
    assert _list_cure(explanation) == ['del box["k"][0], a.b, x, alias, view, step']


@pytest.mark.parametrize(
    "twin", ["torch.from_dlpack(x)", "torch.from_numpy(x.numpy())", "torch.as_tensor(x.numpy())"]
)
def test_two_names_over_one_memory_hold_each_other_alone(notebook: Notebook, twin: str) -> None:
    """What refers to the memory in C++ is the other one: no holder is made up for it."""
    notebook.run(f"import torch\nx = torch.ones(1013)\ny = {twin}")

    explanation = _explain(notebook, "x")

    assert _list_ways(explanation).keys() == {"x", "y"}


@pytest.mark.saved_tensors
def test_a_graph_that_a_name_keeps(notebook: Notebook) -> None:
    """A running total of losses keeps what it saved; the cut says how not to."""
    notebook.run("import torch\nx = torch.ones(1019, requires_grad=True)\ntotal = x.exp().sum()")

    explanation = _explain(notebook, "total")

    assert explanation.held_bytes == DeviceBytes(((HOST, 4 + 2 * 4 * 1019),))
    assert explanation.frees_bytes == DeviceBytes(((HOST, 4 + 4 * 1019),))
    assert explanation.named_bytes == (("x", DeviceBytes(((HOST, 4 * 1019),))),)
    assert _list_ways(_explain(notebook, "x")) == {
        "x": "%memrelease x",
        "total's graph: saved by AccumulateGrad": (
            "call backward(), or drop total (keep total.detach() or .item())"
        ),
    }


def test_a_part_of_a_name(notebook: Notebook) -> None:
    """A path as the account prints it is found, and frees what goes with it alone."""
    notebook.run(
        "import torch\nhistory = [{'logits': torch.ones(1021 + i)} for i in range(3)]\n"
        "model = torch.nn.Linear(5, 7)"
    )

    for expression in ('history[1]["logits"]', "history[1]['logits']"):
        explanation = _explain(notebook, expression)
        assert explanation.held_bytes == explanation.frees_bytes == DeviceBytes(((HOST, 4 * 1022),))
        assert _list_ways(explanation) == {'history[1]["logits"]': 'del history[1]["logits"]'}
    assert _explain(notebook, "model.weight").kind == "parameter"


def test_a_part_that_others_hold_too(notebook: Notebook) -> None:
    """To cut one path frees nothing where another leads to the object, nor its gradient."""
    notebook.run(
        "import torch\nmodel = torch.nn.Linear(101, 103)\n"
        "opt = torch.optim.SGD(model.parameters())\nmodel(torch.ones(1, 101)).sum().backward()"
    )

    explanation = _explain(notebook, "model.weight")

    assert explanation.held_bytes == DeviceBytes(((HOST, 2 * 4 * 101 * 103),))
    assert explanation.frees_bytes == DeviceBytes()


def test_displayed_values_and_memory_that_is_lent(notebook: Notebook) -> None:
    """What IPython shows has a row of its own; a NumPy array is a holder that torch can't see."""
    notebook.run("import torch, numpy as np; a = np.ones(2000); x = torch.from_numpy(a)")
    notebook.run("x")

    assert _list_ways(_explain(notebook, "x")) == {
        "x": "%memrelease x",
        "Out[2]": "%memrelease Out[2]",
        "whatever lent it to torch (NumPy, CuPy, JAX, a file)": (
            "delete the array or file whose memory it shares"
        ),
    }


def test_a_name_without_memory(notebook: Notebook) -> None:
    """It is said to hold nothing, and is no error."""
    notebook.run("import torch; n = 3")

    explanation = _explain(notebook, "n")

    assert (explanation.held_bytes, explanation.holders) == (DeviceBytes(), ())
    assert explanation.type_name == "int"


def test_refusals_name_the_next_step(notebook: Notebook) -> None:
    """Unknown names get close ones; what code would have to compute is not computed."""
    notebook.run(
        "import torch\ncalls = []\nclass A:\n    @property\n    def x(self):\n"
        "        calls.append(1)\n        return torch.ones(5)\n"
        "model = A(); model.t = torch.ones(1049)"
    )

    with pytest.raises(UnknownNameError, match="'modle' is not a variable: did you mean model"):
        _explain(notebook, "modle")
    with pytest.raises(BadInputError, match=r"'\.x' of model was not found"):
        _explain(notebook, "model.x")
    assert notebook.ip.user_ns["calls"] == []


def test_many_holders_are_folded(notebook: Notebook) -> None:
    """Paths that differ in an index or in a key's number are one holder with a count."""
    notebook.run(
        "import torch; x = torch.ones(1061); rows = [[x] for _ in range(50)]\n"
        "named = {f'step {i}': [x] for i in range(60)}"
    )

    assert _list_ways(_explain(notebook, "x")).keys() == {
        "x",
        "rows[…][0] (50 of them)",
        "named[…][0] (60 of them)",
    }


_TRAINER = (
    "class Trainer:\n"
    "    def __init__(self, model):\n"
    "        self.model, self.cache = model, make(4007)\n"
    "        model.trainer = self\n"
    "model = torch.nn.Linear(31, 33); trainer = Trainer(model)"
)


def test_a_part_that_refers_back_to_its_owner(notebook: Notebook, tracker: Tracker) -> None:
    """The attribute of the model is cut, and the model stays, as in Lightning's and HF's trainers.

    https://github.com/Lightning-AI/pytorch-lightning/issues/18289
    """
    notebook.run("import torch")
    notebook.run(_TRAINER)

    explanation = _explain(notebook, "trainer")
    assert explanation.cure is not None
    notebook.follow(explanation.cure)

    assert _list_ways(explanation) == {
        "model.trainer": "del model.trainer",
        "trainer": "%memrelease trainer",
    }
    assert {holder.held_bytes for holder in explanation.holders} == {_on_host(4 * 4007)}
    assert explanation.frees_bytes == DeviceBytes()
    assert _list_cure(explanation) == ["del model.trainer, trainer; import gc; gc.collect()"]
    assert explanation.cure.frees_bytes == _on_host(4 * 4007)
    assert explanation.named_bytes == (("model", _on_host(4 * (31 * 33 + 33))),)
    assert tracker.count_bytes() == 0
    assert "model" in notebook.ip.user_ns


def test_an_owner_that_only_its_part_refers_to(notebook: Notebook, tracker: Tracker) -> None:
    """Once the trainer's own name is gone the model's attribute is all that there is to cut."""
    notebook.run("import torch")
    notebook.run(f"{_TRAINER}; del trainer")

    explanation = _explain(notebook, "model.trainer")
    assert explanation.cure is not None
    notebook.follow(explanation.cure)

    assert _list_ways(explanation) == {"model.trainer": "del model.trainer"}
    assert explanation.frees_bytes == explanation.cure.frees_bytes == _on_host(4 * 4007)
    assert tracker.count_bytes() == 0


def test_a_part_in_a_cycle_needs_the_collector(notebook: Notebook) -> None:
    """A hook that holds its own module: ``del`` alone frees nothing of it."""
    notebook.run(
        "import torch\nclass Pipe: pass\npipe = Pipe(); pipe.t = torch.nn.Linear(71, 73)\n"
        "pipe.t.register_forward_hook(lambda m, i, o, me=pipe.t: None);"
    )

    assert _list_cure(_explain(notebook, "pipe.t")) == ["del pipe.t; import gc; gc.collect()"]
    assert _list_cure(_explain(notebook, "pipe")) == ["%memrelease pipe"]


def test_what_a_library_keeps_gets_no_command_that_frees_nothing(notebook: Notebook) -> None:
    """The holder in a module is named by the answer and by the plan of a release alike."""
    # The collector does not list the holders that were put aside after an earlier test.
    gc.unfreeze()
    notebook.run(
        "import torch, ipywidgets as w\nout = torch.ones(1024, 5); b = w.Button()\n"
        "b.on_click(lambda b, kept=out: None); del b"
    )

    explanation = _explain(notebook, "out")
    (stay,) = notebook.plan("out").stays
    others = [holder.path for holder in explanation.holders if holder.path != "out"]
    notebook.run("w.Widget.close_all()")

    registry = "ipywidgets.widgets.widget._instances"
    assert any(path.startswith(registry) for path in others)
    assert explanation.cure is None
    assert registry in stay.reason.holders


def test_parts_with_names_of_their_own_stay(notebook: Notebook) -> None:
    """What is recommended leaves the user's model and data, in the answer and in a plan."""
    notebook.run(
        "import torch\nnet, data = torch.nn.Linear(31, 33), torch.ones(5003)\n"
        "class Engine: pass\nengine = Engine()\n"
        "engine.net, engine.data, engine.out = net, data, torch.ones(5009)\n"
        "state = engine.__dict__"
    )

    explanation = _explain(notebook, "engine")
    joint = notebook.plan("engine").joint

    assert _list_cure(explanation) == ["%memrelease engine state"]
    assert explanation.cure is not None
    assert explanation.cure.frees_bytes == _on_host(4 * 5009)
    assert [name for name, _ in explanation.named_bytes] == ["data", "net"]
    assert joint == JointRelease(("engine", "state"), _on_host(4 * 5009))


def test_an_exception_is_one_holder(notebook: Notebook) -> None:
    """However many variables of its frames hold the memory: they have one cut."""
    notebook.run(
        "import torch\nx = torch.ones(1063)\ndef fail(n, t):\n    held = [t]\n"
        "    if n: return fail(n - 1, t)\n    raise ValueError\nfail(3, x)"
    )

    explanation = _explain(notebook, "x")

    (holder,) = [each for each in explanation.holders if each.root == "exception"]
    assert (holder.n_variables, holder.n_frames) == (8, 4)
    assert "last exception: 8 variables in 4 frames, innermost fail() line 6: " in (
        report_explanation(explanation).text
    )
    assert _list_cure(explanation) == ["%memrelease x --exceptions"]


@pytest.mark.saved_tensors
def test_what_no_line_of_code_cuts_is_released_together(notebook: Notebook) -> None:
    """The last line is that of a release's plan: a graph is let go of with the name it hangs on."""
    notebook.run(
        "import torch\nmodel = torch.nn.Linear(64, 64)\n"
        "outputs = model(torch.ones(8, 64)).tanh(); loss = outputs.sum()"
    )

    why = report_explanation(_explain(notebook, "model")).text
    plan = report_plan(notebook.plan("model")).text

    command = why.strip().splitlines()[-1]
    assert command.startswith("To free it: %memrelease model outputs loss (")
    assert command == plan.strip().splitlines()[-1]


def test_a_slice_keeps_all_of_its_storage(notebook: Notebook) -> None:
    """Bytes that a clone would free are told; not of parts that together show all of it."""
    notebook.run(
        "import torch\nbig = torch.ones(1024, 1024); row = big[:1]; del big\n"
        "first = []\nfor _ in range(3):\n    x = torch.ones(1024, 512); first.append(x[:1])\n"
        "del x\nq, k = torch.ones(2, 1024, 512).unbind()\n"
        "whole = torch.ones(1024, 1024); part = whole[:1]"
    )

    found = {name: _explain(notebook, name).slices for name in ("row", "first", "q", "part")}

    assert found == {
        "row": Slices(1, 4 * 2**20, 4096),
        "first": Slices(3, 3 * 2 * 2**20, 3 * 2048),
        "q": Slices(),
        "part": Slices(),
    }


def test_the_same_memory_is_reached_here_and_in_the_row(notebook: Notebook) -> None:
    """An answer counts what a graph leads to as a variable's row does, and a plan leaves it."""
    notebook.run(
        "import torch\nmodel = torch.nn.Linear(64, 64); x = torch.ones(128, 64)\n"
        "history = [model(x).tanh() for _ in range(3)]"
    )

    explanation = _explain(notebook, "history")
    row = notebook.list_rows()["history"]
    plan = notebook.plan("history")

    assert explanation.held_bytes == row.held_bytes
    assert explanation.frees_bytes == row.frees_bytes == plan.frees_bytes
    stays = sum(stay.held_bytes.total_bytes for stay in plan.stays)
    assert stays == sum(held.total_bytes for _, held in explanation.named_bytes)
    assert row.held_bytes.total_bytes == row.frees_bytes.total_bytes + stays


def test_parts_of_a_list_are_deleted_from_its_end_on(notebook: Notebook, tracker: Tracker) -> None:
    """To delete one moves those behind it; what is in a list twice goes with the list."""
    notebook.run(
        "x = make(1087); other = make(9); mixed = [other, x, 1, x]; apart = [[x], other, [x], x]"
    )

    explanation = _explain(notebook, "x")
    assert explanation.cure is not None
    notebook.follow(explanation.cure)

    assert _list_cure(explanation) == ["del apart[3], apart[2][0], apart[0][0], x, mixed"]
    assert tracker.count_bytes() == 36


# -- What is typed to cut a path -------------------------------------------------------------------

_SETUP = "import collections, dataclasses, functools, torch"
_NAMED = "x = collections.namedtuple('P', 'u v')(make(9), None)"
_FROZEN = "x = [dataclasses.make_dataclass('F', ['w'], frozen=True)(make(9))]"
_CACHE = "@functools.lru_cache\ndef x(n): return make(n)\ny = x(9); del y"
_GENERATOR = "def run():\n    held = make(9)\n    yield\nx = run(); next(x)"


@pytest.mark.parametrize(
    ("cell", "path", "cut"),
    [
        ("x = {'a': [make(9)]}", 'x["a"][0]', 'del x["a"][0]'),
        ("x = {'a': (1, (make(9),))}", 'x["a"][1][0]', 'del x["a"]'),
        ("x = [frozenset([make(9)])]", "x[0][…]", "del x[0]"),
        (_NAMED.replace("x =", "x = {}; x['k'] ="), 'x["k"].u', 'del x["k"]'),
        (_FROZEN, "x[0].w", "del x[0]"),
        ("x = [functools.partial(print, make(9))]", "x[0].args[0]", "del x[0]"),
        ("x = torch.nn.Linear(1, 1); x.kept = make(9)", "x.kept", "del x.kept"),
        (_CACHE, "x's cache", "x.cache_clear()"),
        (_GENERATOR, "x: run() line 3: held", "x.close()"),
    ],
)
def test_a_cut_that_is_typed(
    notebook: Notebook, tracker: Tracker, cell: str, path: str, cut: str
) -> None:
    """It goes through, and the memory goes."""
    notebook.run(_SETUP)
    notebook.run(cell)
    notebook.run("None")
    assert tracker.count_bytes() == 36

    explanation = explain(notebook.shell, path)
    told = {each.path: word_fix(each.fix).text for each in explanation.holders}
    result = notebook.ip.run_cell(told[path])
    gc.collect()

    assert told == {path: cut}
    assert result.success
    assert tracker.count_bytes() == 0


def test_a_tuple_under_a_name_goes_with_its_name(notebook: Notebook) -> None:
    """There is nothing smaller that can be taken away."""
    notebook.put(x=(torch.ones(9),))

    (holder,) = explain(notebook.shell, "x[0]").holders

    assert (holder.path, word_fix(holder.fix).text) == ("x[0]", "%memrelease x")
