"""When Python ends with the extension loaded, nothing of ours is heard."""

from __future__ import annotations

from pathlib import Path

from tests.remote.programs import run_python, write_script

#: A module that Python clears after ours, with code that runs for the first time then.
_LATE = """
class Late:
    def __del__(self):
        self.run()

    def run(self):
        for _ in range(3):
            pass

kept = [Late() for _ in range(40)]
"""
#: A shell as a program embeds it; the modules are held by ``sys`` until the end.
_SHELL = """
import sys, late
sys.held = late
import gpumemwidget
sys.held_too = gpumemwidget
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_line_magic("load_ext", "gpumemwidget")
shell.run_cell("import torch\\nfor _ in range(200):\\n    x = torch.zeros(8)")
shell.run_line_magic("memtrace", "on")
shell.run_cell("y = [torch.zeros(8) for _ in range(20)]")
"""


def test_the_end_of_a_shell_that_still_records(tmp_path: Path) -> None:
    """Python clears our modules before others, whose code it still reports to us."""
    write_script(tmp_path, _LATE, "late.py")
    script = write_script(tmp_path, _SHELL)

    ended = run_python(tmp_path, script, env={"IPYTHONDIR": str(tmp_path)})

    assert (ended.status, ended.err) == (0, "")
