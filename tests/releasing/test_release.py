"""The release, from plan to report, on the host."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
import torch
from IPython.utils.capture import capture_output

from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.backends.host import HostBackend
from gpumemwidget.errors import BackendError, BadInputError, UnknownNameError
from gpumemwidget.model.devices import Reading
from gpumemwidget.model.ownership import DeviceBytes
from gpumemwidget.model.releases import (
    Reason,
    ReasonKind,
    ReleaseRequest,
    ReleaseStay,
    Remnant,
    StepResult,
)
from gpumemwidget.releasing.release import execute_release
from gpumemwidget.report.release import describe_stays, report_plan, report_release, word_stop
from tests.ownership.notebook import Notebook, Tracker, refuse_to_clone
from tests.shell import open_loaded_shell

MIB = 1024**2


def _names(notebook: Notebook) -> dict[str, object]:
    return {name: notebook.ip.user_ns[name] for name in notebook.shell.list_user_names()}


def test_a_name_is_released_and_measured(notebook: Notebook, tracker: Tracker) -> None:
    """The steps run in their order, nothing is moved, and malloc counts what was planned."""
    notebook.run(f"x = make({16 * MIB})")
    gc.collect()  # Or what other tests have left is collected with it.

    plan = notebook.plan("x")
    report = notebook.release("x")

    assert plan.frees_bytes == DeviceBytes((("host", 64 * MIB),))
    assert (plan.moves, plan.drops, plan.host_needed_bytes) == ((), (), DeviceBytes())
    assert [(step.kind.value, step.status) for step in report.steps] == [
        ("move to CPU", "skipped"),
        ("set to None", "done"),
        ("drop IPython's references", "skipped"),
        ("gc.collect", "done"),
        ("empty_cache", "done"),
    ]
    assert dict(report.steps[1].allocated_freed_bytes)["host"] == pytest.approx(64 * MIB, abs=65536)
    assert dict(report.allocated_freed_bytes)["host"] == pytest.approx(64 * MIB, abs=MIB)
    assert (report.stopped, report.remains) == (None, ())
    assert tracker.count_bytes() == 0
    assert notebook.ip.user_ns["x"] is None


def test_what_others_hold_remains_and_they_are_named(notebook: Notebook, tracker: Tracker) -> None:
    """On the host nothing is moved: the plan names who keeps it, and how to drop that."""
    notebook.run("x = make(256)\nhistory = [x[:5]]")
    notebook.run("(x, 1)")

    report = notebook.release("x")

    assert report.plan.frees_bytes == DeviceBytes()
    kept = Reason(ReasonKind.SHARED, ("history", "Out[2]"))
    assert report.plan.stays == (ReleaseStay("x", "host", DeviceBytes((("host", 1024),)), kept),)
    assert describe_stays(report.plan.stays, is_done=False) == [
        "1.00 KiB of x on host will not be freed: history and Out[2] (--out drops it) also use it"
    ]
    # It is over: what the report says of it is no promise.
    text = " ".join(report_release(report).text.split())
    assert "1.00 KiB of x on host was not freed: history and Out[2]" in text
    assert "will not be freed" not in text
    assert tracker.count_bytes() == 1024
    assert notebook.ip.user_ns["x"] is None


def test_rows_of_ipythons_own(notebook: Notebook, tracker: Tracker) -> None:
    """A displayed value and the last exception are released by the names of their rows."""
    notebook.run("make(10)")
    notebook.run("make(20)")
    notebook.run("def train():\n    batch = make(30)\n    1 / 0\ntrain()")

    first = notebook.release("Out[1]")
    left = tracker.count_bytes()
    second = notebook.release("last exception")

    assert (first.plan.frees_bytes, left) == (DeviceBytes((("host", 40),)), 80 + 120)
    assert second.plan.frees_bytes == DeviceBytes((("host", 120),))
    assert "%debug has nothing to look at" in report_release(second).text
    assert tracker.count_bytes() == 80


def test_the_last_exception_of_a_running_cell(notebook: Notebook, tracker: Tracker) -> None:
    """A release from within a cell frees what the cell before left, without holding it itself."""
    notebook.run("def train():\n    batch = make(30)\n    1 / 0\ntrain()")
    notebook.put(release=lambda: notebook.release(exceptions=True) and None)

    notebook.run("release()")

    assert tracker.count_bytes() == 0


def test_keep_on_the_host_changes_nothing(notebook: Notebook, tracker: Tracker) -> None:
    """What is on the host already is not copied, and the name keeps it."""
    notebook.run("x = make(256)")
    value = notebook.ip.user_ns["x"]

    report = notebook.release("x", keep=True)

    assert report.plan.moves == ()
    assert [stay.reason for stay in report.plan.stays] == [Reason(ReasonKind.ON_HOST)]
    assert [step.status for step in report.steps[:3]] == ["skipped", "skipped", "skipped"]
    assert notebook.ip.user_ns["x"] is value


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("modle", UnknownNameError, "'modle' is not a variable: did you mean model?; nothing was"),
        ("Out[77]", UnknownNameError, "'Out[77]' is not a variable: did you mean Out[2]?"),
        *(
            (name, BadInputError, f"{name!r} is a module, a builtin or IPython's own: name")
            for name in ("print", "torch", "In")
        ),
        ("train", BadInputError, "'train' is a function or a class and holds no tensor memory"),
    ],
)
def test_what_is_no_memory_of_the_users_is_refused(
    notebook: Notebook, tracker: Tracker, name: str, error: type[Exception], message: str
) -> None:
    """One line says why and what to do, and nothing is changed, the good names neither."""
    notebook.run("import torch\nmodel = make(10)\ndef train(): pass\nclass Net: pass")
    notebook.run("make(3)")
    before = _names(notebook)

    with pytest.raises(error) as caught:
        notebook.plan("model", name)

    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
    assert _names(notebook) == before
    assert tracker.count_bytes() == 52


def test_names_that_hold_nothing_are_said(notebook: Notebook) -> None:
    """A second click finds ``None``, and a number holds no tensor memory."""
    notebook.run("import torch\nx = None\nn = 5")

    plan = notebook.plan("x", "n")

    assert plan.empty_names == ("x", "n")
    assert "No tensor memory was found in x and n" in report_plan(plan).text


@pytest.mark.usefixtures("movable")
def test_what_others_hold_is_moved_in_place(notebook: Notebook, tracker: Tracker) -> None:
    """A released model whose parameters an optimizer keeps: those move, its buffers just go."""
    notebook.put(track=tracker.track)
    notebook.run(
        "import torch\n"
        "model = torch.nn.Linear(10, 10, bias=False)\n"
        "model.register_buffer('mask', make(50))\n"
        "track(model.weight)\n"
        "opt = torch.optim.SGD(model.parameters(), lr=0.1)"
    )
    weight_id = id(notebook.ip.user_ns["model"].weight)

    report = notebook.release("model")

    (move,) = report.plan.moves
    assert (move.path, move.kind, move.n_bytes) == ("model", "module", 400)
    assert move.reason == Reason(ReasonKind.SHARED, ("opt",))
    assert report.plan.frees_bytes == DeviceBytes((("host", 600),))
    assert report.steps[0].result == StepResult(n_tensors=1, n_bytes=400)
    assert tracker.count_bytes() == 0
    assert id(notebook.ip.user_ns["opt"].param_groups[0]["params"][0]) == weight_id


@pytest.mark.usefixtures("movable", "tracker")
def test_host_memory_that_a_move_needs_is_a_lower_bound_after_a_cut_walk(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was not met in time may have to be moved too."""
    monkeypatch.setattr("gpumemwidget.releasing.plan.RELEASE_BUDGET_S", 0.0)
    notebook.run("items = [make(10), [[{}] for _ in range(50_000)]]")

    plan = notebook.plan("items", keep=True)
    monkeypatch.setattr(notebook.hardware, "available_host_bytes", lambda: 39)
    refused = notebook.plan("items", keep=True)

    assert plan.host_needed_bytes == DeviceBytes((("host", 40),), is_at_least=True)
    assert "Needs at least 40 B of host memory" in report_plan(plan).text
    words = word_stop(refused.refusal)
    assert "needs at least 40 B of host memory, and 39 B is available" in words


@pytest.mark.usefixtures("tracker")
def test_after_a_cut_walk_a_release_says_what_was_measured(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is still alive has exact bytes; rubbish is not promised, nor denied once it is freed."""
    monkeypatch.setattr("gpumemwidget.releasing.plan.RELEASE_BUDGET_S", 0.0)
    notebook.run(
        "keeper = [make(10)]\n"
        "x = keeper[0]\n"
        "class Ring: pass\n"
        "ring = Ring()\n"
        "ring.itself, ring.many, ring.tensor = ring, [[{}] for _ in range(50_000)], make(1 << 20)"
    )

    plan = report_plan(notebook.plan("x")).text
    kept = report_release(notebook.release("x")).text
    freed = report_release(notebook.release("ring")).text

    assert "gc.collect() frees" not in plan
    assert "at least 40 B of x on host will not be freed: keeper also uses it" in plan
    assert "\n40 B of x on host was not freed: keeper also uses it" in kept
    assert "MiB on host freed" in freed
    assert "No tensor memory" not in freed


@pytest.mark.usefixtures("movable")
def test_a_refused_plan_changes_nothing(
    notebook: Notebook, tracker: Tracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the host is too short for the moves no step is taken, and the report says why."""
    notebook.run("x = make(128)\nhistory = [x]")
    monkeypatch.setattr(notebook.hardware, "available_host_bytes", lambda: 100)

    plan = notebook.plan("x")
    report = notebook.release("x")

    assert plan.refusal == report.stopped
    assert word_stop(report.stopped) == (
        "The move to the CPU needs 512 B of host memory, and 100 B is available: release fewer "
        "names, or release what else holds them too. Nothing was changed."
    )
    assert {step.status for step in report.steps} == {"not reached"}
    assert tracker.count_bytes() == 512
    assert notebook.ip.user_ns["x"] is not None


@pytest.mark.usefixtures("movable")
def test_a_failed_move_leaves_the_names_alone(
    notebook: Notebook, tracker: Tracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The object whose move failed is as it was, those after it too, and nothing is dropped."""
    notebook.run("a = make(10)\nb = make(20)\nc = make(30)\nkept = [a, b, c]")
    refuse_to_clone(monkeypatch, n_bytes=80, make_error=lambda: RuntimeError("out of memory\nmore"))

    report = notebook.release("a", "b", "c")

    assert word_stop(report.stopped) == 'Failed at "move to CPU": b: RuntimeError: out of memory.'
    assert [step.status for step in report.steps] == ["failed", *["not reached"] * 4]
    assert tracker.count_bytes() == 80 + 120
    assert all(notebook.ip.user_ns[name] is not None for name in "abc")


@pytest.mark.usefixtures("movable")
def test_one_object_is_moved_whole_though_others_hold_its_parts(
    notebook: Notebook, tracker: Tracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts that different names share, and names that share a part: all of it is moved, or none.

    A shared parameter and tied weights stay one tensor.
    """
    notebook.put(track=tracker.track)
    notebook.run(
        "import torch\n"
        "model = torch.nn.ModuleList([torch.nn.Linear(5, 5, bias=False) for _ in range(3)])\n"
        "model[1].weight = model[0].weight\n"
        "twin = torch.nn.Sequential(model[0])\n"
        "big = torch.nn.Linear(10, 2, bias=False)\n"
        "model.append(big)\n"
        "ema = [model[2].weight]\n"
        "opt = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for p in model.parameters(): track(p)"
    )
    before = tracker.count_bytes()
    refuse_to_clone(monkeypatch, n_bytes=80, make_error=lambda: RuntimeError("out of memory\nmore"))

    report = notebook.release("model", "twin")
    model, twin = notebook.ip.user_ns["model"], notebook.ip.user_ns["twin"]

    assert (
        word_stop(report.stopped) == 'Failed at "move to CPU": model: RuntimeError: out of memory.'
    )
    assert len(report.plan.moves) == 3
    assert tracker.count_bytes() == before == 280
    assert model[1].weight is model[0].weight is twin[0].weight
    monkeypatch.undo()


@pytest.mark.usefixtures("movable")
def test_a_model_of_which_a_part_must_stay_stays(notebook: Notebook, tracker: Tracker) -> None:
    """Half a model on another device is broken; a list of tensors is not."""
    notebook.run(
        "import torch\n"
        "model = torch.nn.ModuleList([torch.nn.Linear(5, 5, bias=False) for _ in range(2)])\n"
        "opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)\n"
        "loss = (model[0].weight * model[0].weight).sum()\n"
        "items = [make(10), make(20).requires_grad_()]\n"
        "other = (items[1] * items[1]).sum()"
    )

    plan = notebook.plan("model", "opt", "items", keep=True)

    saved = "a computation saved it for backward; run backward() or drop its output"
    assert [(move.path, move.n_bytes) for move in plan.moves] == [("items", 40)]
    assert describe_stays(plan.stays, is_done=False) == [
        f"100 B of model on host will not be freed: {saved}",
        f"100 B of model on host will not be freed: what belongs to it can't be moved: {saved}",
        f"80 B of items on host will not be freed: {saved}",
    ]


def test_a_number_is_dropped_from_nowhere_else(notebook: Notebook) -> None:
    """``5`` is one object for all: what IPython shows of another ``5`` is not the name's."""
    notebook.run("import torch\nn = 5")
    notebook.run("2 + 3")

    report = notebook.release("n")

    assert report.plan.drops == ()
    assert notebook.ip.user_ns["Out"][2] == 5


class _Refusing(dict[str, Any]):
    """A namespace in which one name can't be set."""

    def __setitem__(self, name: str, value: object) -> None:
        if name == "b" and value is None:
            raise vars(self).get("error", ValueError("b is protected\nfor reasons"))
        super().__setitem__(name, value)


@pytest.fixture
def refusing(notebook: Notebook) -> Iterator[Notebook]:
    """A notebook whose name ``b`` can't be set to ``None``."""
    plain = notebook.ip.user_ns
    notebook.ip.user_ns = _Refusing(plain)
    yield notebook
    notebook.ip.user_ns = plain


def test_a_failing_step_stops_the_release(refusing: Notebook) -> None:
    """What was not reached is unchanged, and the report says where it stopped and why."""
    refusing.put(a=torch.ones(1), b=torch.ones(2), c=torch.ones(3))

    report = refusing.release("a", "b", "c")

    assert word_stop(report.stopped) == 'Failed at "set to None": b: ValueError: b is protected.'
    assert [step.status for step in report.steps] == [
        "skipped",
        "failed",
        "not reached",
        "not reached",
        "not reached",
    ]
    assert refusing.ip.user_ns["a"] is None
    assert refusing.ip.user_ns["c"] is not None


def test_what_an_object_saves_from_its_end_is_reported(
    notebook: Notebook, tracker: Tracker
) -> None:
    """``__del__`` puts the tensor aside: it was meant to go, did not, and the report says so."""
    notebook.put(kept=notebook.elsewhere)
    notebook.run(
        "class Sticky:\n"
        "    def __init__(self, t): self.t = t\n"
        "    def __del__(self): saved.append(self.t)\n"
        "saved = []\n"
        f"x = Sticky(make({2 * MIB}))"
    )

    report = notebook.release("x")
    notebook.run("saved.clear()")

    assert report.plan.frees_bytes == DeviceBytes((("host", 8 * MIB),))
    assert report.remains == (Remnant(8 * MIB, "host", ("saved[0]",)),)
    assert tracker.count_bytes() == 0


def test_the_plan_holds_no_memory(notebook: Notebook, tracker: Tracker) -> None:
    """A plan that stays on the screen is strings and numbers."""
    notebook.run("x = make(10)")

    plan = notebook.plan("x")
    del notebook.ip.user_ns["x"]
    gc.collect()

    assert plan.request.names == ("x",)
    assert tracker.count_bytes() == 0


@pytest.mark.saved_tensors
def test_a_cycle_through_a_graph_is_cut(notebook: Notebook, tracker: Tracker) -> None:
    """``backward(create_graph=True)``: gradient and parameter hold each other where no gc looks.

    A parameter that somebody else keeps has its gradient still; what a class says of ``grad`` is
    not asked.
    """
    notebook.put(track=tracker.track)
    notebook.run(
        "import torch\n"
        "class Liar(torch.Tensor):\n"
        "    @property\n"
        "    def grad(self): raise RuntimeError('asked')\n"
        "w = make(10).as_subclass(Liar).requires_grad_()\n"
        "(w ** 3).sum().backward(create_graph=True)\n"
        "track(torch._C.TensorBase.grad.__get__(w))\n"
        "kept = make(5).requires_grad_()\n"
        "(kept ** 3).sum().backward(create_graph=True)\n"
        "second = [kept]"
    )
    kept = notebook.ip.user_ns["kept"]

    plan = notebook.plan("w", "kept")
    report = notebook.release("w", "kept")

    assert dict(plan.frees_bytes.by_device)["host"] >= 80
    assert report.steps[3].result.n_tensors == 1
    assert tracker.count_bytes() == 20
    assert kept.grad.tolist() == [3.0] * 5
    kept.grad = None


@pytest.mark.saved_tensors
@pytest.mark.parametrize("attribute", ["x[:5]", "[x * 2]", "x.square().sum()"])
def test_a_tensor_that_holds_itself_by_an_attribute_goes(
    notebook: Notebook, tracker: Tracker, attribute: str
) -> None:
    """A view or a result of it that it keeps refers back to it in C++, where no gc looks."""
    notebook.run(
        f"x = make(1000).requires_grad_()\nx.kept = {attribute}\n"
        f"y = make(10).requires_grad_()\ny.kept = y[:5]\nelsewhere = [y]"
    )

    plan = notebook.plan("x", "y", keep=False)
    notebook.release("x")

    assert dict(plan.frees_bytes.by_device)["host"] >= 4000
    assert tracker.count_bytes() == 40
    assert notebook.ip.user_ns["y"].kept.shape == (5,)
    del notebook.ip.user_ns["y"].kept


@pytest.mark.parametrize("made", ["torch.empty(3, device='meta')", "torch.empty(0)"])
def test_a_tensor_without_memory_keeps_its_attributes(notebook: Notebook, made: str) -> None:
    """One on ``meta`` or without elements that holds itself is not released with other names."""
    notebook.run(f"import torch\nempty = {made}\nempty.kept = empty[:0]\nx = torch.ones(10)")

    notebook.release("x")

    assert notebook.ip.user_ns["empty"].kept.shape == (0,)
    del notebook.ip.user_ns["empty"].kept


@pytest.mark.usefixtures("movable")
def test_each_step_is_measured(notebook: Notebook, tracker: Tracker) -> None:
    """What is moved, what goes with the names, and what only then IPython lets go of."""
    n = 4 * MIB
    notebook.run(f"moved = make({n})\nkept = [moved]\nplain = make({2 * n})\nshown = make({3 * n})")
    notebook.run("shown")
    gc.collect()

    report = notebook.release("moved", "plain", "shown")

    assert dict(report.plan.frees_bytes.by_device)["host"] == 24 * n
    steps = {step.kind.value: dict(step.allocated_freed_bytes) for step in report.steps}
    for name, n_bytes in (("set to None", 8 * n), ("drop IPython's references", 12 * n)):
        assert steps[name]["host"] == pytest.approx(n_bytes, abs=65536)


@pytest.mark.usefixtures("movable")
@pytest.mark.parametrize(
    ("step", "target"),
    [
        ("move to CPU", "gpumemwidget.releasing.storages._copy_storage"),
        ("drop IPython's references", "gpumemwidget.releasing.release.find_references"),
        ("free cuBLAS workspaces", "gpumemwidget.backends.hardware.Hardware.release_workspaces"),
        ("gc.collect", "gpumemwidget.releasing.release._cut_cycles"),
        ("empty_cache", "gpumemwidget.backends.hardware.Hardware.empty_cache"),
    ],
)
def test_ctrl_c_in_any_step_is_told(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch, step: str, target: str
) -> None:
    """A real SIGINT: the report says where it stopped, and no later step was begun."""
    notebook.put(x=torch.ones(10))
    notebook.put(kept=[notebook.ip.user_ns["x"]])
    address = notebook.ip.user_ns["x"].data_ptr()

    def interrupt(*_args: object, **_options: object) -> None:
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(target, interrupt)
        report = notebook.release("x", cublas=True)

    assert word_stop(report.stopped) == f'Interrupted at "{step}".'
    names = [each.kind.value for each in report.steps]
    reached = {each.kind.value: each.status for each in report.steps}
    assert reached[step] == "failed"
    assert all(reached[name] == "not reached" for name in names[names.index(step) + 1 :])
    assert report.is_interrupted
    if step == "move to CPU":
        assert notebook.ip.user_ns["x"].data_ptr() == address


def test_what_was_freed_is_measured_where_mallocs_count_is_slow(notebook: Notebook) -> None:
    """The sampler's readings then leave the count out; those of a release don't."""
    seconds = count()
    hardware = Hardware([HostBackend(cpu_timer=lambda: float(next(seconds)))])
    notebook.put(x=torch.ones(1 << 20))
    hardware.read()
    [sampled] = hardware.read()

    report = execute_release(notebook.shell, hardware, ReleaseRequest(("x",)))

    hardware.close()
    assert sampled.allocated_bytes is None
    # The release takes some memory too, for what it reports.
    assert dict(report.allocated_freed_bytes)["host"] == pytest.approx(4 << 20, rel=0.05)


@pytest.mark.parametrize("number", range(1, 12, 3))
def test_ctrl_c_between_two_steps_is_told(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Also one that meets a measurement ends the release before its next step, with a report."""
    notebook.put(x=torch.ones(10))
    plan = notebook.plan("x")
    read = notebook.hardware.read_exact
    reads = iter(range(100))

    def interrupt() -> tuple[Reading, ...]:
        if next(reads) == number:
            signal.raise_signal(signal.SIGINT)
        return read()

    with monkeypatch.context() as patched:
        patched.setattr(notebook.hardware, "read_exact", interrupt)
        report = execute_release(notebook.shell, notebook.hardware, plan.request)

    n_reads = next(reads)
    statuses = [step.status for step in report.steps]
    assert report.steps[0].kind.value == "move to CPU"
    assert len(statuses) == 5
    assert report.is_interrupted == (number < n_reads)
    assert (report.stopped is None) == ("not reached" not in statuses and "failed" not in statuses)
    assert (notebook.ip.user_ns["x"] is None) == (statuses[1] == "done")


def test_workspaces_that_must_stay_do_not_stop_the_rest(
    notebook: Notebook, tracker: Tracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why they stay is said, and what else was asked for goes."""

    def refuse() -> bool:
        raise BackendError("cuBLAS's workspaces stay while a CUDA graph is alive")

    notebook.put(x=tracker.make(10))
    monkeypatch.setattr(notebook.hardware, "release_workspaces", refuse)

    report = notebook.release("x", cublas=True)

    assert report.steps[3].result.refusal == "cuBLAS's workspaces stay while a CUDA graph is alive"
    assert report.stopped is None
    assert tracker.count_bytes() == 0


def test_a_cache_that_is_given_back_is_in_the_summary() -> None:
    """It may be more than what the name held, and it is not the name's."""
    said = []

    with open_loaded_shell() as shell:
        shell.run_cell("gpus.free(gpus.allocate(6 << 30)); big = bytearray(1)")
        for _ in range(2):
            with capture_output() as captured:
                shell.run_cell("%memrelease big", store_history=True)
            said.append(str(captured.stdout))

    assert "empty_cache() gave back 6.00 GiB on cuda:0." in said[0].split("Details")[0]
    assert "empty_cache() gave" not in said[1]
