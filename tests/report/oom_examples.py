"""OOMs as sessions meet them, for the tests of the card."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec

from gpumemwidget.model.devices import DeviceInfo, DeviceState, DeviceUse, ProcessUse, Reading
from gpumemwidget.model.ooms import OomCard, OomEvent, Remedy, RemedyKind
from gpumemwidget.model.ownership import DeviceAccount, MemoryKind, Owned
from gpumemwidget.oom.detection import divide_device
from tests.report.examples import HOSTILE, MIB, own

GIB = 1024 * MIB
_RECORDED = Path(__file__).parents[1] / "data" / "h100-oom.json"

_KINDS: tuple[tuple[MemoryKind, int], ...] = (
    ("saved for backward", 38 * GIB),
    ("optimizer state", 12 * GIB),
    ("parameter", 6 * GIB),
    ("gradient", 6 * GIB),
    ("tensor", 3 * GIB),
    ("cuBLAS workspace", 33 * MIB),
)
_ACCOUNT = DeviceAccount(
    "cuda:0", None, tuple(Owned("cuda:0", n, kind, (), "name") for kind, n in _KINDS)
)
OWN = ProcessUse(1, "python", "own", 68 * GIB + 604 * MIB)
OTHER = ProcessUse(4711, "python serve.py", "other", 10 * GIB)
_WAYS = (
    Remedy(RemedyKind.LAST_EXCEPTION, 41 * GIB, "exact"),
    Remedy(RemedyKind.SMALLER_BATCH, 19 * GIB, "about"),
    Remedy(
        RemedyKind.NAMES, 3 * GIB + 200 * MIB, "at least", names=("validation_losses", "old_model")
    ),
    Remedy(RemedyKind.GRADIENTS, 6 * GIB, "exact"),
    Remedy(RemedyKind.OUT, 64 * MIB, "exact"),
    Remedy(RemedyKind.CACHED_BLOCKS, 2 * GIB, "at most"),
    Remedy(RemedyKind.EXPANDABLE_SEGMENTS, None, "at most"),
    Remedy(RemedyKind.NO_GRAD, None, "about"),
)


def make_event(
    device: str = "cuda:0",
    *,
    processes: tuple[ProcessUse, ...] | None = (OWN, OTHER),
    requested_bytes: int | None = 2 * GIB,
    allocated_bytes: int | None = 65 * GIB + 33 * MIB,
    reserved_bytes: int | None = 68 * GIB,
    largest_free_block_bytes: int | None = 512 * MIB,
    device_free_bytes: int | None = 611 * MIB,
    device_total_bytes: int | None = 79 * GIB + 191 * MIB,
    limit_bytes: int | None = None,
) -> OomEvent:
    """A training step on an H100 that others use as well."""
    use = DeviceUse(device, None, device_free_bytes, device_total_bytes, driver_bytes=0)
    info = DeviceInfo(device, device, device_total_bytes, limit_bytes)
    reading = Reading(device, allocated_bytes, reserved_bytes)
    return OomEvent(
        DeviceState(info, reading, use, processes),
        requested_bytes=requested_bytes,
        largest_free_block_bytes=largest_free_block_bytes,
    )


def make_card(**changes: object) -> OomCard:
    """Its card, with all that may stand on one."""
    saved = "saved for backward"
    unseen: dict[str, object] = {"root": "nowhere", "rows": (), "allocated_at": "In [4], line 3"}
    owners = (
        own(("logits",), 12 * GIB),
        *(
            own(("loss", "'s graph", f"[{n}]", ": saved by GeluBackward0"), 3 * GIB, saved)
            for n in range(4)
        ),
        own(
            ("optimizer", ".state", "[model.lm_head.weight]", "['exp_avg']"),
            590 * MIB,
            "optimizer state",
        ),
        own(("model", ".lm_head", ".weight"), 590 * MIB, "parameter"),
        own(("model", ".lm_head", ".weight", ".grad"), 590 * MIB, "gradient"),
        own(("validation_losses", "[12]"), 512 * MIB),
        own(("held where Python can't see",), 400 * MIB, **unseen),
    )
    card = OomCard(
        event=make_event(),
        execution_count=7,
        place="In [7], line 3",
        text="    logits = model(batch.to(device), labels=labels)",
        function="torch.nn.functional.linear",
        owners=owners,
        owned_bytes=65 * GIB,
        ways=_WAYS,
        n_caught=2,
        notes=("What other processes take is the driver's figure.",),
    )
    return _divide(replace(card, **changes), _ACCOUNT)  # type: ignore[arg-type]


def _divide(card: OomCard, account: DeviceAccount | None = None) -> OomCard:
    """The card with the bar of its event, and its ways out in their order."""
    ways = tuple(sorted(card.ways, key=lambda way: way.rank))
    return replace(card, ways=ways, breakdown=divide_device(card.event, account))


def make_host_card(**changes: object) -> OomCard:
    """An array that no machine has the memory for."""
    event = make_event(
        "host",
        processes=None,
        requested_bytes=8 * 1024 * GIB,
        allocated_bytes=900 * MIB,
        reserved_bytes=1300 * MIB,
        largest_free_block_bytes=None,
        device_free_bytes=13 * GIB,
        device_total_bytes=16 * GIB,
    )
    card = OomCard(
        event=event,
        execution_count=3,
        place="In [3], line 1",
        text="distances = np.zeros((1_000_000, 1_000_000))",
        function=None,
        owners=(
            Owned("host", 700 * MIB, "other", ("Python's own objects and libraries",), "nowhere"),
            Owned("host", 200 * MIB, "tensor", ("dataset", ".tensors", "[0]"), "name"),
        ),
        owned_bytes=900 * MIB,
        ways=(
            Remedy(RemedyKind.NAMES, 200 * MIB, "exact", names=("dataset",)),
            Remedy(RemedyKind.SMALLER_BATCH, 4096 * GIB, "about"),
        ),
    )
    return _divide(replace(card, **changes))  # type: ignore[arg-type]


def read_recorded_card() -> OomCard:
    """The one that was recorded on a real GPU."""
    return msgspec.json.decode(_RECORDED.read_bytes(), type=OomCard)


def make_hostile_card() -> OomCard:
    """One whose texts come from a notebook that means no good; a limit, and unknown neighbours."""
    path = "config" + "".join(f"['section_{number}']" for number in range(24))
    card = make_card(
        event=make_event(
            limit_bytes=69 * GIB,
            processes=None,
            largest_free_block_bytes=3 * GIB - 33 * MIB,
        ),
        text=HOSTILE,
        function="torch.<script>alert(1)</script>\u202e",
        owners=(own((HOSTILE,), 9 * GIB), own((path,), 8 * GIB, "parameter")),
        ways=(
            Remedy(RemedyKind.NAMES, GIB, "exact", names=(HOSTILE, HOSTILE)),
            Remedy(RemedyKind.LIMIT, 9 * GIB, "at most"),
        ),
        n_caught=1,
        notes=(HOSTILE,),
    )
    return _divide(card)
