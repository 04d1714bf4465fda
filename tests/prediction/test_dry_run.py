"""A step is carried out on tensors without memory, and nothing of the user's changes."""

from __future__ import annotations

import abc
import copy
import dataclasses
import functools
import importlib
import io
import logging
import os
import pprint
import random
import sqlite3
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy
import pytest
import torch
import traitlets
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gpumemwidget.allocator.caching import CachingAllocator
from gpumemwidget.errors import PredictionError
from gpumemwidget.prediction.dry import tracker
from gpumemwidget.prediction.dry.dry_run import carry_out
from gpumemwidget.prediction.dry.fakes import ShapeCache
from gpumemwidget.prediction.forecast import simulate
from gpumemwidget.prediction.operations import H200, DryRun, Operation, TensorMeta
from gpumemwidget.prediction.workspaces import plan_operation

FILE = str(Path(__file__).resolve())


since_2_11 = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11),
    reason="PyTorch chooses otherwise before 2.11",
)


def names(run: DryRun, *, but: tuple[str, ...] = ("detach", "lift_fresh")) -> list[str]:
    """Return the operators' names without ``aten::``, leaving out those that allocate nothing."""
    bare = [each.name.removeprefix("aten::") for each in run.operations]
    return [each for each in bare if each not in but]


def find(run: DryRun, name: str) -> list[Operation]:
    return [each for each in run.operations if each.name == f"aten::{name}"]


def replay(run: DryRun) -> tuple[int, list[int]]:
    """Return the bytes that are in use at the end, and the peak of each step."""
    living = {each.storage: each.n_bytes for each in run.initial}
    assert len(living) == len(run.initial)
    peaks = []
    start = 0
    for end in run.step_ends:
        peak = sum(living.values())
        for operation in run.operations[start:end]:
            for use in operation.allocated:
                assert use.storage not in living
                living[use.storage] = use.n_bytes
            peak = max(peak, sum(living.values()))
            for storage in operation.freed:
                del living[storage]
        peaks.append(peak)
        start = end
    return sum(living.values()), peaks


def list_lines(operation: Operation) -> list[tuple[str, int]]:
    return [(frame.filename, frame.line) for frame in operation.frames]


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()


def test_mlp_with_adamw() -> None:
    """Parameters, gradients and state are counted to the byte; the state comes in step 1."""
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    parameters = sum(each.numel() * 4 for each in model.parameters())
    x = torch.randn(32, 64)

    run = carry_out(fit, (model, optimizer, x))

    left, peaks = replay(run)
    assert sum(each.n_bytes for each in run.initial) == parameters + 32 * 64 * 4
    assert left == 4 * parameters + 32 * 64 * 4
    assert peaks[1] == peaks[2] > left
    assert len(find(run, "_foreach_addcdiv_.ScalarList")) == 3
    assert run.assumptions == ()


def test_storages_have_roles() -> None:
    """Parameters, gradients, the optimizer's state and the batch are known by their paths."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    run = carry_out(fit, (model, optimizer, torch.randn(2, 4)), steps=1)

    roles = [(role.kind, role.path) for role in run.roles.values()]
    assert sorted(roles) == [
        ("gradient", "model.0.weight"),
        ("optimizer state", "model.0.weight"),
        ("optimizer state", "model.0.weight"),
        ("parameter", "model.0.weight"),
        ("tensor", "x"),
    ]
    assert run.addresses == {}


def test_phases_modules_and_lines_are_noted() -> None:
    """An operator has its phase, its module's path, and the user's line where one runs."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    run = carry_out(fit, (model, optimizer, torch.randn(2, 4)), steps=1)

    forward, backward = find(run, "addmm"), find(run, "mm")
    line = fit.__code__.co_firstlineno + 2
    assert [each.module for each in forward] == ["0", "1.0"]
    assert [list_lines(each) for each in forward] == [[(FILE, line)], [(FILE, line)]]
    assert {each.phase for each in forward} == {"forward"}
    assert [each.module for each in backward] == ["1.0", "1.0", "0"]
    assert {each.phase for each in backward} == {"backward"}
    assert [list_lines(each) for each in backward] == [[(FILE, line)]] * len(backward)
    (update,) = find(run, "_foreach_add_.List")
    assert (update.phase, list_lines(update)) == ("optimizer", [(FILE, line + 1)])
    assert forward[0].arguments[1].device == "cuda"  # type: ignore[union-attr]


def test_batch_norm_and_convolution_are_cast_by_autocast() -> None:
    """A convolution is computed in bfloat16; batch norm takes what that returns."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.MaxPool2d(2))

    def half(x: torch.Tensor) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            model(x).sum().backward()

    x = torch.randn(2, 3, 16, 16)
    run = carry_out(lambda: model(x).sum().backward(), steps=1)
    run_half = carry_out(half, (x,), steps=1)

    assert "native_batch_norm" in names(run)
    assert "native_batch_norm_backward" in names(run)
    assert "native_batch_norm" in names(run_half)
    assert "native_batch_norm_backward" in names(run_half)
    assert [each.results[0].dtype for each in find(run_half, "convolution")] == ["bfloat16"]


def test_a_bias_is_added_in_place_where_a_product_cannot_add_it() -> None:
    """As with plain tensors: PyTorch would add it out of place to a subclass of tensors."""
    layer = nn.Linear(8, 8)

    run = carry_out(lambda x: layer(x.transpose(0, 1)).sum().backward(), (torch.randn(2, 3, 8),))

    assert "add_.Tensor" in names(run)
    assert not {"add.Tensor", "addmm"}.intersection(names(run))


@pytest.mark.parametrize(
    ("dtype", "masked", "capability", "kernel"),
    [
        (torch.float32, False, (9, 0), "_scaled_dot_product_efficient_attention"),
        (torch.float32, True, (9, 0), "_scaled_dot_product_efficient_attention"),
        pytest.param(
            *(torch.bfloat16, False, (9, 0), "_scaled_dot_product_cudnn_attention"),
            marks=since_2_11,
        ),
        pytest.param(
            *(torch.bfloat16, True, (9, 0), "_scaled_dot_product_cudnn_attention"), marks=since_2_11
        ),
        (torch.bfloat16, False, (8, 0), "_scaled_dot_product_flash_attention"),
        (torch.bfloat16, True, (8, 0), "_scaled_dot_product_efficient_attention"),
        (torch.float64, False, (9, 0), "bmm"),
        (torch.float16, False, (7, 5), "_scaled_dot_product_efficient_attention"),
        (torch.bfloat16, False, (7, 5), "bmm"),
    ],
)
def test_attention_takes_the_kernel_of_the_device(
    dtype: torch.dtype, masked: bool, capability: tuple[int, int], kernel: str
) -> None:
    """The kernel follows from the dtype, the mask and the device's generation."""
    q = torch.randn(2, 4, 16, 32, dtype=dtype, requires_grad=True)
    mask = torch.ones(16, 16, dtype=torch.bool) if masked else None

    def attend() -> None:
        nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask).sum().backward()

    assert kernel in names(carry_out(attend, steps=1, capability=capability))


@pytest.mark.parametrize(("make", "n_kept"), [(nn.LSTM, 11), (nn.GRU, 13), (nn.RNN, 3)])
def test_recurrent_networks_are_cudnns(make: Callable[..., nn.Module], n_kept: int) -> None:
    """A recurrent network is one operator, and the gradients of its weights share a buffer."""
    model = make(8, 16, num_layers=2, batch_first=True)

    run = carry_out(lambda x: model(x)[0].sum().backward(), (torch.randn(4, 6, 8),), steps=1)

    (forward,) = find(run, "_cudnn_rnn")
    (backward,) = find(run, "_cudnn_rnn_backward")
    assert forward.results[0].shape == (4, 6, 16)
    assert forward.results[0].stride == (16, 4 * 16, 1)
    assert forward.allocated[-1].n_bytes == 4 * 6 * 16 * n_kept * 4 + 256
    n_weights = sum(each.numel() for each in model.parameters())
    assert backward.allocated[-1].n_bytes == n_weights * 4


def test_recurrent_networks_are_cast_by_autocast() -> None:
    """The weights are copied into one buffer in half precision; their gradients are cast back."""
    model = nn.LSTM(8, 16, batch_first=True)

    def step(x: torch.Tensor) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            y = model(x)[0]
        assert y.dtype == torch.float16
        y.float().sum().backward()
        assert model.weight_hh_l0.grad.dtype == torch.float32

    run = carry_out(step, (torch.randn(2, 4, 8),), steps=1)

    n_bytes = 2 * sum(each.numel() for each in model.parameters())
    zeros = [use for each in find(run, "zeros") for use in each.allocated]
    (buffer,) = [use.storage for use in zeros if use.n_bytes == n_bytes]
    ends = {number: each.phase for each in run.operations for number in each.freed}
    assert ends[buffer] == "backward"
    assert len(find(run, "_cudnn_rnn_backward")) == 1


@pytest.mark.parametrize("make", [nn.LSTMCell, nn.GRUCell])
def test_cells_of_recurrent_networks_are_fused(make: Callable[..., nn.Module]) -> None:
    """As on the device; what backward needs is one tensor."""
    cell = make(8, 16)

    def step(x: torch.Tensor) -> None:
        result = cell(x)
        (result[0] if isinstance(result, tuple) else result).sum().backward()

    run = carry_out(step, (torch.randn(4, 8),), steps=1)

    n_gates = {nn.LSTMCell: 4, nn.GRUCell: 5}[make]
    (forward,) = [each for each in run.operations if "_thnn_fused" in each.name][:1]
    (backward,) = [each for each in run.operations if "_cell_backward" in each.name]
    assert forward.allocated[-1].n_bytes == 4 * n_gates * 16 * 4
    assert forward.allocated[-1].storage in [
        each.storage for each in backward.arguments if isinstance(each, TensorMeta)
    ]


def test_tied_weights_are_one() -> None:
    """A weight that two modules share is counted once, and has one gradient."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(100, 16)
            self.head = nn.Linear(16, 100, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(self.embed(ids))
            return out

    model = Tied()
    ids = torch.zeros(2, 4, dtype=torch.int64)

    run = carry_out(fit, (model, torch.optim.SGD(model.parameters(), 0.1), ids), steps=2)

    assert sorted(each.n_bytes for each in run.initial) == [64, 6400]
    assert replay(run)[0] == 2 * 6400 + 64


def test_gradients_of_before_are_copied() -> None:
    """A gradient of before is there in the first step, and is added to."""
    weight = torch.ones(256, requires_grad=True)
    weight.sum().backward()

    def accumulate() -> None:
        (weight * 2).sum().backward()

    run = carry_out(accumulate, steps=2)

    assert [each.n_bytes for each in run.initial] == [1024, 1024]
    assert replay(run)[0] == 2048
    assert weight.grad is not None
    assert weight.grad.tolist() == [1.0] * 256


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_computes_again(reentrant: bool) -> None:
    """What is checkpointed runs twice, the second time in backward, in the same types."""
    layer = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def step(x: torch.Tensor) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            y = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant)
        y.sum().backward()

    run = carry_out(step, (torch.randn(4, 8, requires_grad=True),), steps=1)

    products = find(run, "addmm")
    assert [each.phase for each in products] == ["forward", "backward"]
    assert {each.results[0].dtype for each in products} == {"bfloat16"}


def test_autocast_keeps_cast_weights_until_it_ends() -> None:
    """A weight that is used twice is cast once, and the cast is freed after the context."""
    layer = nn.Linear(64, 64, bias=False)

    def step(x: torch.Tensor) -> None:
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            layer(layer(x))

    def train(x: torch.Tensor) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            out = layer(layer(x)).float().sum()
        out.backward()

    run = carry_out(train, (torch.randn(2, 64),), steps=1)

    casts = [each for each in find(run, "_to_copy") if each.phase == "forward"]
    assert [each.allocated[0].n_bytes for each in casts] == [64 * 64 * 2, 2 * 64 * 2, 2 * 64 * 4]
    left = replay(carry_out(step, (torch.randn(2, 64),), steps=1))[0]
    assert left == 64 * 64 * 4 + 2 * 64 * 4


def test_grad_scaler_steps() -> None:
    """A scaler finds no infinity, so the optimizer steps, and nothing is assumed."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x: torch.Tensor) -> None:
        scaler = torch.amp.GradScaler("cuda")
        with torch.autocast("cuda", torch.float16):
            loss = model(x).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    run = carry_out(step, (torch.randn(4, 8),), steps=1)

    assert "_amp_foreach_non_finite_check_and_unscale_" in names(run)
    assert any(each.phase == "optimizer" for each in run.operations)
    assert ["not to overflow" in each for each in run.assumptions] == [True]


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_inference_with_a_cache(context: Callable[[], Any]) -> None:
    """Without gradients activations go at once; a cache that grows stays for the call."""
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    layer = nn.Linear(16, 16)

    def generate(x: torch.Tensor) -> torch.Tensor:
        with context():
            cache = x.new_zeros(2, 0, 16)
            for _ in range(3):
                cache = torch.cat([cache, layer(model(x))], 1)
        return cache

    run = carry_out(generate, (torch.randn(2, 4, 16),), steps=1)

    assert [each.results[0].shape[1] for each in find(run, "cat")] == [4, 8, 12]
    assert replay(run)[0] == sum(each.n_bytes for each in run.initial)


@pytest.mark.parametrize("trains", [True, False])
def test_a_step_that_leaves_nothing_runs_once(trains: bool) -> None:
    """All its runs are noted, the same as if each were carried out."""
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    # Modules that are of no file are not copied.
    counter: Any = types.ModuleType("counter")
    counter.n_calls = 0

    def step(x: torch.Tensor) -> torch.Tensor:
        counter.n_calls += 1
        with torch.set_grad_enabled(trains):
            result: torch.Tensor = model(x)
        if trains:
            result.sum().backward()
        return result

    run = carry_out(step, (torch.randn(32, 64),), steps=3)

    alike = [
        (each.name, each.phase, [use.n_bytes for use in each.allocated])
        for each in find(run, "addmm")
    ]
    left, peaks = replay(run)
    assert counter.n_calls == (3 if trains else 1)
    assert alike == alike[:2] * 3
    assert len(run.step_ends) == 3
    if not trains:
        weights = sum(each.n_bytes for each in run.initial)
        assert peaks == [weights + 2 * 32 * 256 * 4] * 3
        assert left == weights


def test_devices_are_redirected() -> None:
    """Code that moves to the device, or makes tensors there, runs as if it were there."""
    seen: list[Any] = []

    def step(x: torch.Tensor) -> None:
        x = x.cuda()
        y = torch.zeros(4, device=x.device) + torch.ones(4, device="cuda") + x.to("cuda:0")
        seen.append((x.is_cuda, x.device.type, x.cpu().device.type, torch.zeros(2).is_cuda))
        assert (y.is_cuda, y.cpu().is_cuda, y.device.type) == (True, False, "cuda")
        assert (torch.zeros(2).is_cuda, torch.tensor(1.0, device="cuda").is_cuda) == (False, True)

    run = carry_out(step, (torch.randn(4),), steps=1)

    assert seen == []
    assert [each.results[0].device for each in find(run, "zeros")] == ["cuda", "cpu", "cpu"]
    assert not torch.cuda.is_initialized()


def test_one_hot_is_made_where_its_tensor_is() -> None:
    """As zeros with ones scattered into them, as on the device."""

    def step() -> None:
        classes = torch.zeros(6, dtype=torch.long, device="cuda")
        assert torch.nn.functional.one_hot(classes, 10).shape == (6, 10)

    run = carry_out(step, (), steps=1)

    zeros = [each.results[0] for each in find(run, "zeros")]
    assert [(each.shape, each.device) for each in zeros] == [((6,), "cuda"), ((6, 10), "cuda")]


# -- What depends on values ------------------------------------------------------------------------


def test_values_that_are_read_are_assumed() -> None:
    """A value that is read is an assumption, which names its line."""

    def step(x: torch.Tensor) -> None:
        loss = x.sum()
        if torch.isnan(loss).any():
            raise ValueError("never")
        assert f"{loss.item():.1f}" == f"{loss:.1f}" == "1.0"
        assert bool(loss > 0)
        assert x.argmax().tolist() == 0

    run = carry_out(step, (torch.randn(4, requires_grad=True),), steps=2)

    first = step.__code__.co_firstlineno
    assert [each.partition(":")[0] for each in run.assumptions] == [
        f"line {first + k} of {FILE}" for k in (2, 4, 5, 6)
    ]


def _keep_boxes(x: torch.Tensor) -> torch.Tensor:
    if not hasattr(torch.ops.torchvision, "nms"):
        LIBRARY.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    kept: torch.Tensor = torch.ops.torchvision.nms(x, x[:, 0], 0.5)
    return kept


LIBRARY = torch.library.Library("torchvision", "FRAGMENT")


@pytest.mark.parametrize(
    ("call", "shape"),
    [
        (lambda x: x[x > 0], (12,)),
        (lambda x: (x > 0).nonzero(), (12, 2)),
        (lambda x: torch.masked_select(x, x > 0), (12,)),
        (lambda x: x.unique(), (12,)),
        (lambda x: x[:, 0].repeat_interleave((x[:, 0] > 0).long()), (3,)),
        (lambda x: x.flatten().long().bincount(minlength=7), (7,)),
        (_keep_boxes, (3,)),
    ],
)
def test_sizes_that_depend_on_values_are_the_most(
    call: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, ...]
) -> None:
    """All entries are selected, all differ, and so on; that is an assumption."""

    def step(weight: torch.Tensor) -> None:
        assert call(weight * 2).shape == shape

    run = carry_out(step, (torch.randn(3, 4, requires_grad=True),), steps=1)

    assert len(run.assumptions) == 1


def test_what_follows_from_small_numbers_is_true() -> None:
    """Labels, masks and counters have values, and what is computed from them alone has too."""
    labels = torch.tensor([3, 1, 3, 0])

    def step(x: torch.Tensor, labels: torch.Tensor) -> None:
        if labels.max() > 3:
            raise ValueError("never")
        assert x[labels == 3].shape == (2, 5)
        assert torch.masked_select(x, (labels > 0)[:, None]).shape == (15,)
        assert labels.unique().tolist() == [0, 1, 3]
        assert labels.nonzero().shape == (3, 1)
        assert int(torch.empty(1).uniform_(7, 7.5)) == 7
        left = torch.full((2,), 3, device=x.device)
        while left.any():
            left[:] -= 1
        labels[0] = 9
        assert labels.tolist() == [9, 1, 3, 0]

    run = carry_out(step, (torch.randn(4, 5, requires_grad=True), labels), steps=1)

    assert run.assumptions == ()
    assert labels.tolist() == [3, 1, 3, 0]


def test_a_value_that_is_overwritten_is_unknown() -> None:
    """What gets numbers from a computation on the device loses its values, with its views."""

    def step(weight: torch.Tensor) -> None:
        numbers = torch.zeros(4, device="cuda")
        view, other = numbers[:2], numbers + 1
        numbers.copy_(weight)
        assert other.tolist() == [1.0] * 4
        assert view[0].item() == 1.0

    run = carry_out(step, (torch.zeros(4, requires_grad=True),), steps=1)

    assert [each.partition(": ")[2] for each in run.assumptions] == [
        "a value that is read from a tensor was taken to be 1.0"
    ]


def test_a_loop_that_waits_for_values_ends_by_its_counter() -> None:
    """A number is taken to differ from the one that would end a loop; the loop's limit holds."""
    layer = nn.Linear(8, 8)

    def generate(x: torch.Tensor) -> None:
        going = torch.ones(2, dtype=torch.int64, device=x.device)
        length = 0
        with torch.no_grad():
            is_over = torch.tensor(False)
            while not is_over:
                x, length = layer(x), length + 1
                is_last = torch.full((2,), length >= 5, dtype=torch.bool, device=x.device)
                going = going & ~(is_last | (x.argmax(1) == 3))
                is_over = going.max() == 0

    run = carry_out(generate, (torch.randn(2, 8),), steps=1)

    assert len(find(run, "addmm")) == 5
    assert ["taken to be False" in each for each in run.assumptions] == [True]


def test_packed_sequences_are_padded_again_and_go_backward() -> None:
    """Packing of unsorted sequences, padding and both backwards have the sizes of the lengths."""
    model = nn.LSTM(8, 16, batch_first=True)
    embedding = nn.Embedding(20, 8)
    lengths = torch.tensor([2, 5, 3])

    def step(words: torch.Tensor) -> None:
        packed = nn.utils.rnn.pack_padded_sequence(
            embedding(words), lengths, batch_first=True, enforce_sorted=False
        )
        padded, again = nn.utils.rnn.pad_packed_sequence(model(packed)[0], batch_first=True)
        assert padded.shape == (3, 5, 16)
        assert again.tolist() == [2, 5, 3]
        padded.sum().backward()

    words = torch.zeros(3, 7, dtype=torch.int64)
    run = carry_out(step, (words,), steps=1)

    assert run.assumptions == ()
    (forward,) = find(run, "_cudnn_rnn")
    assert forward.results[0].shape == (10, 16)
    # Gates and cell of all words.
    assert forward.allocated[-1].n_bytes == 10 * 5 * 16 * 4 + 256
    (backward,) = find(run, "embedding_dense_backward")
    assert backward.results[0].shape == (20, 8)
    assert embedding.weight.grad is None


@pytest.mark.parametrize(
    ("name", "select", "add"),
    [
        ("index_put", lambda x, k: x[k], lambda x, k, y: x.index_put((k,), y, accumulate=True)),
        ("index_add", lambda x, k: x.index_select(0, k), lambda x, k, y: x.index_add(0, k, y)),
    ],
)
def test_gradients_of_rows_are_added_up_in_place(
    name: str, select: Callable[..., Any], add: Callable[..., Any]
) -> None:
    """As with plain tensors; what the user adds to a copy takes the copy's memory."""
    rows = torch.randn(6, 4, requires_grad=True)
    numbers = torch.tensor([1, 1, 5])

    def step(total: torch.Tensor, added: torch.Tensor) -> None:
        select(rows, numbers).sum().backward()
        add(total, numbers, added)

    run = carry_out(step, (torch.zeros(6, 4), torch.ones(3, 4)), steps=1)

    of_autograd, of_user = find(run, name)
    total = of_autograd.arguments[0]
    assert isinstance(total, TensorMeta)
    assert (of_autograd.allocated, of_autograd.results[0].storage) == ((), total.storage)
    assert [use.n_bytes for use in of_user.allocated] == [6 * 4 * 4]


def test_values_are_read_as_arrays() -> None:
    """Known values are read as they are; others are zero, which is an assumption."""
    model = nn.Linear(4, 2)
    lengths = torch.tensor([3, 5])
    found: list[Any] = []

    def step(x: torch.Tensor) -> None:
        found[:] = [lengths.cpu().numpy(), numpy.asarray(model(x).detach().cpu())]
        assert found[0].tolist() == [3, 5]
        assert found[1].tolist() == [[0, 0]] * 3
        assert found[1].dtype == numpy.float32

    run = carry_out(step, (torch.randn(3, 4),), steps=1)

    assert found == []
    assert ["were taken to be 0" in each for each in run.assumptions] == [True]


def test_random_numbers_of_all_distributions_are_drawn() -> None:
    """Distributions without a fake kernel have the sizes of their parameters."""

    def step(x: torch.Tensor) -> None:
        beta = torch.distributions.Beta(x.exp(), x.exp()).rsample()
        assert beta.shape == torch.distributions.Poisson(x.exp()).sample().shape == (8, 4)
        beta.sum().backward()

    carry_out(step, (torch.randn(8, 4, requires_grad=True),), steps=1)


def test_ctc_keeps_the_longest_target_with_anomalies_looked_for() -> None:
    """CTC keeps two places for each sign of the longest target, and one more."""
    targets, lengths = torch.ones(2, 9, dtype=torch.int64), torch.tensor([4, 7])

    def step(scores: torch.Tensor) -> None:
        sizes = torch.full((2,), 12)
        with torch.autograd.detect_anomaly(check_nan=True):
            nn.functional.ctc_loss(scores.log_softmax(2), targets, sizes, lengths).backward()

    run = carry_out(step, (torch.randn(12, 2, 5, requires_grad=True),), steps=1)

    (forward,) = find(run, "_ctc_loss.Tensor")
    assert forward.allocated[1].n_bytes == 2 * 12 * (2 * 7 + 1) * 4
    assert find(run, "_ctc_loss_backward.Tensor")[0].phase == "backward"


# -- The cache -------------------------------------------------------------------------------------


class Block(nn.Module):
    """A convolution, batch norm, attention and a recurrent network, with views between."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.rnn = nn.GRU(8, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = self.norm(self.conv(x)).relu_().flatten(2).transpose(1, 2)
        first, second = self.attention(places, places, places)[0].chunk(2, 1)
        result: torch.Tensor = self.rnn(torch.cat([second, first.contiguous()], 1))[0][:, -1]
        return result


@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_cached_results_are_those_that_are_computed(
    context: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operators whose results are known by their shapes are noted as if each were computed."""
    model = Block()
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)

    def step(x: torch.Tensor) -> None:
        with context(), torch.autocast("cuda", torch.bfloat16):
            loss = model(x).square().mean()
        if loss.requires_grad:
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    x = torch.randn(2, 3, 4, 4)
    cached = carry_out(step, (x,), steps=2)
    monkeypatch.setattr(ShapeCache, "call", lambda *args: args[-1]())
    computed = carry_out(step, (x,), steps=2)

    assert cached == computed


def test_cached_results_have_an_address_and_the_default_type() -> None:
    """Both results of equal operators answer for their address; the default type may change."""

    def step(whole: torch.Tensor) -> None:
        halves = [whole / 2, whole / 2]
        torch.set_default_dtype(torch.float64)
        halves.append(whole / 2)
        assert [half.data_ptr() for half in halves] == [0, 0, 0]

    run = carry_out(step, (torch.arange(3),), steps=1)

    uses = [use for operation in run.operations for use in operation.allocated]
    assert [use.n_bytes for use in uses] == [12, 12, 24]


# -- Refusals --------------------------------------------------------------------------------------


def _read_numpy(x: torch.Tensor) -> None:
    x.numpy()


def _embed_sparsely(x: torch.Tensor) -> None:
    weight = torch.zeros(10, 4, device=x.device, requires_grad=True)
    nn.functional.embedding(x.long(), weight, sparse=True).sum().backward()


def _open_file(_: torch.Tensor) -> None:
    open("nothing", "w")  # noqa: PTH123, SIM115 - what is refused


LOADER = torch.utils.data.DataLoader([1.0, 2.0])
GENERATOR = (each for each in [1, 2])
STREAM = io.StringIO("text")
SPARSE = torch.eye(2).to_sparse()
REPLICAS = nn.DataParallel(nn.Linear(2, 2))


class Wordless(Exception):  # noqa: N818 - no error of ours
    """Its message raises."""

    def __str__(self) -> str:
        raise RuntimeError

    @classmethod
    def fail(cls) -> None:
        raise cls


class Hostile:
    """Answers no question, not even which class it is of."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


HOSTILE = Hostile()
BUILT_BEFORE = torch.ones(2, requires_grad=True).sum()
DEEP: list[Any] = functools.reduce(lambda inner, _: [inner], range(5000), [])
LBFGS = torch.optim.LBFGS([torch.ones(2, requires_grad=True)])


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (_read_numpy, "numpy"),
        (_open_file, "open"),
        (lambda _: next(iter(LOADER)), "`LOADER` is a DataLoader"),
        (lambda _: next(GENERATOR), "`GENERATOR` is a generator"),
        (lambda _: STREAM.read(), "`STREAM` is an open file"),
        (lambda x: x.undefined, "undefined"),
        (lambda x: SPARSE @ x, "`SPARSE` is a tensor of layout torch.sparse_coo"),
        (REPLICAS, r"is a DataParallel.*\.module"),
        (lambda _: globals()["SEEN"].append("lost"), "The step uses `SEEN`: it can't be followed"),
        (_embed_sparsely, "makes a tensor of layout torch.sparse_coo"),
        (lambda _: LBFGS.step(lambda: 0.0), "`LBFGS` is an LBFGS"),
        (lambda _: threading.Thread(target=print).start(), "starts a thread"),
        (lambda _: threading.Timer(0.0, print).start(), "starts a thread"),
        (lambda _: os.open("nothing", os.O_CREAT), "writes a file"),
        (lambda _: os.chdir("nowhere"), "changes the working folder"),
        (lambda _: sqlite3.connect("nothing"), "opens a database"),
        (lambda _: sys.exit(3), "SystemExit: 3"),
        (lambda _: Wordless.fail(), "Wordless"),
        (lambda _: BUILT_BEFORE.backward(), "Compute the loss in the step"),
        (lambda _: DEEP[0], "`DEEP` holds objects within objects"),
        (lambda _: HOSTILE, "`HOSTILE` is a Hostile, which can't be copied"),
        (lambda _: None, "uses no tensors"),
        (lambda _: torch.cuda.Stream(), "makes a CUDA stream"),
        (lambda _: torch.cuda.CUDAGraph(), "makes a CUDA graph"),
        (lambda _: torch.cuda.mem_get_info(), "torch.cuda.mem_get_info"),
    ],
)
def test_what_cannot_be_dry_is_refused_by_name(
    step: Callable[[torch.Tensor], object], words: str
) -> None:
    """The refusal is one line that names the cause."""
    with pytest.raises(PredictionError, match=words) as caught:
        carry_out(step, (torch.randn(2),))
    assert "\n" not in str(caught.value)
    assert (STREAM.tell(), SEEN) == (0, [])


def test_a_loop_that_waits_for_a_value_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a number of operators that memory has room for."""
    monkeypatch.setattr(tracker, "_MAX_OPERATORS", 512)

    def step(x: torch.Tensor) -> None:
        while x.sum() > 0:
            x = x - 1

    with pytest.raises(PredictionError, match="has called 512 operators"):
        carry_out(step, (torch.randn(5000, 20),))


def test_containers_that_hold_themselves_and_mocks_are_copied() -> None:
    ring: list[Any] = [torch.randn(2)]
    ring.append(ring)
    mock = MagicMock(spec=nn.Module)

    run = carry_out(lambda ring, _: ring[1][0] + 1, (ring, mock), steps=1)

    assert len(run.operations) == 1


def test_a_traced_module_is_copied() -> None:
    """Its class is made for it alone (torch.fx)."""
    layers = [nn.Linear(4, 4) for _ in range(200)]
    model = torch.fx.symbolic_trace(nn.Sequential(*layers, nn.ReLU()))

    run = carry_out(model, (torch.randn(2, 4),), steps=1)

    assert "aten::relu" in {each.name for each in run.operations}


def test_a_refusal_names_the_users_line() -> None:
    with pytest.raises(PredictionError) as caught:
        carry_out(_open_file, (torch.randn(2),))
    with pytest.raises(PredictionError) as other:
        carry_out(_read_numpy, (torch.randn(2),))

    lines = [each.__code__.co_firstlineno + 1 for each in (_open_file, _read_numpy)]
    assert str(caught.value).endswith(f" (line {lines[0]} of {FILE}).")
    refused = f"Line {lines[1]} of {FILE} can't be predicted: TypeError"
    assert str(other.value).startswith(refused)


def test_a_file_is_read(tmp_path: Path) -> None:
    """A step may read what it opens itself."""
    path = tmp_path / "item"
    path.write_text("3")

    def step(x: torch.Tensor) -> torch.Tensor:
        with open(path) as file:  # noqa: PTH123 - as users do
            return x.expand(int(file.read()), 2).clone()

    run = carry_out(step, (torch.randn(2),), steps=1)

    assert run.operations[-1].results[0].shape == (3, 2)


class Cube(torch.autograd.Function):
    """A function of the user's that keeps two tensors for backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        square = x * x
        ctx.save_for_backward(x, square)
        return square * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        _, square = ctx.saved_tensors
        return gradient * 3 * square


def test_a_function_of_autograds_that_the_user_wrote_keeps_what_it_saves() -> None:
    """Its operators are noted, and what it saves lives until backward has used it."""
    weight = torch.ones(1024, requires_grad=True)

    run = carry_out(lambda w: Cube.apply(w).sum().backward(), (weight,), steps=1)

    square, cube = (each.allocated[0].storage for each in find(run, "mul.Tensor")[:2])
    ends = {number: each.phase for each in run.operations for number in each.freed}
    assert (ends[square], ends[cube]) == ("backward", "forward")


def test_an_operator_of_an_extension_needs_a_fake() -> None:
    """With one it is noted; without, it is refused by its name."""
    double = torch.library.custom_op(
        "gpumemwidget_tests::double", _double, mutates_args=(), schema="(Tensor x) -> Tensor"
    )

    with pytest.raises(PredictionError, match=r"gpumemwidget_tests::double.*register_fake"):
        carry_out(double, (torch.ones(8),))
    double.register_fake(torch.empty_like)
    run = carry_out(double, (torch.ones(8),))

    assert run.operations[0].name.startswith("gpumemwidget_tests::double")


def _double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_a_failing_step_is_explained_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing of PyTorch's own about it is printed, and its log is as before afterwards."""
    with pytest.raises(PredictionError, match=r"RuntimeError: .*[^.]\. Take it out") as caught:
        carry_out(lambda x: x @ torch.ones(3, 3), (torch.ones(2, 2),))

    assert "\n" not in str(caught.value)
    assert capsys.readouterr().err == ""
    assert not logging.getLogger("torch._subclasses.fake_tensor").disabled


@pytest.mark.parametrize(
    "view",
    [
        torch.randn(1000, 8)[:4],
        torch.randn(8, 4).t(),
        torch.randn(4, 1).expand(4, 8),
        torch.randn(1000, 8)[7:11].requires_grad_(),
    ],
)
def test_a_view_on_the_cpu_is_moved_alone(view: torch.Tensor) -> None:
    """A slice of a data set is on the device as it would be there, without the rest."""
    layer = nn.Linear(8, 8)

    run = carry_out(lambda x: layer(x).sum(), (view,), steps=1)

    (product,) = find(run, "addmm")
    given = product.arguments[1]
    assert isinstance(given, TensorMeta)
    assert (given.device, given.shape, given.stride) == ("cuda", (4, 8), view.stride())
    (n_bytes,) = [use.n_bytes for use in run.initial if use.storage == given.storage]
    assert n_bytes <= 4 * 8 * 4
    assert run.assumptions == ()


def test_an_index_from_the_cpu_is_moved_to_what_it_indexes() -> None:
    """What the step makes on the CPU meets what was taken to be on the device."""
    numbers = torch.tensor([1, 2, 2])

    run = carry_out(lambda: torch.zeros(8).index_add(0, numbers, torch.ones(3)), steps=1)

    assert find(run, "index_add")[0].results[0].device == "cuda"
    assert ["built on the CPU" in each for each in run.assumptions] == [True]


def test_a_refusal_is_not_caught_by_the_step() -> None:
    """Else it would go on another way than the real one."""

    def step(x: torch.Tensor) -> None:
        try:
            x = x + next(iter(LOADER))
        except Exception:  # noqa: BLE001 - as users write
            x = x * 2

    with pytest.raises(PredictionError, match="`LOADER` is a DataLoader"):
        carry_out(step, (torch.randn(2),))


def test_files_are_not_written(tmp_path: Path) -> None:
    """Saving is refused before the file is touched."""
    path = tmp_path / "model.pt"
    path.write_text("kept")

    with pytest.raises(PredictionError, match="writes a file"):
        carry_out(lambda x: torch.save(x, path), (torch.randn(2),))
    with pytest.raises(PredictionError, match="writes a file"):
        carry_out(lambda _: path.write_text("lost"), (torch.randn(2),))

    assert path.read_text() == "kept"


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(3, 8, 3), (2, 3, 16, 16)),
        (nn.GroupNorm(2, 8), (2, 8, 4)),
        (nn.LSTM(8, 16), (5, 2, 8)),
    ],
)
def test_what_is_made_on_the_cpu_is_used_on_the_device(
    layer: nn.Module, shape: tuple[int, ...]
) -> None:
    """A step that was built on the CPU makes its input there; results are on the device."""

    def step() -> None:
        result = layer(torch.randn(shape))
        result = result[0] if isinstance(result, tuple) else result
        assert result.is_cuda
        result.sum().backward()
        assert all(each.grad.is_cuda for each in layer.parameters() if each.grad is not None)

    run = carry_out(step, steps=1)

    assert all(each.results[0].device == "cuda" for each in run.operations[-1:])


def test_what_is_made_on_the_cpu_takes_the_devices_memory() -> None:
    """From its first use there on, once for all its views, until it is freed."""
    layer = nn.Linear(1000, 10).requires_grad_(requires_grad=False)

    def step() -> None:
        x = torch.zeros(500, 1000)
        layer(x)
        layer(x[:1])
        del x
        layer(torch.zeros(1, 1000))

    run = carry_out(step, steps=1)

    products = find(run, "addmm")
    used = [{use.n_bytes for use in product.allocated} for product in products]
    assert used == [{500 * 1000 * 4, 500 * 10 * 4}, {10 * 4}, {1000 * 4, 10 * 4}]
    [x, _] = products[0].allocated
    freed_by = [place for place, each in enumerate(run.operations) if x.storage in each.freed]
    assert freed_by == [run.operations.index(products[1])]


def test_tensors_of_two_gpus_do_not_meet() -> None:
    """What is on another GPU is not taken to be on the device, as what is on the CPU is."""
    layer = nn.Linear(4, 4)

    with pytest.raises(PredictionError, match=r"cuda:1"):
        carry_out(lambda: layer(torch.zeros(2, 4)) + torch.zeros(2, 4, device="cuda:1"))


def test_a_view_that_moves_takes_its_base_along() -> None:
    """Results of the base are on the device from then on."""
    layer = nn.Linear(4, 4)

    def step() -> None:
        total = torch.zeros(8, 4)
        total[:2] += layer(torch.zeros(2, 4))
        assert (total * 2).is_cuda

    carry_out(step, steps=1)


def test_autocast_of_the_cpu_is_the_devices() -> None:
    """A step that was built on the CPU casts there too."""
    model = nn.Linear(4, 4)

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            result: torch.Tensor = model(x)
        return result

    run = carry_out(step, (torch.randn(2, 4),), steps=1)

    assert find(run, "addmm")[0].results[0].dtype == "bfloat16"


def test_events_and_statistics_are_answered() -> None:
    """What a step asks of CUDA to print it is answered without CUDA."""

    def step(x: torch.Tensor) -> None:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        x.cuda(non_blocking=True) * 2
        end.record()
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        end.synchronize()
        begin.elapsed_time(end)
        assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] == 0
        torch.cuda.memory_summary()
        with torch.random.fork_rng():
            torch.rand(2)

    carry_out(step, (torch.randn(2),), steps=1)

    assert not torch.cuda.is_initialized()


def test_a_module_that_moves() -> None:
    """A module that is made or changed in the step moves to the device, and to another dtype."""
    layer = nn.Linear(8, 8)

    def step(x: torch.Tensor) -> None:
        made = nn.Linear(8, 8).to(x.device)
        made(layer(x)).sum().backward()
        layer.half()
        layer.to("cpu").to("cuda")(x.half())
        layer.float()

    run = carry_out(step, (torch.randn(2, 8),), steps=2)

    assert {each.results[0].device for each in find(run, "addmm")} == {"cuda"}
    assert layer.weight.dtype == torch.float32


def test_a_compiled_module_is_carried_out_as_written() -> None:
    layer = torch.compile(nn.Linear(8, 8))

    run = carry_out(layer, (torch.randn(2, 8),), steps=1)

    assert names(run) == ["t", "addmm"]
    assert ["compiled" in each for each in run.assumptions] == [True]


def test_what_the_step_compiles_is_carried_out_as_written() -> None:
    layer = nn.Linear(8, 8)

    def step(x: torch.Tensor) -> torch.Tensor:
        @torch.compile(fullgraph=True)
        def act(x: torch.Tensor) -> torch.Tensor:
            return x.relu()

        result: torch.Tensor = act(torch.compile(layer)(x))
        return result

    run = carry_out(step, (torch.randn(2, 8),), steps=2)

    assert names(run) == ["t", "addmm", "relu"] * 2
    assert ["compiles" in each for each in run.assumptions] == [True]


# -- Nothing changes -------------------------------------------------------------------------------


class World:
    """A user's training: all that a step could change."""

    def __init__(self, momentum: float, *, trained: bool) -> None:
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=momentum)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.scaler = torch.amp.GradScaler("cuda", enabled=False)
        self.losses: list[Any] = []
        self.x = torch.randn(3, 4)
        if trained:
            self.step()

    def step(self) -> None:
        loss = self.scaler.scale(self.model(self.x).sum() + random.random())
        loss.backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.losses.append(loss)
        self.x += torch.from_numpy(numpy.random.rand(3, 4)).float()

    def read(self) -> tuple[Any, ...]:
        """Return everything, as bytes and plain values."""
        tensors = [self.x, *self.model.parameters(), *self.model.buffers()]
        tensors += [each.grad for each in self.model.parameters() if each.grad is not None]
        state = self.optimizer.state_dict()
        for one in state["state"].values():
            tensors += [each for each in one.values() if isinstance(each, torch.Tensor)]
        random_states = (
            torch.get_rng_state().numpy().tobytes(),
            random.getstate(),
            numpy.random.get_state()[1].tobytes(),  # type: ignore[union-attr, index]
        )
        return (
            [each.detach().numpy().tobytes() for each in tensors],
            [id(each) for each in tensors[:8]],
            str(state["param_groups"]),
            self.scheduler.state_dict(),
            self.scaler.state_dict(),
            [id(each) for each in self.losses],
            sorted(vars(self)),
            random_states,
        )


WORLDS: list[World] = []


def step_the_world(_: int = 0) -> None:
    WORLDS[-1].step()


@settings(max_examples=15, deadline=None)
@given(
    momentum=st.sampled_from([0.0, 0.9]),
    trained=st.booleans(),
    way=st.sampled_from(["method", "global", "partial", "closure"]),
    steps=st.integers(1, 3),
)
def test_nothing_of_the_users_changes(momentum: float, trained: bool, way: str, steps: int) -> None:
    """Parameters, gradients, state, buffers, lists and random numbers are as before."""
    world = World(momentum, trained=trained)
    WORLDS[:] = [world]
    ways: dict[str, Callable[[], None]] = {
        "method": world.step,
        "global": step_the_world,
        "partial": functools.partial(step_the_world, 1),
        "closure": lambda: (world.step(), None)[1],
    }
    before = world.read()

    run = carry_out(ways[way], steps=steps)
    WORLDS.clear()

    assert world.read() == before
    assert len(run.step_ends) == steps
    assert find(run, "native_dropout")
    assert find(run, "native_batch_norm")


def _list_leftovers() -> Iterator[Any]:
    yield torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    yield dict(torch.nn.modules.module._global_forward_hooks)
    yield dict(torch.nn.modules.module._global_forward_pre_hooks)
    optimizers = sys.modules["torch.optim.optimizer"]
    yield dict(optimizers._global_optimizer_pre_hooks)
    yield dict(optimizers._global_optimizer_post_hooks)
    yield list(optimizers._foreach_supported_types)
    yield torch.cuda.is_available
    yield torch.clear_autocast_cache
    yield torch._C._only_lift_cpu_tensors()
    yield dict(torch.ops.aten.dropout.default.py_kernels)
    yield torch.is_grad_enabled()
    yield torch.is_autocast_enabled("cuda")
    # PyTorch's own cache, which all fake tensors share.
    yield len(torch._subclasses.fake_tensor.FakeTensorMode.cache)


@pytest.mark.parametrize("where", ["forward", "backward", "optimizer", "nowhere"])
def test_a_run_leaves_nothing(where: str) -> None:
    """No mode, hook or replaced function, nor after a Ctrl-C anywhere in a step."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    def step(x: torch.Tensor) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(x).sum()
        if where == "backward":
            loss.register_hook(interrupt)
        loss.backward()
        if where == "optimizer":
            optimizer.register_step_pre_hook(interrupt)
        optimizer.step()

    if where == "forward":
        model.register_forward_hook(interrupt)
    before = list(_list_leftovers())

    if where == "nowhere":
        carry_out(step, (torch.randn(2, 4),))
    else:
        with pytest.raises(KeyboardInterrupt):
            carry_out(step, (torch.randn(2, 4),))

    assert list(_list_leftovers()) == before
    assert model.weight.grad is None
    assert torch.zeros(2).sum().item() == 0


def test_the_users_lists_and_counters_stay() -> None:
    """A function that assigns to globals and lists does so on copies."""
    history: list[Any] = []
    count = {"steps": 0}

    def step(x: torch.Tensor) -> None:
        history.append(x.sum())
        count["steps"] += 1
        print("nothing is printed")

    run = carry_out(step, (torch.randn(4),), steps=3)

    assert (history, count) == ([], {"steps": 0})
    assert replay(run)[0] == 16 + 3 * 4


SEEN: list[str] = []
SCALE = nn.Parameter(torch.ones(4))


class Loss:
    """A class of the user's whose methods of all kinds read and change what is global."""

    n_calls = 0
    made: list[int] = []  # noqa: RUF012 - as users write it

    def __init__(self) -> None:
        self.made.append(1)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        Loss.n_calls += 1
        Loss.last = x  # type: ignore[attr-defined]
        SEEN.append(self.name)
        return (self.check(x) * SCALE).sum()

    @property
    def name(self) -> str:
        SEEN.append("property")
        return "call"

    @staticmethod
    def check(x: torch.Tensor) -> torch.Tensor:
        SEEN.append("static")
        return x

    @classmethod
    def build(cls) -> Loss:
        SEEN.append("class")
        return cls()

    @torch.no_grad()
    def measure(self, x: torch.Tensor) -> torch.Tensor:
        SEEN.append("decorated")
        return x * SCALE


def test_the_users_classes_stay() -> None:
    """Methods of all kinds work on copies, and a class's own attributes are put back."""
    loss = Loss()
    copy.copy(loss)  # which notes the names of slots in the class
    before = dict(vars(Loss))
    append = SEEN.append

    def step(x: torch.Tensor) -> None:
        append("bound")
        loss(x).backward()
        assert loss.build()(x).requires_grad
        loss.measure(x)
        assert len(SEEN) == 9
        SEEN.clear()

    run = carry_out(step, (torch.randn(2, 4),), steps=2)

    assert len(find(run, "mul.Tensor")) == 2 * 4
    assert SCALE.grad is None
    assert dict(vars(Loss)) == before
    assert (Loss.n_calls, Loss.made, SEEN) == (0, [1], [])
    Loss.made.clear()


@pytest.fixture
def import_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Writes a module and imports it; after the test it is as if it had never been there."""
    names = []

    def import_text(name: str, text: str) -> Any:
        (tmp_path / f"{name}.py").write_text(text)
        names.append(name)
        return importlib.import_module(name)

    monkeypatch.syspath_prepend(tmp_path)
    yield import_text
    for name in names:
        del sys.modules[name]


def test_the_users_modules_stay(
    import_text: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a step reads and changes in a module of the user's is copied, and put back."""
    users_module = import_text(
        "users_module",
        "import torch\n"
        "layer, seen, count = torch.nn.Linear(4, 4), [], 0\n"
        "def train(x):\n"
        "    seen.append(1)\n"
        "    layer(x).sum().backward()\n",
    )
    monkeypatch.setitem(globals(), "users_module", users_module)
    before = dict(vars(users_module))

    run = carry_out(_use_module, (torch.randn(2, 4),), steps=2)

    assert dict(vars(users_module)) == before
    assert (users_module.seen, users_module.layer.weight.grad) == ([], None)
    assert find(run, "addmm")[0].frames[0].filename == str(tmp_path / "users_module.py")


def _use_module(x: torch.Tensor) -> None:
    users_module.count += 1  # type: ignore[name-defined]  # noqa: F821 - the test sets it
    users_module.train(x)  # type: ignore[name-defined]  # noqa: F821


class Registered:
    """A class that keeps its subclasses, whose methods call the methods that they extend."""

    kinds: list[type] = []  # noqa: RUF012 - as users write it
    __slots__ = ("total",)

    def __init_subclass__(cls, *, name: str) -> None:
        cls.kinds.append(cls)
        cls.name = name  # type: ignore[attr-defined]

    def __init__(self) -> None:
        self.total = 0

    def add(self) -> None:
        self.total += 1
        SEEN.append(type(self).name)  # type: ignore[attr-defined]


class Child(Registered, name="child"):
    """A subclass without slots of its own."""

    def add(self) -> None:
        super().add()
        assert self.kinds == [Child]


def test_classes_with_slots_and_subclasses_are_copied() -> None:
    """Copies are of the copied classes: ``super()``, ``isinstance`` and registries hold."""
    child = Child()

    def step(x: torch.Tensor) -> None:
        child.add()
        Child().add()
        assert isinstance(child, Registered)
        assert type(child) is Child
        assert len(SEEN) == 2 * child.total
        x.sin()

    carry_out(step, (torch.randn(2),), steps=2)

    assert (child.total, SEEN, Registered.kinds) == (0, [], [Child])


def test_a_module_that_the_step_imports_is_copied(import_text: Callable[..., Any]) -> None:
    """In the step's own lines, too, and what it holds is the copy's."""
    users_other = import_text("users_other", "seen = []\ndef note():\n    seen.append(1)\n")

    def step(x: torch.Tensor) -> None:
        from users_other import note  # type: ignore[import-not-found]

        note()
        x.sin()

    carry_out(step, (torch.randn(2),))

    assert users_other.seen == []


def test_other_threads_keep_all_that_they_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they set, add and append in classes and modules while a step is carried out."""
    loss, started, ended = Loss(), threading.Event(), threading.Event()
    written: list[int] = []
    module: Any = sys.modules[__name__]
    monkeypatch.setattr(Loss, "made", [])
    monkeypatch.setattr(module, "COUNT", 0, raising=False)

    def write() -> None:
        while not ended.is_set():
            written.append(len(written))
            Loss.made.append(written[-1])
            Loss.n_calls = module.COUNT = written[-1]
            setattr(Loss, f"new_{written[-1] % 8}", written[-1])
            assert Loss.name.fget is module.Loss.name.fget  # type: ignore[attr-defined]
            started.set()
            ended.wait(1e-4)

    def step(x: torch.Tensor) -> None:
        for _ in range(50):
            loss(x).backward()
        SEEN.clear()

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        assert started.wait(60)
        try:
            for _ in range(3):
                carry_out(step, (torch.randn(2, 4),))
        finally:
            ended.set()
    writing.result()

    assert Loss.made == written
    assert (Loss.n_calls, module.COUNT) == (written[-1], written[-1])
    assert {getattr(Loss, f"new_{k}") for k in range(8)} == set(written[-8:])
    for k in range(8):
        delattr(Loss, f"new_{k}")
    Loss.n_calls = 0


class Uncopied:
    """An object that says that it is its own copy, and refuses to be pickled."""

    def __init__(self) -> None:
        self.count = 0

    def __deepcopy__(self, memo: object) -> Uncopied:
        return self

    def __reduce__(self) -> str:
        raise TypeError("not to be pickled")


class Wrapper:
    """An object that hands on whatever is asked of it."""

    def __init__(self, wrapped: object) -> None:
        object.__setattr__(self, "wrapped", wrapped)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.wrapped, name, value)


class Borg:
    """An object that shares its attributes with all others of its class."""

    shared: dict[str, Any] = {}  # noqa: RUF012 - as libraries write it

    def __init__(self) -> None:
        self.__dict__ = self.shared


class AttributeDict(dict[str, Any]):
    """A dictionary whose keys are its attributes."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


@pytest.mark.parametrize("library", [__name__, "collections"])
def test_objects_that_do_not_want_to_be_copied_are(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of them changes, and what two of them share is shared by the copies."""
    monkeypatch.setattr(Borg, "__module__", library)
    uncopied, borgs = Uncopied(), [Borg(), Borg()]
    wrapper, config = Wrapper(uncopied), AttributeDict(size=3)
    borgs[0].count = 0  # type: ignore[attr-defined]

    def step(x: torch.Tensor) -> None:
        wrapper.count += 1
        borgs[0].count += 1  # type: ignore[attr-defined]
        assert uncopied.count == borgs[1].count > 0  # type: ignore[attr-defined]
        # A library's class is shared, and what is made of it anew.
        if library == __name__:
            assert Borg().count == uncopied.count  # type: ignore[attr-defined]
        config.seen = config.size
        assert config["seen"] == 3
        x.sin()

    carry_out(step, (torch.randn(2),), steps=2)

    assert (uncopied.count, Borg.shared) == (0, {"count": 0})
    assert config == {"size": 3}


def test_nothing_is_logged_or_printed(capfd: pytest.CaptureFixture[str]) -> None:
    """Loggers, libraries' prints, warnings and streams that the user keeps show nothing."""
    records: list[logging.LogRecord] = []
    logger = logging.getLogger("users")
    logger.addHandler(handler := logging.Handler())
    handler.emit = records.append  # type: ignore[method-assign]
    stream = sys.stderr

    def step(x: torch.Tensor) -> None:
        logger.error("step")
        pprint.pprint("library")
        warnings.warn("users", stacklevel=1)
        stream.write("kept")
        x.sin()

    carry_out(step, (torch.randn(2),), steps=1)
    logger.removeHandler(handler)

    assert records == []
    assert tuple(capfd.readouterr()) == ("", "")
    assert sys.stderr is stream


class Bar(traitlets.HasTraits):
    """A widget."""

    value = traitlets.Int()
    children = traitlets.Tuple()

    def close(self) -> None:
        self.value = -1


def test_widgets_stay_as_they_are() -> None:
    """A progress bar that a step moves is where it was."""
    bar = Bar(children=(Bar(value=3), Bar()))

    def step(x: torch.Tensor) -> None:
        first, _ = bar.children
        first.value += 1
        bar.close()
        x.sin()

    carry_out(step, (torch.randn(2),), steps=2)

    assert [each.value for each in (bar, *bar.children)] == [0, 3, 0]


# -- Other threads ---------------------------------------------------------------------------------


@pytest.fixture
def meeting() -> Iterator[Any]:
    """Where a step asks another thread to do something; of no file, so it is not copied."""
    meeting: Any = types.ModuleType("meeting")
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        meeting.begin = pool.submit
        meeting.call = lambda function: pool.submit(function).result()
        yield meeting


def _read_settings() -> list[object]:
    """Return settings of the process, as every thread finds them."""
    backends = torch.backends
    return [
        *(torch.get_default_dtype(), torch.zeros(2).dtype, torch.is_anomaly_enabled()),
        *(backends.cudnn.enabled, backends.cudnn.benchmark, backends.cuda.matmul.allow_tf32),
        *(backends.cuda.flash_sdp_enabled(), torch.are_deterministic_algorithms_enabled()),
        *(logging.root.manager.disable, os.environ["USERS_VARIABLE"], "OTHER" in os.environ),
    ]


def test_settings_of_the_process_stay(meeting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the step sets is its own, for other threads meanwhile and for all afterwards.

    A loss of CTC, as Hugging Face's, runs without cuDNN: flags that a context sets go with it.
    """
    monkeypatch.setenv("USERS_VARIABLE", "kept")
    seen: list[list[object]] = []
    meeting.look = lambda: seen.append(_read_settings())

    def step(x: torch.Tensor) -> None:
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
        torch.backends.cudnn.benchmark = True
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.autograd.set_detect_anomaly(True)
        logging.disable(logging.CRITICAL)
        torch.use_deterministic_algorithms(True)
        os.environ["USERS_VARIABLE"] = "of the step"
        os.environ["OTHER"] = "new"
        assert torch.zeros(2).dtype == torch.float64
        math = torch.nn.attention.SDPBackend.MATH
        with torch.backends.cudnn.flags(enabled=False), torch.nn.attention.sdpa_kernel(math):
            assert not torch.backends.cudnn.enabled
            assert not torch.backends.cuda.flash_sdp_enabled()
            meeting.call(meeting.look)
        assert torch.backends.cudnn.enabled
        torch.set_default_device("meta")
        x.sin()

    before = _read_settings()
    carry_out(step, (torch.randn(2),), steps=1)

    assert seen == [before]
    assert _read_settings() == before
    assert torch.is_grad_enabled()
    assert torch.zeros(1).device.type == "cpu"


def test_what_other_threads_do_meanwhile_stays(
    meeting: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What they set, and that they print and warn."""
    monkeypatch.delenv("NEW_VARIABLE", raising=False)

    def work() -> None:
        os.environ["NEW_VARIABLE"] = "new"
        torch.backends.cudnn.benchmark = True
        warnings.warn("of the thread", stacklevel=1)
        print("printed by the thread")

    meeting.work = work

    def step(x: torch.Tensor) -> torch.Tensor:
        torch.backends.cudnn.benchmark = False
        meeting.call(meeting.work)
        return x + 1

    with pytest.warns(UserWarning, match="of the thread"):
        carry_out(step, (torch.randn(2),), steps=1)
    was_set = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False

    assert os.environ.pop("NEW_VARIABLE") == "new"
    assert was_set
    assert capsys.readouterr().out == "printed by the thread\n"


def test_random_numbers_that_another_thread_draws_are_not_drawn_again(meeting: Any) -> None:
    """The step draws from copies of the generators, which go on from where they were."""

    def draw() -> tuple[float, float, float]:
        return torch.rand(1).item(), random.random(), numpy.random.rand()

    drawn = []
    meeting.draw = lambda: drawn.append(draw())

    def step(x: torch.Tensor) -> torch.Tensor:
        first = draw()
        torch.manual_seed(3)
        meeting.call(meeting.draw)
        assert draw() != first
        return x * first[0]

    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(1)
    expected = [draw(), draw()]
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(1)
    carry_out(step, (torch.randn(2, generator=torch.Generator()),), steps=1)

    assert [*drawn, draw()] == expected


def test_another_threads_steps_are_not_the_steps(meeting: Any) -> None:
    """Its modules and its optimizers, while a forward of the step's runs."""
    model, theirs = nn.Linear(4, 4), nn.Linear(4, 4)
    updates, goes_on = threading.Event(), threading.Event()
    optimizer = torch.optim.AdamW(theirs.parameters())

    def wait(*_: object) -> None:
        updates.set()
        assert goes_on.wait(60)

    optimizer.register_step_pre_hook(wait)

    def begin_update() -> None:
        meeting.begin(lambda: fit(theirs, optimizer, torch.ones(2, 4)))
        assert updates.wait(60)

    meeting.begin_update, meeting.end_update = begin_update, goes_on.set

    def step(x: torch.Tensor) -> None:
        meeting.begin_update()
        y = model(x)
        meeting.end_update()
        y.sum().backward()

    run = carry_out(step, (torch.randn(2, 4),), steps=1)
    meeting.call(int)

    assert [each.phase for each in find(run, "addmm")] == ["forward"]
    assert not find(run, "_foreach_addcdiv_.ScalarList")
    assert theirs.weight.grad is not None


def test_other_threads_compile_while_a_library_is_carried_out_as_written(
    meeting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a library has compiled is noted operator by operator."""
    compiled: list[str] = []

    def compile_graph(name: str) -> Callable[..., Any]:
        def compile_here(graph: Any, _inputs: object) -> Any:
            compiled.append(name)
            return graph.forward

        return torch.compile(nn.functional.silu, backend=compile_here)

    theirs = compile_graph("another thread's")
    meeting.compiled = compile_graph("the step's")
    meeting.act = lambda: theirs(torch.ones(4))

    def step(x: torch.Tensor) -> Any:
        meeting.call(meeting.act)
        return meeting.compiled(x)

    run = carry_out(step, (torch.randn(2),), steps=1)

    assert compiled == ["another thread's"]
    assert names(run) == ["silu"]


def test_a_function_that_is_wrapped_meanwhile_works_afterwards(
    meeting: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours stays beneath what another thread put over it, and calls the original."""
    monkeypatch.setattr(os, "mkdir", os.mkdir)
    meeting.wrap = lambda: setattr(os, "mkdir", functools.partial(os.mkdir))

    carry_out(lambda x: (meeting.call(meeting.wrap), x + 1)[1], (torch.randn(2),), steps=1)
    os.mkdir(tmp_path / "new")  # noqa: PTH102 - the function that was wrapped

    assert (tmp_path / "new").is_dir()


# -- Classes of all kinds --------------------------------------------------------------------------


@dataclasses.dataclass
class Settings:
    """A class whose methods Python writes."""

    width: int = 1
    seen: list[str] = dataclasses.field(default_factory=lambda: SEEN)


class Abstract(abc.ABC):
    """A class with a method that is to be written."""

    @abc.abstractmethod
    def run(self) -> None: ...


class Concrete(Abstract):
    """A class with that method."""

    def run(self) -> None:
        SEEN.append("run")


class Doubled(torch.autograd.Function):
    """A function of autograd's that counts its calls."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        SEEN.append("forward")
        return x * 2

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        SEEN.append("backward")
        return gradient * 2


class Noting(type):
    """A class of classes that notes each instance."""

    def __call__(cls) -> Any:
        SEEN.append("made")
        return super().__call__()


class Noted(metaclass=Noting):
    """A class of such a class."""


@functools.singledispatch
def describe(_: object) -> None:
    SEEN.append("anything")


@describe.register
def _(_: Settings) -> None:
    SEEN.append("settings")


SETTINGS, CONCRETE, DOUBLE = Settings(), Concrete(), Doubled.apply


def _use_settings(x: torch.Tensor) -> torch.Tensor:
    SETTINGS.seen.append("settings")
    assert dataclasses.replace(SETTINGS, width=3).seen is Settings().seen is SEEN
    return x + 1


def _use_abstract(x: torch.Tensor) -> torch.Tensor:
    CONCRETE.run()
    assert isinstance(Concrete(), Abstract)
    with pytest.raises(TypeError):
        Abstract()  # type: ignore[abstract]
    return x + 1


def _use_function(x: torch.Tensor) -> None:
    DOUBLE(x * SCALE).sum().backward()
    assert SEEN == ["forward", "backward"]


def _use_class_of_classes(x: torch.Tensor) -> torch.Tensor:
    Noted()
    assert SEEN == ["made"]
    return x + 1


def _use_dispatch(x: torch.Tensor) -> torch.Tensor:
    describe(SETTINGS)
    describe(x)
    assert SEEN == ["settings", "anything"]
    return x + 1


@pytest.mark.parametrize(
    "step", [_use_settings, _use_abstract, _use_function, _use_class_of_classes, _use_dispatch]
)
def test_classes_of_all_kinds_are_copied(step: Callable[[torch.Tensor], object]) -> None:
    """They work as ever, and what they read and change is the copy's."""
    carry_out(step, (torch.randn(2, 4),), steps=1)

    assert SEEN == []
    assert SCALE.grad is None


# -- Gradients that are added up in place ----------------------------------------------------------


def _count_sums(run: DryRun) -> int:
    return sum(
        each.name == "aten::add.Tensor" and each.phase == "backward" for each in run.operations
    )


def _measure(run: DryRun) -> tuple[int, int]:
    """Return the peak of a run, and what is allocated at its end, in bytes."""
    allocator = CachingAllocator(1 << 40)
    plans = [plan_operation(each, H200) for each in run.operations]
    simulation = simulate(run, allocator, plans)
    return simulation.allocated_peak_bytes, allocator.allocated_bytes


def _add_gradients(x: torch.Tensor, weight: Any) -> None:
    y = x * weight
    (y.sigmoid() + y.tanh() + y.exp()).sum().backward()
    weight.grad = None


def test_a_sum_of_gradients_takes_the_memory_of_the_first() -> None:
    """Two products lead to one activation: their gradients take no third tensor."""
    weight = nn.Parameter(torch.randn(1024, 1024))

    def step(x: torch.Tensor) -> None:
        y = x * weight
        (y.exp() + y.exp()).sum().backward()

    run = carry_out(step, (torch.randn(1024, 1024),), steps=1)

    assert len(run.sums_in_place) == _count_sums(run) == 1


def test_what_sums_took_is_freed() -> None:
    """The memory of a sum is freed where the sum was, not where its first part was."""
    weight = nn.Parameter(torch.randn(64, 64))

    once, twice = [
        carry_out(_add_gradients, (torch.randn(64, 64), weight), steps=n_steps)
        for n_steps in (1, 2)
    ]

    assert len(once.sums_in_place) == 2
    assert len(twice.sums_in_place) == _count_sums(twice) == 4
    assert _measure(once) == _measure(twice)


def test_a_sum_that_begins_with_a_view_takes_new_memory() -> None:
    """The gradient of a tied weight is a transposed product first: autograd leaves it as it is."""
    weight = nn.Parameter(torch.randn(50, 8))

    def step(ids: torch.Tensor) -> None:
        hidden = nn.functional.embedding(ids, weight)
        nn.functional.linear(hidden, weight).sum().backward()

    run = carry_out(step, (torch.randint(50, (4,)),), steps=1)

    assert _count_sums(run) == 1
    assert run.sums_in_place == frozenset()


def test_a_sum_of_the_users_own_takes_new_memory() -> None:
    """What is added in forward is left as it is."""
    run = carry_out(lambda x: (x + 1) + (x + 2), (torch.randn(8),), steps=1)

    assert run.sums_in_place == frozenset()
