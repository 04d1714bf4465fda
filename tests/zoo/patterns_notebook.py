"""What the notebook itself keeps: names, views, displayed values."""

from __future__ import annotations

from tests.zoo.pattern import KIB, Pattern

__all__ = ["PATTERNS"]

#: A matrix of 256 × 256 floats.
_MATRIX = 256 * KIB
_OUT = "https://github.com/ipython/ipython/issues/10082"
_FAQ = (
    "https://raw.githubusercontent.com/pytorch/pytorch.github.io/"
    "d95d45ec86b49ad375185b021872caf001696929/docs/master/notes/faq.html"
)

PATTERNS = (
    Pattern(
        id="name",
        title="a name",
        link=_FAQ,
        source="x = torch.zeros(256, 256, device=device)",
        names=("x",),
        frees=_MATRIX,
        owners=("x",),
    ),
    Pattern(
        id="second-name",
        title="a second name for the same tensor",
        link="https://github.com/zhangj111/astnn/issues/8",
        source="""
            logits = torch.zeros(256, 256, device=device)
            best = logits
        """,
        names=("logits", "best"),
        frees=_MATRIX,
        owners=("logits", "best"),
    ),
    Pattern(
        id="slice",
        title="a slice that holds its whole storage",
        link="https://github.com/pytorch/pytorch/issues/50432",
        source="""
            def first_row():
                features = torch.zeros(256, 256, device=device)
                return features[0]
            row = first_row()
        """,
        names=("row",),
        frees=_MATRIX,
        owners=("row*",),
    ),
    Pattern(
        id="views",
        title="views kept in a dict after `del` of their base",
        link="https://github.com/konstmish/prodigy/pull/22",
        source="""
            qkv = torch.zeros(256, 768, device=device)
            heads = dict(zip("qkv", qkv.chunk(3, dim=1)))
            # %%
            del qkv
        """,
        names=("heads",),
        frees=3 * _MATRIX,
        owners=('heads["q"]*',),
    ),
    Pattern(
        id="loop-variable",
        title="the loop's last batch",
        link="https://github.com/pytorch/pytorch/pull/6673",
        source="""
            def loader():
                for _ in range(3):
                    yield torch.zeros(256, 256, device=device)
            for batch in loader():
                pass
        """,
        names=("batch",),
        frees=_MATRIX,
        owners=("batch",),
    ),
    Pattern(
        id="underscore-loop",
        title="`_` of a loop or of an unpacking",
        link="https://github.com/pytorch/pytorch/issues/3931",
        source="""
            lstm = nn.LSTM(256, 256, device=device)
            # %%
            with torch.no_grad():
                y, _ = lstm(torch.zeros(4, 64, 256, device=device))
            # %%
            del y
        """,
        names=("_",),
        frees=2 * 64 * KIB,
        owners=("_[0]", "_[1]"),
    ),
    Pattern(
        id="out",
        title="a displayed value",
        link=_OUT,
        source="""
            x = torch.zeros(256, 256, device=device)
            # %%
            x
        """,
        names=("x",),
        frees=_MATRIX,
        owners=("x", "Out[2]"),
    ),
    Pattern(
        id="out-unnamed",
        title="a displayed value without a name",
        link="https://github.com/ipython/ipython/issues/11204",
        source="""
            torch.zeros(256, 256, device=device)
            # %%
            1 + 1
        """,
        names=("Out[1]",),
        frees=_MATRIX,
        owners=("Out[1]",),
    ),
    Pattern(
        id="out-slice",
        title="a displayed slice",
        link="https://github.com/scipp/scipp/issues/2737",
        source="""
            x = torch.zeros(256, 256, device=device)
            # %%
            x[:2]
        """,
        names=("x", "Out[2]"),
        frees=_MATRIX,
        owners=("x", "Out[2]"),
    ),
    Pattern(
        id="out-tuple",
        title="a displayed tuple of tensors",
        link="https://github.com/ipython/ipython/issues/3452",
        source="""
            q = torch.zeros(256, 256, device=device)
            k = torch.zeros(256, 256, device=device)
            # %%
            q, k
        """,
        names=("q", "k"),
        options=("out",),
        frees=2 * _MATRIX,
        owners=("q", "Out[2][0]"),
    ),
    Pattern(
        id="underscores",
        title="`_`, `__`, `___` and everything else displayed",
        link="https://github.com/ipython/ipython/issues/12879",
        source="""
            torch.zeros(256, 256, device=device)
            # %%
            torch.ones(256, 256, device=device)
            # %%
            torch.zeros(256, 256, device=device)
            # %%
            torch.ones(256, 256, device=device)
        """,
        names=(),
        asked="Out[1]",
        options=("out",),
        frees=4 * _MATRIX,
        owners=("Out[1]", "Out[2]", "Out[3]", "Out[4]"),
    ),
)
