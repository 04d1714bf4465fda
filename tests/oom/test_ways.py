"""The ways out of an OOM: those that apply, and what each gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import pytest
import torch

from gpumemwidget.model.devices import HOST, Block, DeviceInfo, DeviceState, ProcessUse, Segment
from gpumemwidget.model.ooms import OomEvent, Remedy, RemedyKind
from gpumemwidget.model.ownership import DeviceAccount, DeviceBytes, MemoryKind, Owned
from gpumemwidget.oom.remedies import find_remedies
from gpumemwidget.ownership.account import take_running_account
from gpumemwidget.ownership.graph import torch_reader
from gpumemwidget.ownership.graph.walk import Graph
from gpumemwidget.report.oom import word_remedy
from tests.ownership.notebook import Notebook, Tracker
from tests.report.oom_examples import make_event

MIB = 1 << 20
N = MIB // 4

NOTHING = OomEvent(DeviceState(DeviceInfo("cuda:0", "", None), None, None))
ON_HOST = OomEvent(DeviceState(DeviceInfo(HOST, "", None), None, None))


def find(
    notebook: Notebook,
    event: OomEvent = ON_HOST,
    *,
    at_oom: DeviceAccount | None = None,
    mentions: Collection[str] = (),
) -> dict[str, Remedy]:
    """The ways by the words of their kinds."""
    return {way.kind.value: way for way in find_all(notebook, event, at_oom, mentions)}


def find_all(
    notebook: Notebook,
    event: OomEvent = ON_HOST,
    at_oom: DeviceAccount | None = None,
    mentions: Collection[str] = (),
) -> tuple[Remedy, ...]:
    """The ways in their order, for an OOM in which nobody owned anything if nothing is given."""
    _, ways = find_remedies(
        notebook.shell,
        notebook.hardware,
        event,
        at_oom or DeviceAccount(event.device, None, ()),
        mentions=mentions,
        budget_s=10,
    )
    return ways


def find_names(notebook: Notebook, event: OomEvent = ON_HOST) -> list[Remedy]:
    """The sets of names that are offered."""
    return [way for way in find_all(notebook, event) if way.kind is RemedyKind.NAMES]


def own(kind: MemoryKind, n_bytes: int, root: str = "name") -> Owned:
    return Owned("cuda:0", n_bytes, kind, ("x",), root)  # type: ignore[arg-type]


def _list_big(device: DeviceAccount) -> list[tuple[str, str, int]]:
    """The lines of tensors of 1 MiB and more."""
    return [
        (each.owner, each.kind, each.n_bytes)
        for each in device.owned
        if each.kind != "other" and each.n_bytes >= MIB
    ]


def test_both_at_the_end_in_one_walk(notebook: Notebook) -> None:
    """Who has what and the ways out are the same as of a walk each."""
    notebook.run(
        "import torch\nmodel = torch.nn.Linear(1024, 1024)\nunused = [torch.ones(2 * 262144)]\n"
        "def step():\n    h = model(torch.ones(1024, 1024))\n    h.exp().sum().backward()\n"
        "    y = model(h)\n    raise ValueError\nstep()"
    )
    words = frozenset({"model", "step"})

    taken, ways = find_remedies(
        notebook.shell, notebook.hardware, ON_HOST, None, mentions=words, budget_s=60
    )
    alone = take_running_account(notebook.shell, notebook.hardware, HOST, budget_s=60)
    at_oom = next(each for each in alone.devices if each.device == HOST)

    assert {"last exception", "gradients", "names", "smaller batch"} <= {
        way.kind.value for way in ways
    }
    assert taken is not None
    (device,) = (each for each in taken.devices if each.device == HOST)
    assert _list_big(device) == _list_big(at_oom)
    assert taken.is_complete
    # IPython's formatter of tracebacks holds the last one beyond this test.
    notebook.release(exceptions=True)


# -- What can be released --------------------------------------------------------------------------


def test_in_blocks(notebook: Notebook, tracker: Tracker, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device what goes is the allocator's blocks, each once, whatever lies in them."""
    first, second = tracker.make(2 * N), tracker.make(2 * N)
    blocks = [
        Block(each.data_ptr(), 3 * MIB, 2 * MIB, "active_allocated") for each in (first, second)
    ]
    segments = [
        Segment("cuda:0", block.address, 3 * MIB, False, (0, 0), (block,)) for block in blocks
    ]
    monkeypatch.setattr(torch_reader, "_name_device", lambda _device: "cuda:0")
    monkeypatch.setattr(notebook.hardware, "read_segments", lambda: tuple(segments))
    notebook.put(one=first, view=first[5:], two=second)
    del first, second

    with_blocks = find_names(notebook, NOTHING)
    # What sleeps has no memory behind it, as in vLLM's sleep mode.
    own = ProcessUse(10, None, "own", 4 << 30)
    asleep = find_names(notebook, make_event(processes=(own,), requested_bytes=MIB))
    monkeypatch.setattr(notebook.hardware, "read_segments", tuple)
    without = find_names(notebook, NOTHING)

    assert [(way.names, way.gives_bytes, way.gives_is) for way in with_blocks] == [
        (("one", "view"), 3 * MIB, "exact"),
        (("two",), 3 * MIB, "exact"),
    ]
    assert [(way.gives_bytes, way.gives_is) for way in without] == [(2 * MIB, "at least")] * 2
    assert [(way.gives_bytes, way.gives_is) for way in asleep] == [(3 * MIB, "at most")] * 2


def test_displayed_values(notebook: Notebook) -> None:
    """What ``Out`` holds alone."""
    notebook.run("import torch\nx = torch.ones(262144)\ntorch.ones(2 * 262144)")
    notebook.run("x")

    way = find(notebook)["out"]

    assert (way.gives_bytes, word_remedy(way, NOTHING)[1]) == (2 * MIB, "%memrelease --out")


def test_names_that_the_cell_does_not_mention(notebook: Notebook, tracker: Tracker) -> None:
    """Each on its own, or with those that share its memory; those that it mentions are left out."""
    notebook.put(used=tracker.make(4 * N), alone=tracker.make(2 * N), small=tracker.make(10))
    shared = tracker.make(3 * N)
    notebook.put(one=shared, two=[shared])
    del shared

    names = [way for way in find_all(notebook, mentions={"used"}) if way.kind is RemedyKind.NAMES]

    assert [(way.names, way.gives_bytes) for way in names] == [
        (("one", "two"), 3 * MIB),
        (("alone",), 2 * MIB),
    ]
    assert word_remedy(names[0], NOTHING) == (
        "Release one and two together, not mentioned in this cell",
        "%memrelease one two",
    )
    assert notebook.release("one", "two").plan.frees_bytes == DeviceBytes(((HOST, 3 * MIB),))


@pytest.mark.usefixtures("movable")
def test_what_would_be_moved_is_not_offered(notebook: Notebook, tracker: Tracker) -> None:
    """To move what the cell works with off its device is no way out."""
    model = torch.nn.Linear(N, 1, bias=False)
    notebook.put(model=model, also=model)
    del model

    assert "names" not in find(notebook, mentions={"model"})


@pytest.mark.saved_tensors
def test_what_loses_training_state_comes_last_and_one_by_one(
    notebook: Notebook, tracker: Tracker
) -> None:
    """Losses that hold a graph and an optimizer are no one click; a trainer holds its model."""
    notebook.run(
        "import torch\n"
        "model = torch.nn.Linear(1024, 2048)\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "losses = [model(torch.ones(2000, 1024)).exp().sum() for _ in range(2)]\n"
        "losses[0].backward(); optimizer.step()\n"
        "class Trainer: pass\n"
        "trainer = Trainer(); trainer.parts = {'m': torch.nn.Linear(2048, 1024)}"
    )

    names = find_names(notebook)

    assert [(way.names, way.loses_training_state) for way in names] == [
        (("losses",), False),
        (("model", "optimizer", "losses"), True),
        (("optimizer",), True),
        (("trainer",), True),
    ]


def test_little_beside_what_was_asked_for(notebook: Notebook) -> None:
    """What gives less than a hundredth of a request is left out."""
    notebook.put(x=torch.ones(8 * N))

    found = [
        find(notebook, dataclasses.replace(ON_HOST, requested_bytes=asked))
        for asked in (700 * MIB, 900 * MIB, None)
    ]

    assert ["names" in ways for ways in found] == [True, False, True]


def test_too_little_time_for_the_last_exception(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the walk did not come to it, nobody knows what it gives."""
    notebook.run("raise ValueError")
    monkeypatch.setattr(Graph, "is_complete", False)

    way = find(notebook)["last exception"]

    assert (way.gives_bytes, way.gives_is) == (None, "about")


def test_an_earlier_exception(notebook: Notebook) -> None:
    """What it held when the OOM came may be left in cycles, and goes too."""
    notebook.run(
        "import torch\ndef fail():\n    h = torch.ones(2 * 262144)\n    raise ValueError\nfail()"
    )
    earlier = Owned(HOST, 3 * MIB, "tensor", ("last exception: fail(): h",), "exception")

    way = find(notebook, at_oom=DeviceAccount(HOST, 3 * MIB, (earlier,)))["last exception"]

    assert (way.gives_bytes, way.gives_is) == (2 * MIB, "at least")


# -- Settings --------------------------------------------------------------------------------------


def test_the_cache(notebook: Notebook) -> None:
    """Segments that nobody uses are given back by a call."""
    event = dataclasses.replace(NOTHING, cached_bytes=5 * MIB)

    way = find(notebook, event)["cached blocks"]

    assert (way.gives_bytes, way.gives_is, way.can_do) == (5 * MIB, "exact", True)
    assert word_remedy(way, event)[1] == "torch.cuda.empty_cache()"


FRAGMENTED = make_event(
    requested_bytes=8 * MIB,
    allocated_bytes=10 * MIB,
    reserved_bytes=20 * MIB,
    largest_free_block_bytes=4 * MIB,
    device_free_bytes=None,
)


def test_fragments(notebook: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where enough lies in pieces, unless segments may grow already."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)

    way = find(notebook, FRAGMENTED)["expandable segments"]
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")

    assert (way.gives_bytes, way.gives_is, way.can_do) == (10 * MIB, "at most", False)
    assert "expandable segments" not in find(notebook, FRAGMENTED)


@pytest.mark.parametrize(
    ("sizes", "gives_bytes"),
    [
        ([3 * MIB, 4 * MIB], 7 * MIB),
        ([], None),
        # The unknown may be all that is left.
        ([3 * MIB, None], 15 * MIB),
    ],
)
def test_other_processes(
    notebook: Notebook, sizes: list[int | None], gives_bytes: int | None
) -> None:
    """What the driver lists of them, or what may be theirs."""
    others = [ProcessUse(8 + n, f"python {n}", "other", size) for n, size in enumerate(sizes)]
    event = make_event(
        processes=(ProcessUse(7, "python", "own", 155 * MIB), *others),
        requested_bytes=8 * MIB,
        allocated_bytes=150 * MIB,
        reserved_bytes=150 * MIB,
        device_free_bytes=30 * MIB,
        device_total_bytes=200 * MIB,
    )

    way = find(notebook, event).get("other processes")
    unknown = find(
        notebook, dataclasses.replace(event, state=dataclasses.replace(event.state, processes=None))
    )

    assert (way and way.gives_bytes) == gives_bytes
    assert "other processes" not in unknown


def test_a_limit(notebook: Notebook) -> None:
    """It gives what is free on the device beyond what is left below the limit."""
    event = make_event(
        "cuda:1",
        reserved_bytes=20 * MIB,
        limit_bytes=30 * MIB,
        device_total_bytes=100 * MIB,
        device_free_bytes=60 * MIB,
    )

    way = find(notebook, event)["limit"]

    assert (way.gives_bytes, way.gives_is) == (50 * MIB, "at most")
    assert word_remedy(way, event)[1] == "%memlimit off --device cuda:1"


# -- What needs less -------------------------------------------------------------------------------


#: Graphs that other cells have left.
EARLIER = (
    own("saved for backward", 30 * MIB, "out"),
    dataclasses.replace(own("saved for backward", 30 * MIB), steps=("losses", "[0]")),
)


def test_training(notebook: Notebook) -> None:
    """What backward needs can be recomputed, and half the batch needs half of it."""
    owned = (
        own("saved for backward", 4 * MIB),
        own("saved for backward", 2 * MIB, "thread"),
        own("tensor", 2 * MIB, "thread"),
        own("gradient", 3 * MIB),
    )
    others = (own("parameter", 50 * MIB), own("tensor", 70 * MIB), *EARLIER)
    at_oom = DeviceAccount("cuda:0", None, (*owned, *others))

    ways = find(notebook, NOTHING, at_oom=at_oom, mentions={"x", "backward"})

    assert {kind: (way.gives_bytes, way.gives_is) for kind, way in ways.items()} == {
        "checkpointing": (6 * MIB, "at most"),
        "smaller batch": (4 * MIB, "about"),
        "gradients": (3 * MIB, "at most"),
    }
    assert all(not way.can_do for way in ways.values())


def test_what_no_backward_needs(notebook: Notebook) -> None:
    """Where nothing mentions backward, what is saved for it need not be."""
    at_oom = DeviceAccount(
        "cuda:0", None, (own("saved for backward", 6 * MIB, "nowhere"), *EARLIER)
    )

    ways = find(notebook, NOTHING, at_oom=at_oom, mentions={"model"})

    assert ways.keys() == {"no_grad", "smaller batch"}
    assert ways["no_grad"].gives_bytes == 6 * MIB
