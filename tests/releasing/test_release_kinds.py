"""What reaches memory in its own way is released by its name, kept, and brought back.

Containers, functions, objects and exceptions are in the random notebooks of
``tests/ownership/test_random_graphs.py``.
"""

from __future__ import annotations

import multiprocessing

import pytest

from gpumemwidget.model.releases import ReasonKind
from gpumemwidget.releasing.release import execute_restore
from gpumemwidget.releasing.storages import original_devices
from tests.ownership.notebook import Notebook, Tracker

#: Each binds ``x``, which alone leads to what ``make`` made, and tells how many bytes that is.
_KINDS = {
    "tensor": ("x = make(10)", 40),
    "parameter with a gradient": (
        "x = torch.nn.Parameter(make(10))\nx.grad = make(10)",
        80,
    ),
    "module": ("x = torch.nn.Linear(2, 2, bias=False)\nx.register_buffer('mask', make(10))", 40),
    "optimizer": (
        "p = torch.nn.Parameter(make(10))\nx = torch.optim.AdamW([p])\n"
        "p.grad = make(10)\nx.step()\nfor v in x.state[p].values(): track(v)\ndel p, v",
        40 + 40 + 4 + 40 + 40,
    ),
    "trainer": (
        "class Trainer:\n"
        "    def __init__(self):\n"
        "        self.model = torch.nn.Linear(2, 2)\n"
        "        self.model.register_buffer('b', make(10))\n"
        "        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.1)\n"
        "        self.callbacks = [self]\n"
        "        self.history = [{'loss': make(1)}]\n"
        "x = Trainer()",
        44,
    ),
    "model output": (
        "import collections, dataclasses\n"
        "@dataclasses.dataclass\n"
        "class ModelOutput(collections.OrderedDict):\n"
        "    logits: object = None\n"
        "    def __post_init__(self): self['logits'] = self.logits\n"
        "x = ModelOutput(make(10))",
        40,
    ),
    "cycle": ("x = [make(10)]\nx.append({'me': x})", 40),
    "generator": (
        "def stream():\n    batch = make(10)\n    yield 1\n    yield batch\nx = stream()\nnext(x)",
        40,
    ),
    "DataLoader": (
        "x = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(make(10)), batch_size=2)",
        40,
    ),
    "closure": ("def build(t):\n    return lambda: t\nx = build(make(10))", 40),
    "hostile object": (
        "class Hostile:\n"
        "    def __getattribute__(self, name): raise RuntimeError(name)\n"
        "    def __eq__(self, other): raise RuntimeError\n"
        "    def __hash__(self): raise RuntimeError\n"
        "    def __bool__(self): raise RuntimeError\n"
        "    def __repr__(self): raise RuntimeError\n"
        "    def __len__(self): raise RuntimeError\n"
        "    def __iter__(self): raise RuntimeError\n"
        "x = Hostile()\n"
        "object.__setattr__(x, 't', make(10))",
        40,
    ),
    "loss with its graph": ("w = make(10).requires_grad_()\nx = (w * w).sum()\ndel w", 40),
}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.saved_tensors if kind == "loss with its graph" else ())
        for kind in _KINDS
    ],
)
def test_it_is_released_by_its_name(notebook: Notebook, tracker: Tracker, kind: str) -> None:
    """All of it goes, as planned; nothing is moved for nobody, and nothing runs of its own code."""
    source, n_bytes = _KINDS[kind]
    notebook.put(track=tracker.track)
    notebook.run(f"import torch\n{source}")
    assert notebook.ip.last_execution_result.error_in_exec is None
    before = tracker.count_bytes()

    plan = notebook.plan("x")
    report = notebook.release("x")

    assert before == n_bytes
    assert dict(plan.frees_bytes.by_device)["host"] >= n_bytes
    assert (plan.moves, report.stopped, report.remains) == ((), None, ())
    assert notebook.ip.user_ns["x"] is None
    assert tracker.count_bytes() == 0


#: What can be moved in place without its holder's help; what only a function or a graph leads to
#: can't (a loss, a closure), and says so.
_KEPT = [
    *("tensor", "parameter with a gradient", "module", "optimizer", "trainer", "generator"),
    *("model output", "cycle", "DataLoader", "hostile object"),
]


@pytest.mark.usefixtures("movable")
@pytest.mark.parametrize("kind", _KEPT)
def test_it_is_kept_on_the_cpu_and_brought_back(
    notebook: Notebook, tracker: Tracker, kind: str
) -> None:
    """The name stays bound to the same object; the old memory goes, out and back."""
    source, _ = _KINDS[kind]
    original_devices.forget_all()
    notebook.put(track=tracker.track)
    notebook.run(f"import torch\n{source}")
    target = notebook.ip.user_ns["x"]

    released = notebook.release("x", keep=True)
    left = tracker.count_bytes()
    restored = execute_restore(notebook.shell, notebook.hardware, ["x"])

    assert (released.stopped, released.remains, restored.stopped) == (None, (), None)
    assert left == 0
    assert notebook.ip.user_ns["x"] is target
    assert [move.n_bytes for move in restored.plan.moves] == [
        sum(move.n_bytes for move in released.plan.moves)
    ]
    assert restored.remains == ()


@pytest.mark.usefixtures("movable")
@pytest.mark.parametrize("kind", ["closure", "loss with its graph"])
def test_what_cannot_be_kept_says_why(notebook: Notebook, tracker: Tracker, kind: str) -> None:
    """Nothing of it is moved, and the reason is said; without ``keep`` it can be released."""
    source, _ = _KINDS[kind]
    notebook.run(f"import torch\n{source}")
    before = tracker.count_bytes()

    report = notebook.release("x", keep=True)

    assert report.plan.moves == ()
    assert report.plan.stays[0].reason.kind in {ReasonKind.NOT_A_PART, ReasonKind.COMPUTED}
    assert tracker.count_bytes() == before


def test_a_loader_with_workers_is_released(notebook: Notebook, tracker: Tracker) -> None:
    """Its worker processes end with it, and what the loader and its dataset hold goes."""
    notebook.run(
        "import torch\n"
        "loader = torch.utils.data.DataLoader(\n"
        "    torch.utils.data.TensorDataset(make(8)), batch_size=2, num_workers=1,\n"
        "    persistent_workers=True)\n"
        "it = iter(loader)\n"
        "n = len(next(it))\n"
        "worker = it._workers[0].pid"
    )
    pid = notebook.ip.user_ns["worker"]
    began = {each.pid for each in multiprocessing.active_children()}

    report = notebook.release("it", "loader")

    assert pid in began
    assert pid not in {each.pid for each in multiprocessing.active_children()}
    assert (report.stopped, report.remains) == (None, ())
    assert tracker.count_bytes() == 0
