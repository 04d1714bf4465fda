"""What eight devices cost the kernel: an open dashboard at 10 Hz, with its plot or its Device tab.

In a real kernel whose eight devices are simulated, with a front end that counts in the browser's
place. Cells that allocate a little, with the dashboard seen and hidden, take turns: what they
differ in is the watching.
"""

from __future__ import annotations

from statistics import median

from benchmarks.kernel import CountedKernel, start_kernel
from benchmarks.rows import Row, judge

N_DEVICES = 8
MOST_SHARE = 0.02

_SETUP = f"""
import json, time
import torch
from gpumemwidget.testing import simulate_gpus
gpus = simulate_gpus({N_DEVICES})
weights = [gpus.allocate(700 << 20, n // 8) for n in range(8 * {N_DEVICES})]
tensors = [torch.ones(256) for _ in range(2000)]

def measure(seconds):
    '''Processor time of this process while each device allocates ten times a second.'''
    cpu_s = time.process_time()
    for n in range(seconds * 10):
        handles = [gpus.allocate((n % 9 + 1) << 30, device) for device in range({N_DEVICES})]
        time.sleep(0.1)
        for handle in handles:
            gpus.free(handle)
    return time.process_time() - cpu_s
"""


def measure(quick: bool) -> list[Row]:
    """The dashboard at work, without the parts of a device and with them."""
    with start_kernel() as kernel:
        kernel.run(_SETUP)
        kernel.run("%load_ext gpumemwidget")
        kernel.open_dashboard()
        sizes = {"pairs": 1 if quick else 4, "seconds": 1 if quick else 4}
        return [
            _measure_share(kernel, "its plot and cells", device=None, **sizes),
            _measure_share(kernel, "its Device tab", device="cuda:0", **sizes),
        ]


def _measure_share(
    kernel: CountedKernel, what: str, *, device: str | None, pairs: int, seconds: int
) -> Row:
    """The median of what a visible dashboard adds to one core's work."""
    shares: list[float] = []
    n_updates = 0
    cell = f"print(json.dumps(measure({seconds})))"
    for _ in range(pairs):
        kernel.set_visible(False)
        hidden_s = kernel.read_printed(kernel.run(cell))
        kernel.set_visible(True, device=device)
        messages = kernel.run(cell)
        n_updates += sum(message.is_update for message in messages)
        shares.append((kernel.read_printed(messages) - hidden_s) / seconds)
    share = median(shares)
    what = f"kernel's processor time with {N_DEVICES} simulated devices, {what} open"
    rate = f" at {n_updates / (pairs * seconds):.1f} updates a second"
    return judge(what, share, MOST_SHARE, "{:.1%} of a core".format, rate)
