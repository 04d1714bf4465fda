"""What functions keep: closures, defaults, caches, generators, iterators."""

from __future__ import annotations

from tests.zoo.pattern import KIB, Pattern

__all__ = ["PATTERNS"]

#: A matrix of 256 × 256 floats.
_MATRIX = 256 * KIB

PATTERNS = (
    Pattern(
        id="closure",
        title="a closure",
        link="https://github.com/keras-team/keras/pull/23206",
        source="""
            def make_step():
                cache = torch.zeros(256, 256, device=device)
                def step():
                    return cache.sum()
                return step
            step = make_step()
        """,
        names=("step",),
        frees=_MATRIX,
        owners=("step's closure: cache",),
    ),
    Pattern(
        id="lambda",
        title="lambdas in a list of callbacks",
        link="https://github.com/pytorch/pytorch/issues/51883",
        source="""
            callbacks = []
            def on_end(batch):
                callbacks.append(lambda: batch.mean())
            on_end(torch.zeros(256, 256, device=device))
        """,
        names=("callbacks",),
        frees=_MATRIX,
        owners=("callbacks[0]'s closure: batch",),
    ),
    Pattern(
        id="default",
        title="a tensor as a default argument",
        link="https://github.com/nlintz/TensorFlow-Tutorials/pull/100",
        source="""
            def blur(x, kernel=torch.ones(256, 256, device=device)):
                return x @ kernel
        """,
        names=("blur",),
        frees=_MATRIX,
        owners=("blur's default: kernel",),
    ),
    Pattern(
        id="mutable-default",
        title="a mutable default that grows",
        link="https://github.com/ulissigroup/amptorch/issues/107",
        source="""
            def remember(batch, seen=[]):
                seen.append(batch)
                return len(seen)
            for _ in range(2):
                remember(torch.zeros(256, 256, device=device))
        """,
        names=("remember",),
        frees=2 * _MATRIX,
        owners=("remember's default: seen[0]",),
    ),
    Pattern(
        id="partial",
        title="`functools.partial`",
        link="https://github.com/napari/napari/issues/7065",
        source="""
            import functools
            def weighted(x, y, weight):
                return ((x - y) ** 2 * weight).mean()
            loss_fn = functools.partial(weighted, weight=torch.ones(256, 256, device=device))
        """,
        names=("loss_fn",),
        frees=_MATRIX,
        owners=('loss_fn.keywords["weight"]',),
    ),
    Pattern(
        id="bound-method",
        title="a bound method of a deleted model",
        link="https://github.com/pyro-ppl/pyro/pull/1938",
        source="""
            model = nn.Linear(256, 256, bias=False, device=device)
            predict = model.forward
            # %%
            del model
        """,
        names=("predict",),
        frees=_MATRIX,
        owners=("predict.__self__.weight",),
    ),
    Pattern(
        id="lru-cache",
        title="`functools.lru_cache`",
        link="https://github.com/facebookresearch/ParlAI/pull/2487",
        source="""
            import functools
            @functools.lru_cache(maxsize=None)
            def positions(n):
                return torch.arange(n * n, dtype=torch.float32, device=device)
            for n in (256, 512):
                positions(n)
        """,
        names=("positions",),
        frees=_MATRIX + 4 * _MATRIX,
        owners=("positions's cache[512]",),
    ),
    Pattern(
        id="lru-cache-method",
        title="`lru_cache` on a method, which keeps `self`",
        link="https://github.com/huggingface/transformers/pull/45780",
        source="""
            import functools
            class Encoder:
                def __init__(self):
                    self.table = torch.zeros(256, 256, device=device)
                @functools.lru_cache
                def encode(self, n):
                    return self.table[:n].clone()
            encoder = Encoder()
            encoder.encode(128);
        """,
        names=("encoder", "Encoder"),
        frees=_MATRIX + _MATRIX // 2,
        owners=("encoder.table", "Encoder.encode's cache"),
    ),
    Pattern(
        id="memo",
        title="a memo in a decorator's closure",
        link="https://github.com/langchain-ai/langchain/pull/35296",
        source="""
            def memoize(function):
                memo = {}
                def wrapper(n):
                    if n not in memo:
                        memo[n] = function(n)
                    return memo[n]
                return wrapper
            @memoize
            def mask(n):
                return torch.ones(n, n, device=device)
            mask(256).sum().item()
        """,
        names=("mask",),
        frees=_MATRIX,
        owners=("mask's closure: memo[256]",),
    ),
    Pattern(
        id="generator",
        title="a suspended generator",
        link="https://github.com/google-research/flood-forecasting/pull/240",
        source="""
            def batches():
                for n in range(3):
                    batch = torch.full((256, 256), float(n), device=device)
                    yield batch.mean()
            stream = batches()
            next(stream).item()
        """,
        names=("stream",),
        frees=_MATRIX,
        owners=("stream: batches() line 4: batch",),
    ),
    Pattern(
        id="iterators",
        title="`enumerate(zip(…))` half consumed",
        link="https://github.com/ray-project/ray/pull/60598",
        source="""
            images = [torch.zeros(256, 256, device=device) for _ in range(2)]
            pairs = enumerate(zip(images, range(2)))
            # %%
            del images
        """,
        names=("pairs",),
        frees=2 * _MATRIX,
        owners=("pairs*[0]",),
    ),
    Pattern(
        id="cycle",
        title="`itertools.cycle(loader)`, which keeps every batch",
        link="https://github.com/pytorch/pytorch/issues/23900",
        source="""
            import itertools
            from torch.utils.data import DataLoader
            endless = itertools.cycle(DataLoader(torch.zeros(8, 64 * 1024), batch_size=4))
            for step in range(3):
                next(endless).to(device)
        """,
        names=("endless",),
        runs_on="cpu",
        # The two batches: the data went with the loader.
        frees=8 * _MATRIX,
        owners=("endless*",),
    ),
    Pattern(
        id="loader",
        title="a `DataLoader` over a `TensorDataset` on the device",
        link="https://github.com/pytorch/pytorch/issues/31101",
        source="""
            from torch.utils.data import DataLoader, TensorDataset
            images = torch.zeros(256, 256, device=device)
            loader = DataLoader(TensorDataset(images, images.sum(1)), batch_size=64)
            it = iter(loader)
            next(it)[0].sum().item()
            # %%
            del images
        """,
        names=("loader", "it"),
        frees=_MATRIX + KIB,
        owners=("loader.dataset.tensors[0]", "it._dataset"),
    ),
)
