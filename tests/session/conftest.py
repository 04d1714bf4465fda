"""The notebook of the tests of owners, for sessions too."""

from tests.ownership.conftest import hardware, notebook

__all__ = ["hardware", "notebook"]
