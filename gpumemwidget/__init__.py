"""GPU memory in the notebook: exact figures for every cell, a live plot, a release with proof.

``%load_ext gpumemwidget`` begins. Every magic has a function here:

- ``monitor()``: the recorded cells and the samples (``%memledger``)
- ``stat()``: the memory of every device now (``%memstat``)
- ``breakdown()``: whole devices in parts that add up (``%memstat --device``)
- ``owners()``: who owns what is allocated (``%memvars``)
- ``why()``: what holds something, and how to cut it (``%memwhy``)
- ``variables()``, ``plan_release()``, ``release()``: who holds what, and its release
  (``%memrelease``)
- ``plan_restore()``, ``restore()``: what a release moved to the CPU, brought back (``%memrestore``)
- ``trace()``, ``load_trace()``: which line took it, of a ``with`` block or from a file
  (``%%memtrace``)
- ``limit()``, ``reset_peaks()``: what PyTorch may reserve (``%memlimit``), its peaks begun anew
  (``%memreset``)
- ``budget()``: what a cell may have allocated (``%membudget``)
- ``dashboard()``: the dashboard (``%memdash``)

Nothing heavy is imported before it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from gpumemwidget.jupyter.api import (
        breakdown,
        budget,
        dashboard,
        last_failure,
        limit,
        load_trace,
        monitor,
        owners,
        plan_release,
        plan_restore,
        release,
        reset_peaks,
        restore,
        stat,
        trace,
        variables,
        why,
    )

__version__ = "0.1.0"

__all__ = [
    "breakdown",
    "budget",
    "dashboard",
    "last_failure",
    "limit",
    "load_ipython_extension",
    "load_trace",
    "monitor",
    "owners",
    "plan_release",
    "plan_restore",
    "release",
    "reset_peaks",
    "restore",
    "stat",
    "trace",
    "unload_ipython_extension",
    "variables",
    "why",
]


def load_ipython_extension(ipython: InteractiveShell) -> None:
    """``%load_ext gpumemwidget``: record every cell from here on."""
    from gpumemwidget.jupyter.extension import load  # noqa: PLC0415 - only a notebook needs it

    load(ipython)


def unload_ipython_extension(ipython: InteractiveShell) -> None:
    """``%unload_ext gpumemwidget``: take away everything that loading added."""
    from gpumemwidget.jupyter.extension import unload  # noqa: PLC0415 - only a notebook needs it

    unload(ipython)


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("gpumemwidget.jupyter.api"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
