"""Find the largest batch of a training under a limit, by predicting and by trying: NAME.

PyTorch may take a quarter of the device. Predicting is ``gpumemwidget.largest_batch``: the size
that it answers then runs for real, and so does the smallest size of which it said that it does not
fit, which is to run out of memory. Trying is Lightning's ``BatchSizeFinder``, which doubles and
then bisects, and accelerate's ``find_executable_batch_size``, which takes a tenth off until a size
runs. Prints facts as JSON, a line as soon as each is known.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import gpumemwidget
from benchmarks.fit.calibration import make_images, make_tokens
from benchmarks.fit.one_case import N_STEPS

_SHARE_OF_DEVICE = 0.25
#: Size of the batch that the prediction begins with.
_SIZE_AT_HAND = 8
#: First size that accelerate's finder tries; it only goes down.
_LARGEST_SIZE = 512
#: Number of examples in the data set of Lightning's finder, which tries no larger batch.
_N_EXAMPLES = 1 << 16


@dataclass(frozen=True)
class Training:
    """A model, its optimizer, its loss of a batch, and batches of any size."""

    model: Any
    optimizer: Any
    compute_loss: Callable[[Any, Sequence[Any]], Any]
    make_batch: Callable[[int], Sequence[Any]]

    def make_step(self) -> Callable[[Sequence[Any]], None]:
        """Return the training's step as a function of the batch alone."""
        model, optimizer, compute_loss = self.model, self.optimizer, self.compute_loss

        def step(batch: Sequence[Any]) -> None:
            optimizer.zero_grad()
            compute_loss(model, batch).backward()
            optimizer.step()

        return step


def main() -> None:
    """Find the largest batch of the model that is named by the argument."""
    make = _TRAININGS[sys.argv[1]]
    torch.cuda.set_per_process_memory_fraction(_SHARE_OF_DEVICE)
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    _print(limit_bytes=int(_SHARE_OF_DEVICE * total_bytes), gpu=torch.cuda.get_device_name())
    found, result = _predict(make())
    _print(prediction=result)
    if found is not None:
        _print(found_runs=found.size > 0 and _runs(make, found.size))
        larger = {size: each.fits for size, each in found.predictions.items() if size > found.size}
        # Sizes that are too close to say lie between.
        refused = next((size for size, fits in larger.items() if fits is False), None)
        if refused is not None:
            _print(refused_size=refused, refused_fits=False, refused_runs=_runs(make, refused))
    _print(doubling=_double_and_bisect(make()))
    training = make()
    _print(accelerate=_time(lambda: _ask_accelerate(training)))


def make_gpt2() -> Training:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config()).cuda()
    return Training(
        model,
        torch.optim.AdamW(model.parameters()),
        lambda model, batch: model(input_ids=batch[0], labels=batch[0]).loss,
        lambda size: (make_tokens("cuda", 50257, size, 512),),
    )


def make_resnet() -> Training:
    import torchvision

    model = torchvision.models.resnet50().cuda()
    return Training(
        model,
        torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
        lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
        lambda size: make_images("cuda", size),
    )


_TRAININGS: dict[str, Callable[[], Training]] = {"gpt2": make_gpt2, "resnet": make_resnet}


def _runs(make: Callable[[], Training], size: int) -> bool:
    """Return whether a new training runs with a size, without an error for want of memory."""
    training = make()
    return _is_enough(training.make_step(), training.make_batch, size)


def _is_enough(
    step: Callable[[Sequence[Any]], None], make_batch: Callable[[int], Sequence[Any]], size: int
) -> bool:
    gc.collect()
    torch.cuda.empty_cache()
    try:
        batch = make_batch(size)
        for _ in range(N_STEPS):
            step(batch)
        torch.cuda.synchronize()
    except torch.cuda.OutOfMemoryError:
        return False
    return True


# -- By predicting ---------------------------------------------------------------------------------


def _predict(training: Training) -> tuple[Any, dict[str, Any]]:
    """Return the ``LargestBatch``, ``None`` if that failed, and the facts of it."""
    step, batch = training.make_step(), training.make_batch(_SIZE_AT_HAND)
    answers = []

    def find() -> int:
        answers.append(gpumemwidget.largest_batch(step, batch))
        return int(answers[0].size)

    facts = _time(find)
    if not answers:
        return None, facts
    tried = {size: prediction.fits for size, prediction in answers[0].predictions.items()}
    return answers[0], {**facts, "tried": tried}


# -- By trying -------------------------------------------------------------------------------------


def _double_and_bisect(training: Training) -> dict[str, Any]:
    """Return what Lightning's finder finds; without Lightning, what a search in its manner does."""
    try:
        import lightning
    except ImportError:
        step, make_batch = training.make_step(), training.make_batch
        facts = _time(lambda: _bisect(lambda size: _is_enough(step, make_batch, size)))
        return {**facts, "by": "own doubling and bisecting"}
    return {**_time(lambda: _ask_lightning(training)), "by": f"Lightning {lightning.__version__}"}


def _bisect(fits: Callable[[int], bool]) -> int:
    """Return the largest size that fits: double until one does not, then bisect."""
    least, most = 0, 2
    while fits(most):
        least, most = most, 2 * most
    while most - least > 1:
        middle = (least + most) // 2
        if fits(middle):
            least = middle
        else:
            most = middle
    return least


def _ask_lightning(training: Training) -> int:
    """Return what ``BatchSizeFinder`` finds, without the 5% that it takes off for safety."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.tuner import Tuner

    class Fitting(LightningModule):
        """A training in Lightning's form."""

        def __init__(self) -> None:
            super().__init__()
            self.model = training.model
            self.batch_size = 2

        def training_step(self, batch: Sequence[Any], _: int) -> Any:
            return training.compute_loss(self.model, batch)

        def configure_optimizers(self) -> Any:
            return training.optimizer

        def train_dataloader(self) -> Any:
            # One example as many: views, that take no memory.
            one = [each.cpu() for each in training.make_batch(1)]
            examples = [each.expand(_N_EXAMPLES, *each.shape[1:]) for each in one]
            return DataLoader(TensorDataset(*examples), self.batch_size)

    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="gpu" if torch.cuda.is_available() else "cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        size = Tuner(trainer).scale_batch_size(Fitting(), mode="binsearch", margin=0.0)
    assert size is not None
    return int(size)


def _ask_accelerate(training: Training) -> int:
    from accelerate.utils import find_executable_batch_size

    step = training.make_step()

    @find_executable_batch_size(starting_batch_size=_LARGEST_SIZE)
    def run(batch_size: int) -> int:
        batch = training.make_batch(batch_size)
        for _ in range(N_STEPS):
            step(batch)
        torch.cuda.synchronize()
        return batch_size

    size: int = run()
    return size


def _time(find: Callable[[], int]) -> dict[str, Any]:
    gc.collect()
    torch.cuda.empty_cache()
    start = perf_counter()
    try:
        size = find()
    except Exception as exc:  # noqa: BLE001 - what fails is told by name
        return {"error": f"{type(exc).__name__}: {exc}"}
    return {"size": size, "seconds": perf_counter() - start}


def _print(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
