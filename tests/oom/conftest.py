"""A notebook in this process, as the tests of owners have it."""

from tests.ownership.conftest import hardware, movable, notebook, tracker

__all__ = ["hardware", "movable", "notebook", "tracker"]
