"""NVML: PyTorch's numbers for the driver's GPUs, and what is said when something fails or hangs."""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path

import psutil
import pynvml
import pytest

from gpumemwidget.backends.driver import nvml
from gpumemwidget.backends.driver.nvml import NvmlMonitor, TimeLimitedMonitor
from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.backends.host import HostBackend
from gpumemwidget.model.devices import DeviceInfo, DeviceUse
from gpumemwidget.report.render.wording import word_hardware_note
from gpumemwidget.session.whole_devices import take_breakdowns
from gpumemwidget.testing import SimulatedDriver, SimulatedGpus
from tests.backends.fake_nvml import GIB, FakeGpu, FakeNvml

A, B, C = "GPU-aaaa-1", "GPU-bbbb-2", "GPU-cccc-3"


def monitor_of(*gpus: FakeGpu, **environ: str) -> NvmlMonitor:
    return NvmlMonitor(FakeNvml(*gpus), environ=environ, driver=Path("none"))


def three_alike() -> tuple[FakeGpu, ...]:
    return FakeGpu(uuid=A), FakeGpu(uuid=B), FakeGpu(uuid=C)


def two_models() -> tuple[FakeGpu, ...]:
    return FakeGpu("NVIDIA T4", A, 16 * GIB), FakeGpu("NVIDIA H200", B)


def uuids_of(monitor: NvmlMonitor) -> dict[str, str | None]:
    return {info.device: info.uuid for info in monitor.list_infos()}


# -- Numbers ----------------------------------------------------------------------------------


def test_what_is_known_of_a_gpu() -> None:
    """Name, total and UUID, and the whole device's use."""
    monitor = monitor_of(FakeGpu(uuid=A))

    infos, use = monitor.list_infos(), monitor.read_use("cuda:0")

    assert infos == (DeviceInfo("cuda:0", "NVIDIA H200", 140 * GIB, None, A),)
    assert use == DeviceUse("cuda:0", 3 * GIB, 137 * GIB, 140 * GIB, 17, 0)
    assert monitor.read_use("cuda:1") is None
    assert monitor.read_use("host") is None
    assert monitor.take_notes() == ()


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [
        (None, [A, B, C]),
        ("2,0", [C, A]),
        ("1,7,0", [B]),
        ("", []),
        ("-1", []),
        (" 1 , 2 ", [B, C]),
        ("0,-1,2", [A]),
        ("none", []),
        ("1,0,1", []),
        ("GPU-cc,GPU-aa", [C, A]),
        ("GPU-cc,GPU-zz,GPU-aa", [C]),
        ("GPU-", []),
    ],
)
def test_visible_devices_are_numbered_as_cuda_does(visible: str | None, uuids: list[str]) -> None:
    """``cuda:0`` is the first entry of the list, whatever its place on the bus."""
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    monitor = monitor_of(*three_alike(), **environ)

    assert list(uuids_of(monitor).values()) == uuids
    assert list(uuids_of(monitor)) == [f"cuda:{index}" for index in range(len(uuids))]


def test_the_list_may_change_until_cuda_reads_it() -> None:
    """CUDA reads the variable at its first call, so a value set after the load counts."""
    environ: dict[str, str] = {}
    monitor = NvmlMonitor(FakeNvml(*three_alike()), environ=environ)
    before = uuids_of(monitor)

    environ["CUDA_VISIBLE_DEVICES"] = "1"

    assert len(before) == 3
    assert uuids_of(monitor) == {"cuda:0": B}


def test_different_models_are_not_guessed_at() -> None:
    """CUDA puts the fastest first, which NVML can't tell: nothing is numbered, and it says so."""
    monitor = monitor_of(*two_models())

    infos = monitor.list_infos()
    notes = monitor.take_notes()

    assert infos == ()
    assert len(notes) == 1
    assert word_hardware_note(notes[0]).startswith("this machine has GPUs of different models")
    assert monitor.read_use("cuda:0") is None
    assert monitor.take_notes() == ()


def test_different_models_are_numbered_by_the_bus_or_by_what_torch_says() -> None:
    """Where CUDA's order is the bus's, or of the devices in use; torch writes no ``GPU-``."""
    by_bus = monitor_of(*two_models(), CUDA_DEVICE_ORDER="PCI_BUS_ID")
    by_use = monitor_of(*two_models())
    by_use.list_infos({"cuda:0": B.removeprefix("GPU-")})

    first = uuids_of(by_use)
    by_use.list_infos({"cuda:1": A})

    assert uuids_of(by_bus) == {"cuda:0": A, "cuda:1": B}
    assert (first, uuids_of(by_use)) == ({"cuda:0": B}, {"cuda:0": B, "cuda:1": A})
    assert by_bus.take_notes() == by_use.take_notes() == ()


@pytest.mark.parametrize(
    ("in_use", "numbered"), [({"cuda:1": C}, {"cuda:1": C}), ({"cuda:0": "GPU-ffff"}, {})]
)
def test_what_cuda_tells_goes_before_what_was_worked_out(
    in_use: dict[str, str], numbered: dict[str, str]
) -> None:
    """If the order is another, or NVML lacks a GPU, no other number is believed either."""
    monitor = monitor_of(*three_alike())
    assert len(uuids_of(monitor)) == 3

    monitor.list_infos(in_use)

    assert uuids_of(monitor) == numbered


def test_a_mig_instance_is_the_only_device() -> None:
    """CUDA shows one instance, and no other GPU beside it."""
    first = FakeGpu("NVIDIA H200 MIG 1g.18gb", "MIG-1111", 18 * GIB)
    second = FakeGpu("NVIDIA H200 MIG 1g.18gb", "MIG-2222", 18 * GIB)
    gpus = FakeGpu(uuid=A), FakeGpu(uuid=B, instances=[first, second])

    unset = monitor_of(*gpus)
    chosen = monitor_of(*gpus, CUDA_VISIBLE_DEVICES="MIG-22")
    both = monitor_of(*gpus, CUDA_VISIBLE_DEVICES="MIG-22,MIG-11")
    numbered = monitor_of(*gpus, CUDA_VISIBLE_DEVICES="1")
    other = monitor_of(*gpus, CUDA_VISIBLE_DEVICES="0")
    hidden = monitor_of(*gpus, CUDA_VISIBLE_DEVICES="")

    assert uuids_of(unset) == uuids_of(numbered) == {"cuda:0": "MIG-1111"}
    assert uuids_of(other) == {"cuda:0": A}
    assert uuids_of(chosen) == uuids_of(both) == {"cuda:0": "MIG-2222"}
    assert uuids_of(hidden) == {}
    assert chosen.read_use("cuda:0").total_bytes == 18 * GIB


# -- Who is on a device -----------------------------------------------------------------------


def test_who_computes_and_draws_is_there_once() -> None:
    """With the bytes that both lists tell; those that neither tells are unknown."""
    gpu = FakeGpu(processes={7: 70, 3: None, 5: None}, drawing={7: 70, 3: 30, 9: 90})
    monitor = monitor_of(gpu)

    assert monitor.list_processes("cuda:0") == ((3, 30), (5, None), (7, 70), (9, 90))


def test_any_number_of_processes_is_listed() -> None:
    """Also where there are more than ever before."""
    many = {pid: pid << 20 for pid in range(1, 200)} | {7: None}
    monitor = monitor_of(FakeGpu(processes=many))

    listed = monitor.list_processes("cuda:0")

    assert listed == tuple(sorted(many.items()))
    assert [monitor.read_process("cuda:0", pid) for pid in (5, 7, 999)] == [5 << 20, None, None]


def test_processes_that_are_not_told_are_unknown() -> None:
    """Not none; and there is one note."""
    gpu = FakeGpu(processes={7: 70})
    gpu.failures["nvmlDeviceGetComputeRunningProcesses"] = pynvml.NVML_ERROR_NO_PERMISSION
    monitor = monitor_of(gpu)

    told = [monitor.list_processes("cuda:0") for _ in range(2)]
    gpu.failures.clear()
    later = monitor.list_processes("cuda:0")

    assert (told, later) == ([None, None], ((7, 70),))
    assert tuple(map(word_hardware_note, monitor.take_notes())) == (
        "cuda:0: processes can't be read: Insufficient Permissions",
    )


def test_the_real_binding_has_what_we_ask_for() -> None:
    """By these names and this layout, so that nothing is missed on a real machine."""
    theirs, ours = pynvml.c_nvmlProcessInfo_v3_t, nvml._RunningProcess

    for name in ("Compute", "Graphics", "MPSCompute"):
        assert callable(getattr(pynvml, f"nvmlDeviceGet{name}RunningProcesses_v3"))
    assert callable(pynvml._nvmlGetFunctionPointer)
    assert pynvml.nvmlMemory_v2 == FakeNvml.nvmlMemory_v2
    assert ctypes.sizeof(theirs) == ctypes.sizeof(ours)
    assert theirs.pid.offset == ours.pid.offset
    assert theirs.usedGpuMemory.offset == ours.used_bytes.offset


# -- Failures ---------------------------------------------------------------------------------


def test_a_failed_question_is_told_once() -> None:
    """What can't be read is ``None`` with NVML's reason, and one note however often it is asked."""
    gpu = FakeGpu(uuid=A)
    monitor = monitor_of(gpu)
    monitor.list_infos()
    gpu.failures["nvmlDeviceGetMemoryInfo"] = pynvml.NVML_ERROR_GPU_IS_LOST

    uses = [monitor.read_use("cuda:0") for _ in range(3)]

    assert uses == [DeviceUse("cuda:0", None, None, None, 17, failure="GPU is lost")] * 3
    assert tuple(map(word_hardware_note, monitor.take_notes())) == (
        "cuda:0: memory in use can't be read: GPU is lost",
    )
    assert monitor.take_notes() == ()


@pytest.mark.parametrize(
    ("error", "device", "n_notes"),
    [(pynvml.NVML_ERROR_GPU_IS_LOST, "cuda:1", 1), (pynvml.NVML_ERROR_NO_PERMISSION, "cuda:0", 0)],
)
def test_a_lost_gpu_keeps_its_number_from_others(error: int, device: str, n_notes: int) -> None:
    """CUDA does not count one that this user may not open, so that one takes no number."""
    first = FakeGpu(uuid=A, failures={"nvmlDeviceGetHandleByIndex": error})
    monitor = monitor_of(first, FakeGpu(uuid=B))

    assert uuids_of(monitor) == {device: B}
    assert len(monitor.take_notes()) == n_notes


def test_shut_down_by_somebody_else_begins_again() -> None:
    """A user's own nvmlShutdown too many does not end our figures."""
    library = FakeNvml(FakeGpu(uuid=A))
    monitor = NvmlMonitor(library, environ={})
    monitor.list_infos()
    library.n_inits = 0

    use = monitor.read_use("cuda:0")

    assert use.used_bytes == 3 * GIB
    assert monitor.take_notes() == ()
    assert library.n_inits == 1


@pytest.mark.parametrize(
    ("error", "has_driver", "told"),
    [
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, False, "missing: Driver Not Loaded (nvidia-smi"),
        (
            pynvml.NVML_ERROR_LIBRARY_NOT_FOUND,
            True,
            "a container needs the driver capability 'utility'",
        ),
        # A laptop without a GPU.
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, False, None),
    ],
)
def test_a_library_that_does_not_start_is_told_once(
    error: int, has_driver: bool, told: str | None, tmp_path: Path
) -> None:
    """There are no devices, one sentence says why, and nobody tries again."""
    driver = tmp_path / "version"
    if has_driver:
        driver.write_text("NVRM version: 1")
    library = FakeNvml(init_error=error)
    monitor = NvmlMonitor(library, environ={}, driver=driver)

    assert monitor.list_infos() == ()
    assert monitor.read_use("cuda:0") is None
    notes = [word_hardware_note(note) for note in monitor.take_notes()]
    assert len(notes) == (told is not None)
    assert all(str(told) in note for note in notes)
    library.init_error = None
    assert monitor.list_infos() == ()


# -- Care -------------------------------------------------------------------------------------


def test_nothing_is_asked_before_it_is_needed() -> None:
    """Making a monitor starts no library; closing it stops only what it started."""
    library = FakeNvml(FakeGpu())
    NvmlMonitor(library, environ={}).close()
    assert library.n_inits == 0

    library.n_inits = 1  # the user's own
    monitor = NvmlMonitor(library, environ={})
    monitor.list_infos()
    monitor.close()
    monitor.close()

    assert library.n_inits == 1
    assert monitor.list_infos() == ()
    assert monitor.read_use("cuda:0") is None


def test_a_gpu_that_shares_the_hosts_memory_has_the_hosts_figures() -> None:
    """As on DGX Spark and Jetson, where NVML answers "not supported"; nothing is unknown then."""
    failures = {"nvmlDeviceGetMemoryInfo": pynvml.NVML_ERROR_NOT_SUPPORTED}
    gpu = FakeGpu("NVIDIA GB10", failures=failures, processes={os.getpid(): GIB // 4})
    hardware = Hardware(
        [HostBackend()], NvmlMonitor(FakeNvml(gpu), environ={}, driver=Path("none"))
    )

    breakdowns = take_breakdowns(hardware, "cuda:0")
    hardware.close()

    record = breakdowns.record()
    assert (record.is_shared, record.doubts, breakdowns.notes) == (True, (), ())
    assert record.total_bytes == psutil.virtual_memory().total
    assert sum(part.n_bytes for part in record.parts) == record.total_bytes
    assert [part.key for part in record.parts] == ["outside", "unlisted", "free"]
    assert "host memory in use" in breakdowns.to_text()


# -- A driver that takes too long to answer --------------------------------------------------------


class _Driver(SimulatedDriver):
    """A driver that tells the use of a GPU when it may."""

    def __init__(self) -> None:
        super().__init__(SimulatedGpus(1))
        self.may_answer, self.n_asked = threading.Event(), 0

    def read_use(self, device: str) -> DeviceUse | None:
        self.n_asked += 1
        assert self.may_answer.wait(60)
        return super().read_use(device)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> _Driver:
    monkeypatch.setattr(nvml, "_LIMIT_S", 0.1)
    return _Driver()


def test_nobody_waits_twice_for_a_driver_that_hangs(driver: _Driver) -> None:
    """It is asked again once it has answered."""
    monitor = TimeLimitedMonitor(driver)
    infos = monitor.list_infos()

    silent = [monitor.read_use("cuda:0") for _ in range(3)]
    known = monitor.list_infos()
    n_asked = driver.n_asked
    driver.may_answer.set()
    for thread in threading.enumerate():
        if thread.name == "gpumemwidget-driver":
            thread.join(60)
    answered = monitor.read_use("cuda:0")

    unknown = DeviceUse("cuda:0", None, None, None, failure="the driver does not answer")
    assert silent == [unknown] * 3
    assert n_asked == 1
    assert known == infos
    assert answered == driver.read_use("cuda:0")


def test_a_driver_that_hangs_is_closed_without_waiting(driver: _Driver) -> None:
    """Nothing is known of its devices then."""
    monitor = TimeLimitedMonitor(driver)
    monitor.list_infos()
    monitor.read_use("cuda:0")

    monitor.close()

    assert monitor.list_infos() == ()
    driver.may_answer.set()


def test_a_failure_of_the_driver_is_the_askers() -> None:
    """As if it had been asked directly."""

    class Failing(SimulatedDriver):
        def read_use(self, device: str) -> DeviceUse | None:
            raise OSError(device)

    monitor = TimeLimitedMonitor(Failing(SimulatedGpus(1)))

    with pytest.raises(OSError, match="cuda:0"):
        monitor.read_use("cuda:0")
    monitor.close()
