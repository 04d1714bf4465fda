"""Processes beside the one that is tested: others on the same GPU, and programs of their own.

``Neighbour`` takes and frees memory of a device when it is told to. It speaks to CUDA's driver and
needs no torch, so it is there within a second.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

__all__ = [
    "GIB",
    "MIB",
    "SHELL",
    "Neighbour",
    "read_nvml",
    "run_program",
    "run_python",
]

ROOT = Path(__file__).parents[2]
MIB, GIB = 1024**2, 1024**3
#: Whatever happens to those who started it, a process ends.
_LIFE_S = 170
#: Begins a program: a shell with the extension loaded.
SHELL = """
import json, os, sys, time
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance(colors="nocolor")
def cell(source):
    result = shell.run_cell(source, store_history=True)
    return result.error_before_exec or result.error_in_exec
cell("%load_ext gpumemwidget")
import gpumemwidget
monitor = gpumemwidget.monitor()
hardware = monitor.hardware
def devices():
    return {d.device: d for d in monitor.ledger[-1].devices}
"""


class Neighbour:
    """Another process with a context on a device; use it as a context manager.

    Args:
        device: CUDA's number of it.
        is_child: whether it is below this process; else nothing leads from it to here.
        timeout_s: for each answer.
    """

    def __init__(self, device: int = 0, *, is_child: bool = False, timeout_s: float = 30) -> None:
        self._timeout_s = timeout_s
        command = [sys.executable, "-m", "tests.gpu.processes", str(device)]
        if not is_child:
            # The shell ends at once, and what it started is nobody's.
            command = ["sh", "-c", 'exec 3<&0; "$@" <&3 3<&- &', "sh", *command]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            cwd=ROOT,
            start_new_session=True,
        )
        self._rest = b""
        self.pid = 0
        try:
            self.pid = int(self._read_line())
            if not is_child:
                self._process.wait(timeout=timeout_s)
        except BaseException:
            self.close()
            raise

    def take(self, n_bytes: int) -> None:
        """Have this much more, from the next line on."""
        self._tell(f"take {n_bytes}")

    def free(self) -> None:
        """Have nothing but the context."""
        self._tell("free")

    def churn(self) -> None:
        """Take and free all the time, until something else is asked."""
        self._tell("churn")

    def close(self) -> None:
        """End it, and wait until it is gone."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        if self.pid and not _is_gone_within(self.pid, 5, self._process):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            _is_gone_within(self.pid, 5, self._process)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(timeout=5)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def __enter__(self) -> Neighbour:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())
        answer = self._read_line()
        if answer != "done":
            raise RuntimeError(f"the neighbour could not {line!r}: {answer}")

    def _read_line(self) -> str:
        stdout = self._process.stdout
        assert stdout is not None
        until_s = time.monotonic() + self._timeout_s
        while b"\n" not in self._rest:
            ready, _, _ = select.select([stdout], [], [], max(0.0, until_s - time.monotonic()))
            if not ready:
                raise TimeoutError(f"the neighbour said nothing within {self._timeout_s} s")
            more = os.read(stdout.fileno(), 4096)
            if not more:
                raise RuntimeError(f"the neighbour has ended; it said {self._rest!r}")
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()


def _is_gone_within(pid: int, timeout_s: float, process: subprocess.Popen[bytes]) -> bool:
    until_s = time.monotonic() + timeout_s
    while time.monotonic() < until_s:
        process.poll()
        try:
            # What init has not collected yet is gone all the same.
            state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2]
        except OSError:
            return True
        if state.split()[0] == "Z" and pid != process.pid:
            return True
        time.sleep(0.02)
    return False


def read_nvml(index: int = 0) -> tuple[Any, list[int]]:
    """Return the driver's own figures, as nvidia-smi shows them, and who is on the device."""
    import pynvml

    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        return memory, [each.pid for each in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]
    finally:
        pynvml.nvmlShutdown()


def run_program(source: str, **environ: str) -> Any:
    """Run a script as ``run_python`` does; return what its last line has as JSON."""
    return json.loads(run_python(source, **environ).strip().splitlines()[-1])


def run_python(source: str, **environ: str) -> str:
    """Run a script in a new process, where CUDA is not initialised yet; return what it printed.

    Its own children end with it. What fails shows all that it said.

    Args:
        source: the script.
        environ: what differs in its environment.
    """
    # Here, for it brings what a neighbour can do without.
    from tests.remote import programs

    source = f"import signal\nsignal.alarm({_LIFE_S})\n{textwrap.dedent(source)}"
    with tempfile.TemporaryDirectory() as folder:
        environ = {"IPYTHONDIR": folder, **environ}
        ended = programs.run_python(ROOT, "-c", source, timeout_s=_LIFE_S, env=environ)
    assert ended.status == 0, f"{ended.out[-2000:]}\n{ended.err[-4000:]}"
    return ended.out


# -- The neighbour itself --------------------------------------------------------------------------


class _Driver:
    """CUDA's driver, as far as it takes to have memory.

    https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MEM.html
    """

    def __init__(self, device: int) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._call("cuInit", 0)
        number, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(number), device)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
        self._call("cuCtxSetCurrent", context)

    def allocate(self, n_bytes: int) -> int:
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(n_bytes))
        return address.value

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise RuntimeError(f"{name} gave {status}")


def _serve(device: int) -> None:
    signal.alarm(_LIFE_S)
    driver = _Driver(device)
    held: list[int] = []
    rng = random.Random(0)
    print(os.getpid(), flush=True)
    is_churning = False
    rest = b""
    while True:
        ready, _, _ = select.select([0], [], [], 0.004 if is_churning else None)
        if not ready:
            if len(held) > 4 or (held and rng.random() < 0.5):
                driver.free(held.pop(rng.randrange(len(held))))
            else:
                held.append(driver.allocate(rng.choice((2, 20, 64, 300)) * MIB))
            continue
        more = os.read(0, 4096)
        if not more:
            return
        rest += more
        while b"\n" in rest:
            line, _, rest = rest.partition(b"\n")
            verb, _, amount = line.decode().partition(" ")
            is_churning = verb == "churn"
            answer = "done"
            try:
                if verb == "take":
                    held.append(driver.allocate(int(amount)))
                elif verb == "free":
                    while held:
                        driver.free(held.pop())
            except RuntimeError as error:
                answer = str(error)
            print(answer, flush=True)


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
