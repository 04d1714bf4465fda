"""What an exception keeps: the variables of every function that it passed."""

from __future__ import annotations

from tests.zoo.pattern import KIB, Pattern

__all__ = ["PATTERNS"]

#: A matrix of 256 × 256 floats.
_MATRIX = 256 * KIB

PATTERNS = (
    Pattern(
        id="exception",
        title="the last exception",
        link="https://github.com/pytorch/pytorch/issues/27600",
        source="""
            def train():
                batch = torch.zeros(256, 256, device=device)
                raise RuntimeError("CUDA out of memory")
            train()
        """,
        names=(),
        asked="last exception",
        options=("exceptions",),
        frees=_MATRIX,
        owners=("last exception: train() line 3: batch",),
    ),
    Pattern(
        id="exception-nested",
        title="an exception in a function of a function",
        link="https://github.com/ipython/ipython/pull/11572",
        source="""
            def forward(x):
                hidden = x.repeat(2, 1)
                raise RuntimeError("CUDA out of memory")
            def step(batch):
                return forward(batch)
            def fit():
                step(torch.zeros(256, 256, device=device))
            fit()
        """,
        names=(),
        asked="last exception",
        options=("exceptions",),
        frees=3 * _MATRIX,
        owners=(
            "last exception: forward() line 3: hidden",
            "last exception: step() line 5: batch",
        ),
    ),
    Pattern(
        id="exception-context",
        title="`__context__`: an exception in an `except`",
        link="https://github.com/huggingface/trl/pull/5776",
        source="""
            def attempt():
                batch = torch.zeros(512, 256, device=device)
                raise RuntimeError("CUDA out of memory")
            def train():
                try:
                    attempt()
                except RuntimeError:
                    smaller = torch.zeros(256, 256, device=device)
                    raise ValueError("half the batch does not fit either")
            train()
        """,
        names=(),
        asked="last exception",
        options=("exceptions",),
        frees=3 * _MATRIX,
        owners=(
            "last exception: train() line 9: smaller",
            "last exception (its context): attempt() line 3: batch",
        ),
    ),
    Pattern(
        id="exception-cause",
        title="`raise … from …`",
        link="https://github.com/pytorch/torchtitan/pull/4580",
        source="""
            def load():
                weights = torch.zeros(256, 256, device=device)
                raise KeyError("fc.bias")
            def build():
                try:
                    load()
                except KeyError as error:
                    raise RuntimeError("not a checkpoint") from error
            build()
        """,
        names=(),
        asked="last exception",
        options=("exceptions",),
        frees=_MATRIX,
        owners=("last exception (its cause): load() line 3: weights",),
    ),
    Pattern(
        id="exception-group",
        title="an exception group",
        link="https://github.com/python/cpython/issues/98543",
        python=(3, 11),
        source="""
            def fold(n):
                batch = torch.zeros(256, 256, device=device)
                raise RuntimeError(f"fold {n} failed")
            def cross_validate():
                errors = []
                for n in range(3):
                    try:
                        fold(n)
                    except RuntimeError as error:
                        errors.append(error)
                raise ExceptionGroup("folds", errors)
            cross_validate()
        """,
        names=(),
        asked="last exception",
        options=("exceptions",),
        frees=3 * _MATRIX,
        owners=("last exception.exceptions[0]: fold() line 3: batch",),
    ),
    Pattern(
        id="exception-args",
        title="a tensor in an exception's arguments",
        link="https://github.com/sgl-project/sglang-omni/pull/1309",
        source="""
            def check(batch):
                raise ValueError("not finite", batch.isnan())
            check(torch.zeros(1024, 256, device=device))
        """,
        names=(),
        asked="last exception",
        options=("exceptions",),
        frees=4 * _MATRIX + _MATRIX,
        owners=("last exception: check() line 2: batch", "last exception.args[1]"),
    ),
    Pattern(
        id="exception-kept",
        title="exceptions collected in a list",
        link="https://github.com/NVIDIA/cudf/issues/9232",
        source="""
            errors = []
            def evaluate():
                logits = torch.zeros(256, 256, device=device)
                raise RuntimeError("CUDA out of memory")
            for _ in range(2):
                try:
                    evaluate()
                except RuntimeError as error:
                    errors.append(error)
        """,
        names=("errors",),
        frees=2 * _MATRIX,
        owners=("errors[0]: evaluate() line 4: logits",),
    ),
    Pattern(
        id="debug",
        title="`%debug` after an exception",
        link="https://github.com/pytorch/pytorch/issues/10348",
        modules=(
            (
                "keyboard",
                "import io, sys\n"
                "def type_in(text):\n"
                "    sys.stdin = io.StringIO(text)\n"
                "def leave():\n"
                "    sys.stdin = sys.__stdin__\n",
            ),
        ),
        source="""
            import keyboard
            def train():
                batch = torch.zeros(256, 256, device=device)
                raise RuntimeError("CUDA out of memory")
            train()
            # %%
            keyboard.type_in("p batch.shape\\nq\\n")
            %debug
            keyboard.leave()
        """,
        names=(),
        asked="last exception",
        options=("exceptions",),
        frees=_MATRIX,
        owners=("last exception: train() line 4: batch",),
    ),
    Pattern(
        id="out-of-memory",
        title="a real out-of-memory error",
        link="https://github.com/Comfy-Org/ComfyUI/pull/11038",
        source="""
            def train():
                batch = torch.zeros(256, 256, device=device)
                return torch.empty(2**50, dtype=torch.uint8, device=device)
            train()
        """,
        names=(),
        asked="last exception",
        options=("exceptions",),
        frees=_MATRIX,
        owners=("last exception: train() line 3: batch",),
    ),
)
