"""Control groups: which limit holds, and how much room is under it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpumemwidget.backends.host.kernel import list_limited_groups
from tests.backends.procfs import FakeProc, write_group


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    return FakeProc(tmp_path / "proc")


def read_limits(proc: FakeProc, cgroup: Path) -> list[int]:
    """The limits, the innermost group's first."""
    return [group.limit_bytes for group in list_limited_groups(proc.root, cgroup)]


def read_rooms(proc: FakeProc, cgroup: Path) -> list[int | None]:
    """What fits under each limit."""
    return [group.read_room_bytes() for group in list_limited_groups(proc.root, cgroup)]


def test_each_level_has_its_limit(proc: FakeProc, tmp_path: Path) -> None:
    """A group's own limit does not help where one above it is lower."""
    cgroup = tmp_path / "cgroup"
    proc.write_cgroup("0::/user/kernel\n")
    write_group(cgroup / "user", limit="3000", usage=100)
    write_group(cgroup / "user" / "kernel", limit="5000", usage=50)

    assert read_limits(proc, cgroup) == [5000, 3000]


def test_room_counts_page_cache_as_free(proc: FakeProc, tmp_path: Path) -> None:
    """What is left is the limit less the usage, without the cache that the kernel drops first."""
    cgroup = tmp_path / "cgroup"
    proc.write_cgroup("0::/user\n")
    write_group(cgroup / "user", limit="1000", usage=700, inactive_file=250)

    assert read_rooms(proc, cgroup) == [550]


def test_usage_above_the_limit_leaves_nothing(proc: FakeProc, tmp_path: Path) -> None:
    """A limit that was lowered below the usage leaves 0, not less."""
    cgroup = tmp_path / "cgroup"
    proc.write_cgroup("0::/\n")
    write_group(cgroup, limit="1000", usage=4000)

    assert read_rooms(proc, cgroup) == [0]


def test_version_1_is_read_from_its_memory_controller(proc: FakeProc, tmp_path: Path) -> None:
    """In version 1, and beside an empty version 2, the memory line is the one that counts."""
    cgroup = tmp_path / "cgroup"
    (cgroup / "unified" / "job").mkdir(parents=True)
    proc.write_cgroup("9:name=systemd:/x\n4:cpu,memory:/job\n0::/job\n")
    write_group(cgroup / "memory" / "job", limit="800", usage=500, inactive_file=100, version=1)
    write_group(cgroup / "memory", limit="9223372036854771712", usage=9000, version=1)

    assert read_limits(proc, cgroup) == [800]
    assert read_rooms(proc, cgroup) == [400]


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


@pytest.mark.parametrize("text", ["", "\n", "rubbish", "0:", "0::", "::::", "\x00\xff", "4:memory"])
def test_rubbish_means_no_limit(text: str, proc: FakeProc, tmp_path: Path) -> None:
    """Lines that say nothing are passed over without a complaint."""
    proc.write_cgroup(text)

    assert read_limits(proc, tmp_path / "cgroup") == []
