"""Cells that show cards of OOMs in a kernel, for the tests and the pictures of them."""

from __future__ import annotations

from pathlib import Path

__all__ = ["HOST_CARD", "LOAD"]

_ROOT = Path(__file__).parents[2]
#: ``failing`` is shown below the next cell that fails, as a card is below its traceback.
LOAD = f"""
%load_ext gpumemwidget
import dataclasses, os, sys, time, torch
sys.path.insert(0, {str(_ROOT)!r})
from gpumemwidget.jupyter.extension import current_extension
from gpumemwidget.jupyter.oomcard import show_card
from gpumemwidget.traces import OomCard, OomEvent, WayOut
import tests.report.oom_examples as examples
failing = []
def show_failing(result):
    if result.error_in_exec is not None and failing:
        show_card(failing.pop(), current_extension())
get_ipython().events.register("post_run_cell", show_failing)
print("pid", os.getpid())
"""
#: 256 MiB under two names, 256 MiB in a list, and a function that keeps as much when it fails.
HOST_CARD = """
big = torch.ones(64, 1024, 1024)
also_big = torch.ones(64, 1024, 1024)
kept = [torch.ones(64, 1024, 1024)]
def fail():
    activations = torch.ones(64, 1024, 1024)
    raise ValueError("made to fail")
MIB = 1024**2
ways = (
    WayOut("last exception", "Release the last exception: its frames hold what the failed step "
           "had made", 256 * MIB, "exact", "%memrelease --exceptions", can_do=True),
    WayOut("names", "Release a variable that this cell did not use: big", 256 * MIB, "exact",
           "%memrelease big", can_do=True, names=("big",)),
    WayOut("names", "Release a variable that this cell did not use: also_big", 256 * MIB, "exact",
           "%memrelease also_big", can_do=True, names=("also_big",)),
    WayOut("smaller batch", "Halve the batch: batch has 64 rows", 100 * MIB, "about"),
)
card = examples.make_host_card(ways=ways, place="In[2], line 9", text="fail()")
"""
