"""Give pytest the markers ``limit_gpu_memory`` and ``limit_gpu_growth``.

pytest imports this in each of its runs, so nothing else is imported before a marked test runs.
"""

from __future__ import annotations

import inspect
import unittest
from collections.abc import Generator
from functools import partial

import pytest

_MEMORY, _GROWTH = "limit_gpu_memory", "limit_gpu_growth"


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers."""
    config.addinivalue_line(
        "markers",
        f"{_MEMORY}(limit): fail the test if it allocates more than that on a GPU at once, as in "
        "'2 GiB'; without a GPU, its peak is predicted",
    )
    config.addinivalue_line(
        "markers",
        f"{_GROWTH}(limit, warmups=1): run the test once more after the warm-ups, and fail it if "
        "more memory is in use then than before, by more than the limit",
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse marked tests that pytest does not call itself."""
    if _find_markers(item) and issubclass(getattr(item, "cls", None) or object, unittest.TestCase):
        pytest.fail(
            f"{_name_markers(item)} can't measure a method of unittest.TestCase: write the test as "
            "a function, or as a method of a plain class",
            pytrace=False,
        )


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Let a marked test's function run within its limits."""
    markers = _find_markers(pyfuncitem)
    if not markers:
        return (yield)
    function = pyfuncitem.obj
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        pytest.fail(
            f"{_name_markers(pyfuncitem)} can't measure an async test: let a plain test run the "
            "loop, as with asyncio.run()",
            pytrace=False,
        )
    if hasattr(function, "hypothesis"):
        pytest.fail(
            f"{_name_markers(pyfuncitem)} can't measure a test of hypothesis, which runs its "
            "function many times: take one example",
            pytrace=False,
        )
    from gpumemwidget.checks import memory_growth  # noqa: PLC0415 - only marked tests need it

    memory, growth = markers.get(_MEMORY), markers.get(_GROWTH)
    pyfuncitem.obj = partial(memory_growth.run_limited, function, memory, growth)
    try:
        return (yield)
    except memory_growth.LimitError as exc:
        pytest.fail(str(exc), pytrace=False)
    except memory_growth.UnpredictableError as exc:
        pytest.skip(str(exc))
    finally:
        pyfuncitem.obj = function


def _find_markers(item: pytest.Item) -> dict[str, pytest.Mark]:
    found = ((name, item.get_closest_marker(name)) for name in (_MEMORY, _GROWTH))
    return {name: marker for name, marker in found if marker is not None}


def _name_markers(item: pytest.Item) -> str:
    return " and ".join(_find_markers(item))
