"""What threads, tasks and contexts keep."""

from __future__ import annotations

from tests.zoo.pattern import KIB, NO_NAME, Pattern

__all__ = ["PATTERNS"]

#: A matrix of 256 × 256 floats.
_MATRIX = 256 * KIB

PATTERNS = (
    Pattern(
        id="thread-local",
        title="`threading.local()`",
        link="https://github.com/pytorch/pytorch/issues/64412",
        source="""
            import threading
            local = threading.local()
            local.workspace = torch.zeros(256, 256, device=device)
        """,
        names=("local",),
        frees=_MATRIX,
        owners=("local*workspace*",),
    ),
    Pattern(
        id="thread",
        title="a thread that is still running",
        link="https://github.com/pytorch/pytorch/issues/15502",
        source="""
            import threading
            stop = threading.Event()
            def serve(batch):
                stop.wait()
            thread = threading.Thread(
                target=serve,
                name="server",
                args=(torch.zeros(256, 256, device=device),),
                daemon=True,
            )
            thread.start()
        """,
        names=("thread",),
        # What a running function uses can't be taken from it.
        stops="Thread 'server' is in serve(), line 4",
        keeps=_MATRIX,
        frees=0,
        owners=("thread server: serve() line 4: batch",),
        end="stop.set()\nfor each in threading.enumerate():\n"
        "    if each is not threading.current_thread() and each.daemon: each.join(5)",
    ),
    Pattern(
        id="futures",
        title="futures of a thread pool",
        link="https://github.com/agronholm/pythonfutures/issues/16",
        source="""
            from concurrent.futures import ThreadPoolExecutor
            with ThreadPoolExecutor(1) as pool:
                futures = [
                    pool.submit(lambda batch: batch, torch.zeros(256, 256, device=device))
                    for _ in range(2)
                ]
        """,
        names=("futures",),
        frees=2 * _MATRIX,
        owners=("futures[0]._result",),
    ),
    Pattern(
        id="queue",
        title="a prefetch queue that nobody empties",
        link="https://github.com/huggingface/pytorch-image-models/issues/886",
        source="""
            import queue
            prefetched = queue.Queue(maxsize=8)
            for _ in range(3):
                prefetched.put(torch.zeros(256, 256, device=device))
        """,
        names=("prefetched",),
        frees=3 * _MATRIX,
        owners=("prefetched.queue[0]",),
    ),
    Pattern(
        id="task",
        title="a finished asyncio task",
        link="https://github.com/python/asyncio/issues/397",
        source="""
            import asyncio
            async def load():
                return torch.zeros(256, 256, device=device)
            task = asyncio.ensure_future(load())
            await asyncio.wait([task])
            None
        """,
        names=("task",),
        frees=_MATRIX,
        owners=("task*",),
    ),
    Pattern(
        id="gather",
        title="`gather(return_exceptions=True)`",
        link="https://github.com/python/cpython/issues/109534",
        source="""
            import asyncio
            async def infer(n):
                batch = torch.zeros(256, 256, device=device)
                raise RuntimeError("CUDA out of memory")
            results = await asyncio.gather(infer(0), infer(1), return_exceptions=True)
        """,
        names=("results",),
        frees=2 * _MATRIX,
        owners=("results[0]: infer() line 4: batch",),
    ),
    Pattern(
        id="contextvar",
        title="a `ContextVar`",
        link="https://github.com/aiidateam/aiida-core/issues/4698",
        source="""
            import contextvars
            current = contextvars.ContextVar("current")
            current.set(torch.zeros(256, 256, device=device));
        """,
        names=("current",),
        # The value lives in the thread's context, which no name leads to.
        keeps=_MATRIX,
        frees=0,
        cut="current.set(None)",
        owners=("*current*",),
        asked=NO_NAME,
        end="import contextvars\nfor each in contextvars.copy_context():\n"
        "    if each.name == 'current': each.set(None)",
    ),
)
