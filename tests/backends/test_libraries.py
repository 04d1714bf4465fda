"""What other libraries of the process have of a GPU.

On a real one: ``tests/gpu/test_libraries.py``.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

from gpumemwidget.backends.hardware import Hardware, detect_hardware
from gpumemwidget.backends.libraries import list_known_libraries
from gpumemwidget.backends.protocol import GpuLibrary
from gpumemwidget.jupyter.extension import IPythonShell
from gpumemwidget.model.breakdowns import BreakdownDoubt
from gpumemwidget.model.devices import LibraryUse
from gpumemwidget.model.releases import ReleaseRequest
from gpumemwidget.releasing.release import execute_release
from gpumemwidget.report.release import report_release
from gpumemwidget.session.whole_devices import take_breakdowns
from gpumemwidget.testing import simulate_gpus
from gpumemwidget.testing.machine import SimulatedLibrary, SimulatedMachine
from tests.backends.children import run_python
from tests.shell import open_shell

GIB = 1 << 30


def _list_inner(hardware: Hardware, device: str = "cuda:0") -> dict[str, int]:
    """The parts of what is outside PyTorch, by their keys."""
    record = take_breakdowns(hardware, device).record()
    assert sum(part.n_bytes for part in record.parts) == record.total_bytes
    outside = next(part for part in record.parts if part.key == "outside")
    assert not outside.parts or sum(part.n_bytes for part in outside.parts) == outside.n_bytes
    return {part.key: part.n_bytes for part in outside.parts}


def test_a_library_divides_what_is_outside_pytorch() -> None:
    """What its arrays are in, its cache, and the rest; where it is not, there are no such parts."""
    with simulate_gpus(2, total_bytes=16 * GIB) as gpus:
        gpus.allocate(GIB, 0)
        gpus.touch(1)
        gpus.driver.library.set_use(2 * GIB, 3 * GIB, 0)
        hardware = detect_hardware()

        inner, other = _list_inner(hardware), _list_inner(hardware, "cuda:1")
        hardware.close()

    context_bytes = 16 * GIB // 160
    assert inner == {"library": 2 * GIB, "library cache": 3 * GIB, "context": context_bytes}
    assert other == {}


def test_its_cache_is_given_back_when_that_is_asked_for() -> None:
    """By the driver's figure; what its arrays are in stays."""
    with simulate_gpus(total_bytes=16 * GIB) as gpus:
        gpus.driver.library.set_use(2 * GIB, 3 * GIB)
        hardware = detect_hardware()

        planned = hardware.list_caches()
        given = hardware.empty_libraries()
        again = hardware.empty_libraries()
        use = hardware.read_own_use("cuda:0")
        hardware.close()

    assert given == (planned, ())
    assert planned == (("Simulated library", "cuda:0", 3 * GIB),)
    assert again == ((("Simulated library", "cuda:0", 0),), ())
    assert use == 2 * GIB + 16 * GIB // 160


class _Broken:
    """A library that answers with errors where it has no figures."""

    name = "Broken"
    is_imported = True

    def __init__(self, *use: int) -> None:
        self._use = use

    def read_use(self, device: str) -> LibraryUse:
        if not self._use:
            raise RuntimeError(f"no answer on {device}")
        return LibraryUse(self.name, *self._use, can_empty=True)

    def empty_cache(self, device: str) -> None:
        raise RuntimeError(f"refused on {device}")


def _make(gpus: SimulatedMachine, library: GpuLibrary) -> Hardware:
    return Hardware((), gpus.driver, libraries=[library])


def test_a_library_that_fails_is_unknown() -> None:
    """The rest is as before, and a note says why."""
    with simulate_gpus(total_bytes=16 * GIB) as gpus:
        gpus.touch(0)
        hardware = _make(gpus, _Broken())

        breakdowns = take_breakdowns(hardware)
        record = breakdowns.record()
        hardware.close()

    assert [part.parts for part in record.parts if part.key == "outside"] == [()]
    assert record.silent_libraries[:1] == ("Broken",)
    assert "Broken's memory" in " ".join(breakdowns.notes)
    assert "no answer on cuda:0" in " ".join(breakdowns.notes)


def test_one_that_refuses_hides_nothing_of_the_others(tmp_path: Path) -> None:
    """The release says what was given back, and stops with the refusal in the library's words."""
    with simulate_gpus(2, total_bytes=16 * GIB) as gpus, open_shell(tmp_path) as ip:
        gpus.driver.library.set_use(2 * GIB, 3 * GIB, 1)
        hardware = Hardware((), gpus.driver, libraries=[_Broken(GIB, GIB), gpus.driver.library])

        report = execute_release(IPythonShell(ip), hardware, ReleaseRequest((), libraries=True))
        hardware.close()

    text = " ".join(report_release(report).text.split())
    assert "Simulated library gave back 3.00 GiB on cuda:1" in text
    assert "Broken on cuda:1: RuntimeError: refused on cuda:1" in text


def test_more_than_the_process_has_is_not_believed() -> None:
    """As with managed memory, which need not be on the device."""
    with simulate_gpus(total_bytes=16 * GIB) as gpus:
        gpus.touch(0)
        hardware = _make(gpus, _Broken(15 * GIB, GIB))
        record = take_breakdowns(hardware).record()
        hardware.close()

    assert BreakdownDoubt.FIGURES_DIFFER in record.doubts
    assert all(not part.parts for part in record.parts if part.key == "outside")


def test_what_is_imported_and_silent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the part that it may have some of; nothing of it is called."""

    class Silent(ModuleType):
        def __getattribute__(self, name: str) -> object:
            raise AssertionError(name)

    monkeypatch.setitem(sys.modules, "faiss", Silent("faiss"))
    with simulate_gpus(total_bytes=16 * GIB) as gpus:
        gpus.touch(0)
        hardware = detect_hardware()
        breakdowns = take_breakdowns(hardware, "cuda:0")
        hardware.close()

    words = " ".join(breakdowns.to_text().split())
    assert "Imported, and perhaps in here: Faiss." in words


@pytest.mark.parametrize("found", [None, 5, object()])
def test_a_module_that_is_none_is_not_asked(monkeypatch: pytest.MonkeyPatch, found: object) -> None:
    """Somebody may have put anything under the name."""
    names = ("cupy", "jax._src.xla_bridge", "tensorflow", "tensorflow.python.eager.context", "rmm")
    for name in names:
        monkeypatch.setitem(sys.modules, name, found)

    assert [library.read_use("cuda:0") for library in list_known_libraries()] == [None] * 4


def _needs(module: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(module) is None, reason=f"{module} is not installed")


@_needs("jax")
def test_jax_is_asked_of_a_gpu_that_is_not_its_default(tmp_path: Path) -> None:
    """Its CPU is the default here; nothing is initialised by asking, before or after the import."""
    run_python(
        """
        import sys
        from types import SimpleNamespace
        from gpumemwidget.backends.libraries import JaxClient
        from gpumemwidget.model.devices import LibraryUse
        read_use = JaxClient().read_use
        assert read_use("cuda:1") is None and "jax" not in sys.modules
        import jax, jax.extend.backend
        class Client:
            # The second backend: there is no GPU here.
            platform, platform_version = "gpu", ""
            process_index = device_count = local_device_count = lambda _: 1
            def local_devices(self):
                stats = {"bytes_in_use": 5, "pool_bytes": 12, "bytes_limit": 90}
                read = lambda: stats
                return [SimpleNamespace(platform="gpu", local_hardware_id=1, memory_stats=read)]
        jax.extend.backend.register_backend_factory("other", Client, priority=-5)
        assert read_use("cuda:1") is None
        assert sys.modules["jax._src.xla_bridge"]._backends == {}
        assert [device.platform for device in jax.local_devices()] == ["cpu"]
        assert read_use("cuda:1") == LibraryUse("JAX", 5, 7, 90)
        assert read_use("cuda:0") is None
        """,
        tmp_path,
    )


@_needs("tensorflow")
def test_tensorflow_is_not_initialised(tmp_path: Path) -> None:
    """TensorFlow is asked once its context is there; it has no figure of a GPU it is not on."""
    run_python(
        """
        import sys
        from gpumemwidget.backends.libraries import TensorflowContext, list_silent_libraries
        read_use = TensorflowContext().read_use
        assert read_use("cuda:0") is None and "tensorflow" not in sys.modules
        import tensorflow
        context = sys.modules["tensorflow.python.eager.context"]
        assert read_use("cuda:0") is None and context.context_safe() is None
        tensorflow.config.set_soft_device_placement(True)
        assert read_use("cuda:0") is None and not context.context_safe()._initialized
        tensorflow.constant(1)
        assert context.context_safe()._initialized
        assert read_use("cuda:97") is None
        assert list_silent_libraries() == ("TensorFlow",)
        """,
        tmp_path,
    )


@_needs("rmm")
def test_rmm_has_what_its_statistics_count(tmp_path: Path) -> None:
    """RMM's counters need no GPU, as the memory is the host's; the rest of a pool is unknown."""
    run_python(
        """
        import ctypes, sys
        from gpumemwidget.backends.libraries import RmmResource
        from gpumemwidget.model.devices import LibraryUse
        read_use = RmmResource().read_use
        assert read_use("cuda:1") is None and "rmm" not in sys.modules
        import rmm
        assert read_use("cuda:1") is None
        held = {}
        def allocate(n_bytes, stream):
            memory = (ctypes.c_char * (n_bytes + 256))()
            address = (ctypes.addressof(memory) + 255) // 256 * 256
            held[address] = memory
            return address
        memory = rmm.mr.CallbackMemoryResource(allocate, lambda address, *_: held.pop(address))
        rmm.mr.set_per_device_resource(1, memory)
        assert read_use("cuda:1") is None
        counted = rmm.mr.StatisticsResourceAdaptor(memory)
        rmm.mr.set_per_device_resource(1, counted)
        address = counted.allocate(1 << 20)
        assert read_use("cuda:1") == LibraryUse("RMM", 1 << 20)
        pool = rmm.mr.PoolMemoryResource(memory, 1 << 22, 1 << 23)
        pooled = rmm.mr.StatisticsResourceAdaptor(pool)
        rmm.mr.set_per_device_resource(1, rmm.mr.TrackingResourceAdaptor(pooled))
        other = pooled.allocate(1 << 20)
        assert read_use("cuda:1") == LibraryUse("RMM", 1 << 20)
        pooled.push_counters()
        pooled.deallocate(other, 1 << 20)
        assert read_use("cuda:1") == LibraryUse("RMM", 0)
        counted.deallocate(address, 1 << 20)
        rmm.mr.set_per_device_resource(1, rmm.mr.CudaMemoryResource())
        del pool, pooled
        """,
        tmp_path,
    )


def test_one_with_a_figure_is_not_named_as_a_silent_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As RMM, which says what it has where its statistics are on."""

    class Rmm(_Broken):
        name = "RMM"

    monkeypatch.setitem(sys.modules, "rmm", ModuleType("rmm"))
    with simulate_gpus(total_bytes=16 * GIB) as gpus:
        gpus.touch(0)
        gpus.driver.library.set_use(GIB)
        counts, silent = _make(gpus, Rmm(GIB, 0)), _make(gpus, gpus.driver.library)

        known = [use.used_bytes for use in counts.read_libraries("cuda:0") if use.name == "RMM"]
        named = [use.used_bytes for use in silent.read_libraries("cuda:0") if use.name == "RMM"]
        counts.close()
        silent.close()

    assert (known, named) == ([GIB], [None])


def test_gpus_without_pytorch_are_asked_where_another_library_may_be_on_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise those alone that PyTorch is on."""
    with simulate_gpus(2, total_bytes=16 * GIB) as gpus:
        gpus.touch(0)
        hardware = detect_hardware()
        hardware.list_all_devices()

        alone = hardware.read_own_uses()
        gpus.driver.library.set_use(GIB, 0, 1)
        beside = hardware.read_own_uses()
        monkeypatch.setattr(SimulatedLibrary, "is_imported", False)
        hidden = hardware.read_own_uses()
        monkeypatch.setitem(sys.modules, "faiss", ModuleType("faiss"))
        silent = hardware.read_own_uses()
        hardware.close()

    found = [[device for device, _ in uses] for uses in (alone, beside, hidden, silent)]
    assert found == [["cuda:0"], ["cuda:0", "cuda:1"], ["cuda:0"], ["cuda:0", "cuda:1"]]
