"""What an open dashboard costs the kernel: bytes and processor time an update, a busy cell's time.

In a real kernel, with a front end that counts in the browser's place. Cells with the dashboard seen
and hidden take turns; they do the same, so what differs between them is the watching.
"""

from __future__ import annotations

from statistics import median

from benchmarks.kernel import CountedKernel, start_kernel
from benchmarks.rows import Row, format_bytes, format_seconds, judge
from benchmarks.sampler import MOST_SLOWDOWN, measure_pairs

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
    with start_kernel() as kernel:
        kernel.run(_SETUP)
        kernel.run("%load_ext gpumemwidget")
        opening = sum(message.n_bytes for message in kernel.open_dashboard())
        return [
            judge("messages that open the dashboard", opening, MOST_OPENING_BYTES, format_bytes),
            *_measure_updates(kernel, pairs=1 if quick else 5, seconds=1 if quick else 4),
            _measure_slowdown(kernel, pairs=1 if quick else 20),
        ]


def _measure_updates(kernel: CountedKernel, *, pairs: int, seconds: int) -> list[Row]:
    cpu_s: list[float] = []
    bare_s: list[float] = []
    weights: list[int] = []
    for _ in range(pairs):
        kernel.set_visible(False)
        hidden_s = kernel.read_printed(kernel.run(f"print(json.dumps(measure_idle({seconds})))"))
        messages = kernel.run(f"print(json.dumps(measure_bare({seconds})))")
        n_updates = sum(message.is_update for message in messages)
        bare_s.append((kernel.read_printed(messages) - hidden_s) / n_updates)
        kernel.set_visible(True)
        messages = kernel.run(f"print(json.dumps(measure_idle({seconds})))")
        updates = [message.n_bytes for message in messages if message.is_update]
        weights += updates
        cpu_s.append((kernel.read_printed(messages) - hidden_s) / len(updates))
    rate_hz = len(weights) / (pairs * seconds)
    return [
        judge(
            "kernel's processor time an update, sampling included",
            median(cpu_s),
            MOST_CPU_S,
            format_seconds,
        ),
        Row(
            "beside it: a bare message of that size through ipykernel's comm",
            f"{median(bare_s) * 1e3:.2f} ms",
        ),
        judge(
            "bytes an update, headers included",
            median(weights),
            MOST_UPDATE_BYTES,
            format_bytes,
            f" at {rate_hz:.1f} Hz",
        ),
    ]


def _measure_slowdown(kernel: CountedKernel, *, pairs: int) -> Row:
    updates = 0
    visible_s = 0.0

    def time_hidden() -> float:
        kernel.set_visible(False)
        return kernel.read_printed(kernel.run(_BUSY))

    def time_visible() -> float:
        nonlocal updates, visible_s
        kernel.set_visible(True)
        messages = kernel.run(_BUSY)
        took_s = kernel.read_printed(messages)
        updates += sum(message.is_update for message in messages)
        visible_s += took_s
        return took_s

    slowdown = measure_pairs(time_hidden, time_visible, pairs=pairs)
    rate = f" at {updates / visible_s:.1f} updates a second"
    what = "slow-down of a busy cell by an open dashboard"
    return judge(what, slowdown, MOST_SLOWDOWN, "{:+.1%}".format, rate)
