"""The notebook of the tests of owners, and their objects whose code must not run."""

from tests.ownership.conftest import hardware, notebook, nothing_is_called

__all__ = ["hardware", "notebook", "nothing_is_called"]
