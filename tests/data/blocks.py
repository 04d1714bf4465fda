"""A training step, a live graph and a CUDA graph, whose blocks are recorded at the end.

    python -m tools.record OUT.json.gz --snapshot -- tests/data/blocks.py

The history knows the line of each block; it records Python's stacks alone, as C++'s take seconds.
"""

import torch

torch.cuda.memory._record_memory_history("state", stacks="python")
layer = torch.nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
model = torch.nn.TransformerEncoder(layer, 6, enable_nested_tensor=False).cuda()
optimizer = torch.optim.AdamW(model.parameters())
batch = torch.randn(8, 64, 128, device="cuda")
model(batch).square().mean().backward()
optimizer.step()
loss = model(batch).square().mean()

stream = torch.cuda.Stream()
stream.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(stream), torch.no_grad():
    for _ in range(3):
        layer.cuda()(batch)
torch.cuda.current_stream().wait_stream(stream)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph), torch.no_grad():
    result = layer(batch)
graph.replay()
torch.cuda.synchronize()
