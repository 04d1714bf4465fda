"""Every allocated block has a storage that claims it, or words that say what it is."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumemwidget.backends.snapshot import parse_segments
from gpumemwidget.model.devices import Block, Frame, Reading, Segment
from gpumemwidget.model.ownership import Owned
from gpumemwidget.ownership import blocks as blocks_module
from gpumemwidget.ownership.account import take_memory_account
from gpumemwidget.ownership.blocks import BlockMap, read_workspace_sizes
from gpumemwidget.ownership.graph import torch_reader
from gpumemwidget.testing import SimulatedGpus
from gpumemwidget.tracing.sources import format_allocation
from tests.ownership.notebook import Notebook

MIB = 1 << 20
HOPPER = frozenset({32 * MIB, MIB})


@pytest.fixture(autouse=True)
def _workspaces_of_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_module, "read_workspace_sizes", lambda _: HOPPER)


def take_map(allocator: SimulatedGpus) -> BlockMap:
    return BlockMap(parse_segments(allocator.take_snapshot()["segments"]))


def make_segment(
    *requested: int,
    address: int = 1 << 40,
    pool_id: tuple[int, int] = (0, 0),
    frames: Sequence[Frame] = (),
    state: Literal["active_allocated", "active_pending_free", "inactive"] = "active_allocated",
) -> Segment:
    """A segment with blocks of whole MiB or of 512 bytes, side by side."""
    blocks = []
    end = address
    for each in requested:
        n_bytes = -(-each // 512) * 512
        blocks.append(Block(end, n_bytes, each, state, tuple(frames)))
        end += n_bytes
    is_private = pool_id != (0, 0)
    return Segment("cuda:0", address, end - address, is_private, pool_id, tuple(blocks))


def describe(segment: Segment, **options: object) -> tuple[Owned, ...]:
    return BlockMap([segment]).describe_unclaimed(set(), **options)


def test_an_address_within_a_block_finds_it() -> None:
    """From its first byte to its last, and no further, on the device it is on."""
    allocator = SimulatedGpus(2)
    first = allocator.find_address(allocator.allocate(1000))
    freed = allocator.allocate(1000)
    hole = allocator.find_address(freed)
    last = allocator.find_address(allocator.allocate(5 * MIB))
    allocator.free(freed)
    blocks = take_map(allocator)

    found = blocks.find("cuda:0", first)

    assert found is not None
    assert (found.address, found.n_bytes, found.requested_bytes) == (first, 1024, 1000)
    assert blocks.find("cuda:0", first + 1023) == found
    assert blocks.find("cuda:0", first + 1024) is None
    assert blocks.find("cuda:0", first - 1) is None
    assert blocks.find("cuda:0", hole) is None
    assert blocks.find("cuda:1", first) is None
    assert blocks.find("cuda:0", last + MIB) == blocks.find("cuda:0", last) is not None


@given(
    st.lists(st.tuples(st.integers(1, 40 * MIB), st.booleans(), st.booleans()), max_size=30),
)
def test_claimed_and_unclaimed_are_all_that_is_allocated(
    plan: list[tuple[int, bool, bool]],
) -> None:
    """Whatever was allocated and freed: each block in use is in one of the two, to the byte."""
    allocator = SimulatedGpus()
    kept = []
    for n_bytes, is_freed, is_claimed in plan:
        handle = allocator.allocate(n_bytes)
        if is_freed:
            allocator.free(handle)
        else:
            kept.append((allocator.find_address(handle), n_bytes, is_claimed))
    blocks = take_map(allocator)

    found = [blocks.find("cuda:0", address + n_bytes - 1) for address, n_bytes, _ in kept]
    claimed = {("cuda:0", address) for address, _, is_claimed in kept if is_claimed}
    unclaimed = blocks.describe_unclaimed(claimed)

    assert [each.address for each in found if each is not None] == [each[0] for each in kept]
    claimed_bytes = sum(each.n_bytes for each in found if ("cuda:0", each.address) in claimed)
    allocated_bytes = allocator.stats()["allocated_bytes"]["all"]["current"]
    assert claimed_bytes + sum(each.n_bytes for each in unclaimed) == allocated_bytes


def test_what_is_beyond_the_request_is_told_if_it_is_known_of_all() -> None:
    """One block of a line that does not tell what was asked for is enough for not knowing."""
    known = make_segment(1, 3 * MIB - 100, 1000)
    silent = replace(known.blocks[2], requested_bytes=None)
    unknown = replace(known, blocks=(*known.blocks[:2], silent))

    (told,), (untold,) = describe(known), describe(unknown)

    assert (told.n_bytes, told.rounding_bytes) == (3 * MIB + 1536, 511 + 100 + 24)
    assert (untold.n_bytes, untold.rounding_bytes) == (3 * MIB + 1536, None)


def test_a_private_pool_is_named_by_the_graph_that_has_it() -> None:
    """By its number where no object is known."""
    segment = make_segment(2 * MIB, pool_id=(3, 0))

    (unnamed,) = describe(segment)
    (named,) = describe(segment, pools={(3, 0): "graph"})

    assert unnamed == Owned(
        "cuda:0",
        2 * MIB,
        "CUDA-graph pool",
        ("private pool 3, 0 on cuda:0",),
        "nowhere",
        rounding_bytes=0,
    )
    assert named.steps == ("private pool of graph on cuda:0",)


def test_the_random_state_of_cuda_graphs_is_known_where_there_is_a_graph() -> None:
    """Eight bytes each for the seed and the offset, in the common pool; else they are unknown."""
    common, pool = make_segment(8, 8), make_segment(2 * MIB, address=1 << 41, pool_id=(3, 0))
    claimed = {("cuda:0", 1 << 41)}

    (state,) = BlockMap([common, pool]).describe_unclaimed(claimed)
    (unknown,) = describe(common)

    assert state.steps == ("random state of CUDA graphs on cuda:0",)
    assert (state.kind, state.n_bytes) == ("CUDA-graph pool", 1024)
    assert (unknown.kind, unknown.n_bytes) == ("unknown", 1024)


def test_freed_blocks_that_a_stream_still_uses_are_nobodys() -> None:
    """The allocator does not count them as allocated, so the account does not either."""
    segment = make_segment(2 * MIB, state="active_pending_free")

    assert describe(segment) == ()
    assert BlockMap([segment]).find("cuda:0", segment.address) is None


CELL = "/tmp/ipykernel_7/123.py"
TORCH = sysconfig.get_path("purelib") + "/torch/nn/functional.py"


@pytest.mark.parametrize(
    ("files", "line"),
    [
        ([TORCH, CELL, TORCH], "In [7], line 2"),
        ([TORCH, "/home/me/train.py", CELL], "train.py, line 2"),
        ([sysconfig.get_path("stdlib") + "/runpy.py", CELL], "In [7], line 2"),
        ([TORCH, "<frozen runpy>"], "functional.py, line 1"),
        # On the machine of a recording, too.
        ([r"C:\venv\Lib\site-packages\torch\nn\functional.py", CELL], "In [7], line 2"),
        (["/usr/lib/python3.12/contextlib.py", CELL], "In [7], line 2"),
        (["/tmp/torchinductor_me/ab/cab.py", CELL], "In [7], line 2"),
        ([], None),
    ],
)
def test_the_line_that_allocated_it_is_the_users(files: list[str], line: str | None) -> None:
    """The innermost line that is neither PyTorch's nor Python's own; of a cell by its number."""
    frames = [Frame(name, number, "f") for number, name in enumerate(files, 1)]

    assert format_allocation(frames, {CELL: 7}) == line


def test_unclaimed_blocks_say_where_they_were_allocated() -> None:
    """Where a history was recorded; what comes from different lines is told apart."""
    segments = [
        make_segment(MIB, 3 * MIB, frames=[Frame(CELL, 3, "f")]),
        make_segment(3 * MIB, address=1 << 41, frames=[Frame(CELL, 4, "f")]),
    ]
    blocks = BlockMap(segments, cells={CELL: 7})

    owned = blocks.describe_unclaimed({("cuda:0", 1 << 40)})

    assert [(each.n_bytes, each.allocated_at) for each in owned] == [
        (3 * MIB, "In [7], line 3"),
        (3 * MIB, "In [7], line 4"),
    ]


@pytest.mark.parametrize(
    ("properties", "environ", "sizes"),
    [
        ({"major": 9}, {}, {32 * MIB, MIB}),
        ({"major": 8}, {}, {8_519_680, MIB}),
        ({"major": 9}, {"CUBLAS_WORKSPACE_CONFIG": ":4096:2:16:8"}, {8_519_680, MIB}),
        ({"major": 9}, {"CUBLAS_WORKSPACE_CONFIG": ":0:0"}, {MIB}),
        ({"major": 9}, {"CUBLAS_WORKSPACE_CONFIG": "much"}, {32 * MIB, MIB}),
        ({"major": 9}, {"CUBLASLT_WORKSPACE_SIZE": "4096"}, {32 * MIB, 4 * MIB}),
        ({"gcnArchName": "gfx942"}, {}, {128 * MIB, 76 * MIB}),
        ({"gcnArchName": "gfx90a"}, {"HIPBLAS_WORKSPACE_CONFIG": ":8:1"}, {8192, 76 * MIB}),
    ],
)
def test_workspace_sizes_are_those_that_pytorch_takes(
    properties: dict[str, object],
    environ: dict[str, str],
    sizes: set[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the environment, else by the device's generation; on ROCm by its own rules."""
    for name in ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    torch = SimpleNamespace(
        _C=SimpleNamespace(),
        cuda=SimpleNamespace(
            is_initialized=lambda: True,
            get_device_properties=lambda _: SimpleNamespace(**properties),
        ),
        version=SimpleNamespace(hip="6.4" if "gcnArchName" in properties else None),
    )
    monkeypatch.setattr(blocks_module, "find_torch", lambda: torch)

    assert read_workspace_sizes("cuda:0") == sizes


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("n_unknown", [0, 1])
def test_gradient_buckets_are_named_by_their_module(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch, n_unknown: int
) -> None:
    """They have the parameters' bytes; beside other unknown blocks they are only supposed."""
    notebook.run(
        "import torch\n"
        "net = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(40)])\n"
        "ddp = torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=16)\n"
        "for _ in range(4):\n    ddp(torch.ones(1, 512)).sum().backward(); net.zero_grad()"
    )
    ddp = notebook.ip.user_ns["ddp"]
    logged = ddp.logger._get_ddp_logging_data().strs_map["rebuilt_bucket_sizes"]
    buckets = [int(size) for size in logged.split(",")]
    requested = {each.data_ptr(): each.nbytes for each in ddp.parameters()}
    requested |= {n << 30: size for n, size in enumerate([*buckets, *[777] * n_unknown], start=1)}
    del ddp
    segments = [make_segment(size, address=start) for start, size in requested.items()]
    monkeypatch.setattr(torch_reader, "_name_device", lambda _device: "cuda:0")
    monkeypatch.setattr(notebook.hardware, "read_segments", lambda: segments)
    allocated = sum(segment.n_bytes for segment in segments)
    reading = Reading("cuda:0", allocated, None)
    monkeypatch.setattr(notebook.hardware, "read_exact", lambda: (reading,))

    account = take_memory_account(notebook.shell, notebook.hardware)

    (device,) = account.devices
    found = [line for line in device.owned if "bucket" in line.owner]
    assert len(buckets) > 1
    if n_unknown:
        assert {line.kind for line in found} == {"unknown"}
        assert "perhaps a gradient bucket of DistributedDataParallel" in found[0].owner
    else:
        assert sum(line.n_bytes for line in found) == sum(-(-each // 512) * 512 for each in buckets)
        assert {(line.owner, line.kind) for line in found} == {
            ("ddp's gradient buckets", "gradient")
        }
        assert not [line for line in device.owned if line.kind == "unknown"]
