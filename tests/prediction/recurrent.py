"""Recurrent networks recorded on a GPU, with the allocations and frees within cuDNN's operators."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).parent / "recordings" / "operators" / "recurrent.json.gz"


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
    data = json.loads(gzip.decompress(FILE.read_bytes()))
    return [RecordedRecurrent(**each) for each in data["networks"]]
