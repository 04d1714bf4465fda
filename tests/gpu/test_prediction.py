"""Predictions on a real GPU: nothing is touched, and steps take what was predicted."""

from __future__ import annotations

import functools
import gc
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import gpumemwidget
from gpumemwidget.errors import PredictionError
from tests.gpu.processes import MIB, run_program, run_python

torch = pytest.importorskip("torch")
nn = torch.nn
pytestmark = pytest.mark.gpu

#: Shares of the real peak by which a prediction may be off.
ALLOCATED_OFF, RESERVED_OFF = 0.015, 0.05


@pytest.fixture(autouse=True)
def emptied() -> Iterator[None]:
    torch.cuda.init()
    # What an earlier test left must not go in the middle of the next one.
    gc.collect()
    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()


def train(model: Any, optimizer: Any, x: Any, y: Any) -> None:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()


def train_cast(model: Any, optimizer: Any, x: Any, y: Any) -> None:
    optimizer.zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()


def infer(model: Any, x: Any) -> Any:
    with torch.no_grad():
        return model(x)


def make_mlp() -> Any:
    layers = [nn.Linear(2048, 2048), nn.GELU(), nn.LayerNorm(2048)] * 4
    return nn.Sequential(*layers, nn.Linear(2048, 1000)).cuda()


def make_convolutions() -> Any:
    sizes = [(3, 64), (64, 128), (128, 256)]
    layers = [
        layer
        for inner, outer in sizes
        for layer in (
            nn.Conv2d(inner, outer, 3, 2, 1, bias=False),
            nn.BatchNorm2d(outer),
            nn.ReLU(),
        )
    ]
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 1000)
    ).cuda()


class Transformer(nn.Module):  # type: ignore[misc, name-defined]
    """Some layers with attention and a head."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True, dropout=0.0)
        self.layers = nn.TransformerEncoder(layer, 4)
        self.head = nn.Linear(512, 1000)

    def forward(self, x: Any) -> Any:
        return self.head(self.layers(x)[:, 0])


def make_labels(n: int) -> Any:
    return torch.randint(0, 1000, (n,), device="cuda")


class Recurrent(nn.Module):  # type: ignore[misc, name-defined]
    """Two layers of LSTM, whose weights lie in one storage, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(256, 512, 2, batch_first=True)
        self.head = nn.Linear(512, 1000)

    def forward(self, x: Any) -> Any:
        return self.head(self.layers(x)[0][:, -1])


def fit(
    model: Any, make_optimizer: Callable[..., Any], *shape: int, step: Callable[..., None] = train
) -> tuple[Any, ...]:
    """Return a step of training and its arguments, a random batch of this shape among them."""
    model = model.cuda()
    x = torch.randn(*shape, device="cuda")
    return step, model, make_optimizer(model.parameters()), x, make_labels(shape[0])


def fit_views() -> tuple[Any, ...]:
    """Two batches in one storage."""
    model = make_mlp()
    first, second = torch.randn(2, 2048, 2048, device="cuda")
    labels = make_labels(2048)

    def train_twice(model: Any, optimizer: Any, *batches: Any) -> None:
        for batch in batches:
            train(model, optimizer, batch, labels)

    return train_twice, model, torch.optim.AdamW(model.parameters()), first, second


def fit_transformer() -> tuple[Any, ...]:
    return fit(Transformer(), torch.optim.AdamW, 32, 512, 512)


_optim, _partial = torch.optim, functools.partial
#: What returns a step and its arguments, by what it is a case of.
CASES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "mlp": lambda: fit(make_mlp(), _optim.AdamW, 4096, 2048),
    "mlp, fused": lambda: fit(make_mlp(), _partial(_optim.Adam, fused=True), 4096, 2048),
    "mlp, autocast": lambda: fit(
        make_mlp(), _partial(_optim.SGD, lr=0.1), 8192, 2048, step=train_cast
    ),
    "convolutions": lambda: fit(
        make_convolutions(), _partial(_optim.SGD, lr=0.1, momentum=0.9), 64, 3, 128, 128
    ),
    "transformer": fit_transformer,
    "recurrent": lambda: fit(Recurrent(), _optim.Adam, 64, 128, 256),
    "views": fit_views,
    "inference": lambda: (
        *(infer, make_convolutions().eval()),
        torch.randn(256, 3, 128, 128, device="cuda"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_takes_what_was_predicted(case: str) -> None:
    """Allocated and reserved, from the allocator as it stands; and nothing is touched before."""
    step, *args = CASES[case]()
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    random = torch.cuda.get_rng_state()

    prediction = gpumemwidget.predict(step, *args)

    assert torch.cuda.memory_stats() == stats
    assert torch.equal(torch.cuda.get_rng_state(), random)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        step(*args)
    allocated = torch.cuda.max_memory_allocated()
    reserved = torch.cuda.max_memory_reserved()
    figures = (
        f"allocated {prediction.allocated_peak_bytes / allocated - 1:+.4%}, "
        f"reserved {prediction.reserved_peak_bytes / reserved - 1:+.4%}, reserved "
        f"{prediction.record.reserved.at_least} to {prediction.record.reserved.at_most}, {reserved}"
    )
    assert prediction.fits
    assert abs(prediction.allocated_peak_bytes / allocated - 1) < ALLOCATED_OFF, figures
    assert abs(prediction.reserved_peak_bytes / reserved - 1) < RESERVED_OFF, figures
    assert reserved <= prediction.record.reserved.at_most, figures
    assert (
        sum(owner.n_bytes for owner in prediction.record.owners) == prediction.allocated_peak_bytes
    )


def checkpoint_blocks(model: Any, optimizer: Any, x: Any, y: Any) -> None:
    checkpoint = importlib.import_module("torch.utils.checkpoint").checkpoint
    for block in model.layers.layers:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def train_halves(model: Any, optimizer: Any, x: Any, y: Any) -> None:
    optimizer.zero_grad()
    for inputs, labels in zip(x.chunk(2), y.chunk(2), strict=True):
        nn.functional.cross_entropy(model(inputs), labels).backward()
    optimizer.step()


def leave(*_: Any) -> None:
    """Change nothing: the step is another one."""


@pytest.mark.parametrize(
    ("name", "change", "step"),
    [
        ("checkpointing of model.layers.layers", checkpoint_blocks, train),
        ("bfloat16 autocast", leave, train_cast),
        ("half the batch, gradients accumulated over two", leave, train_halves),
    ],
)
def test_a_remedy_gives_what_was_predicted(
    name: str, change: Callable[..., None], step: Callable[..., None]
) -> None:
    """Each is predicted again with one change, and takes what that says."""
    before, *args = fit_transformer()
    prediction = gpumemwidget.predict(before, *args, remedies=True)
    remedy = next(each for each in prediction.remedies if each.name == name)
    change(*args)
    torch.cuda.reset_peak_memory_stats()

    for _ in range(3):
        step(*args)

    allocated = remedy.allocated_peak_bytes / torch.cuda.max_memory_allocated() - 1
    reserved = remedy.reserved_peak_bytes / torch.cuda.max_memory_reserved() - 1
    figures = f"allocated {allocated:+.4%}, reserved {reserved:+.4%}"
    assert abs(allocated) < ALLOCATED_OFF, figures
    assert abs(reserved) < RESERVED_OFF, figures


def test_what_stands_and_what_is_cached_counts() -> None:
    """A hole in the cache serves the step, and a limit of the process decides whether it fits."""
    layer = nn.Linear(4096, 4096, bias=False).cuda().requires_grad_(False)
    x = torch.randn(4096, 4096, device="cuda")
    infer(layer, x)
    hole = torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")
    del hole

    prediction = gpumemwidget.predict(infer, layer, x)

    assert prediction.reserved_peak_bytes == torch.cuda.memory_reserved()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 32 * MIB) / total)
    try:
        assert gpumemwidget.predict(infer, layer, x, remedies=False).fits is False
        with pytest.raises(torch.OutOfMemoryError):
            infer(layer, x)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert gpumemwidget.predict(infer, layer, x).fits


def test_the_largest_batch_runs_and_a_refused_size_does_not() -> None:
    """On a device that is limited to a part of itself."""
    model = make_mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = torch.randn(64, 2048, device="cuda"), make_labels(64)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(4 * (1 << 30) / total)
    try:
        found = gpumemwidget.largest_batch(lambda batch: train(model, optimizer, *batch), (x, y))
        # Between the two are sizes that are too close to say.
        larger = min(size for size, each in found.predictions.items() if each.fits is False)
        del x, y
        torch.cuda.empty_cache()

        def run(size: int) -> None:
            x, y = torch.randn(size, 2048, device="cuda"), make_labels(size)
            for _ in range(3):
                train(model, optimizer, x, y)

        run(found.size)
        torch.cuda.empty_cache()
        with pytest.raises(torch.OutOfMemoryError):
            run(larger)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_kernel_of_tritons_is_refused_by_name() -> None:
    """It would be compiled and started for real."""
    triton = pytest.importorskip("triton")

    @triton.jit  # type: ignore[untyped-decorator]
    def negate(pointer: Any) -> None:
        pass

    def step(x: Any) -> None:
        negate[(1,)](x)

    with pytest.raises(PredictionError, match="the Triton kernel `negate`"):
        gpumemwidget.predict(step, torch.ones(8, device="cuda"))


def test_a_gpu_that_is_not_in_use_is_not_brought_into_use() -> None:
    """A prediction in a process that has made no CUDA call makes none."""
    out = run_python(
        """
import torch
import gpumemwidget
layer = torch.nn.Linear(1024, 1024)
prediction = gpumemwidget.predict(lambda x: layer(x).sum().backward(), torch.randn(64, 1024))
assert prediction.fits, prediction
assert not torch.cuda.is_initialized()
print(prediction.record.device.name, prediction.record.device.total_bytes)
"""
    )

    assert out.startswith("cuda:0 ")


@pytest.mark.parametrize("n_before", [0, 1])
def test_the_user_may_choose_the_size_of_cublas_workspaces(n_before: int) -> None:
    """One that is chosen in the environment is predicted, and found where it stands already."""
    predicted, real = run_program(
        f"""
import torch
import gpumemwidget
layer = torch.nn.Linear(512, 512).cuda()
def step(x):
    layer(x).sum().backward()
    layer.zero_grad()
x = torch.randn(64, 512, device="cuda")
for _ in range({n_before}):
    step(x)
prediction = gpumemwidget.predict(step, x)
torch.cuda.reset_peak_memory_stats()
step(x)
print([prediction.allocated_peak_bytes, torch.cuda.max_memory_allocated()])
""",
        CUBLAS_WORKSPACE_CONFIG=":4096:3:16:4",
    )

    # cuBLASLt keeps a mebibyte of its own, made while the layer's output is there.
    assert 0 <= real - predicted <= MIB + 64 * 512 * 4
    # Two of them, for forward and backward have one each.
    assert real > 2 * (12 * MIB + 64 * 1024)
