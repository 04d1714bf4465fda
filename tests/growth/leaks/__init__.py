"""Programs with a leak that somebody reported: each must be found, with its line and its holder."""

from __future__ import annotations

from tests.growth.leaks import runs_models, runs_objects, steps_graphs, steps_objects

__all__ = ["LEAKS"]

LEAKS = (
    *runs_objects.LEAKS,
    *runs_models.LEAKS,
    *steps_graphs.LEAKS,
    *steps_objects.LEAKS,
)
