"""What a person sees of the dashboard and when: the first paint, the plot's delay in mid-cell.

In JupyterLab and Chromium, on the same machine as the kernel. The page itself takes the times: a
sample's age when the frame that shows it has been painted, on the one clock that both sides share.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.rows import Row, format_seconds, judge
from tests.browser.lab import Lab, start_browser, start_lab
from tools.chromium import find_chromium

MOST_FIRST_PAINT_S = 0.8
MOST_LATENCY_S = 0.1

_SETUP = """
import torch
import gpumemwidget
from benchmarks.machine import list_devices
from benchmarks.sampler import SmallOperations
for device in list_devices():
    torch.zeros(1, device=device)
work = SmallOperations((list_devices() or ["cpu"])[0])
"""
_OFFSET = "clock = gpumemwidget.monitor().clock\nprint(clock.wall() - clock.now())"
_LOAD, _SET_UP, _ASK_OFFSET, _DASHBOARD, _BUSY = range(5)

#: Runs the selected cell; the milliseconds until the plot's first frame is painted.
_FIRST_PAINT = """
() => new Promise((done) => {
  const start = performance.now();
  const look = () => {
    if (!document.querySelector("[data-drawn]")) return;
    observer.disconnect();
    const channel = new MessageChannel();
    channel.port1.onmessage = () => done(performance.now() - start);
    channel.port2.postMessage(null);
  };
  const observer = new MutationObserver(look);
  observer.observe(document.body, {
    subtree: true, childList: true, attributes: true, attributeFilter: ["data-drawn"],
  });
  void window.jupyterapp.commands.execute("notebook:run-cell");
})
"""
#: From now on notes the time of each newest sample that was painted, and when that was, in epoch s.
_WATCH = """
() => {
  window.painted = [];
  const root = document.querySelector("[data-drawn]");
  let last = root.dataset.lastTime;
  new MutationObserver(() => {
    const sample = root.dataset.lastTime;
    if (sample === last) return;
    last = sample;
    // This stands in the frame that draws; the message is handled when the frame has been painted.
    const channel = new MessageChannel();
    channel.port1.onmessage = () => window.painted.push(
      [Number(sample), (performance.timeOrigin + performance.now()) / 1000]);
    channel.port2.postMessage(null);
  }).observe(root, { attributes: true, attributeFilter: ["data-last-time"] });
}
"""


def measure(quick: bool) -> list[Row]:
    """The first paint and the latency; only that there is no browser, where there is none."""
    if find_chromium() is None:
        return [Row("first paint and latency", "no browser here")]
    # The kernel starts in another folder and still has to find the benchmarks' own code.
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])
    with (
        tempfile.TemporaryDirectory() as folder,
        start_browser() as browser,
        start_lab(Path(folder), browser) as lab,
    ):
        first_s = median(_time_first_paint(lab) for _ in range(1 if quick else 5))
        latency_s = _measure_latency(lab, quick=quick)
    paint = "from running `%memdash` to the plot's first paint"
    latency = "from a reading to its paint, in mid-cell (median)"
    return [
        judge(paint, first_s, MOST_FIRST_PAINT_S, format_seconds),
        judge(latency, latency_s, MOST_LATENCY_S, format_seconds),
    ]


def _time_first_paint(lab: Lab) -> float:
    """In a new kernel and page, so that nothing of ours has been imported or parsed before."""
    with lab.open(["%load_ext gpumemwidget", "%memdash"]) as notebook:
        notebook.wait_for_kernel()
        notebook.run(0)
        notebook.select(1)
        return float(notebook.page.evaluate(_FIRST_PAINT)) / 1000


def _measure_latency(lab: Lab, *, quick: bool) -> float:
    """The median age of a sample when it is painted."""
    busy = f"for _ in range({4 if quick else 20}): work.time_block()"
    cells = ["%load_ext gpumemwidget", _SETUP, _OFFSET, "%memdash", busy]
    with lab.open(cells) as notebook:
        notebook.wait_for_kernel()
        notebook.run(_LOAD)
        notebook.run(_SET_UP, timeout_s=60)
        offset_s = float(notebook.run(_ASK_OFFSET))
        notebook.run(_DASHBOARD)
        notebook.page.wait_for_selector("[data-last-time]")
        notebook.page.evaluate(_WATCH)
        notebook.run(_BUSY, timeout_s=120)
        painted = notebook.page.evaluate("() => window.painted")
    return median(painted_s - (sample_s + offset_s) for sample_s, painted_s in painted)
