"""A notebook on a real GPU, saved with its outputs: ``python -m tests.gpu.notebook OUT.ipynb``.

A real kernel runs it, so that what the GPU's tests hold to figures can be looked at as a person
sees it, here or on another machine. It is saved whatever happens, with what came out until then;
the exit status says whether all went well. ``--of`` executes another notebook in its place, in the
folder where it lies. It needs nbclient and ipykernel; without a GPU it runs on the host.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_notebook

__all__ = ["CELLS", "build", "execute", "list_troubles"]

_ROOT = Path(__file__).parents[2]
_CELL_TIMEOUT_S = 60
_WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
_FAILS = "raises-exception"

#: What the cells are, in order; those that must fail have that in front.
CELLS = (
    "%load_ext gpumemwidget",
    """\
import subprocess, sys, torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
width, n_tokens, n_rows = (1024, 512, 16) if device == "cuda" else (64, 32, 4)""",
    "%memstat --device",
    """\
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20_000, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True) for _ in range(8)
        )
        self.head = nn.Linear(width, 20_000, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


model = Model().to(device)
optimizer = torch.optim.AdamW(model.parameters())


def loss_of(tokens):
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())""",
    """\
%%memtrace
tokens = torch.randint(20_000, (n_rows, n_tokens), device=device)
for step in range(2):
    loss = loss_of(tokens)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.2f}")""",
    """\
# Every other row of these goes again, and leaves its place between two that stay.
rows = [torch.ones(n_rows * 1000, 80, device=device) for _ in range(60)]
del rows[::2]
validation_loss = loss_of(tokens)
staging = torch.empty(100 << 20, dtype=torch.uint8, pin_memory=device == "cuda")""",
    """\
if device == "cuda":
    square = torch.randn(2048, 2048, device=device)
    beside = torch.cuda.Stream()
    with torch.cuda.stream(beside):
        (square @ square).relu()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = (square @ square).relu().sum()""",
    """\
# Another process on the same device, below this one.
code = '''
import sys, torch
x = torch.ones(64, 1024, 1024, device=sys.argv[1])
print("ready", flush=True)
sys.stdin.read()
'''
child = subprocess.Popen(
    [sys.executable, "-W", "ignore", "-c", code, device],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
)
print(child.stdout.readline())""",
    "%memstat --device",
    "%memstat",
    "%memvars",
    """\
child.communicate("")
child.returncode""",
    "%memlimit",
    "%membudget 64MiB",
    """\
kept = torch.ones(n_rows, 4096, 1024, device=device)
del kept""",
    "%membudget off",
    f"{_FAILS}: "
    """\
def step(n_rows):
    tokens = torch.randint(20_000, (n_rows, n_tokens), device=device)
    loss = loss_of(tokens)
    # A gigabyte more than there is.
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else 2**46
    return loss, torch.empty(free + 2**30, dtype=torch.uint8, device=device)


step(n_rows)""",
    "%memrelease --exceptions",
    "%memrelease --dry-run validation_loss rows",
    "%memrelease validation_loss rows",
    "%memstat --device",
    "%memreset",
    "%memledger",
    "%memdash",
    """\
import gpumemwidget

print(gpumemwidget.last_failure())""",
    "%unload_ext gpumemwidget",
)


def build() -> NotebookNode:
    """The notebook, not yet executed."""
    cells = []
    for source in CELLS:
        cell = new_code_cell(source.removeprefix(f"{_FAILS}: "))
        if source.startswith(_FAILS):
            cell.metadata["tags"] = [_FAILS]
        cells.append(cell)
    notebook: NotebookNode = new_notebook(cells=cells)  # type: ignore[no-untyped-call]
    return notebook


def execute(notebook: NotebookNode, folder: Path) -> str:
    """Run all cells in a fresh kernel, whatever becomes of each; their outputs come into them.

    Returns:
        Why it ended before the last one; ``""`` where it did not.
    """
    paths = [str(_ROOT), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    client = NotebookClient(
        notebook,
        timeout=_CELL_TIMEOUT_S,
        allow_errors=True,
        record_timing=True,
        resources={"metadata": {"path": str(folder)}},
    )
    try:
        client.execute()
    except (CellTimeoutError, DeadKernelError, RuntimeError) as exc:
        return f"{type(exc).__name__}: {exc}"
    return ""


def list_troubles(notebook: NotebookNode) -> list[str]:
    """What did not go as it should: cells that failed or did not, and what went to stderr."""
    troubles = []
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        title = cell.source.partition("\n")[0]
        errors = [output for output in cell.outputs if output.output_type == "error"]
        must_fail = _FAILS in cell.metadata.get("tags", ())
        if must_fail and not errors:
            troubles.append(f"{title}: did not fail")
        if not must_fail:
            troubles.extend(f"{title}: {each.ename}: {each.evalue}" for each in errors)
        troubles.extend(
            f"{title}: on stderr: {output.text.strip()}"
            for output in cell.outputs
            if output.output_type == "stream" and output.name == "stderr"
        )
    return troubles


def print_texts(notebook: NotebookNode) -> None:
    """The cells with what they put out as text, for who has only a terminal."""
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        times = cell.metadata.get("execution", {})
        print(f"\n=== In [{cell.execution_count}] {times.get('shell.execute_reply', '')}")
        print(cell.source)
        for output in cell.outputs:
            if output.output_type == "error":
                print(f"--- {output.ename}: {output.evalue}")
            else:
                print("---", output.get("text") or output.get("data", {}).get("text/plain", ""))


def main() -> int:
    """Execute it and save what came out."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.notebook", description=__doc__)
    parser.add_argument("out", type=Path, help="where it is saved")
    parser.add_argument("--of", type=Path, help="another notebook to execute")
    options = parser.parse_args()
    notebook = build() if options.of is None else nbformat.read(options.of, as_version=4)
    folder = (Path.cwd() if options.of is None else options.of.parent).resolve()
    start_s = time.perf_counter()

    cause = execute(notebook, folder)

    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            # It is dead without its kernel, and its text stands beside it.
            output.get("data", {}).pop(_WIDGET_VIEW, None)
    notebook.metadata.pop("widgets", None)
    options.out.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")
    print_texts(notebook)
    troubles = [*([cause] if cause else []), *list_troubles(notebook)]
    print(f"\n{options.out}: {time.perf_counter() - start_s:.0f} s, {len(troubles)} troubles")
    for trouble in troubles:
        print(f"- {trouble}")
    return 1 if troubles else 0


if __name__ == "__main__":
    sys.exit(main())
