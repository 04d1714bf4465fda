"""Several devices of another kind than CUDA: told, accounted and released each by itself.

On two real GPUs: ``tests/gpu/test_many.py``.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu.processes import run_program
from tests.toydevice import make_start

#: Two devices, a shell with the extension, and what is asked of it as JSON.
_SHELL = """
import gc, json
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config
config = Config()
config.HistoryManager.enabled = False
shell = InteractiveShell.instance(config=config, colors="nocolor")
def cell(source):
    result = shell.run_cell(source, store_history=True)
    error = result.error_before_exec or result.error_in_exec
    assert error is None, error
cell("%load_ext gpumemwidget")
import gpumemwidget
monitor = gpumemwidget.monitor()
def read_allocated():
    gc.collect()
    return [torch.accelerator.memory_allocated(index) for index in range(2)]
def read_reserved():
    return [torch.accelerator.memory_reserved(index) for index in range(2)]
def take_account():
    before = read_allocated(), read_reserved(), torch.accelerator.current_device_index()
    account = gpumemwidget.owners()
    assert before == (read_allocated(), read_reserved(), torch.accelerator.current_device_index())
    return {
        each.device: {
            "allocated": each.allocated_bytes,
            "kinds": dict(each.sum_kinds()),
            "owners": {owned.owner: owned.n_bytes for owned in each.owned},
        }
        for each in account.devices if each.device != "host"
    }
"""

_SPREAD = """
class Spread(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(128, 256).to("toy:0")
        self.second = torch.nn.Linear(256, 384).to("toy:1")
    def forward(self, x):
        return self.second(self.first(x.to("toy:0")).relu().to("toy:1"))
model = Spread()
optimizer = torch.optim.AdamW(model.parameters())
x = torch.randn(64, 128)
model(x).square().mean().backward()
optimizer.step()
"""
#: Of the two layers: multiples of 512, so that nothing is rounded.
FIRST_BYTES = 4 * (128 * 256 + 256)
SECOND_BYTES = 4 * (256 * 384 + 384)


def run(body: str) -> Any:
    """What a program prints last, that has two devices and a shell."""
    shell = _SHELL + f"SPREAD = {_SPREAD!r}\ncell('import torch')\n"
    return run_program(make_start() + shell + body)


@pytest.fixture(scope="module")
def spread() -> Any:
    """A trained model over two devices: looked at, and released."""
    return run(
        """
untouched = [info.device for info in monitor.hardware.list_devices()]
before = read_allocated()
cell(SPREAD)
found = {
    "untouched": untouched,
    "cell": {each.device: [each.allocated.before_bytes, each.allocated.after_bytes]
             for each in monitor.ledger[-1].devices},
    "account": take_account(),
    "allocated": read_allocated(),
    "rows": {row.name: dict(row.held_bytes.by_device) for row in gpumemwidget.variables()},
    "why": [dict(each.held_bytes.by_device) for each in gpumemwidget.why("model").holders],
}
reserved = read_reserved()
kept = gpumemwidget.plan_release("model", keep=True)
report = gpumemwidget.release("model", "optimizer")
found.update(
    kept=[list(kept.moves), [stay.reason.kind.name for stay in kept.stays]],
    stopped=report.stopped,
    freed=dict(report.allocated_freed_bytes),
    steps={step.kind.value: dict(step.reserved_freed_bytes) for step in report.steps},
    after=read_allocated(), before=before, reserved=[reserved, read_reserved()],
)
print(json.dumps(found))
"""
    )


def test_a_spread_model_is_accounted_on_each(spread: Any) -> None:
    """Parameters, gradients and states, on the device that they are on, to the byte."""
    for index, n_bytes in enumerate((FIRST_BYTES, SECOND_BYTES)):
        device = spread["account"][f"toy:{index}"]
        assert device["allocated"] == spread["allocated"][index] == 4 * n_bytes
        assert device["kinds"] == {
            "parameter": n_bytes,
            "gradient": n_bytes,
            "optimizer state": 2 * n_bytes,
        }
    assert "model.first.weight.grad" in spread["account"]["toy:0"]["owners"]
    assert 'optimizer.state[model.second.bias]["exp_avg"]' in spread["account"]["toy:1"]["owners"]
    assert spread["rows"]["model"] == {"toy:0": 2 * FIRST_BYTES, "toy:1": 2 * SECOND_BYTES}
    assert spread["why"][0] == {"toy:0": FIRST_BYTES * 2, "toy:1": SECOND_BYTES * 2}


def test_devices_are_there_from_their_first_use(spread: Any) -> None:
    """The cell that touches them begins at 0."""
    assert spread["untouched"] == ["host"]
    assert spread["cell"]["toy:0"] == [0, spread["allocated"][0]]
    assert spread["cell"]["toy:1"] == [0, spread["allocated"][1]]


def test_a_spread_model_is_released_from_all(spread: Any) -> None:
    """Nothing of it is left, and both caches are given back."""
    assert spread["stopped"] is None
    assert spread["freed"]["toy:0"] == 4 * FIRST_BYTES
    assert spread["freed"]["toy:1"] == 4 * SECOND_BYTES
    assert spread["after"] == spread["before"] == [0, 0]
    assert min(spread["reserved"][0]) > 0
    assert spread["reserved"][1] == [0, 0]
    assert spread["steps"]["empty_cache"]["toy:0"] == spread["reserved"][0][0]


def test_what_pytorch_can_not_move_in_place_is_said_before(spread: Any) -> None:
    """Of devices that an extension brings: the plan says so, and does not fail half way."""
    moves, reasons = spread["kept"]

    assert moves == []
    assert reasons == ["IMMOVABLE"] * 2


def test_what_is_not_told_of_a_device_is_said() -> None:
    """Its limit and its total are unknown; it is in use all the same, and has peaks to reset."""
    shown = run(
        """
import contextlib, io
cell("import torch; a = torch.ones(1000, device='toy:1')")
shown = []
for line in ("%memlimit", "%memreset", "%memstat --device", "%memstat --device toy:1"):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        cell(line)
    shown.append(" ".join(out.getvalue().split()))
print(json.dumps(shown))
"""
    )

    limits, reset, devices, one = shown
    # Neither a limit nor a total, and so nothing that is left.
    assert limits.split("toy:1")[1].split() == ["—", "4.00", "KiB", "—"]
    assert "PyTorch's peaks, now reset" in reset
    for told in (devices, one):
        assert "toy:1: neither PyTorch nor a driver knows its total" in told
    assert "host" in devices


def test_copies_between_devices_and_the_current_one() -> None:
    """Each is where it is, whichever is current; a release of one leaves the other."""
    found = run(
        """
torch.accelerator.set_device_index(1)
cell('''
a = torch.ones(1000, 128, device="toy:0")
b = a.to("toy:1")
c = torch.ones(128, device="toy")
both = {"a": a, "b": b}
view = b[3:]
''')
peaks = {each.device: each.allocated.peak_bytes for each in monitor.ledger[-1].devices}
rows = {
    row.name: [dict(each.by_device) for each in (row.held_bytes, row.frees_bytes)]
    for row in gpumemwidget.variables()
}
account = take_account()
first = dict(gpumemwidget.release("both", "a").allocated_freed_bytes)
second = dict(gpumemwidget.release("b", "view").allocated_freed_bytes)
left = {each.device: each.allocated_bytes for each in monitor.hardware.read()}
print(json.dumps([rows, account, first, second, left, peaks,
                  torch.accelerator.current_device_index()]))
"""
    )

    rows, account, first, second, left, peaks, current = found
    n_bytes = 1000 * 128 * 4
    assert rows["a"] == [{"toy:0": n_bytes}, {}]
    assert rows["view"] == [{"toy:1": n_bytes}, {}]
    assert rows["c"] == [{"toy:1": 512}, {"toy:1": 512}]
    assert rows["both"][0] == {"toy:0": n_bytes, "toy:1": n_bytes}
    assert account["toy:0"]["owners"] == {"a": n_bytes}
    assert account["toy:1"]["owners"] == {"b": n_bytes, "c": 512}
    assert (first["toy:0"], first.get("toy:1", 0)) == (n_bytes, 0)
    assert (second.get("toy:0", 0), second["toy:1"]) == (0, n_bytes)
    assert (left["toy:0"], left["toy:1"]) == (0, 512)
    # Of an extension's devices nothing is reset, so a cell has no peak.
    assert peaks == {"toy:0": None, "toy:1": None, "host": None}
    assert current == 1


def test_an_oom_is_its_own_devices() -> None:
    """The card is of the device that the error names, not of the current or the fullest one."""
    found = run(
        """
from gpumemwidget.jupyter import outputs as cell_outputs
cards = []
show = cell_outputs.show_card
cell_outputs.show_card = lambda card, extension: (cards.append(card), show(card, extension))
cell("a = torch.ones(1 << 20, device='toy:0'); b = torch.ones(128, device='toy:1')")
text = "XPU out of memory. Tried to allocate 16.00 MiB. GPU 1 has a total capacity of 1.00 GiB"
from gpumemwidget.oom import detection as ooms
ooms._KINDS["XPU"] = "toy"
result = shell.run_cell(f"raise torch.OutOfMemoryError({text!r})", store_history=True)
print(json.dumps([[card.event.device, card.event.allocated_bytes, card.event.requested_bytes,
                   [each.owner for each in card.owners], list(card.notes)] for card in cards]))
"""
    )

    assert found == [
        [
            "toy:1",
            512,
            16 << 20,
            ["b"],
            ["Measured after the error, while the traceback still holds its frames"],
        ]
    ]
