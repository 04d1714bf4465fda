"""A notebook in this process, as the tests of owners have it."""

from tests.ownership.conftest import hardware, heap_put_aside, movable, notebook, tracker

__all__ = ["hardware", "heap_put_aside", "movable", "notebook", "tracker"]
