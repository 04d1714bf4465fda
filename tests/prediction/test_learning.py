"""Learning from recorded runs what operators allocate inside."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from benchmarks.fit.calibration import lstm, unet
from gpumemwidget.prediction.allocator.allocator import CachingAllocator
from gpumemwidget.prediction.dry.dry_run import carry_out
from gpumemwidget.prediction.operations import DryRun, Operation, StorageUse
from gpumemwidget.prediction.simulation import Simulation, simulate
from gpumemwidget.prediction.workspaces.learning import RequestHistory, learn, read_requests
from gpumemwidget.prediction.workspaces.planner import MeasuredWorkspaces, WorkspacePlanner
from gpumemwidget.prediction.workspaces.plans import H200, GpuFacts, Step
from gpumemwidget.prediction.workspaces.rules import plan_operation
from tests.prediction.operators import operation, read_operators, tensor
from tests.prediction.recorded import GIB, MIB, make_events, read_run

BUILDERS = {"lstm": lstm, "unet": unet}
#: A GPU on which the rules are wrong about what the recorded one did.
SMALL = replace(H200, n_multiprocessors=20, threads_per_multiprocessor=1024)

# -- Recorded models -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def carry_out_model() -> Callable[[str], DryRun]:
    """Return the first three steps of a recorded model, carried out dry."""
    known: dict[str, DryRun] = {}

    def get(name: str) -> DryRun:
        if name not in known:
            torch.manual_seed(0)
            step, args = BUILDERS[name]("cpu")
            known[name] = carry_out(step, args, {}, steps=3)
        return known[name]

    return get


def read_step(name: str, number: int) -> RequestHistory:
    """Return the requests of a recorded step, numbered from 0."""
    run = read_run(name)
    ends = [run["built"], *(step["end"] for step in run["steps"])]
    return read_requests(make_events(run["events"][ends[number] : ends[number + 1]]))


def list_step(run: DryRun, number: int) -> tuple[Operation, ...]:
    ends = (0, *run.step_ends)
    return run.operations[ends[number] : ends[number + 1]]


def simulate_model(name: str, run: DryRun, planner: WorkspacePlanner) -> Simulation:
    """Play a dry run from the state of the allocator in which the recorded model was built."""
    recorded = read_run(name)
    allocator = CachingAllocator(140 * GIB)
    allocator.addresses_fall = True
    blocks = []
    for event in recorded["events"][: recorded["built"]]:
        if event > 0:
            blocks.append(allocator.allocate(event))
        else:
            allocator.free(blocks[event])
    living = defaultdict(list)
    for block in allocator.active_blocks.values():
        living[-(-block.requested_bytes // 512)].append(block)
    standing = {}
    for use in run.initial:
        if use.n_bytes:
            standing[use.storage] = living[-(-use.n_bytes // 512)].pop(0)
    return simulate(run, allocator, list(map(planner.plan, run.operations)), standing=standing)


def list_peaks(name: str, run: DryRun, planner: WorkspacePlanner) -> list[tuple[int, int]]:
    """Return the peaks of allocated and reserved that each step is predicted to have."""
    steps = simulate_model(name, run, planner).steps
    return [(step.allocated_bytes, step.reserved_bytes) for step in steps]


def read_peaks(name: str) -> list[tuple[int, int]]:
    """Return the peaks of allocated and reserved that each step had."""
    steps = read_run(name)["steps"]
    return [(step["allocated_peak_bytes"], step["reserved_peak_bytes"]) for step in steps]


@pytest.mark.parametrize("gpu", [H200, SMALL], ids=["estimates", "wrong rules"])
@pytest.mark.parametrize("name", BUILDERS)
def test_what_was_recorded_is_predicted_exactly(
    name: str, gpu: GpuFacts, carry_out_model: Callable[[str], DryRun]
) -> None:
    """One recorded step is enough for the peaks of all; the rules alone miss the UNet's."""
    run, table = carry_out_model(name), MeasuredWorkspaces()

    n_learned = learn(list_step(run, 1), read_step(name, 1), gpu, table)

    assert n_learned == len(table) > 0
    assert list_peaks(name, run, WorkspacePlanner(gpu, table)) == read_peaks(name)
    is_met_by_rules = list_peaks(name, run, WorkspacePlanner(gpu)) == read_peaks(name)
    assert is_met_by_rules == (name == "lstm")


@pytest.mark.parametrize("name", BUILDERS)
def test_a_recording_may_have_more_than_the_dry_run(
    name: str, carry_out_model: Callable[[str], DryRun]
) -> None:
    """The first step also made the optimizer's state, which stands when its cell is predicted."""
    run, table = carry_out_model(name), MeasuredWorkspaces()

    learn(list_step(run, 1), read_step(name, 0), H200, table)

    assert list_peaks(name, run, WorkspacePlanner(H200, table)) == read_peaks(name)


def test_nothing_is_learned_from_another_run(carry_out_model: Callable[[str], DryRun]) -> None:
    """Too few of the outputs were requested."""
    table = MeasuredWorkspaces()

    assert learn(list_step(carry_out_model("unet"), 1), read_step("lstm", 1), H200, table) == 0
    assert learn(list_step(carry_out_model("lstm"), 0), read_step("lstm", 1), H200, table) == 0
    assert len(table) == 0


# -- Single operators ------------------------------------------------------------------------------


def make_run(*calls: Operation) -> list[Operation]:
    """Return calls whose outputs have storages of their own, and stay."""
    run, n_storages = [], 0
    for call in calls:
        uses = [
            StorageUse(n_storages + place, use.n_bytes) for place, use in enumerate(call.allocated)
        ]
        n_storages += len(uses)
        run.append(replace(call, allocated=tuple(uses)))
    return run


def find_learned(
    run: list[Operation], requests: list[int], gpu: GpuFacts = H200
) -> list[tuple[Step, ...] | None]:
    """Return what is learned of each operator from requests and frees."""
    table = MeasuredWorkspaces()
    learn(run, read_requests(make_events(requests)), gpu, table)
    return [table.find(call, gpu) for call in run]


#: Operators that no rule knows, and one that is known to allocate its output alone.
UNKNOWN = operation("aten::im2col", tensor("float32", 1000), allocated=(4000,))
OTHER = operation("aten::im2col", tensor("float32", 2000), allocated=(8000,))
ADD = operation("aten::add.Tensor", tensor("float32", 500), allocated=(2000,))
DOT = operation("aten::dot", tensor("float32", 8), tensor("float32", 8), allocated=(4,))
PRODUCT = operation(
    "aten::mm", tensor("float32", 8, 16), tensor("float32", 16, 32), allocated=(1024,)
)


def list_requests(steps: tuple[Step, ...]) -> list[int]:
    """Return the requests and frees of an operator, with all its temporaries freed at its end."""
    requests, living, n_requests = [], {}, 0
    for step in steps:
        if step.kind == "free":
            requests.append(living.pop(step.index) - n_requests)
        else:
            if step.kind == "temporary":
                living[step.index] = n_requests
            requests.append(step.n_bytes)
            n_requests += 1
    return [*requests, *(number - n_requests for number in living.values())]


def test_recorded_operators_are_learned_as_they_were() -> None:
    """All that no rule is sure of, each between two others; a few are too unlike their fakes."""
    n_learned, refused = 0, set()
    for recorded in read_operators():
        plan = plan_operation(recorded.operation, H200)
        if plan.at_least_bytes != plan.at_most_bytes and recorded.steps:
            run = make_run(ADD, recorded.operation, ADD)
            found = find_learned(run, [2000, *list_requests(recorded.steps), 2000])[1]
            if found is None:
                refused.add(recorded.operation.name)
            else:
                assert sort_frees(found) == sort_frees(recorded.steps)
                n_learned += 1

    assert n_learned > 550
    assert refused == {
        "aten::_cudnn_rnn_backward",
        "aten::_embedding_bag_backward",
        "aten::linalg_inv_ex",
    }


def sort_frees(steps: tuple[Step, ...]) -> list[Step]:
    """Return steps with neighbouring frees in the order of their temporaries."""
    groups = itertools.groupby(steps, lambda step: step.kind == "free")
    return [
        step
        for is_free, group in groups
        for step in (sorted(group, key=lambda step: step.index) if is_free else group)
    ]


def test_temporaries_have_their_order_and_their_frees() -> None:
    """One before the output, one after the first was freed, one that goes at the end."""
    run = make_run(ADD, UNKNOWN, ADD)

    found = find_learned(run, [2000, 111, 4000, -2, 222, 333, -1, -2, 2000])

    steps = (
        Step("temporary", 0, 111),
        Step("output", 0, 4000),
        Step("free", 0, 0),
        Step("temporary", 1, 222),
        Step("temporary", 2, 333),
    )
    assert found == [None, steps, None]


def test_a_copy_as_large_as_the_output_is_told_by_its_life() -> None:
    """The output lives until the dry run frees it, the copy not as long."""
    run = make_run(UNKNOWN, *[ADD] * 5, OTHER)
    run[-1] = replace(run[-1], freed=(run[0].allocated[0].storage,))

    found = find_learned(run, [4000, 4000, -2, *[2000] * 5, -6, 8000])

    assert found[0] == (Step("temporary", 0, 4000), Step("output", 0, 4000))


def test_an_operator_without_temporaries_is_learned_too() -> None:
    """Then its outputs alone are certain."""
    assert find_learned(make_run(UNKNOWN, ADD), [4000, 2000]) == [(Step("output", 0, 4000),), None]


def test_a_request_that_stays_is_no_temporary() -> None:
    """It is still there when the next operator allocates: nothing is learned of its neighbours."""
    assert find_learned(make_run(UNKNOWN, ADD), [4000, 111, 2000, -2]) == [None, None]


def test_what_cublas_keeps_is_no_temporary() -> None:
    """Its workspace stays, and the operators around it are learned all the same."""
    run = make_run(PRODUCT, UNKNOWN)

    assert find_learned(run, [1024, 32 * MIB, 4000]) == [None, (Step("output", 0, 4000),)]


@pytest.mark.parametrize("product", [PRODUCT, DOT], ids=["with a rule", "without a rule"])
def test_what_each_product_takes_is_not_learned(product: Operation) -> None:
    """PyTorch 2.15 frees cuBLAS's workspace after each product, and it is planned already."""
    gpu = replace(H200, torch_version=(2, 15))
    n_bytes = product.allocated[0].n_bytes
    requests = [n_bytes, 32 * MIB, -1, 4000, 111, -1]

    product_steps, steps = find_learned(make_run(product, UNKNOWN), requests, gpu)

    assert product_steps in (None, (Step("output", 0, n_bytes),))
    assert steps == (Step("output", 0, 4000), Step("temporary", 0, 111))


def test_an_output_of_another_size_is_not_learned() -> None:
    """A size may depend on values, which a dry run does not have; the rest is learned."""
    run = make_run(UNKNOWN, *[ADD] * 20, OTHER)

    found = find_learned(run, [3000, -1, *[2000] * 20, 8000, 111, -1])

    assert found[0] is None
    assert found[-1] == (Step("output", 0, 8000), Step("temporary", 0, 111))


def test_a_long_row_of_unknown_requests_is_skipped() -> None:
    """As where a cell made an optimizer's state when it was recorded."""
    run = make_run(UNKNOWN, *[ADD] * 5)

    found = find_learned(run, [4000, 111, -1, 2000, *[3000] * 50, *[2000] * 4])

    assert found[0] == (Step("output", 0, 4000), Step("temporary", 0, 111))


def test_of_calls_that_differ_the_largest_counts() -> None:
    """The library may choose another algorithm once it has measured."""
    run = make_run(UNKNOWN, UNKNOWN, UNKNOWN)

    found = find_learned(run, [4000, 111, -1, 4000, 333, -1, 4000, 222, -1])

    assert found[0] == (Step("output", 0, 4000), Step("temporary", 0, 333))


def test_a_free_between_two_operators_tells_whose_a_temporary_is() -> None:
    """What comes after it is the second operator's."""
    run = make_run(ADD, UNKNOWN, OTHER, ADD)
    run[2] = replace(run[2], freed=(run[0].allocated[0].storage,))

    found = find_learned(run, [2000, 4000, 111, -1, -3, 222, 8000, -2, 2000])

    assert found[1] == (Step("output", 0, 4000), Step("temporary", 0, 111))
    assert found[2] == (Step("temporary", 0, 222), Step("output", 0, 8000))
