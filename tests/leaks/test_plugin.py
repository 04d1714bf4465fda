"""The markers of the pytest plugin: what goes beyond a limit fails, and nothing else does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

# Imported here, they stay: what a run within this process imports goes with it.
import gpumemwidget.checks.memory_growth
import gpumemwidget.leaks.survey
import gpumemwidget.report.leaks
import gpumemwidget.testing  # noqa: F401

pytest_plugins = ["pytester"]

#: The plugin as a module, whether or not the installed package has it as an entry point.
_PLUGIN = ("-p", "no:gpumemwidget", "-p", "gpumemwidget.checks.pytest_plugin")
_OPTIONS = (*_PLUGIN, "-p", "no:cacheprovider", "--strict-markers", "-rs")

_GPU = """
    import pytest
    from gpumemwidget.testing import simulate_gpus

    MIB = 1 << 20

    @pytest.fixture
    def gpus():
        with simulate_gpus() as gpus:
            gpus.allocate(100 * MIB)
            yield gpus
"""


def run(pytester: pytest.Pytester, source: str) -> pytest.RunResult:
    """Run tests with the plugin within this process, and return what came of them.

    They may import nothing more of torch, whose modules can't come twice.
    """
    pytester.makepyfile(source)
    return pytester.runpytest_inprocess(*_OPTIONS)


def test_the_plugin_is_light(pytester: pytest.Pytester) -> None:
    """Without marked tests it brings nothing of ours but itself: neither torch nor the rest."""
    pytester.makepyfile(
        """
        import sys

        def test_modules():
            own = {name for name in sys.modules if name.partition(".")[0] == "gpumemwidget"}
            names = {"gpumemwidget", "gpumemwidget.checks", "gpumemwidget.checks.pytest_plugin"}
            assert own == names
            assert "torch" not in sys.modules
        """
    )

    result = pytester.runpytest_subprocess(*_OPTIONS, "-p", "no:hypothesispytest")

    result.assert_outcomes(passed=1)


def test_the_markers_are_listed(pytester: pytest.Pytester) -> None:
    """``pytest --markers`` says what they do."""
    result = pytester.runpytest_inprocess(*_PLUGIN, "--markers")

    result.stdout.fnmatch_lines(
        ["@pytest.mark.limit_gpu_memory(limit): *", "@pytest.mark.limit_gpu_growth(limit, warm*"]
    )


def test_a_peak_is_held_to_its_limit(pytester: pytest.Pytester) -> None:
    """It is the peak of the test alone, to the byte; the message has it with the limit."""
    result = run(
        pytester,
        _GPU
        + """
    @pytest.mark.limit_gpu_memory(64 * MIB)
    def test_within(gpus):
        gpus.free(gpus.allocate(64 * MIB))

    @pytest.mark.limit_gpu_memory("63 MiB")
    def test_beyond(gpus):
        for _ in range(2):
            gpus.free(gpus.allocate(64 * MIB))
            gpus.torch.cuda.reset_peak_memory_stats(0)

    @pytest.mark.limit_gpu_memory("1 MiB")
    def test_that_fails(gpus):
        gpus.allocate(64 * MIB)
        assert 1 == 2
""",
    )

    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(
        [
            "*_ test_beyond _*",
            "the test allocated 64.00 MiB at once on cuda:0, and the limit is 63.00 MiB.",
            "*_ test_that_fails _*",
            "E * assert 1 == 2",
        ]
    )


def test_a_peak_is_predicted_where_there_is_no_gpu(pytester: pytest.Pytester) -> None:
    """The body is not run; a test that can't be predicted is skipped with the reason."""
    pytester.makepyfile(
        """
    import pytest
    import torch

    @pytest.fixture
    def layer():
        return torch.nn.Linear(1024, 1024)

    def train(layer):
        layer(torch.zeros(8, 1024, device="cuda")).sum().backward()

    @pytest.mark.limit_gpu_memory("100 MiB")
    def test_within(layer):
        train(layer)
        print("the body ran")

    @pytest.mark.limit_gpu_memory("1 MiB")
    def test_beyond(layer):
        train(layer)

    @pytest.mark.limit_gpu_memory("1 MiB")
    def test_that_needs_values(layer):
        assert layer.weight.argmax().item() == 1234
""",
    )

    result = pytester.runpytest_subprocess(*_OPTIONS)

    result.assert_outcomes(passed=1, failed=1, skipped=1)
    result.stdout.fnmatch_lines(
        [
            "the test would allocate * MiB at once on cuda:0, and the limit is 1.00 MiB (predicted,"
            " as there is no GPU here).",
            "In use at the peak: * gradient layer.weight.",
            "SKIPPED * no GPU here, and the peak can't be predicted: *AssertionError*",
        ]
    )


def test_growth_is_held_to_its_limit(pytester: pytest.Pytester) -> None:
    """The test runs once more after its warm-ups, and what it leaves then is what counts."""
    result = run(
        pytester,
        """
    import pytest
    import torch

    CACHE, RUNS = {}, []

    @pytest.mark.limit_gpu_growth("1 MiB")
    def test_that_fills_a_cache():
        CACHE.setdefault("table", torch.zeros(4 << 20))

    @pytest.mark.limit_gpu_growth("1 MiB", warmups=2)
    @pytest.mark.parametrize("shape", [(1024, 2048)])
    def test_that_leaks(shape, monkeypatch):
        RUNS.append(torch.zeros(shape))
        if len(RUNS) == 3:
            print("the third run")

    @pytest.mark.limit_gpu_growth("1 MiB", warmups=0)
    def test_once():
        RUNS.append(None)
        assert RUNS.count(None) == 1
""",
    )

    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*_ test_that_leaks* _*",
            "host memory grew by 8.0? MiB, and the limit is 1.00 MiB.",
            "the third run",
        ]
    )


def test_both_limits_at_once(pytester: pytest.Pytester) -> None:
    """The peak is that of all runs, and growth is checked within."""
    result = run(
        pytester,
        _GPU
        + """
    KEPT = []

    @pytest.mark.limit_gpu_memory("8 MiB")
    @pytest.mark.limit_gpu_growth("2 MiB")
    def test_within(gpus):
        KEPT.append(gpus.allocate(2 * MIB))

    @pytest.mark.limit_gpu_memory("3 MiB")
    @pytest.mark.limit_gpu_growth("2 MiB")
    def test_peak_beyond(gpus):
        KEPT.append(gpus.allocate(2 * MIB))

    @pytest.mark.limit_gpu_memory("8 MiB")
    @pytest.mark.limit_gpu_growth("1 MiB")
    def test_growth_beyond(gpus):
        KEPT.append(gpus.allocate(2 * MIB))
""",
    )

    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(
        [
            "the test allocated 4.00 MiB at once on cuda:0, and the limit is 3.00 MiB.",
            "cuda:0 grew by 2.00 MiB, and the limit is 1.00 MiB.",
        ]
    )


def test_what_can_not_be_held_to_a_limit_is_refused(pytester: pytest.Pytester) -> None:
    """Markers without a limit, and tests that pytest does not call itself, fail in one line."""
    result = run(
        pytester,
        """
    import unittest
    import pytest
    from hypothesis import given, strategies

    @pytest.mark.limit_gpu_memory
    def test_without_a_limit():
        pass

    @pytest.mark.limit_gpu_growth("1 MiB", runs=3)
    def test_with_another_option():
        pass

    @pytest.mark.limit_gpu_growth("a lot")
    def test_without_an_amount():
        pass

    @pytest.mark.limit_gpu_growth(0)
    async def test_async():
        pass

    @pytest.mark.limit_gpu_growth(0)
    @given(strategies.integers())
    def test_random(number):
        pass

    class TestMethods(unittest.TestCase):
        @pytest.mark.limit_gpu_growth(0)
        def test_method(self):
            pass

    class TestPlain:
        @pytest.mark.limit_gpu_growth(0)
        def test_method(self):
            pass
""",
    )

    result.assert_outcomes(passed=1, failed=5, errors=1)
    result.stdout.fnmatch_lines(
        [
            "limit_gpu_growth can't measure a method of unittest.TestCase: *",
            "limit_gpu_memory: missing 1 required positional argument: 'limit'",
            "limit_gpu_growth: got an unexpected keyword argument 'runs'",
            "limit_gpu_growth: 'a lot' is not an amount of memory: *",
            "limit_gpu_growth can't measure an async test: *",
            "limit_gpu_growth can't measure a test of hypothesis, *",
        ]
    )


@pytest.mark.slow
def test_the_examples_of_the_documents_pass(pytester: pytest.Pytester) -> None:
    """The page on leaks in tests is a file of tests that pass, with a GPU and without."""
    page = Path(__file__).parents[2] / "docs" / "leaks-in-tests.md"
    blocks = re.findall(
        r"^```python\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    pytester.makepyfile("\n".join(blocks))

    result = pytester.runpytest_subprocess(*_OPTIONS)

    result.assert_outcomes(passed=4)
