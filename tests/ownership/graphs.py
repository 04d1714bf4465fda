"""Builds namespaces of any shape, step by step, of which every storage is watched and none held."""

from __future__ import annotations

import collections
import functools
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tests.ownership.notebook import Notebook, Tracker

#: The module whose table holds what no variable names. Each world has a new one: what was there
#: when the tests began is put aside, and a search of the process does not see it.
LIBRARY = "library_of_a_world"

#: How big the next tensor is: never twice the same, for a cycle through C++ outlives its names. The
#: account lists what no name holds on the host from 4096 bytes on.
_sizes = itertools.count(1_301, 2)


class Thing:
    """A user's object."""

    def method(self) -> None:
        """Something to be bound."""


class Slotted:
    """A user's object without a dictionary."""

    __slots__ = ("kept", "more", "never")


@dataclass
class Record:
    """A user's record."""

    kept: object
    more: object = None


@dataclass(frozen=True, slots=True)
class Frozen:
    """A user's record without a dictionary."""

    kept: object


class Pair(NamedTuple):
    """A user's named tuple."""

    first: object
    second: object


class Double(torch.autograd.Function):
    """A function of the user's own, with something saved and something kept."""

    tracker: Tracker

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        """Twice the tensor."""
        ctx.save_for_backward(Double.tracker.track(tensor.clone()))
        ctx.kept = {"a": Double.tracker.track(tensor.detach().clone())}
        return tensor * 2

    @staticmethod
    def backward(_ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        """The gradient of that."""
        return grads[0] * 2


def _is_hashable(target: object) -> bool:
    try:
        hash(target)
    except TypeError:
        # A record of a list has a hash that asks the list.
        return False
    return True


#: What is done, and which of what there is it is done with.
Action = tuple[str, int, int]


class World:
    """A notebook's namespace that grows by random actions.

    Args:
        notebook: where the names are bound.
    """

    def __init__(self, notebook: Notebook) -> None:
        library = types.ModuleType(LIBRARY)
        vars(library)["TABLE"] = {}
        sys.modules[LIBRARY] = library
        notebook.ip.reset(new_session=False)
        notebook.drop("last exception")
        self.notebook = notebook
        self.tracker = Tracker()
        Double.tracker = self.tracker
        self._number = 0

    @staticmethod
    def list_actions() -> list[str]:
        """Everything that can be done."""
        return [name.removeprefix("make_") for name in vars(World) if name.startswith("make_")]

    def run(self, actions: list[Action]) -> None:
        """Bind a name to what each action makes, unless it makes nothing."""
        for name, one, other in actions:
            make: Callable[[int, int], object] = getattr(self, f"make_{name}")
            made = make(one, other)
            if made is not None:
                self._number += 1
                self.notebook.put(**{f"v{self._number}": made})
            del made

    def names(self) -> list[str]:
        """The names that are bound."""
        return self.notebook.shell.list_user_names()

    def pick(self, which: int, *classes: type) -> Any:
        """Something that there is, of these classes; a new tensor where there is none."""
        namespace = self.notebook.shell.user_ns
        values = [namespace[name] for name in self.names()]
        found = [each for each in values if not classes or isinstance(each, classes)]
        return found[which % len(found)] if found else self.make_tensor(which, 0)

    def _pick_dense(self, which: int) -> Any:
        """A tensor to compute with."""
        namespace = self.notebook.shell.user_ns
        values = [namespace[name] for name in self.names()]
        tensors = [each for each in values if isinstance(each, torch.Tensor)]
        found = [each for each in tensors if each.layout is torch.strided]
        return found[which % len(found)] if found else self.make_tensor(which, 0)

    # -- tensors -----------------------------------------------------------------------------------

    def make_tensor(self, which: int, _other: int) -> Any:
        """One of its own storage."""
        tensor = self.tracker.make(next(_sizes))
        return tensor.requires_grad_() if which % 2 else tensor

    def make_parameter(self, _which: int, _other: int) -> Any:
        """A parameter of no module."""
        return torch.nn.Parameter(self.make_tensor(0, 0))

    def make_view(self, which: int, _other: int) -> Any:
        """A part of another, in its storage."""
        return self._pick_dense(which).detach().reshape(-1)[:7]

    def make_tracked_view(self, which: int, _other: int) -> Any:
        """A view that autograd knows of: it holds what it is a view of."""
        return self._pick_dense(which).reshape(-1)[:9].view(-1, 1)

    def make_attribute(self, which: int, other: int) -> None:
        """An attribute of a tensor."""
        tensor = self.pick(which, torch.Tensor)
        tensor.extra = [self.pick(other)]

    def make_gradient(self, which: int, _other: int) -> None:
        """A gradient, where a tensor can have one."""
        tensor = self.pick(which, torch.Tensor)
        if tensor.requires_grad and tensor.is_leaf and tensor.grad is None:
            tensor.grad = self.tracker.track(torch.ones_like(tensor))

    def make_hook(self, which: int, other: int) -> None:
        """A hook on a tensor, with something in its closure."""
        tensor = self.pick(which, torch.Tensor)
        held = self.pick(other)
        if tensor.requires_grad:
            tensor.register_hook(lambda grad: grad if held is not None else None)

    def make_sparse(self, _which: int, _other: int) -> Any:
        """A sparse tensor: indices and values."""
        size = next(_sizes)
        indices = self.tracker.track(torch.arange(size)[None])
        values = self.tracker.make(size)
        return torch.sparse_coo_tensor(indices, values, (size,), check_invariants=False)

    # -- autograd graphs ---------------------------------------------------------------------------

    def make_loss(self, which: int, _other: int) -> Any:
        """A result with a graph: what each step saves is watched."""
        middle = self.tracker.track(self._pick_dense(which).reshape(-1).square())
        result = self.tracker.track(middle.exp())
        return self.tracker.track((result * middle).sum())

    def make_sum(self, which: int, other: int) -> Any:
        """``total = total + loss``."""
        one, two = self._pick_dense(which), self._pick_dense(other)
        return self.tracker.track(one.sum() + two.exp().sum().detach() + two.sum())

    def make_custom(self, which: int, _other: int) -> Any:
        """The result of a function of the user's own."""
        tensor = self._pick_dense(which)
        return self.tracker.track(Double.apply(tensor))

    def make_backward(self, which: int, _other: int) -> None:
        """Gradients of a loss of its own, whose graph is gone then."""
        tensor = self._pick_dense(which)
        if tensor.requires_grad and tensor.is_leaf and tensor.grad is None:
            tensor.square().sum().backward()
            self.tracker.track(tensor.grad)

    # -- modules and what trains them --------------------------------------------------------------

    def make_module(self, which: int, _other: int) -> Any:
        """A layer, with gradients or without."""
        size = next(_sizes)
        module = torch.nn.Linear(size, 1)
        for parameter in module.parameters():
            self.tracker.track(parameter)
        module.register_buffer("mask", self.tracker.make(size))
        if which % 2:
            module(torch.ones(2, size)).sum().backward()
            for parameter in module.parameters():
                self.tracker.track(parameter.grad)
        return module

    def make_sequence(self, which: int, other: int) -> Any:
        """Modules in a module; one may be in several."""
        parts = [self.pick(each, torch.nn.Module) for each in (which, other)]
        modules = [part for part in parts if isinstance(part, torch.nn.Module)]
        return torch.nn.ModuleList(modules)

    def make_tie(self, which: int, other: int) -> None:
        """A weight that two modules share."""
        one, two = self.pick(which, torch.nn.Linear), self.pick(other, torch.nn.Linear)
        if isinstance(one, torch.nn.Linear) and isinstance(two, torch.nn.Linear):
            one.weight = two.weight

    def make_module_hook(self, which: int, other: int) -> None:
        """A forward hook that keeps something, as those who collect activations do."""
        module = self.pick(which, torch.nn.Module)
        if isinstance(module, torch.nn.Module):
            module.register_forward_hook(functools.partial(print, self.pick(other)))

    def make_state_dict(self, which: int, _other: int) -> Any:
        """Detached tensors over the storages of the parameters."""
        module = self.pick(which, torch.nn.Module)
        return module.state_dict() if isinstance(module, torch.nn.Module) else None

    def make_optimizer(self, which: int, other: int) -> Any:
        """An optimizer, with a state where there are gradients."""
        module = self.pick(which, torch.nn.Linear)
        if not isinstance(module, torch.nn.Linear):
            return None
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        optimizer.step()
        for state in optimizer.state.values():
            self.tracker.track(state["momentum_buffer"])
        if other % 2:
            return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        return optimizer

    # -- Python's own ------------------------------------------------------------------------------

    def make_container(self, which: int, other: int) -> Any:
        """A container of one kind or another."""
        one, two = self.pick(which), self.pick(other)
        makers: list[Callable[[], object]] = [
            lambda: [one, two],
            lambda: (one, two),
            lambda: {"a": one, "b": {"c": two}},
            lambda: {3: (one,), (1, "x"): two},
            lambda: {each for each in (one, two) if _is_hashable(each)},
            lambda: collections.deque([one, two], maxlen=3),
            lambda: collections.defaultdict(list, {"a": [one], "b": [two]}),
            lambda: collections.OrderedDict(a=one, b=two),
            lambda: collections.ChainMap({"a": one}, {"b": two}),
            lambda: Pair(one, two),
            lambda: types.MappingProxyType({"a": one, "b": two}),
            lambda: torch.nn.utils.rnn.PackedSequence(
                self.make_tensor(0, 0), self.tracker.track(torch.ones(1).int())
            ),
        ]
        return makers[(which + 3 * other) % len(makers)]()

    def make_object(self, which: int, other: int) -> Any:
        """An object of one kind or another."""
        one, two = self.pick(which), self.pick(other)
        thing, slotted = Thing(), Slotted()
        vars(thing).update(kept=one, more=[two])
        slotted.kept, slotted.more = one, (two,)
        local = type("Local", (), {"__module__": "__main__", "kept": one})
        choices = [
            thing,
            thing.method,
            slotted,
            Record(one, two),
            Frozen(one),
            types.SimpleNamespace(a=one, b=two),
            local,
            local(),
        ]
        return choices[(which + 3 * other) % len(choices)]

    def make_callable(self, which: int, other: int) -> Any:
        """A function with something in its closure, its defaults, its cache."""
        one, two = self.pick(which), self.pick(other)

        def closure() -> object:
            return one, two

        def default(value: object = one, *, more: object = two) -> object:
            return value, more

        @functools.lru_cache
        def cached(_number: int) -> object:
            return two

        cached(1)
        choices = [
            lambda: one,
            closure,
            default,
            functools.partial(print, one, end=two),
            cached,
            functools.partial(closure),
        ]
        return choices[(which + 3 * other) % len(choices)]

    def make_iterator(self, which: int, other: int) -> Any:
        """An iterator or generator that has more to give."""

        def generate(held: object) -> Iterator[object]:
            inner = [held]
            yield 1
            yield inner

        one, two = self.pick(which), self.pick(other)
        generator = generate(one)
        next(generator)
        choices = [
            generator,
            generate(two),
            iter([one, two]),
            map(type, [one]),
            zip([one], [two], strict=True),
            itertools.chain([one], [two]),
            enumerate([one]),
            itertools.cycle([two]),
        ]
        return choices[(which + 3 * other) % len(choices)]

    def make_alias(self, which: int, _other: int) -> Any:
        """A second name."""
        return self.pick(which)

    def make_cycle(self, which: int, other: int) -> None:
        """A container in itself, by way of another."""
        container = self.pick(which, list, dict, Thing, Record)
        inner = self.pick(other)
        if isinstance(container, list):
            container.append([container, inner])
        elif isinstance(container, dict):
            container["again"] = (container, inner)
        elif isinstance(container, Thing | Record):
            container.again = [container, inner]  # type: ignore[union-attr]

    # -- IPython and the rest of the process -------------------------------------------------------

    def make_output(self, which: int, _other: int) -> None:
        """A displayed value."""
        self.notebook.ip.execution_count += 1
        self.notebook.ip.displayhook.update_user_ns(self.pick(which))

    def make_exception(self, which: int, other: int) -> None:
        """A failed cell; its frames hold what they worked with."""

        def train(held: object) -> None:
            batch = self.make_tensor(0, 0)
            try:
                raise KeyError(str(type(batch)))
            except KeyError as exc:
                error = ValueError(str(type(held)))
                error.held = self.pick(other)  # type: ignore[attr-defined]
                raise error from exc

        try:
            train(self.pick(which))
        except ValueError:
            self.notebook.ip.showtraceback()

    def make_elsewhere(self, which: int, _other: int) -> None:
        """A table in an imported module holds it too."""
        table = vars(sys.modules[LIBRARY])["TABLE"]
        table[str(len(table))] = self.pick(which)

    def make_deletion(self, which: int, _other: int) -> None:
        """A name is deleted; what it held may be rubbish in a cycle now."""
        names = self.names()
        if names:
            del self.notebook.ip.user_ns[names[which % len(names)]]
