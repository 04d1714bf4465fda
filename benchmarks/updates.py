"""What an open dashboard costs the kernel: bytes and processor time an update, a busy cell's time.

In a real kernel, with a front end that counts in the browser's place. Cells with the dashboard seen
and hidden take turns; they do the same, so what differs between them is the watching.
"""

from __future__ import annotations

import importlib.util
import json
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.rows import Row, emit
from benchmarks.sampler import MOST_SLOWDOWN, measure_pairs

if TYPE_CHECKING:
    from benchmarks.kernel import CountedKernel, Message

MOST_CPU_S = 0.5e-3
MOST_UPDATE_BYTES = 2_000
MOST_OPENING_BYTES = 1_300_000

_SETUP = """
import contextvars, json, threading, time
import torch
from comm import create_comm
from benchmarks.machine import list_devices
from benchmarks.sampler import SmallOperations
for device in list_devices():
    torch.zeros(1, device=device)
work = SmallOperations((list_devices() or ["cpu"])[0])

def measure_idle(seconds):
    '''Processor time while little happens, but enough that every sample differs.'''
    kept = []
    cpu_s, until_s = time.process_time(), time.perf_counter() + seconds
    while time.perf_counter() < until_s:
        time.sleep(0.05)
        kept.append(torch.ones(4096, device=work.device))
    return time.process_time() - cpu_s

def measure_bare(seconds):
    '''The same while a thread sends as often, as much, and nothing else.'''
    comm = create_comm(target_name="gpumemwidget.bench")
    done = threading.Event()
    content = {"method": "custom", "content": {"kind": "rows"}}
    def send():
        while not done.wait(0.1):
            comm.send(content, None, [bytes(8 * (5 + 4 * (1 + len(list_devices()))))])
    thread = threading.Thread(target=contextvars.copy_context().run, args=(send,))
    thread.start()
    try:
        return measure_idle(seconds)
    finally:
        done.set()
        thread.join()
"""
#: A busy cell of some seconds: what happens at its ends weighs little in it.
_BUSY = "print(json.dumps(sum(work.time_block() for _ in range(4))))"


def measure(quick: bool) -> list[Row]:
    """Opening, updates and a busy cell, one after the other in one kernel."""
    if importlib.util.find_spec("jupyter_client") is None:
        return [Row("an open dashboard's cost to the kernel", "no Jupyter kernel here")]
    from benchmarks.kernel import start_kernel

    with start_kernel() as kernel:
        kernel.run(_SETUP)
        kernel.run("%load_ext gpumemwidget")
        opening = sum(message.n_bytes for message in kernel.open_dashboard())
        return [
            Row(
                "messages that open the dashboard",
                f"{opening / 1e6:.3f} MB",
                value=opening,
                limit=MOST_OPENING_BYTES,
                target="≤ 1.3 MB",
            ),
            *_measure_updates(kernel, pairs=1 if quick else 5, seconds=1 if quick else 4),
            _measure_slowdown(kernel, pairs=1 if quick else 20),
        ]


def _measure_updates(kernel: CountedKernel, *, pairs: int, seconds: int) -> list[Row]:
    cpu_s: list[float] = []
    bare_s: list[float] = []
    weights: list[int] = []
    for _ in range(pairs):
        kernel.set_visible(False)
        hidden_s = _read_number(kernel.run(f"print(json.dumps(measure_idle({seconds})))"))
        messages = kernel.run(f"print(json.dumps(measure_bare({seconds})))")
        bare_s.append((_read_number(messages) - hidden_s) / sum(map(_is_update, messages)))
        kernel.set_visible(True)
        messages = kernel.run(f"print(json.dumps(measure_idle({seconds})))")
        updates = [message.n_bytes for message in messages if _is_update(message)]
        weights += updates
        cpu_s.append((_read_number(messages) - hidden_s) / len(updates))
    rate_hz = len(weights) / (pairs * seconds)
    return [
        Row(
            "kernel's processor time an update, sampling included",
            f"{median(cpu_s) * 1e3:.2f} ms",
            value=median(cpu_s),
            limit=MOST_CPU_S,
            target="≤ 0.5 ms",
        ),
        Row(
            "beside it: a bare message of that size through ipykernel's comm",
            f"{median(bare_s) * 1e3:.2f} ms",
        ),
        Row(
            "bytes an update, headers included",
            f"{median(weights) / 1e3:.2f} kB at {rate_hz:.1f} Hz",
            value=median(weights),
            limit=MOST_UPDATE_BYTES,
            target="≤ 2 kB",
        ),
    ]


def _measure_slowdown(kernel: CountedKernel, *, pairs: int) -> Row:
    updates = 0
    visible_s = 0.0

    def time_hidden() -> float:
        kernel.set_visible(False)
        return _read_number(kernel.run(_BUSY))

    def time_visible() -> float:
        nonlocal updates, visible_s
        kernel.set_visible(True)
        messages = kernel.run(_BUSY)
        took_s = _read_number(messages)
        updates += sum(_is_update(message) for message in messages)
        visible_s += took_s
        return took_s

    slowdown = measure_pairs(time_hidden, time_visible, pairs=pairs)
    return Row(
        "slow-down of a busy cell by an open dashboard",
        f"{slowdown:+.1%} at {updates / visible_s:.1f} updates a second",
        value=slowdown,
        limit=MOST_SLOWDOWN,
        target="≤ 1% at 10 Hz",
    )


def _is_update(message: Message) -> bool:
    """Whether it brings a new sample, and not the start or end of a cell."""
    if message.kind != "comm_msg":
        return False
    return message.content["data"].get("content", {}).get("kind") == "rows"


def _read_number(messages: list[Message]) -> float:
    text = "".join(message.content["text"] for message in messages if message.kind == "stream")
    return float(json.loads(text))


if __name__ == "__main__":
    emit(measure)
