"""What the card of an OOM costs a person, beside half a million objects and ten thousand tensors.

Both of its parts: the look at the owners within the allocation that fails (on a GPU), and the card
itself once the traceback is shown. On the host, which has no such moment, the second part does all.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import RichOutput, capture_output

from benchmarks.account import fill_heap
from benchmarks.rows import Row, format_seconds, judge
from benchmarks.shell import run, start_shell
from gpumemwidget.jupyter.outputs import OomCards
from gpumemwidget.session.oom_watch import OomWatch

MOST_CARD_S = 1.0
#: Our two parts of an OOM.
_TIMED = ((OomWatch, "_keep"), (OomCards, "end"))

#: A training step that runs out of memory with activations at hand. On a GPU these are some hundred
#: MiB: a card leaves out what is next to nothing there.
_STEP = """
layer = torch.nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
model = torch.nn.TransformerEncoder(layer, 12, enable_nested_tensor=False).to({device!r})
optimizer = torch.optim.AdamW(model.parameters())
def train():
    for step in range(2):
        loss = model(torch.randn({batch}, 64, device={device!r})).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    output = model(torch.randn({batch}, 64, device={device!r}))
    return torch.empty(2**44, device={device!r}) + output.mean()
"""


def measure(quick: bool) -> list[Row]:
    """The cost of a card on each of the devices here, as medians."""
    shell = start_shell()
    run(shell, "%load_ext gpumemwidget")
    n_objects, _ = fill_heap(shell, quick=quick)
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    return [
        _measure_card(shell, device, n_objects=n_objects, n_runs=2 if quick else 7)
        for device in devices
    ]


def _measure_card(shell: InteractiveShell, device: str, *, n_objects: int, n_runs: int) -> Row:
    run(shell, _STEP.format(device=device, batch="8, 16" if device == "cpu" else "256, 64"))
    seconds = [_time_card(shell) for _ in range(n_runs + 1)]
    # The first one finds cold caches.
    card_s = median(seconds[1:])
    words = "the host" if device == "cpu" else "the GPU"
    what = f"the card of an OOM on {words} beside {n_objects:,} objects"
    return judge(what, card_s, MOST_CARD_S, format_seconds)


def _time_card(shell: InteractiveShell) -> float:
    """Seconds that one OOM costs with us beyond the OOM itself."""
    spent_s: list[float] = []

    def count(part: Callable[..., None]) -> Callable[..., None]:
        def timed(*args: Any) -> None:
            start_s = perf_counter()
            part(*args)
            spent_s.append(perf_counter() - start_s)

        return timed

    parts = [(owner, name, vars(owner)[name]) for owner, name in _TIMED]
    for owner, name, part in parts:
        setattr(owner, name, count(part))
    try:
        with capture_output() as shown:
            shell.run_cell("train()", store_history=True)
    finally:
        for owner, name, part in parts:
            setattr(owner, name, part)
    cards = [text for text in map(_read_text, shown.outputs) if "Out of memory on" in text]
    if len(cards) != 1 or "What you can do" not in cards[0]:
        raise RuntimeError(f"no card with ways out was shown: {cards} {shown.stdout}{shown.stderr}")
    return sum(spent_s)


def _read_text(output: RichOutput) -> str:
    text: str = output.data.get("text/plain", "")
    return text
