"""Accounts of owners and explanations as a real session makes them, for the reports' tests."""

from __future__ import annotations

from dataclasses import replace

from gpumemwidget.model.ownership import (
    AccountNote,
    Cure,
    DeviceAccount,
    DeviceBytes,
    Explanation,
    Fix,
    FixKind,
    Holder,
    MemoryAccount,
    MemorySource,
    Owned,
    Slices,
    Variable,
)
from tests.report.examples import HOSTILE, KIB, MIB, on_gpu, own

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
        owned.append(own(steps, n_bytes, "parameter", "model", "optimizer", "losses"))
        owned.append(own((*steps, ".grad"), n_bytes, "gradient", "model", "optimizer"))
        for name in ("exp_avg", "exp_avg_sq"):
            state = ("optimizer", ".state", f"[{''.join(steps)}]", f'["{name}"]')
            owned.append(own(state, n_bytes, "optimizer state"))
    for number in range(40):
        saved = ("losses", f"[{number}]", "'s graph", ": saved by MulBackward0")
        owned.append(own(saved, 3 * MIB, "saved for backward"))
        owned.append(own(("losses", f"[{number}]"), 512, "tensor"))
    nowhere: dict[str, object] = {"rows": (), "root": "nowhere"}
    owned += [
        own(("batch",), 256 * MIB, "tensor", "batch", "Out[7]"),
        own(("Out[9]",), 64 * MIB, root="out"),
        own(("last exception", ": train() line 12", ": hidden"), 96 * MIB, root="exception"),
        own(("torchmodels._CACHE", '["rope"]'), 4 * MIB, rows=(), root="module"),
        own(
            ("thread loader", ": load() line 30: x"),
            MIB,
            rows=(),
            root="thread",
        ),
        own(
            ("held where Python can't see", "[1]"),
            5 * MIB,
            held_elsewhere=True,
            allocated_at="In [4], line 3",
            **nowhere,
        ),
        own(("cuBLAS workspace",), 33 * MIB, "cuBLAS workspace", **nowhere),
        own(("CUDA-graph pool (0, 1)",), 20 * MIB, "CUDA-graph pool", **nowhere),
    ]
    owned.sort(key=lambda each: -each.n_bytes)
    return DeviceAccount("cuda:0", sum(each.n_bytes for each in owned), tuple(owned))


def make_host_account() -> DeviceAccount:
    """The host beside it: a data set, what is no tensor's, and 2 MiB of which nothing is known."""
    nowhere: dict[str, object] = {"rows": (), "root": "nowhere", "device": "host"}
    owned = (
        own(("Python's own objects and libraries",), 700 * MIB, "other", **nowhere),
        own(("dataset", ".tensors", "[0]"), 90 * MIB, device="host"),
        own(("dataset", ".tensors", "[1]"), 10 * MIB, device="host"),
        own(("unknown",), 2 * MIB, "unknown", **nowhere),
    )
    return DeviceAccount("host", 802 * MIB, owned)


def make_account(**changes: object) -> MemoryAccount:
    """The account of the whole session."""
    n_parameters = sum(n_bytes for _, n_bytes in _list_parameters())
    batch = replace(
        _hold("batch", "tensor", 256 * MIB, 256 * MIB),
        type_name="torch.Tensor",
        shape=(64, 1024, 1024),
        dtype="float32",
        shared_with=("Out[7]",),
    )
    account = MemoryAccount(
        devices=(make_host_account(), make_gpu_account()),
        variables=(
            _hold("optimizer", "optimizer", 4 * n_parameters, 2 * n_parameters),
            _hold("model", "module", 2 * n_parameters, 2 * n_parameters),
            _hold("losses", "container", n_parameters + 120 * MIB, 120 * MIB + 40 * 512),
            batch,
            _hold("Out[7]", "view", 256 * MIB, 0, root="out"),
            _hold("Out[9]", "tensor", 64 * MIB, 64 * MIB, root="out"),
            _hold("last exception", "exception", 96 * MIB, 96 * MIB, root="exception"),
            _hold("dataset", "object", 100 * MIB, 100 * MIB, device="host"),
        ),
        is_complete=True,
        duration_s=0.042,
    )
    return replace(account, **changes)  # type: ignore[arg-type]


def _hold(
    name: str, kind: str, held: int, frees: int, *, device: str = "cuda:0", root: str = "name"
) -> Variable:
    amounts = DeviceBytes(((device, held),)), DeviceBytes(((device, frees),) if frees else ())
    return Variable(name, root, kind, kind, None, None, *amounts)  # type: ignore[arg-type]


def make_big_account() -> MemoryAccount:
    """Ten thousand storages under sixty names, and names of the worst."""
    owned = [
        own((f"run_{number % 50}", f"[{number // 50}]", '["logits"]'), (number + 1) * 512)
        for number in range(9_000)
    ]
    owned += [own(("state", f'["layer_{number}.weight"]'), MIB) for number in range(990)]
    owned += [own((HOSTILE, f'["{HOSTILE}"]'), KIB), own(("x" * 100, ".y" * 200), KIB)]
    owned += [own((f"t{number}",), KIB) for number in range(8)]
    total = sum(each.n_bytes for each in owned)
    device = DeviceAccount("cuda:0", total, tuple(owned))
    notes = (AccountNote("cuda:1", 4 * MIB), AccountNote("host", MIB, MemorySource.PINNED))
    return MemoryAccount((device,), (), False, 2.0, notes)


def make_odd_account() -> MemoryAccount:
    """A thread's variables, and a second name of a tensor."""
    more: dict[str, object] = {"root": "thread", "held_elsewhere": True}
    where = ": load() line 7: "
    owned = (
        own(("x",), MIB, "tensor", "x", "y"),
        *(
            own(("thread loader", f"{where}{name}"), rows=(), **more)
            for name in ("batch", "labels")
        ),
    )
    second = Variable("y", "name", "tensor", "torch.Tensor", None, None, on_gpu(1), DeviceBytes())
    devices = (DeviceAccount("cuda:0", 3 * MIB, owned),)
    return MemoryAccount(devices, (second,), is_complete=True, duration_s=0.1)


def make_unread_account() -> MemoryAccount:
    """What is allocated can't be read."""
    owned = (own(("x",), MIB), own(("y",), 3 * MIB))
    return MemoryAccount((DeviceAccount("cuda:0", None, owned),), (), True, 0.01)


def make_explanation() -> Explanation:
    """A weight that a trainer, a list and the last exception hold as well."""
    weight = "model.transformer.h[3].mlp.c_fc.weight"
    frame = "last exception: train_one_epoch_with_gradient_accumulation() line 212: self."
    cleared = DeviceBytes((("cuda:0", 9 * MIB), ("host", KIB)))
    return Explanation(
        name=weight,
        kind="parameter",
        type_name="torch.nn.Parameter",
        held_bytes=on_gpu(18),
        frees_bytes=DeviceBytes(),
        holders=(
            Holder(weight, "name", Fix(FixKind.RELEASE_ROW, "model"), on_gpu(18)),
            Holder(
                "optimizer.param_groups[0]['params'][39]",
                "name",
                Fix(FixKind.RELEASE_ROW, "optimizer"),
                on_gpu(18),
            ),
            Holder(
                frame + weight,
                "exception",
                Fix(FixKind.RELEASE_EXCEPTIONS),
                on_gpu(18),
                n_variables=73,
                n_frames=15,
            ),
            Holder(
                "losses[0…39].grad_fn", "name", Fix(FixKind.DROP_GRAPH, "losses[0…39]"), cleared
            ),
            Holder(
                "a C++ object that Python does not see",
                "nowhere",
                Fix(FixKind.END_UNSEEN),
                on_gpu(9),
            ),
        ),
        n_more=3,
        cure=Cure(
            fixes=(
                Fix(FixKind.DELETE, "cache.weights[3]"),
                Fix(FixKind.CLEAR_GRADIENT, "head.weight.grad"),
                Fix(FixKind.RELEASE_ROW, "model"),
                Fix(FixKind.RELEASE_EXCEPTIONS),
            ),
            needs_collection=True,
            frees_bytes=on_gpu(18),
        ),
        named_bytes=(("optimizer", on_gpu(36)), ("batch", on_gpu(2))),
        slices=Slices(3, 6 * MIB, 6 * KIB),
    )


def make_lone_explanation(**changes: object) -> Explanation:
    """A tensor that its name alone holds."""
    own = Holder("x", "name", Fix(FixKind.RELEASE_ROW, "x"), on_gpu(4))
    explanation = Explanation(
        "x",
        "tensor",
        "torch.Tensor",
        on_gpu(4),
        on_gpu(4),
        (own,),
        cure=Cure((own.fix,), needs_collection=False, frees_bytes=on_gpu(4)),
        slices=Slices(1, 4 * MIB, 4 * KIB),
    )
    return replace(explanation, **changes)  # type: ignore[arg-type]


def make_unnamed_explanation(**changes: object) -> Explanation:
    """What no name reaches: a table in a library's C++, and workspaces."""
    cache = "a tuple of 2 held by a closure of functools.lru_cache"
    explanation = Explanation(
        name="",
        kind="",
        type_name="",
        held_bytes=on_gpu(38),
        frees_bytes=DeviceBytes(),
        holders=(
            Holder("cuBLAS workspace", "nowhere", Fix(FixKind.RELEASE_CUBLAS), on_gpu(33)),
            Holder(
                cache, "nowhere", Fix(FixKind.CLEAR_CACHE, "library.load", "library"), on_gpu(5)
            ),
        ),
    )
    return replace(explanation, **changes)  # type: ignore[arg-type]
