"""What people run on a GPU, as cells: each has something of its own in how it holds memory."""

from __future__ import annotations

__all__ = ["WORKLOADS"]

_GPT2 = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel
torch.manual_seed(0)
config = GPT2Config(n_layer=6)
with torch.device("cuda"):
    model = GPT2LMHeadModel(config)
opt = torch.optim.AdamW(model.parameters())
tokens = torch.randint(0, config.vocab_size, (2, 128), device="cuda")
"""

_STEP = """
loss = model(tokens, labels=tokens).loss
loss.backward()
opt.step()
"""

_SMALL = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.LayerNorm(512), torch.nn.Linear(512, 256)
).cuda()
x = torch.randn(64, 256, device="cuda")
"""

_TRAIN_COMPILED = """
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for _ in range(4):
    opt.zero_grad()
    loss = fast(x).square().mean()
    loss.backward()
    opt.step()
"""

#: Cells by the name of the workload.
WORKLOADS: dict[str, tuple[str, ...]] = {
    "GPT-2, built": (_GPT2,),
    "GPT-2, a step": (_GPT2, _STEP),
    "GPT-2, a live graph": (_GPT2, _STEP, "out = model(tokens, labels=tokens)"),
    "GPT-2, AMP": (
        _GPT2,
        """
scaler = torch.amp.GradScaler("cuda")
for _ in range(2):
    opt.zero_grad()
    with torch.autocast("cuda", torch.float16):
        loss = model(tokens, labels=tokens).loss
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
""",
        """
with torch.autocast("cuda", torch.bfloat16):
    out = model(tokens, labels=tokens)
""",
    ),
    "GPT-2, checkpointing": (
        _GPT2,
        """
model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
model.train()
""",
        _STEP,
        "out = model(tokens, labels=tokens, use_cache=False)",
    ),
    "GPT-2, reentrant checkpointing": (
        _GPT2,
        """
model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
model.enable_input_require_grads()
model.train()
""",
        _STEP,
        "out = model(tokens, labels=tokens, use_cache=False)",
    ),
    "GPT-2, accumulation": (
        _GPT2,
        """
total_loss = 0
losses = []
for _ in range(3):
    loss = model(tokens, labels=tokens).loss
    total_loss += loss
    losses.append(loss)
""",
        "(loss / 3).backward()",
    ),
    "GPT-2, saved on the CPU": (
        _GPT2,
        """
with torch.autograd.graph.save_on_cpu():
    out = model(tokens, labels=tokens)
""",
    ),
    "GPT-2, generate": (
        _GPT2,
        """
model.eval()
out = model.generate(
    tokens[:, :16], max_new_tokens=24, do_sample=False, return_dict_in_generate=True,
    output_scores=True, pad_token_id=0,
)
""",
        """
with torch.no_grad():
    cache = model(tokens, use_cache=True).past_key_values
""",
    ),
    "ResNet, training": (
        """
import torch, torchvision
torch.backends.cudnn.benchmark = True
model = torchvision.models.resnet18().cuda().to(memory_format=torch.channels_last)
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
images = torch.randn(8, 3, 128, 128, device="cuda").to(memory_format=torch.channels_last)
labels = torch.randint(0, 1000, (8,), device="cuda")
for _ in range(2):
    opt.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    opt.step()
""",
        """
with torch.autocast("cuda", torch.bfloat16):
    out = model(images)
""",
    ),
    "LSTM": (
        """
import torch
model = torch.nn.LSTM(128, 256, num_layers=2, dropout=0.1, batch_first=True).cuda()
out, state = model(torch.randn(8, 32, 128, device="cuda"))
out.sum().backward(retain_graph=True)
""",
    ),
    # cuDNN keeps its dropout's random state for good, held in C++.
    "LSTM, its graph gone": (
        """
import torch
model = torch.nn.LSTM(128, 256, num_layers=2, dropout=0.1, batch_first=True).cuda()
out, state = model(torch.randn(8, 32, 128, device="cuda"))
out.sum().backward()
del out, state
""",
    ),
    "streams": (
        _SMALL,
        """
streams = [torch.cuda.Stream() for _ in range(3)]
outs = []
for stream in streams:
    with torch.cuda.stream(stream):
        outs.append(model(x).sum())
        (x @ x.t()).sum()
torch.cuda.synchronize()
""",
        # Freed while another stream uses it: no longer allocated, and not yet to be had again.
        """
used = torch.empty(8 << 20, dtype=torch.uint8, device="cuda")
with torch.cuda.stream(streams[0]):
    torch.cuda._sleep(100_000_000)
    used.record_stream(streams[0])
del used
""",
    ),
    "torch.compile": (_SMALL, "fast = torch.compile(model)", _TRAIN_COMPILED),
    "torch.compile, inference": (
        _SMALL,
        "fast = torch.compile(model, options={'freezing': False})",
        "with torch.no_grad():\n    outs = [fast(x) for _ in range(3)]",
    ),
    "torch.compile, reduce-overhead": (
        _SMALL,
        "fast = torch.compile(model, mode='reduce-overhead')",
        "with torch.no_grad():\n    outs = [fast(x).clone() for _ in range(4)]\n    last = fast(x)",
    ),
    "torch.compile, reduce-overhead, training": (
        _SMALL,
        "fast = torch.compile(model, mode='reduce-overhead')",
        _TRAIN_COMPILED,
    ),
    "CUDA graph": (
        _SMALL,
        """
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side), torch.no_grad():
    for _ in range(3):
        model(x)
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph), torch.no_grad():
    static_out = model(x)
graph.replay()
torch.cuda.synchronize()
""",
        """
random_graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(random_graph):
    noise = torch.rand(1000, device="cuda")
random_graph.replay()
""",
        "del static_out",
    ),
    "CUDA graph, training": (
        _SMALL,
        """
graphed = torch.cuda.make_graphed_callables(model, (x,))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    opt.zero_grad()
    graphed(x).sum().backward()
    opt.step()
""",
    ),
    "a memory pool": (
        _SMALL,
        """
pool = torch.cuda.MemPool()
with torch.cuda.use_mem_pool(pool):
    y = torch.randn(1000, 1000, device="cuda")
    z = model(x)
""",
    ),
    "OOM, caught": (
        _SMALL,
        """
def train():
    batch = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    kept.append(model(x))
    return torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
kept = []
try:
    train()
except torch.OutOfMemoryError as exc:
    print("caught", type(exc).__name__)
""",
    ),
    "OOM": (
        _SMALL,
        """
def train(depth):
    batch = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    hidden = model(x)
    if depth:
        return train(depth - 1)
    return torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
train(2)
""",
    ),
}
