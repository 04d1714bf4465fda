"""Operators recorded on a GPU, each with the allocations and frees within it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpumemwidget.prediction.operations import (
    Argument,
    Operation,
    Phase,
    Step,
    StorageUse,
    TensorMeta,
)

FILE = Path(__file__).parent / "recordings" / "operators" / "h200.json.gz"

ITEM_BYTES = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "float32"), 4),
    **dict.fromkeys(("int64", "float64", "complex64"), 8),
}


def tensor(dtype: str, *shape: int, stride: tuple[int, ...] | None = None) -> TensorMeta:
    """Return a tensor on the GPU, contiguous unless ``stride`` is given."""
    if stride is None:
        steps = [1]
        for size in reversed(shape[1:]):
            steps.append(steps[-1] * max(1, size))
        stride = tuple(reversed(steps)) if shape else ()
    return TensorMeta(dtype, shape, stride, "cuda", 0, ITEM_BYTES[dtype])


def operation(
    name: str,
    *arguments: Argument,
    allocated: tuple[int, ...] = (),
    options: tuple[tuple[str, Argument], ...] = (),
    phase: Phase = "forward",
) -> Operation:
    """Return a call of an operator that allocates outputs of these sizes."""
    uses = tuple(StorageUse(number, n_bytes) for number, n_bytes in enumerate(allocated))
    return Operation(name, arguments, options, (), (), uses, phase, "", None)


@dataclass(frozen=True)
class RecordedOperator:
    """A call of an operator as a dry run has it, and what it allocated in a real run."""

    operation: Operation
    steps: tuple[Step, ...]
    #: How often it was called, by recording.
    calls: dict[str, int]


def read_operators() -> Iterator[RecordedOperator]:
    """Yield every recorded operator; no two are alike."""
    data = json.loads(gzip.decompress(FILE.read_bytes()))
    for name, arguments, options, allocated, steps, calls in data["operators"]:
        yield RecordedOperator(
            operation(
                name if "::" in name else f"aten::{name}",
                *(_parse_argument(argument) for argument in arguments),
                allocated=tuple(allocated),
                options=tuple((key, _parse_argument(value)) for key, value in options),
            ),
            tuple(_parse_steps(steps)),
            calls,
        )


def _parse_argument(argument: Any) -> Argument:
    """Return an argument; ``$float32|8,512|512,1@cpu`` is a tensor."""
    if isinstance(argument, list):
        return tuple(_parse_argument(item) for item in argument)
    if not isinstance(argument, str) or not argument.startswith("$"):
        return argument  # type: ignore[no-any-return]
    text, _, device = argument[1:].partition("@")
    dtype, *sizes = text.split("|")
    shape, *strides = (tuple(int(n) for n in part.split(",") if n) for part in sizes)
    meta = tensor(dtype, *shape, stride=strides[0] if strides else None)
    return TensorMeta(dtype, shape, meta.stride, device or "cuda", 0, meta.item_bytes)


def _parse_steps(text: str) -> Iterator[Step]:
    """Yield the steps of ``o1=4 w512 f0 o0=64``: outputs, temporaries, and frees of these."""
    n_temporaries = 0
    for word in text.split():
        if word[0] == "o":
            index, _, n_bytes = word[1:].partition("=")
            yield Step("output", int(index), int(n_bytes))
        elif word[0] == "w":
            yield Step("temporary", n_temporaries, int(word[1:]))
            n_temporaries += 1
        else:
            yield Step("free", int(word[1:]), 0)


# -- Recurrent networks ----------------------------------------------------------------------------

RECURRENT_FILE = Path(__file__).parent / "recordings" / "operators" / "recurrent.json.gz"


@dataclass(frozen=True)
class RecordedRecurrent:
    """A network, the size of its input, and what its operators allocated and freed in order."""

    mode: str
    input: int
    hidden: int
    layers: int
    bidirectional: bool
    dropout: float
    times: int
    batch: int
    batch_first: bool
    #: The words of all sequences if they were packed.
    words: int | None
    dtype: str
    #: A positive number is a request in bytes; -1 frees the first request, -2 the second.
    forward: list[int]
    #: None if the network was not trained.
    backward: list[int] | None

    def choose_lengths(self) -> list[int]:
        """Return lengths of packed sequences that have as many words as the recorded ones."""
        if self.words is None:
            return []
        left = self.words
        lengths = []
        for n_others in reversed(range(self.batch)):
            lengths.append(min(self.times, left - n_others))
            left -= lengths[-1]
        return lengths

    def __str__(self) -> str:
        """Return what distinguishes the network from others."""
        kinds = [
            *(["packed"] if self.words is not None else []),
            *(["bidirectional"] if self.bidirectional else []),
            *(["dropout"] if self.dropout else []),
            *(["inference"] if self.backward is None else []),
        ]
        sizes = f"{self.times}x{self.batch}x{self.input}"
        name = f"{self.mode}-{self.layers}x{self.hidden}-{sizes}-{self.dtype}"
        return "-".join([name, *kinds])


def read_recurrent() -> list[RecordedRecurrent]:
    """Return every recorded network."""
    data = json.loads(gzip.decompress(RECURRENT_FILE.read_bytes()))
    return [RecordedRecurrent(**each) for each in data["networks"]]
