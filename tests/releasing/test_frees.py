"""What the plan promises is what goes: random object graphs, proved by torch's weak references."""

from __future__ import annotations

import functools
import gc
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.ownership.notebook import Notebook, Tracker

#: What no variable names, as a library's table would hold it.
_TABLE: dict[str, object] = {}


class _Holder:
    """A user's object."""

    kept: object = None


class _World:
    """Builds a random namespace; every storage in it is watched and none is held."""

    def __init__(self, notebook: Notebook, rng: random.Random) -> None:
        self.notebook = notebook
        self.rng = rng
        self.tracker = Tracker()
        self.size = 10

    def run(self, n_actions: int) -> None:
        actions: list[Callable[[], Any]] = [
            self.make_tensor,
            self.make_tensor,
            self.make_view,
            self.make_list,
            self.make_dict,
            self.make_object,
            self.make_closure,
            self.make_partial,
            self.make_generator,
            self.make_module,
            self.make_optimizer,
            self.make_loss,
            self.make_alias,
            self.make_cycle,
            self.display,
            self.fail,
            self.put_elsewhere,
            self.delete,
        ]
        for number in range(n_actions):
            made = self.rng.choice(actions)()
            if made is not None:
                self.notebook.put(**{f"v{number}": made})
            del made

    def names(self) -> list[str]:
        return self.notebook.shell.list_user_names()

    def pick(self, cls: type = object) -> Any:
        namespace = self.notebook.shell.user_ns
        values = [namespace[name] for name in self.names() if isinstance(namespace[name], cls)]
        return self.rng.choice(values) if values else self.make_tensor()

    def make_tensor(self) -> torch.Tensor:
        self.size += 1
        tensor = self.tracker.make(self.size)
        return tensor.requires_grad_() if self.rng.random() < 0.4 else tensor

    def make_view(self) -> torch.Tensor:
        tensor = self.pick(torch.Tensor)
        return tensor.detach()[: 1 + tensor.numel() // 2] if tensor.dim() else tensor.detach()

    def make_list(self) -> list[object]:
        return [self.pick() for _ in range(self.rng.randint(1, 3))]

    def make_dict(self) -> dict[str, object]:
        return {"a": self.pick(), "b": (self.pick(), self.make_tensor())}

    def make_object(self) -> object:
        if self.rng.random() < 0.5:
            return SimpleNamespace(a=self.pick())
        holder = _Holder()
        holder.kept = self.pick()
        return holder

    def make_closure(self) -> object:
        held = self.pick()
        return lambda: held

    def make_partial(self) -> object:
        return functools.partial(print, self.pick(), end=self.make_tensor())

    def make_generator(self) -> object:
        def generate(held: object) -> Any:
            yield 1
            yield held

        generator = generate(self.pick())
        next(generator)
        return generator

    def make_module(self) -> object:
        self.size += 1
        module = torch.nn.Linear(self.size, 1)
        for parameter in module.parameters():
            self.tracker.track(parameter)
        if self.rng.random() < 0.5:
            module(torch.ones(2, self.size)).sum().backward()
            for parameter in module.parameters():
                self.tracker.track(parameter.grad)
        return module

    def make_optimizer(self) -> object:
        module = self.pick(torch.nn.Module)
        if not isinstance(module, torch.nn.Module):
            return module
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        if all(parameter.grad is not None for parameter in module.parameters()):
            optimizer.step()
            for state in optimizer.state.values():
                self.tracker.track(state["momentum_buffer"])
        return optimizer

    def make_loss(self) -> object:
        tensor = self.pick(torch.Tensor)
        middle = self.tracker.track(tensor.reshape(-1).square())
        result = self.tracker.track(middle.exp())
        return self.tracker.track((result * middle).sum())

    def make_alias(self) -> object:
        return self.pick()

    def make_cycle(self) -> object:
        container = self.pick(list)
        if isinstance(container, list):
            container.append(self.rng.choice([container, self.pick()]))
            return None
        return container

    def display(self) -> None:
        self.notebook.ip.execution_count += 1
        self.notebook.ip.displayhook.update_user_ns(self.pick())

    def fail(self) -> None:
        def train(held: object) -> None:
            batch = self.make_tensor()
            raise ValueError(str(type(batch)))

        try:
            train(self.pick())
        except ValueError:
            self.notebook.ip.showtraceback()

    def put_elsewhere(self) -> None:
        _TABLE[str(len(_TABLE))] = self.pick()

    def delete(self) -> None:
        names = self.names()
        if names:
            del self.notebook.ip.user_ns[self.rng.choice(names)]


@pytest.mark.usefixtures("capsys")
@given(seed=st.integers(0, 2**32), n_actions=st.integers(1, 25), out=st.booleans())
@pytest.mark.saved_tensors
def test_what_the_plan_frees_is_what_goes(
    notebook: Notebook, seed: int, n_actions: int, out: bool
) -> None:
    """The bytes of the storages that expire are those of the plan, no more and no fewer."""
    _TABLE.clear()
    notebook.ip.reset(new_session=False)
    notebook.drop("last exception")
    rng = random.Random(seed)
    world = _World(notebook, rng)
    world.run(n_actions)
    gc.collect()
    rows = list(notebook.list_rows())
    chosen = rng.sample(rows, k=min(len(rows), rng.randint(1, 4)))
    if not chosen:
        return
    before = world.tracker.count_bytes()

    plan = notebook.plan(*chosen, out=out)
    single = {name: row.frees_bytes for name, row in notebook.list_rows().items()}
    report = notebook.release(*chosen, out=out)

    freed = before - world.tracker.count_bytes()
    assert report.stopped is None
    assert dict(plan.frees_bytes.by_device).get("host", 0) == freed
    if len(chosen) == 1 and not out:
        assert single[chosen[0]] == plan.frees_bytes


@pytest.fixture(autouse=True)
def _empty_table() -> Any:
    yield
    _TABLE.clear()
