"""All patterns of the zoo, in the order of the table in docs/zoo.md."""

from __future__ import annotations

from tests.zoo import (
    patterns_autograd,
    patterns_exceptions,
    patterns_functions,
    patterns_gpu,
    patterns_models,
    patterns_notebook,
    patterns_objects,
    patterns_threads,
)
from tests.zoo.pattern import Pattern

__all__ = ["PATTERNS"]

PATTERNS: tuple[Pattern, ...] = (
    *patterns_notebook.PATTERNS,
    *patterns_exceptions.PATTERNS,
    *patterns_autograd.PATTERNS,
    *patterns_models.PATTERNS,
    *patterns_functions.PATTERNS,
    *patterns_threads.PATTERNS,
    *patterns_objects.PATTERNS,
    *patterns_gpu.PATTERNS,
)
