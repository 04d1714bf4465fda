"""What a look at the memory must never do to the process that it looks at.

What may end or hang the process runs in one of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpumemwidget.errors import BadInputError
from gpumemwidget.ownership.why import explain
from gpumemwidget.report.release import report_explanation, report_plan
from tests.ownership.notebook import Notebook

#: The processes import torch, which takes long beside others.
pytestmark = pytest.mark.timeout(400)

_ROOT = Path(__file__).parents[2]
_PRELUDE = """
import gc
from types import ModuleType

from IPython.core.interactiveshell import InteractiveShell

ip = InteractiveShell.instance()
ip.run_cell("%load_ext gpumemwidget\\nimport torch, asyncio, _asyncio, builtins")
"""


def _run(source: str) -> str:
    """Run a program in a process of its own; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", _PRELUDE + source],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


_LOOKS = """
asked = []
get_referents = gc.get_referents

def record(*targets):
    asked.extend(each for each in targets if issubclass(type(each), ModuleType))
    return get_referents(*targets)

gc.get_referents = record
ip.run_cell('''
class Loop(ModuleClass):
    pass
held = Loop("held")
held.tensor = torch.zeros(2000)
keep = [torch.zeros(4) for _ in range(400)]
def hold(tensors):
    yield
    tensors
# Something that no variable leads to holds more than can be searched for at once.
builtins.holder = hold(list(keep))
next(builtins.holder)
builtins.modules = [asyncio, _asyncio, held]
async def wait():
    for _ in range(50):
        await asyncio.sleep(0)
asyncio.run(wait())
'''.replace("ModuleClass", "type(asyncio)"))
lines = "%memvars;%memwhy keep;%memwhy --unnamed;%memrelease keep --dry-run;%memstat"
for line in lines.split(";"):
    assert ip.run_cell(line).success, line
from gpumemwidget.leaks.survey import take_survey
from gpumemwidget.jupyter.extension import IPythonShell

survey = take_survey(IPythonShell(ip), budget_s=10.0, depth="holders")
print("groups", len(survey.groups))
print("asked about", asked)
ip.run_cell("asyncio.run(wait())")
gc.collect()
print("collected")
"""


def test_the_collector_is_never_asked_about_modules() -> None:
    """``_asyncio`` of Python 3.12.0 to 3.12.5 would break, and the next collection never end."""
    output = _run(_LOOKS)

    assert "asked about []" in output
    assert output.rstrip().endswith("collected")


_SURVEYS = """
from gpumemwidget.leaks.survey import take_survey
from gpumemwidget.jupyter.extension import IPythonShell

shell = IPythonShell(ip)
ip.run_cell("x = torch.zeros(300, requires_grad=True)\\ntotal = x")
taken = []
for _ in range({n_runs}):
    ip.run_cell("for _ in range({n_nodes}): {statement}")
    taken.append(take_survey(shell, budget_s=10.0, depth="names"))
ip.run_cell("%memvars")
print("taken", [each is not None for each in taken])
ip.run_cell("del total, kept" if "kept" in ip.user_ns else "del total")
gc.collect()
print("alive")
"""


@pytest.mark.parametrize(
    ("n_runs", "n_nodes", "statement"),
    [
        pytest.param(16, 4900, "total = total + x", id="chain"),
        pytest.param(2, 100_000, "total = total + x", id="long chain"),
        pytest.param(
            2,
            50_000,
            "total = total + x; kept = globals().setdefault('kept', []); kept.append(total)",
            id="chain whose tensors are kept",
        ),
    ],
)
def test_the_end_of_a_chain_of_nodes_is_survived(n_runs: int, n_nodes: int, statement: str) -> None:
    """All looks together make few enough Python objects of nodes, and then none is taken."""
    output = _run(_SURVEYS.format(n_runs=n_runs, n_nodes=n_nodes, statement=statement))

    assert output.rstrip().endswith("alive")
    assert "taken [True" in output
    assert "False" in output


def test_no_code_of_ours_runs_when_an_object_of_the_users_goes(notebook: Notebook) -> None:
    """A callback of a weak reference would lose the exception of a handler that meets it."""
    notebook.run(
        "import torch, weakref\n"
        "class Meta(type): pass\n"
        "class Holder(metaclass=Meta):\n"
        "    def __init__(self): self.tensor = torch.zeros(2000)\n"
        "class Wrapped(torch.Tensor): pass\n"
        "holder, wrapped = Holder(), torch.zeros(10).as_subclass(Wrapped)\n"
        "def list_callbacks():\n"
        "    objects = (Meta, Holder, Wrapped, holder, wrapped, holder.tensor)\n"
        "    found = [ref for each in objects for ref in weakref.getweakrefs(each)]\n"
        "    return [each for each in found if each.__callback__ is not None]\n"
    )
    list_callbacks = notebook.ip.user_ns["list_callbacks"]
    before = list_callbacks()

    notebook.list_rows()
    notebook.run("%memvars\n%memwhy holder\n%memrelease holder --dry-run")

    assert list_callbacks() == before


def test_a_search_that_was_cut_off_never_says_that_there_is_nothing(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor at the end of a long chain is not seen in time, and the words are those of that."""
    monkeypatch.setattr("gpumemwidget.ownership.why.FULL_BUDGET_S", 0.0)
    monkeypatch.setattr("gpumemwidget.releasing.plan.RELEASE_BUDGET_S", 0.0)
    notebook.run(
        "import torch\n"
        "class Link: __slots__ = ('next',)\n"
        "chain = last = Link()\n"
        "for _ in range(20_000): last.next = Link(); last = last.next\n"
        "last.next = torch.zeros(1 << 18)\n"
        "del last"
    )

    why = report_explanation(explain(notebook.shell, "chain")).text
    plan = report_plan(notebook.plan("chain")).text

    words = r"No tensor memory was found{} among the [\d,]+ objects that could be looked at in 0 s"
    assert re.search(words.format(""), " ".join(why.split()))
    assert re.search(words.format(" in chain"), " ".join(plan.split()))
    with pytest.raises(BadInputError, match="was not found in the objects that could be looked at"):
        explain(notebook.shell, "chain.next.next")
