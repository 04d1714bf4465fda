"""Accounts of owners and explanations as a real session makes them, for the reports' tests."""

from __future__ import annotations

from gpumemwidget.model.ownership import (
    DeviceAccount,
    DeviceBytes,
    Explanation,
    Fix,
    FixKind,
    Holder,
    MemoryAccount,
    MemoryKind,
    Owned,
    Variable,
)
from tests.report.examples import HOSTILE, KIB, MIB

#: Parts of one block of GPT-2, with the bytes of their float32 weights.
_BLOCK = (
    (".ln_1.weight", 3 * KIB),
    (".ln_1.bias", 3 * KIB),
    (".attn.c_attn.weight", 6912 * KIB),
    (".attn.c_attn.bias", 9 * KIB),
    (".attn.c_proj.weight", 2304 * KIB),
    (".attn.c_proj.bias", 3 * KIB),
    (".mlp.c_fc.weight", 9 * MIB),
    (".mlp.c_proj.weight", 9 * MIB),
)


def _split(path: str) -> tuple[str, ...]:
    """``.attn.c_attn`` as the steps ``.attn`` and ``.c_attn``."""
    return tuple(f".{part}" for part in path.split(".") if part)


def _own(
    steps: tuple[str, ...],
    n_bytes: int,
    kind: MemoryKind = "tensor",
    *rows: str,
    device: str = "cuda:0",
    **more: object,
) -> Owned:
    values: dict[str, object] = {"root": "name", "rows": rows or steps[:1], **more}
    return Owned(device, n_bytes, kind, steps, **values)  # type: ignore[arg-type]


def _list_parameters() -> list[tuple[tuple[str, ...], int]]:
    embedding = (("model", ".transformer", ".wte", ".weight"), 147 * MIB)
    blocks = [
        (("model", ".transformer", ".h", f"[{number}]", *_split(path)), n_bytes)
        for number in range(12)
        for path, n_bytes in _BLOCK
    ]
    return [embedding, *blocks]


def make_gpu_account() -> DeviceAccount:
    """GPT-2 in training with AdamW, a list of losses, outputs, a failed cell."""
    owned: list[Owned] = []
    for steps, n_bytes in _list_parameters():
        owned.append(_own(steps, n_bytes, "parameter", "model", "optimizer", "losses"))
        owned.append(_own((*steps, ".grad"), n_bytes, "gradient", "model", "optimizer"))
        for name in ("exp_avg", "exp_avg_sq"):
            state = ("optimizer", ".state", f"[{''.join(steps)}]", f'["{name}"]')
            owned.append(_own(state, n_bytes, "optimizer state"))
    for number in range(40):
        saved = ("losses", f"[{number}]", "'s graph", ": saved by MulBackward0")
        owned.append(_own(saved, 3 * MIB, "saved for backward"))
        owned.append(_own(("losses", f"[{number}]"), 512, "tensor"))
    owned += [
        _own(("batch",), 256 * MIB, "tensor", "batch", "Out[7]"),
        _own(("Out[9]",), 64 * MIB, root="out"),
        _own(
            ("last exception", ": train() line 12", ": hidden"),
            96 * MIB,
            "tensor",
            "last exception",
            root="exception",
        ),
        _own(("torchmodels._CACHE", '["rope"]'), 4 * MIB, rows=(), root="module"),
        _own(
            ("thread loader: load() line 30: x",),
            MIB,
            rows=(),
            root="thread",
            thread="thread loader",
        ),
        _own(
            ("held where Python can't see", "[1]"),
            5 * MIB,
            rows=(),
            root="nowhere",
            held_elsewhere=True,
            allocated_at="In[4], line 3",
        ),
        _own(("cuBLAS workspace",), 33 * MIB, "cuBLAS workspace", rows=(), root="nowhere"),
        _own(("CUDA-graph pool (0, 1)",), 20 * MIB, "CUDA-graph pool", rows=(), root="nowhere"),
    ]
    owned.sort(key=lambda each: -each.n_bytes)
    return DeviceAccount("cuda:0", sum(each.n_bytes for each in owned), tuple(owned))


def make_host_account() -> DeviceAccount:
    """The host beside it: a data set, what is no tensor's, and 2 MiB of which nothing is known."""
    owned = (
        _own(("Python's own objects and libraries",), 700 * MIB, "other", rows=(), root="nowhere"),
        _own(("dataset", ".tensors", "[0]"), 90 * MIB, device="host"),
        _own(("dataset", ".tensors", "[1]"), 10 * MIB, device="host"),
        _own(("unknown",), 2 * MIB, "unknown", rows=(), root="nowhere"),
    )
    host = tuple(
        Owned("host", each.n_bytes, each.kind, each.steps, each.root, each.rows) for each in owned
    )
    return DeviceAccount("host", 802 * MIB, host)


def make_account(**changes: object) -> MemoryAccount:
    """The account of the whole session."""
    gpu, host = make_gpu_account(), make_host_account()
    n_parameters = sum(n_bytes for _, n_bytes in _list_parameters())
    values: dict[str, object] = {
        "devices": (host, gpu),
        "variables": (
            _hold("optimizer", "optimizer", 4 * n_parameters, 2 * n_parameters),
            _hold("model", "module", 2 * n_parameters, 2 * n_parameters),
            _hold("losses", "container", n_parameters + 120 * MIB, 120 * MIB + 40 * 512),
            Variable(
                "batch",
                "name",
                "tensor",
                "torch.Tensor",
                (64, 1024, 1024),
                "torch.float32",
                DeviceBytes((("cuda:0", 256 * MIB),)),
                DeviceBytes((("cuda:0", 256 * MIB),)),
                ("Out[7]",),
            ),
            _hold("Out[7]", "view", 256 * MIB, 0, root="out"),
            _hold("Out[9]", "tensor", 64 * MIB, 64 * MIB, root="out"),
            _hold("last exception", "exception", 96 * MIB, 96 * MIB, root="exception"),
            _hold("dataset", "object", 100 * MIB, 100 * MIB, device="host"),
        ),
        "is_complete": True,
        "duration_s": 0.042,
    }
    return MemoryAccount(**{**values, **changes})  # type: ignore[arg-type]


def _hold(
    name: str,
    kind: str,
    held: int,
    frees: int,
    *,
    device: str = "cuda:0",
    root: str = "name",
) -> Variable:
    amounts = DeviceBytes(((device, held),)), DeviceBytes(((device, frees),) if frees else ())
    return Variable(name, root, kind, kind, None, None, *amounts)  # type: ignore[arg-type]


def make_big_account() -> MemoryAccount:
    """Ten thousand storages under sixty names, and names of the worst."""
    owned = [
        _own((f"run_{number % 50}", f"[{number // 50}]", '["logits"]'), (number + 1) * 512)
        for number in range(9_000)
    ]
    owned += [_own(("state", f'["layer_{number}.weight"]'), MIB) for number in range(990)]
    owned += [_own((HOSTILE, f'["{HOSTILE}"]'), KIB), _own(("x" * 100, ".y" * 200), KIB)]
    owned += [_own((f"t{number}",), KIB) for number in range(8)]
    total = sum(each.n_bytes for each in owned)
    device = DeviceAccount("cuda:0", total + 3 * MIB, tuple(owned))
    return MemoryAccount((device,), (), False, 2.0, ("cuda:1 is lost.",))


def make_unread_account() -> MemoryAccount:
    """What is allocated can't be read on one device; on the other more was found than there is."""
    owned = (_own(("x",), MIB), _own(("y",), 3 * MIB))
    devices = (DeviceAccount("cuda:0", None, owned), DeviceAccount("cuda:1", MIB, owned))
    return MemoryAccount(devices, (), True, 0.01)


def make_explanation(**changes: object) -> Explanation:
    """A weight that a trainer, a list and the last exception hold as well."""
    values: dict[str, object] = {
        "name": "model.transformer.h[3].mlp.c_fc.weight",
        "kind": "parameter",
        "type_name": "torch.nn.Parameter",
        "held_bytes": DeviceBytes((("cuda:0", 18 * MIB),)),
        "frees_bytes": DeviceBytes(),
        "holders": (
            Holder(
                "model.transformer.h[3].mlp.c_fc.weight",
                "name",
                Fix(FixKind.RELEASE_ROW, "model"),
                DeviceBytes((("cuda:0", 18 * MIB),)),
            ),
            Holder(
                "optimizer.param_groups[0]['params'][39]",
                "name",
                Fix(FixKind.RELEASE_OPTIMIZER, "optimizer"),
                DeviceBytes((("cuda:0", 18 * MIB),)),
            ),
            Holder(
                "last exception: train_one_epoch_with_gradient_accumulation() line 212: self.model"
                ".transformer.h[3].mlp.c_fc.weight",
                "exception",
                Fix(FixKind.RELEASE_EXCEPTIONS),
                DeviceBytes((("cuda:0", 18 * MIB),)),
            ),
            Holder(
                "losses[0…39].grad_fn",
                "name",
                Fix(FixKind.DROP_GRAPH, "losses[0…39]"),
                DeviceBytes((("cuda:0", 9 * MIB), ("host", KIB))),
            ),
            Holder(
                "a C++ object that Python does not see",
                "nowhere",
                Fix(FixKind.END_UNSEEN),
                DeviceBytes((("cuda:0", 9 * MIB),)),
            ),
        ),
        "n_more": 3,
    }
    return Explanation(**{**values, **changes})  # type: ignore[arg-type]


def make_lone_explanation(**changes: object) -> Explanation:
    """A tensor that its name alone holds."""
    values: dict[str, object] = {
        "name": "x",
        "kind": "tensor",
        "type_name": "torch.Tensor",
        "held_bytes": DeviceBytes((("cuda:0", 4 * MIB),)),
        "frees_bytes": DeviceBytes((("cuda:0", 4 * MIB),)),
        "holders": (
            Holder("x", "name", Fix(FixKind.RELEASE_ROW, "x"), DeviceBytes((("cuda:0", 4 * MIB),))),
        ),
    }
    return Explanation(**{**values, **changes})  # type: ignore[arg-type]


def make_unnamed_explanation(**changes: object) -> Explanation:
    """What no name reaches: a table in a library's C++, and workspaces."""
    values: dict[str, object] = {
        "name": "no name",
        "is_unnamed": True,
        "kind": "",
        "type_name": "",
        "held_bytes": DeviceBytes((("cuda:0", 38 * MIB),)),
        "frees_bytes": DeviceBytes(),
        "holders": (
            Holder(
                "cuBLAS workspace",
                "nowhere",
                Fix(FixKind.RELEASE_CUBLAS),
                DeviceBytes((("cuda:0", 33 * MIB),)),
            ),
            Holder(
                "a tuple of 2 held by a closure of functools.lru_cache",
                "nowhere",
                Fix(FixKind.CLEAR_CACHE, "library.load", "library"),
                DeviceBytes((("cuda:0", 5 * MIB),)),
            ),
        ),
    }
    return Explanation(**{**values, **changes})  # type: ignore[arg-type]
