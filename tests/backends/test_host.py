"""The host backend: real malloc and real procfs where the machine has them, and files elsewhere."""

from __future__ import annotations

import mmap
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from gpumemwidget.backends.host import HostBackend, find_malloc, list_limited_groups
from tests.backends.children import run_in_fork
from tests.backends.procfs import FakeProc, write_group

MIB = 1024 * 1024
#: What Python itself may take or give in between, and the kernel's mark may trail (a batch of pages
#: for each CPU).
SLACK_BYTES = 2 * MIB

linux = pytest.mark.skipif(
    not sys.platform.startswith("linux") or find_malloc() is None,
    reason="needs Linux with glibc 2.33 or later",
)


@pytest.fixture
def host() -> Iterator[HostBackend]:
    backend = HostBackend()
    yield backend
    backend.close()


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    return FakeProc(tmp_path / "proc")


@pytest.fixture
def fake_host(proc: FakeProc, tmp_path: Path) -> Iterator[Callable[[], HostBackend]]:
    made = []

    def make() -> HostBackend:
        made.append(HostBackend(proc.root, tmp_path / "cgroup", find_malloc=lambda: None))
        return made[-1]

    yield make
    for backend in made:
        backend.close()


def make_and_drop(n_bytes: int) -> None:
    """Let so many bytes be resident for a moment, in new pages: malloc may have kept old ones."""
    with mmap.mmap(-1, n_bytes) as block:
        for offset in range(0, n_bytes, mmap.PAGESIZE):
            block[offset] = 1


# -- Real memory ------------------------------------------------------------------------------


@linux
def test_allocated_follows_malloc(host: HostBackend) -> None:
    """A block of 64 MiB raises allocated by as much, and its end takes it back."""
    before = host.read_exact()[0].allocated_bytes
    block = bytearray(64 * MIB)
    held = host.read_exact()[0].allocated_bytes
    del block
    after = host.read_exact()[0].allocated_bytes

    assert 64 * MIB <= held - before < 64 * MIB + SLACK_BYTES
    assert abs(after - before) < SLACK_BYTES


@linux
def test_reset_by_somebody_else_is_noticed(host: HostBackend) -> None:
    """Where the mark falls below what was seen of it, the peak is "at least" the best seen."""
    host.start_span()
    make_and_drop(128 * MIB)
    (seen,) = host.read()

    Path("/proc/self/clear_refs").write_text("5")
    (after,) = host.read_exact()

    assert (seen.peak_is, after.peak_is) == ("exact", "at least")
    assert after.reserved_peak_bytes == seen.reserved_peak_bytes


@linux
def test_trim_gives_freed_memory_back(host: HostBackend) -> None:
    """``empty_cache`` returns small freed blocks that malloc had kept."""
    blocks = [bytes(4000) for _ in range(20_000)]
    keep = blocks[-1]
    del blocks
    (before,) = host.read()

    host.empty_cache()
    (after,) = host.read()

    assert before.reserved_bytes - after.reserved_bytes > 40 * MIB
    assert len(keep) == 4000


# -- resource.getrusage -----------------------------------------------------------------------


@linux
@pytest.mark.parametrize("who", [resource.RUSAGE_SELF, resource.RUSAGE_THREAD])
def test_ru_maxrss_is_not_lowered(host: HostBackend, who: int) -> None:
    """A user who asks for the process's peak after our resets is told what it was."""
    make_and_drop(128 * MIB)
    before = resource.getrusage(who)

    for _ in range(3):
        host.start_span()
    after = resource.getrusage(who)

    assert after.ru_maxrss >= before.ru_maxrss
    assert type(after) is resource.struct_rusage
    assert len(after) == len(before)
    assert after.ru_utime >= before.ru_utime


@linux
def test_childrens_usage_is_the_kernels(host: HostBackend) -> None:
    """Only the process's own mark is ours to mend, and bad arguments are refused as ever."""
    original = resource.getrusage
    host.start_span()

    assert resource.getrusage is not original
    assert resource.getrusage(resource.RUSAGE_CHILDREN) == original(resource.RUSAGE_CHILDREN)
    with pytest.raises(ValueError, match="invalid who"):
        resource.getrusage(99)


# -- Forks and threads ------------------------------------------------------------------------


@linux
def test_a_forked_child_reads_itself(host: HostBackend) -> None:
    """In a child the figures are the child's, the parent's marks are gone, and its span is cut."""
    host.start_span()
    make_and_drop(256 * MIB)
    (parent,) = host.read_exact()
    host.start_span()

    def look() -> list[object]:
        block = bytearray(32 * MIB)
        (reading,) = host.read_exact()
        own = Path("/proc/self/status").read_text()
        resident_kib = int(own.partition("VmRSS:")[2].split()[0])
        told_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        mark_kib = int(own.partition("VmHWM:")[2].split()[0])
        del block
        (fresh,) = host.start_span()
        return [
            abs(reading.reserved_bytes - resident_kib * 1024) < SLACK_BYTES,
            reading.peak_is,
            abs(told_kib - mark_kib) * 1024 < SLACK_BYTES,
            fresh.peak_is,
        ]

    assert run_in_fork(look) == [True, "at least", True, "exact"]
    assert host.read_as_user()[0].reserved_peak_bytes >= parent.reserved_peak_bytes


@linux
def test_a_child_forked_while_a_thread_reads_is_not_stuck(host: HostBackend) -> None:
    """A lock that another thread held at the fork does not hold the child."""
    assert host._lock.acquire(timeout=5)
    try:
        answer = run_in_fork(lambda: host.read()[0].peak_is)
    finally:
        host._lock.release()

    assert answer == "exact"


# -- Other machines ---------------------------------------------------------------------------


def test_without_procfs_the_peak_is_sampled(tmp_path: Path) -> None:
    """The resident size of psutil stands in, and the peak is the highest that a read has seen."""
    backend = HostBackend(tmp_path / "none", tmp_path / "none", find_malloc=lambda: None)
    backend.start_span()
    block = bytearray(64 * MIB)
    (held,) = backend.read()
    del block
    (after,) = backend.read_exact()

    assert after.peak_is == "sampled"
    assert after.reserved_peak_bytes == held.reserved_bytes
    assert after.allocated_bytes is None
    assert backend.list_devices()[0].total_bytes > 0
    assert backend.read_memory("host")[0] > 0
    backend.empty_cache()
    backend.close()


def test_without_a_reset_the_peak_is_sampled(
    proc: FakeProc, fake_host: Callable[[], HostBackend]
) -> None:
    """Where the mark can't be reset, it tells nothing of the span."""
    proc.write_status(resident_kib=100, mark_kib=500)
    host = fake_host()

    (start,) = host.start_span()
    proc.write_status(resident_kib=300, mark_kib=500)
    (middle,) = host.read()
    proc.write_status(resident_kib=200, mark_kib=800)
    (end,) = host.read_exact()

    peaks = [(r.reserved_peak_bytes // 1024, r.peak_is) for r in (start, middle, end)]
    assert peaks == [(100, "sampled"), (300, "sampled"), (300, "sampled")]


def test_a_status_without_a_mark_gives_a_sampled_peak(
    proc: FakeProc, fake_host: Callable[[], HostBackend]
) -> None:
    """Some sandboxes tell the resident size alone."""
    proc.write_status(resident_kib=100, mark_kib=None)
    (proc.root / "self" / "clear_refs").write_text("")
    host = fake_host()

    host.start_span()
    proc.write_status(resident_kib=90, mark_kib=None)
    (end,) = host.read_exact()

    assert (end.reserved_bytes, end.reserved_peak_bytes) == (90 * 1024, 100 * 1024)
    assert end.peak_is == "sampled"


@linux
@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("closed", ["all", "clear_refs"])
def test_files_that_took_the_place_of_closed_ones_are_left_alone(
    tmp_path: Path, closed: str, reads: bool
) -> None:
    """A program that closes files and opens its own is read on, and its files stay whole."""
    script = """
import os, sys
from gpumemwidget.backends.host import HostBackend
host = HostBackend()
host.start_span()
for number in range(3, 256):
    link = f"/proc/self/fd/{number}"
    if os.path.lexists(link) and (sys.argv[2] == "all" or "clear_refs" in os.readlink(link)):
        os.close(number)
files = [os.open(sys.argv[1], os.O_RDWR | os.O_CREAT) for _ in range(8)]
if sys.argv[3] == "True":
    host.start_span()
(reading,) = host.read_exact()
host.close()
for file in files:
    os.fstat(file)
print(reading.peak_is, os.stat(sys.argv[1]).st_size)
"""
    command = [sys.executable, "-c", script, str(tmp_path / "mine"), closed, str(reads)]
    answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout

    peak_is = "exact" if closed == "clear_refs" and not reads else "sampled"
    assert answer.split() == [peak_is, "0"]


def test_the_containers_limit_is_the_total(
    proc: FakeProc, fake_host: Callable[[], HostBackend], tmp_path: Path
) -> None:
    """Total and room are the machine's or the control group's, whichever is lower."""
    proc.write_cgroup("0::/\n")
    write_group(tmp_path / "cgroup", limit=str(900 * 1024), usage=850 * 1024)
    limited = fake_host()
    limits = (limited.list_devices()[0].total_bytes, limited.read_memory("host")[0])
    write_group(tmp_path / "cgroup", limit=str(1 << 60), usage=10 * 1024)
    free = fake_host()

    assert limits == (900 * 1024, 50 * 1024)
    assert free.list_devices()[0].total_bytes == psutil.virtual_memory().total
    assert free.read_memory("host")[0] <= psutil.virtual_memory().total


# -- malloc -----------------------------------------------------------------------------------


class SlowMalloc:
    """A malloc whose count takes a set time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.cost_s = 0.0
        self.n_reads = 0

    def read_in_use(self) -> int:
        self.n_reads += 1
        self.now_s += self.cost_s
        return 1000 + self.n_reads

    def trim(self) -> None:
        self.now_s += 1.0


def test_a_fragmented_heap_is_counted_seldom_by_a_sampler() -> None:
    """A count that takes 8 ms comes at most every 800 ms, save at a cell's ends."""
    malloc = SlowMalloc()
    backend = HostBackend(
        find_malloc=lambda: malloc, timer=lambda: malloc.now_s, cpu_timer=lambda: malloc.now_s
    )
    malloc.cost_s = 0.008

    first = backend.read()[0].allocated_bytes
    malloc.now_s += 0.5
    between = backend.read()[0].allocated_bytes
    ends = [backend.start_span()[0].allocated_bytes, backend.read_exact()[0].allocated_bytes]
    malloc.now_s += 0.81
    later = backend.read()[0].allocated_bytes
    backend.close()

    assert (first, between, ends, later) == (1001, None, [1002, 1003], 1004)


# -- Control groups --------------------------------------------------------------------------------


def read_limits(proc: FakeProc, cgroup: Path) -> list[int]:
    """The limits, the innermost group's first."""
    return [group.limit_bytes for group in list_limited_groups(proc.root, cgroup)]


def read_rooms(proc: FakeProc, cgroup: Path) -> list[int | None]:
    """What fits under each limit."""
    return [group.read_room_bytes() for group in list_limited_groups(proc.root, cgroup)]


def test_each_level_has_its_limit_and_its_room(proc: FakeProc, tmp_path: Path) -> None:
    """The cache that the kernel drops first counts as free; usage above a limit leaves 0."""
    cgroup = tmp_path / "cgroup"
    proc.write_cgroup("0::/user/kernel\n")
    write_group(cgroup, limit="1000", usage=4000)
    write_group(cgroup / "user", limit="3000", usage=700, inactive_file=250)
    write_group(cgroup / "user" / "kernel", limit="5000", usage=50)

    assert read_limits(proc, cgroup) == [5000, 3000, 1000]
    assert read_rooms(proc, cgroup) == [4950, 2550, 0]


@pytest.mark.parametrize("path", ["/docker/0123abc", "/../other"])
def test_a_path_outside_the_mount_means_the_mount(
    path: str, proc: FakeProc, tmp_path: Path
) -> None:
    """A container without a namespace reads the host's path; its own group is what is mounted."""
    cgroup = tmp_path / "cgroup"
    write_group(tmp_path / "other", limit="1")
    proc.write_cgroup(f"0::{path}\n")
    write_group(cgroup, limit="1234")

    assert read_limits(proc, cgroup) == [1234]
