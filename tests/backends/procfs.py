"""A procfs and control groups made of plain files, to be read as the kernel's are."""

from __future__ import annotations

from pathlib import Path


class FakeProc:
    """A folder with the files of ``/proc`` that we read."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "self").mkdir(parents=True)
        (root / "stat").write_text("btime 1000\n")
        (root / "meminfo").symlink_to("/proc/meminfo")

    def write_status(self, *, resident_kib: int, mark_kib: int | None) -> None:
        mark = "" if mark_kib is None else f"VmHWM:\t{mark_kib:8} kB\n"
        (self.root / "self" / "status").write_text(
            f"Name:\tpython\nVmSize:\t  999999 kB\n{mark}VmRSS:\t{resident_kib:8} kB\nThreads:\t1\n"
        )

    def write_cgroup(self, text: str) -> None:
        (self.root / "self" / "cgroup").write_text(text)

    def write_process(
        self,
        pid: int,
        parent: int,
        *command: str,
        start: int = 100,
        thread_name: str = "python",
        resident_pages: int = 1000,
        state: str = "S",
        files: tuple[str, ...] = (),
    ) -> None:
        """One process; written again it is replaced, its open files apart."""
        folder = self.root / str(pid)
        (folder / "fd").mkdir(parents=True, exist_ok=True)
        # From the 4th field on, see proc(5); those that nobody reads are 0.
        fields = [parent, *[0] * 17, start, *[0] * 30]
        (folder / "stat").write_text(f"{pid} ({thread_name}) {state} {' '.join(map(str, fields))}")
        (folder / "statm").write_text(f"9999 {resident_pages} 3 4 0 5 0\n")
        (folder / "cmdline").write_text("".join(f"{word}\0" for word in command))
        for number, path in enumerate(files):
            (folder / "fd" / str(number)).symlink_to(path)

    def write_namespace(self, name: str) -> None:
        """What the numbers of processes count in."""
        (self.root / "self" / "ns").mkdir(exist_ok=True)
        (self.root / "self" / "ns" / "pid").symlink_to(name)


def write_group(folder: Path, *, limit: str, usage: int = 0, inactive_file: int = 0) -> None:
    """One control group's memory files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive_file}\nactive_file 9\n")
