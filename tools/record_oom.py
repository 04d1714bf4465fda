"""Runs a GPU out of memory in a training step, clicks through the card, and writes it down.

``python -m tools.record_oom FILE`` on a machine with a GPU of 80 GB. What each button freed is
printed beside what it had promised. A GPU of another size wants other batches.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from gpumemwidget.model.ooms import OomCard

if TYPE_CHECKING:
    from gpumemwidget.session.session import Session

_MODEL = """
import torch
from torch import nn

device = "cuda"
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50_000, 2048)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(2048, 16, 8192, batch_first=True, dropout=0.0)
            for _ in range(12)
        )
        self.head = nn.Linear(2048, 50_000, bias=False)
    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

model = Model().to(device)
optimizer = torch.optim.AdamW(model.parameters())

def loss_of(tokens):
    logits = model(tokens)
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())

def step(n_rows):
    tokens = torch.randint(50_000, (n_rows, 512), device=device)
    loss = loss_of(tokens)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()
"""
_CELLS = (
    "%load_ext gpumemwidget",
    _MODEL,
    "step(4)",
    "batches = torch.randint(50_000, (4, 4, 512), device=device)\n"
    "validation_losses = [loss_of(batch) for batch in batches]",
    "torch.randn(512, 1024, 1024, device=device)",
    "for n_rows in (8, 16, 32, 64, 128):\n    step(n_rows)",
)


def main(path: Path) -> None:
    """Play the cells, click on every button, write the card."""
    from IPython.core.interactiveshell import InteractiveShell

    from gpumemwidget.jupyter import outputs as cell_outputs
    from gpumemwidget.session.session import current_session
    from gpumemwidget.widgets.oom_buttons import CardButtons

    cards: list[OomCard] = []
    # Where the card is shown it is also kept.
    show = cell_outputs.show_card

    def keep(card: OomCard, session: Session) -> None:
        cards.append(card)
        show(card, session)

    cell_outputs.show_card = keep
    shell: Any = InteractiveShell.instance()
    for source in _CELLS:
        shell.run_cell(source, store_history=True)
    [card] = cards
    session = current_session()
    buttons = CardButtons(session)
    buttons.add("card", card)
    for place in range(len(buttons.describe()["card"])):
        buttons._handle_custom_msg({"kind": "do", "card": "card", "way": place}, [])
        print(buttons.describe()["card"][place])
    # The stack's files are those of one machine.
    event = dataclasses.replace(card.event, frames=())
    card = dataclasses.replace(card, event=event)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(card), indent=1) + b"\n")
    shell.run_cell("%unload_ext gpumemwidget")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
