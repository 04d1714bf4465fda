"""A few training steps, to be recorded with ``python -m tools.record``.

On the first GPU where there is one, else on the CPU.
"""

import time

import torch

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))).to(device)
optimizer = torch.optim.Adam(model.parameters())
for _ in range(10):
    loss = model(torch.randn(4096, 1024, device=device)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.1)
try:
    torch.empty(1 << 50, dtype=torch.uint8, device=device)
except RuntimeError as exc:
    print(type(exc).__name__)
del model, optimizer, loss
if device.type == "cuda":
    torch.cuda.empty_cache()
time.sleep(0.1)
