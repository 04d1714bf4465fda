"""What only a GPU keeps: the libraries' workspaces, graphs' pools, pinned memory."""

from __future__ import annotations

from tests.zoo.pattern import KIB, Pattern

__all__ = ["PATTERNS"]

#: A batch of 64 × 256 floats.
_BATCH = 64 * KIB

PATTERNS = (
    Pattern(
        id="cublas",
        title="cuBLAS's workspace after the first matrix product",
        link="https://github.com/pytorch/pytorch/issues/95668",
        source="""
            a = torch.randn(256, 256, device=device)
            (a @ a).sum().item()
            # %%
            del a
        """,
        names=(),
        asked="no name",
        options=("cublas",),
        runs_on="cuda",
        is_counted_by_allocator=True,
        frees=0,
        owners=("cuBLAS workspace*",),
    ),
    Pattern(
        id="cuda-graph",
        title="a CUDA graph with its static tensors",
        link="https://github.com/pytorch/pytorch/pull/190308",
        source="""
            x = torch.zeros(64, 256, device=device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = (x * 2).relu()
            graph.replay()
        """,
        names=("x", "y", "graph"),
        runs_on="cuda",
        # And the seed and the offset of the graph's random numbers, which no plan knows of.
        frees=2 * _BATCH + 16,
        plans_less_on_gpu_because="the random state goes with the last graph, whichever that is",
        owners=("x", "y"),
    ),
    Pattern(
        id="pinned",
        title="pinned host memory",
        link="https://github.com/pytorch/pytorch/issues/134332",
        source="""
            staging = [torch.zeros(64, 256).pin_memory() for _ in range(2)]
        """,
        names=("staging",),
        runs_on="cuda",
        is_on_host=True,
        plans_less_on_gpu_because="PyTorch keeps pinned memory, and no counter shows that it goes",
        frees=2 * _BATCH,
        owners=("staging",),
    ),
)
