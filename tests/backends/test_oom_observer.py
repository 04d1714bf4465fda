"""OOMs are noticed where they happen, on an allocator that needs no GPU.

The same on a real one: ``tests/gpu/test_oom.py``.
"""

from __future__ import annotations

import _thread
import gc
import importlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gpumemwidget.backends import hooks
from gpumemwidget.backends.cuda import oom_observer as ooms
from gpumemwidget.backends.cuda.backend import CudaBackend
from gpumemwidget.backends.cuda.oom_observer import OomMoment, OomObserver
from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.model.ooms import OomEvent
from gpumemwidget.oom.detection import describe_oom
from gpumemwidget.testing import DeviceFullError, SimulatedGpus, simulate_torch
from tests.backends.late_cuda import delay_cuda

MIB = 1 << 20


class FakeCuda:
    """Torch with an allocator that is full at 200 MiB, and CUDA that is initialised when told."""

    def __init__(self) -> None:
        self.allocator = SimulatedGpus(total_bytes=200 * MIB)
        self.torch: Any = simulate_torch(self.allocator)
        delay_cuda(self.torch)
        self.observers: list[Callable[[int, int, int, int], None]] = []
        self.torch._C._cuda_attach_out_of_memory_observer = self.observers.append
        self.initialise = self.torch.cuda.init

    def allocate(self, n_bytes: int, *, allowed_bytes: int = 200 * MIB) -> int:
        """Allocate as PyTorch does: the observers first, then the error."""
        try:
            return self.allocator.allocate(n_bytes)
        except DeviceFullError:
            reserved = self.allocator.stats(0)["reserved_bytes"]["all"]["current"]
            for observer in self.observers:
                observer(0, n_bytes, allowed_bytes, 200 * MIB - reserved)
            raise


@dataclass
class Watcher:
    """A handler that keeps the state at each OOM."""

    hardware: Hardware
    events: list[OomEvent] = field(default_factory=list)
    failures: list[tuple[str, str]] = field(default_factory=list)

    def note(self, moment: OomMoment) -> None:
        self.events.append(
            describe_oom(
                self.hardware,
                moment.device,
                requested_bytes=moment.requested_bytes,
                frames=moment.read_stack(),
                moment=moment,
            )
        )

    def fail(self, what: str, exc: Exception) -> None:
        self.failures.append((what, repr(exc)))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    cuda = FakeCuda()
    monkeypatch.setattr(ooms, "_attached", [])
    monkeypatch.setattr(hooks, "find_torch", lambda: cuda.torch)
    yield cuda
    assert ooms._observers == []


@pytest.fixture
def watcher(cuda: FakeCuda) -> Iterator[Watcher]:
    backend = CudaBackend(cuda.torch)
    yield Watcher(Hardware([backend]))
    backend.close()


@pytest.fixture
def observer(cuda: FakeCuda, watcher: Watcher) -> Iterator[OomObserver]:
    """An observer that is not open yet."""
    observer = OomObserver(watcher.note, watcher.fail)
    yield observer
    observer.close()


def run_out(cuda: FakeCuda) -> None:
    """Allocate more than there is."""
    with pytest.raises(DeviceFullError):
        cuda.allocate(100 * MIB)


def test_what_stood(cuda: FakeCuda, watcher: Watcher, observer: OomObserver) -> None:
    """The counters, the blocks, the driver's figures and the stack that asked, innermost first."""
    cuda.initialise()
    observer.open()
    first, *_ = (cuda.allocate(40 * MIB) for _ in range(3))
    cuda.allocator.free(first)
    cuda.allocate(10 * MIB)

    run_out(cuda)

    (event,) = watcher.events
    assert event.device == "cuda:0"
    assert event.requested_bytes == 100 * MIB
    assert event.allocated_bytes == 90 * MIB
    assert event.device_total_bytes == 200 * MIB
    assert event.device_free_bytes == 200 * MIB - (event.reserved_bytes or 0)
    assert event.largest_free_block_bytes == 30 * MIB
    assert event.limit_bytes is None
    here = [(Path(frame.filename).name, frame.function) for frame in event.frames[:2]]
    functions = ["FakeCuda.allocate", "run_out"]
    assert here == [("test_oom_observer.py", function) for function in functions]
    assert watcher.failures == []


def test_it_waits_for_cuda(cuda: FakeCuda, watcher: Watcher, observer: OomObserver) -> None:
    """Nothing is attached before CUDA is initialised, and then at once: in the same cell."""
    observer.open()
    before = list(cuda.observers)

    cuda.initialise()
    cuda.allocate(150 * MIB)
    run_out(cuda)

    assert before == []
    assert len(cuda.observers) == 1
    assert len(watcher.events) == 1


def test_it_waits_for_torch(
    cuda: FakeCuda,
    watcher: Watcher,
    observer: OomObserver,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It comes with the user's import of torch, beside whoever else waits for it."""
    (tmp_path / "torch.py").write_text("import builtins\nvars().update(vars(builtins.fake_torch))")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("builtins.fake_torch", cuda.torch, raising=False)
    monkeypatch.setattr(hooks, "find_torch", lambda: None)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    arrived: list[object] = []
    other = ooms.TorchImportHook(arrived.append)

    observer.open()
    other.expect()
    module = importlib.import_module("torch")
    cuda.initialise()

    assert arrived == [module]
    assert len(cuda.observers) == 1
    assert watcher.failures == []


def test_one_for_the_process(cuda: FakeCuda, watcher: Watcher, observer: OomObserver) -> None:
    """Torch keeps what was attached: it does nothing when closed, and is used again when opened."""
    cuda.initialise()
    observer.open()
    cuda.allocate(150 * MIB)
    observer.close()

    run_out(cuda)
    told_closed = len(watcher.events)
    observer.open()
    run_out(cuda)

    assert told_closed == 0
    assert len(cuda.observers) == 1
    assert len(watcher.events) == 1


def test_no_observers_here(cuda: FakeCuda, watcher: Watcher, observer: OomObserver) -> None:
    """Another allocator refuses, and a build without CUDA has no such call: no failure."""

    def refuse(_observer: object) -> None:
        raise RuntimeError("cudaMallocAsync does not yet support attachOutOfMemoryObserver")

    cuda.torch._C._cuda_attach_out_of_memory_observer = refuse
    observer.open()
    cuda.initialise()
    observer.close()
    del cuda.torch._C._cuda_attach_out_of_memory_observer
    cuda.torch.cuda._queued_calls.clear()

    observer.open()

    assert cuda.torch.cuda._queued_calls == []
    assert watcher.failures == []


def test_a_failure_of_ours(cuda: FakeCuda, watcher: Watcher, observer: OomObserver) -> None:
    """It is told, keeps nothing of the user's alive, and the user's error is what is raised."""
    raised: list[Exception] = []

    class Held:
        pass

    def fail(what: str, exc: Exception) -> None:
        raised.append(exc)
        raise ValueError("nor can it be told")

    def break_down(_moment: OomMoment) -> None:
        raise IndexError("ours")

    broken = OomObserver(break_down, fail)
    cuda.initialise()
    broken.open()
    cuda.allocate(150 * MIB)

    def run() -> weakref.ref[Held]:
        held = Held()
        run_out(cuda)
        return weakref.ref(held)

    held = run()
    gc.collect()
    broken.close()

    assert held() is None
    assert [type(each) for each in raised] == [IndexError]


def _engine_run_backward(wait: threading.Event, ready: threading.Event) -> None:
    ready.set()
    wait.wait(10)


@pytest.fixture
def run_out_beside_a_backward(
    cuda: FakeCuda, watcher: Watcher, observer: OomObserver
) -> Callable[..., list[str]]:
    """Runs out of memory on a thread, while another waits for a backward: the stack's functions."""

    def run_beside(start: Callable[[Callable[[], None]], object]) -> list[str]:
        wait, ready, done = threading.Event(), threading.Event(), threading.Event()
        waiting = threading.Thread(target=_engine_run_backward, args=(wait, ready))
        observer.open()
        cuda.initialise()
        cuda.allocate(150 * MIB)

        def run() -> None:
            run_out(cuda)
            done.set()

        waiting.start()
        ready.wait(10)
        start(run)
        done.wait(10)
        wait.set()
        waiting.join()
        return [frame.function.rpartition(".")[2] for frame in watcher.events[0].frames]

    return run_beside


def test_autograds_threads_have_the_stack_of_backward(
    run_out_beside_a_backward: Callable[..., list[str]],
) -> None:
    """They have none of their own: it is that of the thread which waits in ``backward``."""
    # As autograd's, the thread begins in no function of threading's.
    functions = run_out_beside_a_backward(lambda run: _thread.start_new_thread(run, ()))

    assert functions[:3] == ["allocate", "run_out", "run"]
    assert "_engine_run_backward" in functions[3:]


def test_a_thread_of_pythons_has_its_own(
    run_out_beside_a_backward: Callable[..., list[str]],
) -> None:
    """Its stack is what asked, whoever else is in a backward."""
    functions = run_out_beside_a_backward(lambda run: threading.Thread(target=run).start())

    assert functions[-1] == "_bootstrap"
    assert "_engine_run_backward" not in functions
