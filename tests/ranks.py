"""Ranks of a training that is simulated: real messages of real counters, in real files.

Each rank has simulated GPUs of its own and a clock that the test moves, so that two minutes are
recorded in no time. What it writes is what a recorder of ``gpumemwidget.record`` writes.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from gpumemwidget.backends.cuda.backend import CudaBackend
from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.backends.protocol import MemoryBackend
from gpumemwidget.model.cells import Status
from gpumemwidget.model.devices import HOST, DeviceInfo, Reading
from gpumemwidget.model.ooms import OomCard
from gpumemwidget.model.processes import ProcessInfo, ProcessRole
from gpumemwidget.remote.messages import MessageFile
from gpumemwidget.remote.writer.record_writer import RecordWriter
from gpumemwidget.remote.writer.spans import OpenSpan, Spans
from gpumemwidget.testing import SimulatedDriver, SimulatedGpus, simulate_torch

__all__ = ["DRIVER_BYTES", "GIB", "MIB", "Rank", "write_ranks"]

MIB = 1 << 20
GIB = 1 << 30
#: What the driver keeps of each GPU for itself.
DRIVER_BYTES = 640 * MIB


class _HostMemory(MemoryBackend):
    """The memory of a process that is not this one: nothing of this process is touched."""

    kind = HOST

    def __init__(self) -> None:
        self.allocated_bytes, self.resident_bytes = 2 * GIB, 3 * GIB

    def list_devices(self) -> tuple[DeviceInfo, ...]:
        return (DeviceInfo(HOST, "host memory", 512 * GIB),)

    def read(self) -> tuple[Reading, ...]:
        return (Reading(HOST, self.allocated_bytes, self.resident_bytes),)

    start_span = read_as_user = read


class _File(MessageFile):
    """A file without a thread that writes it."""

    def close(self) -> None:
        """Do nothing: it is open only while it is written."""


class Rank:
    """A process on another host, which records to a file.

    Args:
        folder: where the file is made.
        number: its rank.
        host: what its host is called.
        gpu: the index of its GPU, of ``n_gpus`` there; ``None``: it uses none.
        ago_s: how long ago it began.
        name, role: how it describes itself.
    """

    def __init__(
        self,
        folder: Path,
        number: int | None,
        *,
        host: str = "node1",
        gpu: int | None = 0,
        n_gpus: int = 4,
        ago_s: float = 130.0,
        name: str = "python train.py --epochs 3",
        role: ProcessRole = "rank",
        label: str = "",
        pid: int | None = None,
        process_id: str | None = None,
    ) -> None:
        self.gpus = SimulatedGpus(n_gpus)
        self.gpus.name = "NVIDIA H100 80GB HBM3"
        self.driver = SimulatedDriver(self.gpus)
        self.driver.driver_bytes = DRIVER_BYTES
        self.host = _HostMemory()
        self.hardware = Hardware([CudaBackend(simulate_torch(self.gpus)), self.host], self.driver)
        self.gpu = gpu
        self.now_s = 0.0
        self.id = process_id or f"{host}-{role}-{number}-{label}"
        pid = 4000 + (number or 0) if pid is None else pid
        self._file = _File(folder / f"{self.id}.gpumem.jsonl")
        began_at = time.time() - ago_s
        process = ProcessInfo(self.id, host, pid, name, began_at, role, number, label)
        self._writer = RecordWriter(self._file, process)
        if gpu is not None:
            self.gpus.touch(gpu)
        self._spans = Spans(self.hardware, lambda: self.now_s)
        self._spans.start()
        self._blocks: list[int] = []

    @property
    def path(self) -> Path:
        """The file."""
        return self._file.path

    def take(self, n_bytes: int) -> None:
        """Allocate a block on its GPU."""
        self._blocks.append(self.gpus.allocate(n_bytes, self.gpu or 0))

    def drop(self) -> None:
        """Free the block that was allocated last."""
        self.gpus.free(self._blocks.pop())

    def begin(self, name: str, number: int | None = None) -> OpenSpan:
        """Begin a span."""
        span = self._spans.begin(name, number)
        assert span is not None
        self._writer.begin_span(span.running)
        return span

    def end(self, span: OpenSpan, status: Status = "ok") -> None:
        """End a span."""
        record, still_open = self._spans.end(span, status), self._spans.open_spans
        assert record is not None
        self._writer.end_span(record, still_open[-1].running if still_open else None)

    def sample(self, after_s: float = 0.1) -> None:
        """Let time pass, and record the counters."""
        self.now_s += after_s
        infos = {info.device: info for info in self.hardware.list_all_devices()}
        self._writer.write_sample(self.now_s, self.hardware.read(), infos)

    def write_use(self) -> None:
        """Record what the driver reports of its GPU."""
        infos = [info for info in self.hardware.list_devices() if info.device != HOST]
        uses = [use for info in infos if (use := self.hardware.read_use(info)) is not None]
        own = [(info.device, self.hardware.read_own_use(info.device)) for info in infos]
        known = tuple((device, n_bytes) for device, n_bytes in own if n_bytes is not None)
        self._writer.write_use(self.now_s, tuple(uses), known)

    def train(self, n_steps: int, *, n_bytes: int, first: int = 1, step_s: float = 4.0) -> None:
        """Make steps that each allocate so much at their highest, sampled twice a second."""
        for number in range(first, first + n_steps):
            span = self.begin("step", number)
            for layer in range(4):
                self.take(n_bytes // 4)
                self.sample(step_s / 8)
                if layer == 3:
                    self.write_use()
            for _ in range(4):
                self.drop()
                self.sample(step_s / 8)
            self.end(span)

    def write_oom(self, card: OomCard) -> None:
        """Record that it ran out of memory."""
        self._writer.write_oom(card, self.now_s)

    def close(self, error: str = "") -> None:
        """End the recording."""
        self._writer.close(self.now_s, error)
        self.stop()

    def stop(self) -> None:
        """Write nothing more, as a process that was killed."""
        self._file.close()
        self.hardware.close()

    def die(self) -> None:
        """End without a word, and long ago."""
        self.stop()
        long_ago = time.time() - 600
        os.utime(self.path, (long_ago, long_ago))


def write_ranks(folder: Path) -> list[Rank]:
    """Write a training of 8 ranks on 2 hosts with 4 GPUs each; return the ranks that still run.

    Rank 3 stands out, rank 5 ran out of memory, rank 6 was killed, rank 0 shares its GPU with a
    server that is not recorded, rank 7 with an evaluation that is; a loader uses no GPU.
    """
    from tests.report.oom_examples import make_card

    folder.mkdir(exist_ok=True)
    ranks = []
    for number in range(8):
        rank = Rank(folder, number, host=f"node{1 + number // 4}", gpu=number % 4)
        if number == 0:
            rank.driver.set_process(2**31 - 7, 6 * GIB, 0, name="python serve.py")
        rank.take(22 * GIB)
        for epoch in (1, 2):
            span = rank.begin("epoch", epoch)
            rank.train(
                15,
                n_bytes=(30 if number == 3 else 24) * GIB + number * 100 * MIB,
                first=15 * epoch - 14,
            )
            if epoch == 2 and number == 5:
                rank.write_oom(make_card())
                rank.close("OutOfMemoryError: CUDA out of memory. Tried to allocate 12.00 GiB.")
                break
            if epoch == 2 and number == 6:
                rank.die()
                break
            rank.end(span)
        else:
            rank.begin("epoch", 3)
            rank.take(12 * GIB)
            for _ in range(10):
                rank.sample(1.0)
            rank.write_use()
            ranks.append(rank)
    evaluation = Rank(
        folder, None, host="node2", gpu=3, role="program", name="python evaluate.py", pid=5100
    )
    evaluation.take(11 * GIB)
    for one, other in ((ranks[-1], evaluation), (evaluation, ranks[-1])):
        taken_bytes = one.hardware.read_own_use("cuda:3")
        assert taken_bytes is not None
        other.driver.set_process(5100 if one is evaluation else 4007, taken_bytes, 3)
    for _ in range(130):
        evaluation.sample(1.0)
    evaluation.write_use()
    ranks[-1].write_use()
    loader = Rank(
        folder, None, host="node1", gpu=None, role="worker", label="loader 0", name="python data.py"
    )
    for n in range(120):
        loader.host.resident_bytes = (3 * GIB) + (n % 40) * 100 * MIB
        loader.sample(1.0)
    return [*ranks, evaluation, loader]
