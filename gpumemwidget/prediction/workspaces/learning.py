"""Learn from a recorded run what operators allocate inside: the requests that no output explains.

The run is also carried out dry. What the dry run plans and what was requested come in the same
order, so they are aligned by their sizes, and by how many others come while each lives. A request
that is left over, and freed before a later operator allocates, is a temporary of its operator.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, NamedTuple

from gpumemwidget.model.traces import ACTIONS, TraceEvents
from gpumemwidget.prediction.operations import Operation
from gpumemwidget.prediction.workspaces.planner import (
    MeasuredWorkspaces,
    WorkspacePlanner,
    describe_signature,
)
from gpumemwidget.prediction.workspaces.plans import (
    GpuFacts,
    Step,
    WorkspacePlan,
    peak_of_temporaries,
)

#: Nothing is learned if fewer of the dry run's outputs were requested: the run went another way.
MIN_MATCHED_SHARE: Final = 0.9
_ALLOC, _FREE = ACTIONS.index("alloc"), ACTIONS.index("free_requested")
#: The ``freed_at`` of what was in use at the end.
_NEVER: Final = 1 << 62

#: Maximum number of alignments that are followed at once, the best ones.
_MAX_ALIGNMENTS: Final = 8
#: Maximum number of requests of the right size that are looked at for one output.
_MAX_LOOKS: Final = 32
#: Costs of an alignment: of an output without a request, of another planned allocation without a
#: request, of a left-over request that is freed soon, of one that stays; and the most that a row
#: of left-over requests costs.
_NO_OUTPUT, _NO_OTHER, _LEFT_SOON, _LEFT_LONG, _LEFT_MOST = 2.0, 0.5, 0.1, 1.0, 6.0
#: Number of requests within which a temporary is mostly freed.
_SOON: Final = 8


@dataclass(frozen=True, slots=True, eq=False)
class RequestHistory:
    """The requests that an allocator served during a run, in their order."""

    #: Type ``q``: the bytes of each, before rounding.
    sizes: array[int]
    #: Type ``q``: the number of requests made before it was freed.
    freed_at: array[int]


def read_requests(events: TraceEvents) -> RequestHistory:
    """Return the requests among an allocator's events."""
    sizes, freed_at = array("q"), array("q")
    living: dict[int, int] = {}
    columns = zip(events.actions, events.addresses, events.sizes, strict=True)
    for action, address, n_bytes in columns:
        if action == _ALLOC:
            living[address] = len(sizes)
            sizes.append(n_bytes)
            freed_at.append(_NEVER)
        elif action == _FREE and address in living:
            freed_at[living.pop(address)] = len(sizes)
    return RequestHistory(sizes, freed_at)


def learn(
    operations: Sequence[Operation],
    requests: RequestHistory,
    gpu: GpuFacts,
    measured: MeasuredWorkspaces,
) -> int:
    """Add what the operators of a recorded run allocated inside, but where a rule is sure of it.

    Of calls that differ, the one that takes most counts.

    Args:
        operations: the same run, carried out dry.
        requests: what was recorded of it.
        gpu: the GPU that it was recorded on.
        measured: the table to add to.

    Returns:
        The number of different operators that were added.
    """
    planner = WorkspacePlanner(gpu)
    plans = [planner.plan(operation) for operation in operations]
    expected = _list_expected(operations, plans, gpu)
    matches = _align(expected, requests)
    n_outputs = sum(each.step.kind == "output" for each in expected)
    n_matched = sum(expected[place].step.kind == "output" for place in matches)
    if n_matched < MIN_MATCHED_SHARE * n_outputs:
        return 0
    run = _AlignedRun(operations, plans, expected, matches, requests)
    found: dict[str, tuple[int, int, tuple[Step, ...]]] = {}
    for place, steps in run.list_measured():
        signature, n_bytes = describe_signature(operations[place]), peak_of_temporaries(steps)
        if signature not in found or n_bytes > found[signature][0]:
            found[signature] = (n_bytes, place, steps)
    for _, place, steps in found.values():
        measured.add(operations[place], gpu, steps)
    return len(found)


def _is_sure(plan: WorkspacePlan) -> bool:
    return plan.at_least_bytes == plan.at_most_bytes


# -- What should have been requested ---------------------------------------------------------------


class _Expected(NamedTuple):
    """An allocation that the dry run plans."""

    #: The place of its operator.
    operation: int
    step: Step
    #: The number of others that come while it lives, if it is an output.
    n_meanwhile: int
    #: The allocation is freed before the end of the run.
    is_freed: bool


def _list_expected(
    operations: Sequence[Operation], plans: Sequence[WorkspacePlan], gpu: GpuFacts
) -> list[_Expected]:
    """Return the outputs, what cuBLAS takes, and the temporaries that a rule is sure of."""
    found: list[_Expected] = []
    #: The outputs in use, by their storage.
    living: dict[int, int] = {}
    for place, (operation, plan) in enumerate(zip(operations, plans, strict=True)):
        for output in [living.pop(each) for each in operation.freed if each in living]:
            n_meanwhile = len(found) - output - 1
            found[output] = found[output]._replace(n_meanwhile=n_meanwhile, is_freed=True)
        for step in plan.steps:
            if step.kind == "output":
                living[operation.allocated[step.index].storage] = len(found)
                found.append(_Expected(place, step, 0, is_freed=False))
            elif step.kind == "kept":
                found.append(_Expected(place, step, 0, is_freed=False))
            elif step.kind == "temporary":
                is_cublas = gpu.has_workspace_per_product and step.n_bytes == gpu.cublas_bytes
                if is_cublas or _is_sure(plan):
                    found.append(_Expected(place, step, 0, is_freed=True))
    for output in living.values():
        found[output] = found[output]._replace(n_meanwhile=len(found) - output - 1)
    return found


def _align(expected: Sequence[_Expected], requests: RequestHistory) -> dict[int, int]:
    """Return the number of the request for each expected allocation that was found."""
    #: The requests by their bytes, and by whether they were freed.
    alike: dict[tuple[int, bool], list[int]] = {}
    #: The cost of leaving over all requests up to each.
    costs = [0.0]
    columns = zip(requests.sizes, requests.freed_at, strict=True)
    for number, (n_bytes, freed_at) in enumerate(columns):
        alike.setdefault((n_bytes, freed_at != _NEVER), []).append(number)
        costs.append(costs[-1] + (_LEFT_SOON if freed_at - number <= _SOON else _LEFT_LONG))

    def list_next(each: _Expected, first: int) -> Iterator[int]:
        """Yield the next request, from ``first`` on, that lives as long, and one that stays."""
        for is_freed in (True, False):
            if is_freed != each.is_freed and (each.is_freed or each.step.kind == "kept"):
                continue
            numbers = alike.get((each.step.n_bytes, is_freed), [])
            begin = bisect_left(numbers, first)
            for number in numbers[begin : begin + _MAX_LOOKS]:
                # A few operators make tensors in a dry run alone.
                n_meanwhile = requests.freed_at[number] - number - 1
                if 8 * n_meanwhile >= 7 * each.n_meanwhile - 8:
                    yield number
                    break

    # By the number of requests before it: the cost, and the pairs that were matched, last first.
    best: dict[int, tuple[float, Any]] = {0: (0.0, None)}
    for place, each in enumerate(expected):
        options: dict[int, tuple[float, Any]] = {}
        missing = _NO_OUTPUT if each.step.kind == "output" else _NO_OTHER
        for first, (cost, pairs) in best.items():
            if first not in options or options[first][0] > cost + missing:
                options[first] = (cost + missing, pairs)
            for number in list_next(each, first):
                total = cost + min(costs[number] - costs[first], _LEFT_MOST)
                if number + 1 not in options or options[number + 1][0] > total:
                    options[number + 1] = (total, (place, number, pairs))
        best = dict(sorted(options.items(), key=lambda item: item[1][0])[:_MAX_ALIGNMENTS])
    pairs = min(best.values(), key=lambda option: option[0])[1]
    matches: dict[int, int] = {}
    while pairs is not None:
        place, number, pairs = pairs
        matches[place] = number
    return matches


# -- What is left over -----------------------------------------------------------------------------


class _AlignedRun:
    """A dry run beside what was requested.

    Args:
        operations: the operators.
        plans: the plan of each.
        expected: what they plan.
        matches: the number of the request for each that was found.
        requests: what was requested.
    """

    def __init__(
        self,
        operations: Sequence[Operation],
        plans: Sequence[WorkspacePlan],
        expected: Sequence[_Expected],
        matches: dict[int, int],
        requests: RequestHistory,
    ) -> None:
        self._operations = operations
        self._plans = plans
        self._requests = requests
        #: The requests of each operator's outputs and temporaries, without those of sure rules.
        self._steps: list[dict[int, Step]] = [{} for _ in operations]
        #: Operators with an output that was not found, or with a request that was no temporary.
        self._unclear: set[int] = set()
        #: The request of each storage.
        self._storages: dict[int, int] = {}
        for place, (operation, step, *_) in enumerate(expected):
            if step.kind == "output" and place in matches:
                self._steps[operation][matches[place]] = step
                storage = operations[operation].allocated[step.index].storage
                self._storages[storage] = matches[place]
            elif step.kind == "output":
                self._unclear.add(operation)
        anchors = [(matches[place], expected[place].operation) for place in sorted(matches)]
        self._place_rest([*anchors, (len(requests.sizes), len(operations))])

    def list_measured(self) -> Iterator[tuple[int, tuple[Step, ...]]]:
        """Yield the place of each operator that no rule is sure of, with its steps."""
        for place, plan in enumerate(self._plans):
            if not _is_sure(plan) and place not in self._unclear:
                yield place, tuple(self._list_steps(self._steps[place]))

    def _list_steps(self, steps: dict[int, Step]) -> Iterator[Step]:
        """Yield an operator's steps in order, with frees between its requests."""
        living: dict[int, int] = {}
        for number in sorted(steps):
            for earlier in [each for each in living if self._requests.freed_at[each] <= number]:
                yield Step("free", living.pop(earlier), 0)
            step = steps[number]
            if step.kind == "temporary":
                living[number] = step.index
            yield step

    def _place_rest(self, anchors: Sequence[tuple[int, int]]) -> None:
        """Give the requests between those that were found to the operators between them."""
        #: For each operator the first request of a later one.
        follows = [len(self._requests.sizes)] * len(self._operations)
        for (_, begin), (number, end) in pairwise([(0, 0), *anchors]):
            follows[begin:end] = [number] * (end - begin)
        done, begin = 0, 0
        for number, end in anchors:
            if number > done:
                between = range(begin, min(end + 1, len(self._operations)))
                unsure = [place for place in between if not _is_sure(self._plans[place])]
                ends = self._find_ends(between, done) if unsure else []
                for rest in range(done, number):
                    self._place(rest, _narrow(unsure, ends, rest), follows)
            done, begin = number + 1, end

    def _find_ends(self, between: range, done: int) -> list[tuple[int, int]]:
        """Return before which operators something was freed, and how many requests came before."""
        ends = []
        for place in between[1:]:
            freed = [self._storages.get(storage) for storage in self._operations[place].freed]
            ats = [self._requests.freed_at[number] for number in freed if number is not None]
            if ats and max(ats) >= done:
                ends.append((place, max(ats)))
        return ends

    def _place(self, rest: int, places: Sequence[int], follows: Sequence[int]) -> None:
        """Give a request to the first of some operators whose end it does not outlive."""
        n_bytes, freed_at = self._requests.sizes[rest], self._requests.freed_at[rest]
        place = next((place for place in places if freed_at <= follows[place]), None)
        if place is None:
            self._unclear.update(places)
            return
        steps = self._steps[place]
        index = sum(step.kind == "temporary" for step in steps.values())
        steps[rest] = Step("temporary", index, n_bytes)


def _narrow(places: Sequence[int], ends: Sequence[tuple[int, int]], rest: int) -> Sequence[int]:
    """Return those of some operators that were running when a request was made.

    Args:
        places: the operators.
        ends: before which operators something was freed, and the number of requests before.
        rest: the number of the request.
    """
    low = max((place for place, at in ends if at <= rest), default=0)
    high = min((place for place, at in ends if at > rest), default=1 << 62)
    return [place for place in places if low <= place < high]
