"""Find the path by which a person would reach an object, and what makes it let go.

Many paths lead to one storage. The best one, such as ``model.h[3].attn.weight``, is the shortest of
those that say what it is for: a parameter belongs to its module and not to the optimizer's list of
parameters, a tensor with a name to that name and not to the autograd graph that saved it. So
references have levels, and a path of a lower level comes before any of a higher one.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from types import TracebackType

from gpumemwidget.model.ownership import Fix, FixKind, MemoryKind, RootKind
from gpumemwidget.ownership.graph.kinds import Kind
from gpumemwidget.ownership.graph.objects import is_a, read_attribute
from gpumemwidget.ownership.graph.walk import Graph
from gpumemwidget.ownership.labels import Labels, PathStep, Role, StepKind, spell_steps

Steps = tuple[PathStep, ...]

_N_LEVELS = 24
_NO_PARENT = -1


@dataclass(frozen=True, slots=True)
class Root:
    """An object where paths begin."""

    place: int
    #: The name: ``model``, ``Out[7]``, ``last exception``.
    word: str
    kind: RootKind
    #: The name of the variable of ``contextvars`` that it is the value of.
    context_variable: str = ""
    #: The thread of a running function, with which ``word`` begins.
    thread: str = ""

    @property
    def steps(self) -> Steps:
        """The first steps of a path from here: the thread of a variable is a step of its own."""
        if self.context_variable:
            return (PathStep(StepKind.CONTEXT_VARIABLE, self.word, self.context_variable),)
        if self.thread:
            where = PathStep(StepKind.PART, self.word.removeprefix(self.thread))
            return (PathStep(StepKind.ROOT, self.thread), where)
        return (PathStep(StepKind.ROOT, self.word),)


class Paths:
    """The best path to each object that leads to memory; of a kind the better roots come first."""

    def __init__(self, graph: Graph, roots: Sequence[Root]) -> None:
        self._graph = graph
        self._leads = graph.flag_reaching_memory()
        self._parents: dict[int, int] = {}
        #: The root of each path, and where one leads through an autograd graph: a path may be long.
        self._begins: dict[int, int] = {}
        self._in_graphs: set[int] = set()
        self._levels: dict[int, int] = {}
        self._roots: dict[int, Root] = {}
        self._labels = Labels(graph)
        self._steps: dict[int, tuple[Steps, Role]] = {}
        self._find_special_places()
        self._search(roots)
        self._name_keys()

    def find_root(self, place: int) -> Root | None:
        """Return the root of the best path to an object; ``None`` if no path leads to it."""
        begin = self._begins.get(place)
        return None if begin is None else self._roots[begin]

    def list_steps(self, place: int) -> Steps:
        """Return the steps of the best path; ``()`` if no path leads there."""
        return self._read_steps(place)[0] if place in self._parents else ()

    def list_places(self, place: int) -> list[int]:
        """Return the objects of the best path, the last one first; ``[]`` without a path."""
        places = []
        while place in self._parents:
            places.append(place)
            place = self._parents[place]
        return places

    def rank(self, place: int) -> tuple[int, int]:
        """Return how good the best path to an object is: less is better."""
        return self._levels.get(place, _N_LEVELS), len(self.list_steps(place))

    def passes_graph(self, place: int) -> bool:
        """Return whether the best path leads through an autograd graph."""
        return place in self._in_graphs or self._graph.kinds[place] is Kind.NODE

    def passes(self, place: int, ways: Collection[int]) -> bool:
        """Return whether the best path to an object leads through one of the others."""
        while place != _NO_PARENT:
            if place in ways:
                return True
            place = self._parents.get(place, _NO_PARENT)
        return False

    def name_part(self, parent: int, child: int) -> Steps:
        """Return the best path to an object, and on to a part of it."""
        steps, role = self._read_steps(parent)
        step, _ = self._labels.name_edge(parent, role, child)
        return _join(steps, step)

    def list_links(self, parent: int, child: int) -> list[tuple[PathStep, int, int]]:
        """Return the steps from the root of an object to a part of it, each with its two places.

        A step to what its holder has under two names is ``FIXED``: to delete one leaves the other.
        """
        links = []
        role = Role()
        for holder, part in itertools.pairwise([*reversed(self.list_places(parent)), child]):
            step, role = self._labels.name_edge(holder, role, part)
            if step.kind is StepKind.PART and self._graph.edges[holder].count(part) > 1:
                step = PathStep(StepKind.FIXED, step.text)
            if step.kind is not StepKind.SAME:
                links.append((step, holder, part))
        return links

    def find_part(self, start: int, word: str, text: str) -> tuple[int, int] | None:
        """Return the places of the object to which a spelled path leads, and of its holder.

        Nothing of it is evaluated: each step is compared with the text.
        """
        pending = [(_NO_PARENT, start, Role(), text.removeprefix(word))]
        met: set[tuple[int, str]] = set()
        while pending:
            parent, place, role, rest = pending.pop()
            if not rest:
                return place, parent
            for part in dict.fromkeys(self._graph.edges[place]):
                if not self._leads[part]:
                    continue
                step, part_role = self._labels.name_edge(place, role, part)
                # A class's attributes are asked for as the instance's own.
                typed = "" if step.kind is StepKind.CLASS else step.text
                left = rest.removeprefix(typed)
                if (not typed or left != rest) and (part, left) not in met:
                    met.add((part, left))
                    pending.append((place, part, part_role, left))
        return None

    # -- the search --------------------------------------------------------------------------------

    def _find_special_places(self) -> None:
        """Find what decides on levels: the tables of modules and optimizers, and exceptions."""
        graph = self._graph
        reader = graph.reader
        self.modules, self.optimizers, self.parameters, exceptions, tracebacks = (
            graph.list_instances(
                *(reader.module_type, reader.optimizer_type, reader.parameter_type),
                *(BaseException, TracebackType),
            )
        )
        self._exceptions, self._tracebacks = set(exceptions), set(tracebacks)
        self._module_tables = self._find_tables(self.modules, "_parameters", "_buffers")
        #: The lists and tables that an optimizer has of what it trains.
        self._optimizers_lists = self._find_tables(self.optimizers, "param_groups", "state")
        self._module_tensors = {
            part
            for table in self._module_tables
            for part in graph.edges[table]
            if graph.kinds[part] is Kind.TENSOR
        }

    def _find_tables(self, places: Sequence[int], *names: str) -> set[int]:
        objects, find = self._graph.objects, self._graph.find
        found = {find(read_attribute(objects[place], name)) for place in places for name in names}
        return {place for place in found if place is not None}

    def _search(self, roots: Sequence[Root]) -> None:
        # Well-known roots come first.
        root_levels: dict[RootKind, int] = {
            "name": 0,
            "out": 1,
            "exception": 2,
            "thread": 4,
            "module": 5,
            "nowhere": 7,
        }
        levels: list[deque[tuple[int, int]]] = [deque() for _ in range(_N_LEVELS)]
        for root in roots:
            if self._leads[root.place]:
                self._roots.setdefault(root.place, root)
                level = root_levels[root.kind]
                # A parameter is better named by its module, and an exception by itself than by the
                # debugger that has looked at it.
                if root.place in self._module_tensors or (
                    root.kind == "exception"
                    and not (root.place in self._exceptions or root.place in self._tracebacks)
                ):
                    level += 1
                levels[level].append((root.place, _NO_PARENT))
        graph, parents, in_graphs = self._graph, self._parents, self._in_graphs
        for level, pending in enumerate(levels):
            while pending:
                place, parent = pending.popleft()
                if place in parents:
                    continue
                parents[place] = parent
                self._levels[place] = level
                self._begins[place] = self._begins.get(parent, place)
                if parent in in_graphs or graph.kinds[place] is Kind.NODE:
                    in_graphs.add(place)
                if graph.edges[place]:
                    self._add_parts(place, level, levels)

    def _add_parts(self, place: int, level: int, levels: Sequence[deque[tuple[int, int]]]) -> None:
        leads, parents, tensors = self._leads, self._parents, self._module_tensors
        kinds = self._graph.kinds
        kind = kinds[place]
        own = level
        # Ways through code and through what an optimizer trains are second choice, and those into
        # an autograd graph the last.
        if kind is Kind.FUNCTION or kind is Kind.FRAME or kind is Kind.CLASS:
            own += 1
        elif place in self._optimizers_lists:
            own += 2
        in_table = place in self._module_tables
        is_exception = place in self._exceptions
        last = len(levels) - 1
        for part in self._graph.edges[place]:
            if not leads[part] or part in parents:
                continue
            cost = own
            part_kind = kinds[part]
            if part_kind is Kind.NODE and kind is not Kind.NODE:
                cost += 10
            elif part in tensors and not in_table:
                cost += 1
            elif part_kind is Kind.STORAGE:
                cost += self._weigh_tensor(place, part)
            elif is_exception and part in self._exceptions:
                # An exception's own traceback is nearer than that of the one it was raised in.
                cost += 1
            levels[cost if cost < last else last].append((part, place))

    def _weigh_tensor(self, place: int, storage: int) -> int:
        """Return how far a tensor is from being the storage's own, if several look at it."""
        graph = self._graph
        others = graph.tensors_on.get(storage, ())
        if len(others) < 2 or graph.kinds[place] is not Kind.TENSOR:
            return 0
        cost = 0
        if place not in self._module_tensors and not self._module_tensors.isdisjoint(others):
            cost += 1
        with graph.reader.quiet():
            # A view shows a part of what another tensor holds.
            return cost + graph.reader.is_view(graph.objects[place])

    # -- the words ---------------------------------------------------------------------------------

    def _read_steps(self, place: int) -> tuple[Steps, Role]:
        chain: list[int] = []
        ancestor = place
        while ancestor not in self._steps and ancestor != _NO_PARENT:
            chain.append(ancestor)
            ancestor = self._parents[ancestor]
        for ancestor in reversed(chain):
            parent = self._parents[ancestor]
            if parent == _NO_PARENT:
                self._steps[ancestor] = (self._roots[ancestor].steps, Role())
                continue
            steps, role = self._steps[parent]
            step, part_role = self._labels.name_edge(parent, role, ancestor)
            self._steps[ancestor] = (_join(steps, step), part_role)
        return self._steps[place]

    def _name_keys(self) -> None:
        """Name the parameters under which optimizers keep their state."""
        graph = self._graph
        for optimizer in self.optimizers:
            state = read_attribute(graph.objects[optimizer], "state")
            for key in list(dict.keys(state)) if is_a(state, dict) else ():
                place = graph.find(key)
                # Through its tables there is no better path.
                if place in self._parents and not self.passes(place, self._optimizers_lists):
                    self._labels.key_names[place] = spell_steps(self._read_steps(place)[0])


def _join(steps: Steps, step: PathStep) -> Steps:
    """Return the path with one more step, unless it says nothing; no place is unknown twice."""
    is_unnamed_again = step.kind is StepKind.UNNAMED and steps[-1].kind is step.kind
    if step.kind is StepKind.SAME or is_unnamed_again:
        return steps
    # Longer ones lose their middle: of a list of ten thousand links nobody reads the last one's.
    if len(steps) == 64:
        return (*steps[:-2], PathStep(StepKind.PART, "…"), step)
    return (*steps, step)


# -- what makes a path let go --------------------------------------------------------------------


def find_fix(root: RootKind, steps: tuple[PathStep, ...], *, kind: MemoryKind | None = None) -> Fix:
    """Return what a person does so that a path no longer holds memory of this kind."""
    begin = steps[0]
    by_memory: dict[MemoryKind | None, FixKind] = {
        "cuBLAS workspace": FixKind.RELEASE_CUBLAS,
        "CUDA-graph pool": FixKind.DELETE_CUDA_GRAPH,
        "compile cache": FixKind.RESET_COMPILER,
    }
    fixed = by_memory.get(kind)
    if fixed is None and begin.kind is StepKind.CONTEXT_VARIABLE:
        return Fix(FixKind.SET_CONTEXT_VARIABLE, begin.name)
    if fixed is None and root in ("exception", "thread"):
        fixed = FixKind.END_FUNCTION if root == "thread" else FixKind.RELEASE_EXCEPTIONS
    if fixed is not None:
        return Fix(fixed)
    if root == "nowhere":
        fixes = {StepKind.RUBBISH: FixKind.COLLECT, StepKind.LENDER: FixKind.DELETE_LENDER}
        return Fix(fixes.get(begin.kind, FixKind.END_UNSEEN))
    if root == "out":
        return Fix(FixKind.RELEASE_DISPLAYED, begin.text)
    # The notebook may not have imported the module.
    module = begin.text.rpartition(".")[0] if root == "module" else ""
    if module.startswith("ipywidgets."):
        # Its registry keeps each widget, and all that its callbacks refer to, until it is closed.
        return Fix(FixKind.CLOSE_WIDGETS, "ipywidgets.Widget", "ipywidgets")
    cut, number = find_cut(steps)
    if module and cut is FixKind.RELEASE_ROW:
        cut = FixKind.DELETE
    return Fix(cut, spell_steps(steps[:number]), module)


def find_cut(steps: Steps, *, drops_graphs: bool = False) -> tuple[FixKind, int]:
    """Return what cuts a path from a variable, and how many of its steps are typed for that.

    With ``drops_graphs`` it drops the tensor whose autograd graph the path leads through.
    """
    # Steps whose holder decides, not what it leads to.
    by_step = {
        StepKind.GRAPH: FixKind.DROP_GRAPH,
        StepKind.CACHE: FixKind.CLEAR_CACHE,
        StepKind.FRAME: FixKind.CLOSE,
    }
    for number, step in enumerate(steps):
        if step.kind is StepKind.GRAPH and drops_graphs:
            steps = steps[:number]
            break
        if step.kind in by_step:
            return by_step[step.kind], number
        if step.kind in (StepKind.WITHIN, StepKind.TRACEBACK):
            # A frame keeps its variables as long as the exception is kept.
            steps = steps[:number]
            break
    # A part that its whole can't let go of, or that has no name, goes with the whole.
    while steps[-1].kind in (StepKind.FIXED, StepKind.UNNAMED, StepKind.CLASS) and len(steps) > 1:
        steps = steps[:-1]
    if len(steps) == 1:
        return FixKind.RELEASE_ROW, 1
    is_gradient = steps[-1].kind is StepKind.GRADIENT
    return FixKind.CLEAR_GRADIENT if is_gradient else FixKind.DELETE, len(steps)
