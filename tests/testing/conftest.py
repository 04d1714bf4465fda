"""A shell to load the extension into."""

from tests.jupyter.conftest import shell

__all__ = ["shell"]
