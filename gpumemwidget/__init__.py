"""GPU memory in the notebook: exact figures for every cell, a live plot, a release with proof."""

from __future__ import annotations

__version__ = "0.1.0"
