"""What containers, classes, cycles, libraries and shared memory keep."""

from __future__ import annotations

from tests.zoo.pattern import KIB, Pattern

__all__ = ["PATTERNS"]

#: A matrix of 256 × 256 floats.
_MATRIX = 256 * KIB

PATTERNS = (
    Pattern(
        id="history",
        title="a history: a list of dicts",
        link="https://github.com/Lightning-AI/pytorch-lightning/issues/1510",
        source="""
            history = [
                {"step": n, "logits": torch.zeros(256, 256, device=device)} for n in range(18)
            ]
        """,
        names=("history",),
        frees=18 * _MATRIX,
        owners=('history[17]["logits"]',),
    ),
    Pattern(
        id="metrics",
        title="a `defaultdict` of metrics",
        link="https://github.com/pytorch/torchtitan/issues/763",
        source="""
            from collections import defaultdict
            metrics = defaultdict(list)
            for step in range(3):
                metrics["loss"].append(torch.zeros(256, 256, device=device))
        """,
        names=("metrics",),
        frees=3 * _MATRIX,
        owners=('metrics["loss"][0]',),
    ),
    Pattern(
        id="nested",
        title="tensors deep in nested containers",
        link="https://github.com/Lightning-AI/pytorch-lightning/issues/15514",
        source="""
            outputs = [({"heads": [(torch.zeros(256, 256, device=device), 1)]}, "val")]
        """,
        names=("outputs",),
        frees=_MATRIX,
        owners=('outputs[0][0]["heads"][0][0]',),
    ),
    Pattern(
        id="replay",
        title="a replay buffer (`deque`)",
        link="https://github.com/recursionpharma/gflownet/pull/130",
        source="""
            from collections import deque, namedtuple
            Transition = namedtuple("Transition", "state action")
            replay = deque(maxlen=4)
            for n in range(6):
                replay.append(Transition(torch.zeros(256, 256, device=device), n))
        """,
        names=("replay",),
        frees=4 * _MATRIX,
        owners=("replay[0].state",),
    ),
    Pattern(
        id="slots",
        title="embeddings stored on the objects themselves (`__slots__`)",
        link="https://github.com/flairNLP/flair/issues/1078",
        source="""
            class Sentence:
                __slots__ = ("text", "embedding")
                def __init__(self, text):
                    self.text = text
                    self.embedding = torch.zeros(256, 256, device=device)
            sentences = [Sentence("one"), Sentence("two")]
        """,
        names=("sentences",),
        frees=2 * _MATRIX,
        owners=("sentences[0].embedding",),
    ),
    Pattern(
        id="class-attribute",
        title="a tensor as a class attribute",
        link="https://github.com/pytorch/pytorch/pull/89108",
        source="""
            class Config:
                mean = torch.zeros(256, 256, device=device)
        """,
        names=("Config",),
        frees=_MATRIX,
        owners=("Config.mean",),
    ),
    Pattern(
        id="registry",
        title="a class that lists its instances",
        link="https://github.com/talmolab/sleap-nn/issues/574",
        source="""
            class Tracker:
                instances = []
                def __init__(self):
                    self.frame = torch.zeros(256, 256, device=device)
                    self.instances.append(self)
            tracker = Tracker()
        """,
        names=("tracker", "Tracker"),
        frees=_MATRIX,
        owners=("tracker.frame", "Tracker.instances[0]"),
    ),
    Pattern(
        id="cycle-of-objects",
        title="parent and child: a cycle",
        link="https://github.com/pytorch/pytorch.github.io/pull/1541",
        source="""
            class Node:
                def __init__(self, parent=None):
                    self.parent, self.children = parent, []
                    self.embedding = torch.zeros(256, 256, device=device)
                    if parent is not None:
                        parent.children.append(self)
            tree = Node()
            Node(tree);
        """,
        names=("tree",),
        frees=2 * _MATRIX,
        owners=("tree.embedding", "tree.children[0].embedding"),
    ),
    Pattern(
        id="finalizer",
        title="a cycle with `__del__`",
        link="https://github.com/univention/python-notifier/pull/14",
        source="""
            class Session:
                def __init__(self):
                    self.me = self
                    self.state = torch.zeros(256, 256, device=device)
                def __del__(self):
                    self.state = None
            session = Session()
        """,
        names=("session",),
        frees=_MATRIX,
        owners=("session.state",),
    ),
    Pattern(
        id="weak",
        title="weak references only",
        link="https://github.com/pytorch/pytorch/pull/85462",
        source="""
            import weakref
            x = torch.zeros(256, 256, device=device)
            ref = weakref.ref(x)
            cache = weakref.WeakValueDictionary(x=x)
        """,
        names=("x",),
        frees=_MATRIX,
        owners=("x",),
    ),
    Pattern(
        id="weak-keys",
        title="a `WeakKeyDictionary` whose values hold their keys",
        link="https://github.com/WhatDreamsCost/WhatDreamsCost-ComfyUI/issues/212",
        source="""
            import weakref
            models = weakref.WeakKeyDictionary()
            model = nn.Linear(256, 256, bias=False, device=device)
            models[model] = {"patched": model}
            # %%
            del model
        """,
        names=("models",),
        frees=_MATRIX,
        owners=('models.data*["patched"].weight',),
    ),
    Pattern(
        id="library",
        title="a global of an imported module",
        link="https://github.com/TylerYep/torchinfo/pull/395",
        modules=(
            (
                "summarize",
                "_cached_forward_pass = {}\n"
                "def summary(name, model):\n"
                "    _cached_forward_pass[name] = model\n",
            ),
        ),
        source="""
            import summarize
            model = nn.Linear(256, 256, bias=False, device=device)
            summarize.summary("linear", model)
        """,
        names=("model",),
        # On the host it stays with the module; from a GPU it is moved.
        keeps=_MATRIX,
        frees=0,
        frees_on_gpu=_MATRIX,
        cut='del summarize._cached_forward_pass["linear"]',
        owners=("model.weight", 'summarize._cached_forward_pass["linear"]'),
    ),
    Pattern(
        id="monkeypatch",
        title="a function of a library, patched by a closure",
        link="https://github.com/huggingface/accelerate/pull/1971",
        modules=(("textlib", "def encode(text):\n    return len(text)\n"),),
        source="""
            import textlib
            def patch():
                table = torch.zeros(256, 256, device=device)
                textlib.encode = lambda text: table[len(text)]
                return table
            table = patch()
        """,
        names=("table",),
        keeps=_MATRIX,
        frees=0,
        frees_on_gpu=_MATRIX,
        owners=("table", "textlib.encode's closure: table"),
    ),
    Pattern(
        id="log-records",
        title="log records that keep their arguments",
        link="https://github.com/pytest-dev/pytest/issues/8307",
        source="""
            import logging.handlers
            buffer = logging.handlers.MemoryHandler(1000)
            log = logging.Logger("train")
            log.addHandler(buffer)
            log.info("logits %s", torch.zeros(256, 256, device=device))
        """,
        names=("buffer", "log"),
        frees=_MATRIX,
        owners=("buffer.buffer[0].args[0]",),
    ),
    Pattern(
        id="object-array",
        title="a NumPy array of tensors",
        link="https://github.com/ray-project/ray/issues/30629",
        source="""
            import numpy as np
            embeddings = np.empty(2, dtype=object)
            for n in range(2):
                embeddings[n] = torch.zeros(256, 256, device=device)
        """,
        names=("embeddings",),
        frees=2 * _MATRIX,
        owners=("embeddings[0]",),
    ),
    Pattern(
        id="data-frame",
        title="a column of tensors in pandas",
        link="https://github.com/pytorch/pytorch/issues/78412",
        source="""
            import pandas as pd
            df = pd.DataFrame({"text": ["a", "b"]})
            tensors = [torch.zeros(256, 256, device=device) for _ in range(2)]
            df["embedding"] = pd.Series(tensors, dtype=object)
            del tensors
        """,
        names=("df",),
        frees=2 * _MATRIX,
        owners=("df*[0]",),
    ),
    Pattern(
        id="numpy-view",
        title="`x.numpy()`, which shares the memory",
        link="https://github.com/pytorch/pytorch/issues/51849",
        source="""
            x = torch.zeros(256, 256)
            array = x.numpy()
        """,
        names=("x", "array"),
        runs_on="cpu",
        frees=_MATRIX,
        owners=("x", "array"),
    ),
    Pattern(
        id="from-numpy",
        title="`torch.from_numpy`, which borrows the memory",
        link="https://github.com/pytorch/tutorials/pull/485",
        source="""
            import numpy as np
            array = np.zeros((256, 256), dtype=np.float32)
            x = torch.from_numpy(array).mul_(2)
        """,
        names=("x", "array"),
        runs_on="cpu",
        frees=_MATRIX,
        plans_less_because="torch does not tell whether the NumPy array is still there",
        owners=("x",),
    ),
    Pattern(
        id="dlpack",
        title="two tensors over one memory (DLPack)",
        link="https://github.com/NVIDIA/cudf/issues/4277",
        source="""
            x = torch.zeros(256, 256, device=device)
            y = torch.from_dlpack(x)
        """,
        names=("x", "y"),
        frees=_MATRIX,
        plans_less_because="DLPack's reference is held in C++, out of sight",
        owners=("x", "y"),
    ),
)
