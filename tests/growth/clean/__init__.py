"""Programs without a leak, of which many look as if they had one: no alarm may be raised."""

from __future__ import annotations

from tests.growth.clean import (
    collecting,
    evaluation,
    generation,
    generative,
    notebook,
    recipes,
    reinforcement,
    sequences,
    training,
)

__all__ = ["CLEAN"]

CLEAN = (
    *training.PROGRAMS,
    *recipes.PROGRAMS,
    *sequences.PROGRAMS,
    *generation.PROGRAMS,
    *reinforcement.PROGRAMS,
    *generative.PROGRAMS,
    *evaluation.PROGRAMS,
    *collecting.PROGRAMS,
    *notebook.PROGRAMS,
)
