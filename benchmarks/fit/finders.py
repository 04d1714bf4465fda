"""Find the largest batch of a training under a limit, by predicting and by trying: NAME.

Trying is done in both ways that are in use: accelerate's, which halves until a size runs, and
Lightning's, which doubles and then bisects. Prints facts as JSON.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

from benchmarks.fit.calibration import fit_images, fit_language, make_images, make_tokens
from benchmarks.fit.one_case import N_STEPS, predict_peaks

_LIMIT_BYTES = 16 << 30
_FIRST_SIZE = 256


def main() -> None:
    """Find the largest batch of the model that is named by the argument."""
    step = _MODELS[sys.argv[1]]()
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(_LIMIT_BYTES / total_bytes)
    found = _time(lambda: _double_and_bisect(lambda size: _is_predicted(step, size)))
    _print(limit_bytes=_LIMIT_BYTES, prediction=found)
    if "size" in found:
        _print(runs=_runs(step, found["size"]))
    _print(
        **{"doubling and bisecting": _time(lambda: _double_and_bisect(lambda n: _runs(step, n)))}
    )
    _print(accelerate=_time(lambda: _ask_accelerate(step)))


def make_gpt2() -> Callable[[int], None]:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config()).cuda()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(size: int) -> None:
        tokens = make_tokens("cuda", 50257, size, 512)
        fit_language(model, optimizer, {"input_ids": tokens, "labels": tokens})

    return step


def make_resnet() -> Callable[[int], None]:
    import torchvision

    model = torchvision.models.resnet50().cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return lambda size: fit_images(model, optimizer, *make_images("cuda", size))


_MODELS: dict[str, Callable[[], Callable[[int], None]]] = {
    "gpt2": make_gpt2,
    "resnet": make_resnet,
}


# -- Sizes -----------------------------------------------------------------------------------------


def _is_predicted(step: Callable[[int], None], size: int) -> bool:
    """Return whether a size is predicted to fit under the limit."""
    return bool(predict_peaks(step, (size,))["reserved_bytes"] <= _LIMIT_BYTES)


def _runs(step: Callable[[int], None], size: int) -> bool:
    """Return whether a size runs without an error for want of memory."""
    gc.collect()
    torch.cuda.empty_cache()
    try:
        for _ in range(N_STEPS):
            step(size)
        torch.cuda.synchronize()
    except torch.cuda.OutOfMemoryError:
        return False
    return True


def _double_and_bisect(fits: Callable[[int], bool]) -> int:
    """Return the largest size that fits, as Lightning's ``BatchSizeFinder(mode="binsearch")``."""
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


def _ask_accelerate(step: Callable[[int], None]) -> int:
    from accelerate.utils import find_executable_batch_size

    @find_executable_batch_size(starting_batch_size=_FIRST_SIZE)
    def run(batch_size: int) -> int:
        for _ in range(N_STEPS):
            step(batch_size)
        torch.cuda.synchronize()
        return batch_size

    size: int = run()
    return size


def _time(find: Callable[[], int]) -> dict[str, Any]:
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
