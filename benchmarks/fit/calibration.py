"""Training steps that the prediction was built with: what it gets right here proves little.

Each builder returns a step and its arguments, which are on the device, with random weights and
data. The allocator histories of these steps are in ``tests/prediction/recordings``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

#: A step, and what it is called with.
Case = tuple[Callable[..., object], tuple[Any, ...]]


def fit_language(model: Any, optimizer: Any, batch: dict[str, Any], dtype: Any = None) -> None:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype, enabled=dtype is not None):
        loss = model(**batch).loss
    loss.backward()
    optimizer.step()


def fit_images(model: Any, optimizer: Any, images: Any, labels: Any, dtype: Any = None) -> None:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype, enabled=dtype is not None):
        loss = functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()


def infer_tokens(model: Any, batch: dict[str, Any]) -> Any:
    with torch.no_grad():
        return model(**batch)


def infer_images(model: Any, images: Any) -> Any:
    with torch.no_grad():
        return model(images)


def make_tokens(device: str, n_words: int, *shape: int) -> Any:
    """Return random numbers of words."""
    return torch.randint(0, n_words, shape, device=device)


def make_images(device: str, n: int) -> tuple[Any, Any]:
    """Return random images as ImageNet's, with labels."""
    return torch.randn(n, 3, 224, 224, device=device), make_tokens(device, 1000, n)


# -- Language --------------------------------------------------------------------------------------


def gpt2(device: str, *, batch: int = 8, checkpoints: bool = False, dtype: Any = None) -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config()).to(device)
    tokens = make_tokens(device, 50257, batch, 512)
    if checkpoints:
        model.gradient_checkpointing_enable()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters())
    step = functools.partial(fit_language, dtype=dtype)
    return step, (model, optimizer, {"input_ids": tokens, "labels": tokens})


def gpt2_inference(device: str) -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config()).to(device).eval()
    return infer_tokens, (model, {"input_ids": make_tokens(device, 50257, 16, 512)})


def llama(device: str) -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=16,
        vocab_size=32000,
    )
    model = LlamaForCausalLM(config).to(device, torch.bfloat16)
    tokens = make_tokens(device, 32000, 4, 1024)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return fit_language, (model, optimizer, {"input_ids": tokens, "labels": tokens})


def bert(device: str) -> Case:
    from transformers import BertConfig, BertForMaskedLM

    model = BertForMaskedLM(BertConfig()).to(device)
    tokens = make_tokens(device, 30522, 16, 256)
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
    return fit_language, (model, torch.optim.AdamW(model.parameters()), batch)


def t5(device: str) -> Case:
    from transformers import T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(T5Config(decoder_start_token_id=0)).to(device)
    tokens = make_tokens(device, 32128, 8, 256)
    optimizer = torch.optim.AdamW(model.parameters())
    return fit_language, (model, optimizer, {"input_ids": tokens, "labels": tokens})


def mixtral(device: str) -> Case:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=32000,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_local_experts=8,
    )
    model = MixtralForCausalLM(config).to(device, torch.bfloat16)
    tokens = make_tokens(device, 32000, 4, 512)
    optimizer = torch.optim.AdamW(model.parameters())
    return fit_language, (model, optimizer, {"input_ids": tokens, "labels": tokens})


class LstmLanguageModel(nn.Module):
    """Words in, the scores of the next words out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10000, 512)
        self.rnn = nn.LSTM(512, 1024, 2, batch_first=True)
        self.head = nn.Linear(1024, 10000)

    def forward(self, tokens: Any) -> Any:
        return self.head(self.rnn(self.embedding(tokens))[0])


def fit_lstm(model: Any, optimizer: Any, tokens: Any) -> None:
    optimizer.zero_grad()
    functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()


def lstm(device: str) -> Case:
    model = LstmLanguageModel().to(device)
    optimizer = torch.optim.Adam(model.parameters())
    return fit_lstm, (model, optimizer, make_tokens(device, 10000, 32, 128))


# -- Images ----------------------------------------------------------------------------------------


def resnet(device: str, *, batch: int = 32, dtype: Any = None) -> Case:
    import torchvision

    model = torchvision.models.resnet50().to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    step = functools.partial(fit_images, dtype=dtype)
    return step, (model, optimizer, *make_images(device, batch))


def efficientnet(device: str) -> Case:
    import torchvision

    model = torchvision.models.efficientnet_b0().to(device).eval()
    return infer_images, (model, torch.randn(64, 3, 224, 224, device=device))


def vit(device: str) -> Case:
    import torchvision

    model = torchvision.models.vit_b_16().to(device)
    return fit_images, (model, torch.optim.AdamW(model.parameters()), *make_images(device, 32))


def convnext(device: str) -> Case:
    import torchvision

    model = torchvision.models.convnext_tiny().to(device)
    return fit_images, (model, torch.optim.AdamW(model.parameters()), *make_images(device, 16))


class TwoConvolutions(nn.Sequential):
    """Two convolutions, each with batch norm."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__(
            *(nn.Conv2d(n_in, n_out, 3, padding=1), nn.BatchNorm2d(n_out), nn.ReLU()),
            *(nn.Conv2d(n_out, n_out, 3, padding=1), nn.BatchNorm2d(n_out), nn.ReLU()),
        )


class UNet(nn.Module):
    """A UNet of three levels."""

    def __init__(self, n: int = 32) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            [TwoConvolutions(3, n), TwoConvolutions(n, 2 * n), TwoConvolutions(2 * n, 4 * n)]
        )
        self.lift = nn.ModuleList(
            [nn.ConvTranspose2d(4 * n, 2 * n, 2, 2), nn.ConvTranspose2d(2 * n, n, 2, 2)]
        )
        self.up = nn.ModuleList([TwoConvolutions(4 * n, 2 * n), TwoConvolutions(2 * n, n)])
        self.head = nn.Conv2d(n, 3, 1)
        self.pool = nn.MaxPool2d(2)

    def forward(self, images: Any) -> Any:
        first = self.down[0](images)
        second = self.down[1](self.pool(first))
        third = self.down[2](self.pool(second))
        second = self.up[0](torch.cat([self.lift[0](third), second], 1))
        return self.head(self.up[1](torch.cat([self.lift[1](second), first], 1)))


def fit_images_to_images(model: Any, optimizer: Any, images: Any, targets: Any) -> None:
    optimizer.zero_grad()
    functional.mse_loss(model(images), targets).backward()
    optimizer.step()


def unet(device: str) -> Case:
    model = UNet().to(device)
    images = torch.randn(8, 3, 128, 128, device=device)
    optimizer = torch.optim.Adam(model.parameters())
    return fit_images_to_images, (model, optimizer, images, torch.randn_like(images))


CASES: dict[str, Callable[[str], Case]] = {
    "gpt2": gpt2,
    "gpt2-bf16": functools.partial(gpt2, dtype=torch.bfloat16),
    "gpt2-ckpt": functools.partial(gpt2, checkpoints=True),
    "gpt2-infer": gpt2_inference,
    "llama": llama,
    "bert": bert,
    "t5": t5,
    "resnet": resnet,
    "resnet-bf16": functools.partial(resnet, dtype=torch.bfloat16),
    "effnet": efficientnet,
    "unet": unet,
    "vit": vit,
    "convnext": convnext,
    "lstm": lstm,
    "mixtral": mixtral,
}
