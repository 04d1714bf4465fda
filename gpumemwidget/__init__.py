"""GPU memory in the notebook: exact figures for every cell, a live plot, a release with proof.

``%load_ext gpumemwidget`` begins, and ``%memhelp`` lists the magics. Each has a function here that
does the same in code. Nothing heavy is imported before it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from gpumemwidget.api import *

__version__ = "0.1.0"

__all__ = [
    "assert_no_growth",
    "breakdown",
    "budget",
    "compare",
    "dashboard",
    "largest_batch",
    "last_failure",
    "limit",
    "load",
    "load_ipython_extension",
    "load_trace",
    "monitor",
    "owners",
    "plan_release",
    "plan_restore",
    "predict",
    "ray_env",
    "record",
    "release",
    "reset_peaks",
    "restore",
    "span",
    "stat",
    "trace",
    "unload_ipython_extension",
    "variables",
    "watch",
    "watch_cluster",
    "watch_loop",
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
    value = globals()[name] = getattr(import_module("gpumemwidget.api"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
