"""Training steps whose predictions were wrong when they were first recorded, and mended after.

They were among the steps of ``judged`` once. The prediction has been changed by what was learned
from them, so they judge it no more; they stay in the benchmark to show that they are still right.

Each builder returns a step and its arguments, with random weights and data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.fit.calibration import Case, make_tokens

# -- Detection: Faster R-CNN of torchvision, fp32, SGD ---------------------------------------------


def fit_detection(model: Any, optimizer: Any, images: list[Any], targets: list[Any]) -> float:
    losses = model(images, targets)
    loss = sum(losses.values())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.item())


def detection(device: str) -> Case:
    from torchvision.models.detection import fasterrcnn_resnet50_fpn

    model = fasterrcnn_resnet50_fpn(weights=None, weights_backbone=None, num_classes=91).to(device)
    parameters = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD(parameters, 0.02, momentum=0.9, weight_decay=1e-4)
    images, targets = [], []
    for height, width, n in ((480, 640, 7), (640, 427, 3)):
        corners = torch.rand(n, 2) * torch.tensor([width / 2, height / 2])
        sizes = torch.rand(n, 2) * torch.tensor([width / 2 - 9, height / 2 - 9]) + 8
        images.append(torch.rand(3, height, width).to(device))
        boxes = torch.cat([corners, corners + sizes], 1).to(device)
        targets.append({"boxes": boxes, "labels": make_tokens(device, 90, n) + 1})
    return fit_detection, (model, optimizer, images, targets)


# -- Speech: wav2vec 2.0 with CTC, fp16 with a GradScaler ------------------------------------------


def fit_speech(
    model: Any, optimizer: Any, scaler: Any, scheduler: Any, batch: dict[str, Any]
) -> None:
    optimizer.zero_grad()
    with torch.autocast("cuda", torch.float16):
        loss = model(**batch).loss
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()


def speech(device: str) -> Case:
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    model = Wav2Vec2ForCTC(Wav2Vec2Config(mask_time_prob=0.0)).to(device)
    model.freeze_feature_encoder()
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 3e-5)
    # With the usual 65536 the first gradients overflow, and the optimizer takes no step.
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-5, total_steps=1000)
    batch = {
        "input_values": torch.randn(8, 16000 * 6, device=device),
        "labels": make_tokens(device, 31, 8, 60) + 1,
    }
    return fit_speech, (model, optimizer, scaler, scheduler, batch)


# -- A packed bidirectional LSTM, fp32, Adam with clipped gradients --------------------------------


class Tagger(nn.Module):
    """Words in, the scores of each word's tag out."""

    def __init__(self, n_words: int = 30000, n_tags: int = 50) -> None:
        super().__init__()
        self.embedding = nn.Embedding(n_words, 300, padding_idx=0)
        self.dropout = nn.Dropout(0.3)
        self.rnn = nn.LSTM(300, 768, 3, batch_first=True, bidirectional=True, dropout=0.3)
        self.head = nn.Linear(2 * 768, n_tags)

    def forward(self, words: Any, lengths: Any) -> Any:
        packed = nn.utils.rnn.pack_padded_sequence(
            self.dropout(self.embedding(words)), lengths, batch_first=True, enforce_sorted=False
        )
        hidden, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.head(self.dropout(hidden))


def fit_tagger(model: Any, optimizer: Any, words: Any, lengths: Any, tags: Any) -> float:
    optimizer.zero_grad()
    scores = model(words, lengths)
    loss = functional.cross_entropy(scores.transpose(1, 2), tags, ignore_index=-100)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    return float(loss.item())


def packed_lstm(device: str) -> Case:
    model = Tagger().to(device)
    lengths = torch.randint(20, 121, (64,))
    lengths[7] = 120
    is_padding = torch.arange(120) >= lengths[:, None]
    words = (make_tokens("cpu", 29999, 64, 120) + 1).masked_fill(is_padding, 0)
    tags = make_tokens("cpu", 50, 64, 120).masked_fill(is_padding, -100)
    optimizer = torch.optim.Adam(model.parameters())
    return fit_tagger, (model, optimizer, words.to(device), lengths, tags.to(device))


# -- Generation with a cache, bf16 weights, sampled ------------------------------------------------


def generate(model: Any, tokens: Any, mask: Any) -> Any:
    return model.generate(
        input_ids=tokens,
        attention_mask=mask,
        max_new_tokens=48,
        do_sample=True,
        top_k=50,
        top_p=0.9,
        pad_token_id=0,
        eos_token_id=None,
    )


def generation(device: str) -> Case:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=50000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=4,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = Qwen2ForCausalLM(config).to(device, torch.bfloat16).eval()
    tokens = make_tokens(device, 50000, 16, 768)
    return generate, (model, tokens, torch.ones_like(tokens))


# -- Segmentation: DeepLabv3 in channels-last, SGD with a polynomial schedule ----------------------


def fit_segmentation(model: Any, optimizer: Any, scheduler: Any, images: Any, labels: Any) -> None:
    scores = model(images)
    loss = functional.cross_entropy(scores["out"], labels, ignore_index=255)
    loss = loss + 0.5 * functional.cross_entropy(scores["aux"], labels, ignore_index=255)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()


def segmentation(device: str) -> Case:
    from torchvision.models.segmentation import deeplabv3_resnet50

    model = deeplabv3_resnet50(
        weights=None, weights_backbone=None, num_classes=21, aux_loss=True
    ).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, 1000, 0.9)
    images = torch.randn(8, 3, 320, 320, device=device).to(memory_format=torch.channels_last)
    labels = make_tokens(device, 21, 8, 320, 320)
    return fit_segmentation, (model, optimizer, scheduler, images, labels)


# -- A packed bidirectional GRU whose lengths and losses come from a mask, NAdam -------------------


class GruTagger(nn.Module):
    """Words and their capitals in, the scores of each word's tag out."""

    def __init__(self, n_words: int = 40000, n_tags: int = 19, n: int = 512) -> None:
        super().__init__()
        self.words = nn.Embedding(n_words, 256, padding_idx=0)
        self.capitals = nn.Embedding(5, 16, padding_idx=0)
        self.rnn = nn.GRU(272, n, num_layers=2, batch_first=True, bidirectional=True, dropout=0.5)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Sequential(nn.Linear(2 * n, n), nn.Tanh(), nn.Linear(n, n_tags))

    def forward(self, words: Any, capitals: Any) -> Any:
        lengths = (words != 0).sum(1)
        embedded = torch.cat([self.words(words), self.capitals(capitals)], -1)
        packed = nn.utils.rnn.pack_padded_sequence(
            self.dropout(embedded), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        packed, _ = self.rnn(packed)
        hidden, _ = nn.utils.rnn.pad_packed_sequence(
            packed, batch_first=True, total_length=words.shape[1]
        )
        return self.head(self.dropout(hidden))


def fit_entities(
    model: Any, optimizer: Any, words: Any, capitals: Any, tags: Any
) -> tuple[float, float]:
    model.train()
    mask = words != 0
    scores = model(words, capitals)
    loss = functional.cross_entropy(scores[mask], tags[mask])
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    right = (scores.argmax(-1) == tags)[mask].float().mean()
    return loss.item(), right.item()


def packed_gru(device: str) -> Case:
    model = GruTagger().to(device)
    lengths = torch.randint(8, 161, (192,))
    lengths[11] = 160
    is_padding = torch.arange(160) >= lengths[:, None]
    words = (make_tokens("cpu", 39999, 192, 160) + 1).masked_fill(is_padding, 0)
    capitals = (make_tokens("cpu", 4, 192, 160) + 1).masked_fill(is_padding, 0)
    tags = make_tokens("cpu", 19, 192, 160).masked_fill(is_padding, 0)
    optimizer = torch.optim.NAdam(model.parameters(), 1e-3)
    return fit_entities, (model, optimizer, *(each.to(device) for each in (words, capitals, tags)))


# -- A graph network of plain PyTorch: messages by index_add, attention over neighbours ------------


class GraphAttention(nn.Module):
    """Attention over the neighbours of each node, as in https://arxiv.org/abs/1710.10903."""

    def __init__(self, n_in: int, n_out: int, n_heads: int = 4) -> None:
        super().__init__()
        self.project = nn.Linear(n_in, n_heads * n_out, bias=False)
        self.score_from = nn.Parameter(torch.randn(n_heads, n_out) / n_out**0.5)
        self.score_to = nn.Parameter(torch.randn(n_heads, n_out) / n_out**0.5)
        self.n_heads = n_heads

    def forward(self, nodes: Any, edges: Any) -> Any:
        sources, targets = edges
        values = self.project(nodes).view(len(nodes), self.n_heads, -1)
        scores = (values * self.score_from).sum(-1)[sources]
        scores = functional.leaky_relu(scores + (values * self.score_to).sum(-1)[targets], 0.2)
        highest = scores.new_full((len(nodes), self.n_heads), -torch.inf)
        highest = highest.scatter_reduce(0, targets[:, None].expand_as(scores), scores, "amax")
        weights = (scores - highest[targets]).exp()
        total = torch.zeros_like(highest).index_add(0, targets, weights)
        messages = values[sources] * (weights / (total[targets] + 1e-9))[..., None]
        return torch.zeros_like(values).index_add(0, targets, messages).flatten(1)


class GraphNetwork(nn.Module):
    """Classes of a graph's nodes."""

    def __init__(self, n_in: int = 128, n: int = 32, n_classes: int = 40) -> None:
        super().__init__()
        self.first, self.second = GraphAttention(n_in, n), GraphAttention(4 * n, n)
        self.norm, self.head = nn.LayerNorm(4 * n), nn.Linear(4 * n, n_classes)

    def forward(self, nodes: Any, edges: Any) -> Any:
        nodes = functional.dropout(functional.elu(self.first(nodes, edges)), 0.5, self.training)
        return self.head(functional.elu(self.second(self.norm(nodes), edges)))


def fit_graph(model: Any, optimizer: Any, graph: dict[str, Any], known: Any) -> None:
    optimizer.zero_grad()
    scores = model(graph["nodes"], graph["edges"])
    functional.cross_entropy(scores[known], graph["labels"][known]).backward()
    optimizer.step()


def graph(device: str) -> Case:
    n_nodes, n_edges = 40_000, 300_000
    model = GraphNetwork().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3, weight_decay=5e-4)
    data = {
        "nodes": torch.randn(n_nodes, 128, device=device),
        "edges": make_tokens(device, n_nodes, 2, n_edges),
        "labels": make_tokens(device, 40, n_nodes),
    }
    return fit_graph, (model, optimizer, data, torch.randperm(n_nodes)[: n_nodes // 2].to(device))


# -- Reviews: three packed bidirectional LSTM layers, attention over words, fp16 autocast ----------


class ReviewClassifier(nn.Module):
    """Words of a review in, stars out; the words are weighed by a learned query."""

    def __init__(self, n_words: int = 40000, n: int = 320, n_hidden: int = 448) -> None:
        super().__init__()
        self.words = nn.Embedding(n_words, n, padding_idx=0)
        self.norm = nn.LayerNorm(n)
        self.encoder = nn.LSTM(n, n_hidden, 3, batch_first=True, dropout=0.35, bidirectional=True)
        self.query = nn.Linear(2 * n_hidden, 1)
        self.head = nn.Sequential(nn.Linear(2 * n_hidden, 256), nn.ReLU(), nn.Linear(256, 5))

    def forward(self, tokens: Any, lengths: Any) -> Any:
        packed = nn.utils.rnn.pack_padded_sequence(
            self.norm(self.words(tokens)), lengths, batch_first=True, enforce_sorted=False
        )
        hidden, _ = nn.utils.rnn.pad_packed_sequence(
            self.encoder(packed)[0], batch_first=True, total_length=tokens.shape[1]
        )
        weights = self.query(hidden).squeeze(-1).masked_fill(tokens == 0, -1e4).softmax(-1)
        return self.head((weights.unsqueeze(-1) * hidden).sum(1))


def fit_reviews(model: Any, optimizer: Any, scaler: Any, texts: Any, stars: Any) -> None:
    model.train()
    optimizer.zero_grad()
    with torch.autocast("cuda", torch.float16):
        loss = functional.cross_entropy(model(*texts), stars, label_smoothing=0.05)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    scaler.step(optimizer)
    scaler.update()


def reviews(device: str) -> Case:
    model = ReviewClassifier().to(device)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3, weight_decay=1e-6)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    lengths = torch.randint(40, 301, (112,))
    lengths[17] = 300
    tokens = make_tokens("cpu", 39999, 112, 300) + 1
    tokens = tokens.masked_fill(torch.arange(300) >= lengths[:, None], 0).to(device)
    return fit_reviews, (model, optimizer, scaler, (tokens, lengths), make_tokens(device, 5, 112))


# -- Molecules: messages along edges, GRU cells, sums by molecule, no extension --------------------


class MoleculeNetwork(nn.Module):
    """Properties of molecules from their atoms and bonds, as in https://arxiv.org/abs/1704.01212."""

    def __init__(self, n_kinds: int = 64, n_bonds: int = 12, n: int = 256) -> None:
        super().__init__()
        self.atoms, self.bonds = nn.Embedding(n_kinds, n), nn.Linear(n_bonds, n)
        self.message = nn.Sequential(nn.Linear(3 * n, n), nn.SiLU(), nn.Linear(n, n))
        self.update, self.norm = nn.GRUCell(n, n), nn.BatchNorm1d(n)
        self.gate, self.value = nn.Linear(2 * n, n), nn.Linear(n, n)
        self.head = nn.Sequential(nn.Linear(n, n), nn.SiLU(), nn.Dropout(0.1), nn.Linear(n, 19))
        self.n_rounds = 5

    def forward(self, kinds: Any, edges: Any, features: Any, owners: Any, n_molecules: int) -> Any:
        hidden = begin = self.atoms(kinds)
        bonds = self.bonds(features)
        sources, targets = edges
        for _ in range(self.n_rounds):
            messages = self.message(torch.cat([hidden[sources], hidden[targets], bonds], -1))
            places = targets[:, None].expand_as(messages)
            received = torch.zeros_like(hidden).scatter_add(0, places, messages)
            hidden = self.norm(self.update(received, hidden))
        read = torch.sigmoid(self.gate(torch.cat([hidden, begin], -1))) * self.value(hidden)
        total = read.new_zeros(n_molecules, read.shape[1]).index_add(0, owners, read)
        return self.head(total)


def fit_molecules(model: Any, optimizer: Any, scheduler: Any, batch: dict[str, Any]) -> float:
    wanted = batch["properties"]
    predicted = model(
        batch["kinds"], batch["edges"], batch["features"], batch["owners"], len(wanted)
    )
    is_known = ~wanted.isnan()
    loss = functional.smooth_l1_loss(predicted, wanted.nan_to_num(), reduction="none")
    loss = (loss * is_known).sum() / is_known.sum()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 10.0)
    optimizer.step()
    scheduler.step(loss.item())
    return float(loss.item())


def molecules(device: str) -> Case:
    n_molecules, n_atoms = 384, 30
    n = n_molecules * n_atoms
    model = MoleculeNetwork().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 5e-4, amsgrad=True)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=5)
    owners = torch.arange(n_molecules).repeat_interleave(n_atoms)
    sources = torch.arange(n).repeat_interleave(4)
    targets = owners[sources] * n_atoms + torch.randint(0, n_atoms, (4 * n,))
    properties = torch.randn(n_molecules, 19)
    properties[torch.rand(n_molecules, 19) < 0.2] = torch.nan
    batch = {
        "kinds": make_tokens("cpu", 64, n),
        "edges": torch.stack([sources, targets]),
        "features": torch.randn(4 * n, 12),
        "owners": owners,
        "properties": properties,
    }
    return fit_molecules, (
        *(model, optimizer, scheduler),
        {name: each.to(device) for name, each in batch.items()},
    )


CASES: dict[str, Callable[[str], Case]] = {
    "detection": detection,
    "speech": speech,
    "lstm-packed": packed_lstm,
    "segmentation": segmentation,
    "generate": generation,
    "gru-packed": packed_gru,
    "gnn": graph,
    "lstm-reviews": reviews,
    "molecules": molecules,
}
