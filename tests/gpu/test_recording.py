"""Recorded ranks on real GPUs: DDP and FSDP2 under torchrun, with exact peaks of each rank.

Each rank keeps its own marks beside ours: it resets PyTorch's peaks at a step's start and reads
them at its end, as a user does. Its resets must not cut ours short, nor ours its.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import gpumemwidget
from gpumemwidget.model.devices import DeviceUse
from gpumemwidget.model.processes import ProcessState, SpanRecord
from gpumemwidget.remote.reader.recordings import Recordings, share_gpus
from tests.gpu.conftest import N_GPUS
from tests.remote.programs import RUN, find_peak, run_python, write_script

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

MIB = 1 << 20

#: A rank that trains. It writes what PyTorch tells it: the peak of each step since its own reset,
#: the peak of a spike, what is left at the end, and its GPU's UUID.
_TRAIN = """
import json, os, sys, torch
import torch.distributed as dist
import gpumemwidget

rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
torch.manual_seed(0)

def make_model():
    layers = [torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.GELU(),
                                  torch.nn.Linear(4096, 1024)) for _ in range(4)]
    model = torch.nn.Sequential(*layers).cuda()
    {wrap}
    return model

def read():
    torch.cuda.synchronize()
    return [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]

model = make_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
steps = []
for step in range(4):
    # Of another size on each rank, and at each step.
    batch = torch.randn(256 * (1 + rank) * (1 + step % 2), 1024, device="cuda")
    torch.cuda.synchronize()
    with gpumemwidget.span("train", step):
        torch.cuda.reset_peak_memory_stats()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.append(read())
    del batch, loss

# No reset of the user's from here on: its peak is the highest of both spans.
torch.cuda.reset_peak_memory_stats()
with gpumemwidget.span("spike"):
    held = torch.empty((200 + 100 * rank) << 20, dtype=torch.uint8, device="cuda")
    del held
with gpumemwidget.span("after"):
    held = torch.empty(8 << 20, dtype=torch.uint8, device="cuda")
spike = read()
stats = torch.cuda.memory_stats()
told = {{
    "rank": rank, "steps": steps, "spike": spike,
    "stats": [stats["allocated_bytes.all.peak"], stats["reserved_bytes.all.peak"]],
    "allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved(),
    "uuid": f"GPU-{{torch.cuda.get_device_properties(rank).uuid}}",
    "total": torch.cuda.mem_get_info(rank)[1],
}}
with open(os.path.join(sys.argv[1], f"told{{rank}}.json"), "w") as file:
    json.dump(told, file)
dist.barrier()
dist.destroy_process_group()
"""

_DDP = "model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank])"
_FSDP2 = """
    from torch.distributed.fsdp import fully_shard
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
"""

Told = dict[int, dict[str, Any]]


def run_ranks(folder: Path, wrap: str, n_ranks: int) -> Told:
    """Train under torchrun; return what each rank read itself."""
    script = write_script(folder, _TRAIN.format(wrap=wrap))
    told_in = folder / "told"
    told_in.mkdir()
    ended = run_python(
        folder,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        n_ranks,
        *RUN,
        "--to",
        folder / "records",
        script,
        told_in,
        timeout_s=200,
        env={"NCCL_NVLS_ENABLE": "0"},
    )
    assert ended.status == 0, ended.err[-4000:]
    found = [json.loads(path.read_text()) for path in told_in.glob("*.json")]
    assert len(found) == n_ranks
    return {each["rank"]: each for each in found}


def find_spans(state: ProcessState, name: str) -> list[SpanRecord]:
    return [span for span in state.spans if span.name == name]


def read_peaks(span: SpanRecord, device: str) -> list[int | None]:
    (found,) = [each for each in span.devices if each.device == device]
    assert found.peak_is == "exact"
    return [found.allocated.peak_bytes, found.reserved.peak_bytes]


def check_ranks(recordings: Recordings, told: Told) -> None:
    """The peaks of each rank's spans are those that PyTorch told it, to the byte."""
    states = recordings.processes
    assert [state.info.number for state in states] == sorted(told)
    for state in states:
        read = told[state.info.number or 0]
        device = f"cuda:{state.info.number}"
        # Where many end, the one with the highest peak is recorded, and the others are counted.
        place = 0
        for span in find_spans(state, "train"):
            counted = read["steps"][place : place + span.n_spans]
            place += span.n_spans
            peaks = read_peaks(span, device)
            # At its start a span has what was there; the user's marks begin a line later.
            assert peaks[0] == max(allocated for allocated, _ in counted)
            assert peaks in [list(step) for step in counted]
        assert place == len(read["steps"])
        (spike,) = find_spans(state, "spike")
        assert read_peaks(spike, device) == read["spike"]
        assert read["stats"] == read["spike"]
        assert sum(span.n_spans for span in state.spans if "to step" in span.name) == 1
        assert sum(span.n_spans for span in find_spans(state, "step")) == len(read["steps"]) - 1
        peak = find_peak(state, device)
        highest = max(read["spike"][0], *(allocated for allocated, _ in read["steps"]))
        assert peak.peak_is == "exact"
        assert (peak.allocated_bytes or 0) >= highest
        assert state.status == "ended"
        assert state.n_unread == 0


def check_bar(state: ProcessState, use: DeviceUse, *, torchs_total: int) -> None:
    """The parts of the GPU's bar while the rank ran are the driver's total, to the byte."""
    (share,) = share_gpus([replace(state, status="running")])
    (part,) = share.parts
    assert part.n_bytes is not None
    assert share.other_bytes is not None
    assert share.free_bytes is not None
    assert use.driver_bytes is not None
    taken = part.n_bytes + share.other_bytes
    assert taken + use.driver_bytes + share.free_bytes == share.total_bytes
    # PyTorch's total leaves out what the driver keeps for itself.
    assert share.total_bytes == torchs_total + use.driver_bytes


def check_gpus(recordings: Recordings, told: Told) -> None:
    """Each GPU is there once, by its UUID, with the driver's figures and its rank."""
    shares = {share.uuid: share for share in share_gpus(recordings.processes)}
    assert sorted(shares, key=str) == sorted(read["uuid"] for read in told.values())
    for read in told.values():
        share = shares[read["uuid"]]
        (part,) = share.parts
        assert part.process.info.number == read["rank"]
        (use,) = [each for each in part.process.uses if each.device == part.device]
        assert (use.used_bytes or 0) > read["reserved"]
        check_bar(part.process, use, torchs_total=read["total"])
        own = dict(part.process.own_bytes).get(part.device)
        # In a container the driver knows this process by another pid.
        if own is not None:
            assert read["reserved"] < own <= (use.used_bytes or 0)


@pytest.mark.parametrize("wrap", [_DDP, _FSDP2], ids=["ddp", "fsdp2"])
def test_ranks_of_torchrun(wrap: str, tmp_path: Path) -> None:
    """Exact peaks per rank, beside the program's own marks, and each GPU once."""
    if wrap == _FSDP2 and N_GPUS < 2:
        pytest.skip("needs two GPUs")
    n_ranks = min(2, N_GPUS)

    told = run_ranks(tmp_path, wrap, n_ranks)

    recordings = gpumemwidget.load(tmp_path / "records")
    check_ranks(recordings, told)
    check_gpus(recordings, told)


_OOM = """
import torch
x = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
def ask():
    return torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
ask()
"""


def test_an_oom(tmp_path: Path) -> None:
    """Its card has the line, the bytes and the owner: a variable of the program."""
    script = write_script(tmp_path, _OOM)

    ended = run_python(tmp_path, *RUN, "--to", "a.jsonl", script, timeout_s=100)

    (state,) = gpumemwidget.load(tmp_path / "a.jsonl").processes
    (card,) = state.ooms
    assert ended.status == 1
    assert state.status == "failed"
    assert card.event.device == "cuda:0"
    assert card.event.requested_bytes == 1 << 50
    assert card.event.allocated_bytes == 64 * MIB
    assert card.text.startswith("return torch.empty(1 << 50")
    assert [(owned.steps[0], owned.n_bytes) for owned in card.owners] == [("x", 64 * MIB)]


def test_no_context_where_there_was_none(tmp_path: Path) -> None:
    """A program that does not use its GPU has no CUDA context for being recorded."""
    script = write_script(
        tmp_path,
        "import torch, time, gpumemwidget\n"
        "with gpumemwidget.span('epoch'):\n    time.sleep(0.5)\n"
        "print(torch.cuda.is_initialized(), torch._C._cuda_hasPrimaryContext(0))\n",
    )

    ended = run_python(tmp_path, *RUN, "--to", "a.jsonl", script, timeout_s=100)

    (state,) = gpumemwidget.load(tmp_path / "a.jsonl").processes
    assert ended.out == "False False\n"
    assert [info.device for info in state.devices] == ["host"]


_BESIDE = """
import json, sys, torch, gpumemwidget
from IPython.core.interactiveshell import InteractiveShell
from gpumemwidget.session.session import find_session

MIB = 1 << 20

def spike(n_mib):
    held = torch.empty(n_mib * MIB, dtype=torch.uint8, device="cuda")
    del held

def trace_spike():
    with gpumemwidget.trace(device="cuda:0") as trace:
        spike(100)
    return trace.record.devices[0].allocated.peak_bytes

kept = torch.empty(16 * MIB, dtype=torch.uint8, device="cuda")
told = {"traced": []}
if "traced before" in sys.argv:
    told["traced"].append(trace_spike())
with gpumemwidget.record("a.jsonl"):
    with gpumemwidget.span("traced"):
        spike(300)
        told["traced"].append(trace_spike())
        spike(50)
    if "loaded" in sys.argv:
        with gpumemwidget.span("loaded"):
            shell = InteractiveShell.instance()
            shell.run_line_magic("load_ext", "gpumemwidget")
            spike(200)
            shell.user_ns["spike"] = spike
            shell.run_cell("spike(150)", store_history=True)
            with gpumemwidget.span("within"):
                spike(60)
            told["cell"] = find_session().monitor.ledger.records[-1].devices[0].allocated.peak_bytes
            shell.run_line_magic("unload_ext", "gpumemwidget")
    with gpumemwidget.span("after"):
        spike(30)
told["peak"] = torch.cuda.max_memory_allocated()
torch.cuda.reset_peak_memory_stats()
with gpumemwidget.record("b.jsonl"), gpumemwidget.span("again"):
    spike(70)
told["peak again"] = torch.cuda.max_memory_allocated()
print(json.dumps(told))
"""


@pytest.mark.parametrize("order", ["traced within", "traced before", "loaded"])
def test_traces_and_the_extension_beside_a_recording(order: str, tmp_path: Path) -> None:
    """Each has its own exact peaks, and the user theirs, also when the recording has ended."""
    script = write_script(tmp_path, _BESIDE)

    ended = run_python(tmp_path, script, order, timeout_s=100)

    assert ended.status == 0, ended.err[-4000:]
    told = json.loads(ended.out.splitlines()[-1])
    (state,) = gpumemwidget.load(tmp_path / "a.jsonl").processes
    (again,) = gpumemwidget.load(tmp_path / "b.jsonl").processes
    spans = [span for span in (*state.spans, *again.spans) if span.name != "the program"]
    peaks = {span.name: read_peaks(span, "cuda:0")[0] for span in spans}
    loaded = {"within": 76 * MIB, "loaded": 216 * MIB} if order == "loaded" else {}
    assert set(told["traced"]) == {116 * MIB}
    assert told.get("cell", 166 * MIB) == 166 * MIB
    assert peaks == {
        "traced": 316 * MIB,
        **loaded,
        "after": 46 * MIB,
        "again": 86 * MIB,
    }
    # The extension says that it takes them with it.
    assert order == "loaded" or told["peak"] == 316 * MIB
    assert told["peak again"] == 86 * MIB
