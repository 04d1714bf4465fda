"""A shell with the extension."""

from tests.jupyter.conftest import loaded, shell

__all__ = ["loaded", "shell"]
