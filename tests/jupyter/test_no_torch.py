"""What stands under the name ``torch`` and is not PyTorch: a stand-in, half a module, nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_MAGICS = (
    *("memstat", "memstat --device", "memstat --device host", "memvars", "memvars x --all"),
    *("memwhy x", "memwhy --unnamed", "memwhy Out[1]", "memledger", "memledger --all"),
    *("memrelease --dry-run x", "memrelease x", "memrelease --out --exceptions", "memrestore x"),
    *("memrelease --cublas", "memrestore"),
    *("memlimit", "memlimit 0.5", "memlimit 12GiB", "memlimit off", "memreset", "memdash"),
    *("membudget", "membudget 1TiB", "membudget 10MiB --device host", "membudget off"),
    *("memtrace", "memtrace on", "memtrace off"),
)
_FUNCTIONS = (
    *("monitor", "stat", "breakdown", "owners", "variables", "limit", "budget", "dashboard"),
    *("reset_peaks", "plan_restore", "restore"),
)
#: Stand-ins that every run tries; all the others are slow together.
_USUAL = ("nothing", "a module that fails whatever it is asked")
#: How ``stand_in`` is made.
_STAND_INS = {
    "nothing": "stand_in = None",
    "a mock": "stand_in = unittest.mock.MagicMock()",
    "a module that fails whatever it is asked": """
class Raising(types.ModuleType):
    def __getattribute__(self, name):
        raise RuntimeError(f'{name} was asked for')
stand_in = Raising('torch')
""",
    "a module that loads itself when it is used": """
spec = importlib.util.find_spec('torch')
spec.loader = importlib.util.LazyLoader(spec.loader)
stand_in = importlib.util.module_from_spec(spec)
sys.modules['torch'] = stand_in
spec.loader.exec_module(stand_in)
""",
}
_PROGRAM = """
import importlib.util, sys, types, unittest.mock
{make}
sys.modules["torch"] = stand_in
from IPython.core.error import UsageError
from IPython.testing.globalipapp import start_ipython
import gpumemwidget
shell = start_ipython()
shell.run_cell("%load_ext gpumemwidget")
shell.run_cell("x = bytearray(2**20)\\nx[:3]", store_history=True)
bad = []
for line in {magics!r}:
    result = shell.run_cell("%" + line, store_history=True)
    error = result.error_before_exec or result.error_in_exec
    if error is not None and type(error) is not UsageError or "\\n" in str(error):
        bad.append(f"%{{line}}: {{error!r}}")
for name in {functions!r}:
    try:
        repr(getattr(gpumemwidget, name)())
    except gpumemwidget.errors.GpuMemError as error:
        if "\\n" in str(error):
            bad.append(f"{{name}}(): {{error!r}}")
result = shell.run_cell("%%memtrace\\ny = bytearray(2**22)", store_history=True)
bad += [repr(error) for error in [result.error_in_exec] if error]
shell.run_cell("%unload_ext gpumemwidget")
assert sys.modules["torch"] is stand_in
print("BAD:", bad)
"""


@pytest.mark.parametrize(
    "name",
    [
        name if name in _USUAL else pytest.param(name, marks=pytest.mark.slow)
        for name in sorted(_STAND_INS)
    ],
)
def test_what_is_not_torch_is_left_alone(name: str, tmp_path: Path) -> None:
    """Each magic and function answers, or refuses in one line; no failure of ours is shown."""
    program = _PROGRAM.format(make=_STAND_INS[name], magics=_MAGICS, functions=_FUNCTIONS)

    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={"PYTHONPATH": str(Path(__file__).parents[2]), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("BAD: []\n"), done.stdout[-3000:]
    assert "Traceback" not in done.stdout + done.stderr
    assert "not recorded" not in done.stdout
    assert "failed" not in done.stdout
