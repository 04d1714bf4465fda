"""Training steps that judge the prediction: none of them was used to build it.

Each builder returns a step and its arguments, with random weights and data.

Before its first judgement, a step here has only been run for real, on a CPU with a small batch.
Nobody has predicted it, or carried it out on tensors without memory, to see what comes of it: what
fails must be found by the judgement. What is then learned from a step may go into the prediction;
from then on the step belongs to ``learned``, and a new one takes its place here.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.fit.calibration import Case, make_images, make_tokens

# -- Diffusion: a UNet with attention, bf16 autocast, clipped gradients, fused AdamW ---------------


class ResidualBlock(nn.Module):
    """Two convolutions that know the time step."""

    def __init__(self, n_in: int, n_out: int, n_time: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.GroupNorm(32, n_in), nn.SiLU(), nn.Conv2d(n_in, n_out, 3, padding=1)
        )
        self.time = nn.Linear(n_time, n_out)
        self.second = nn.Sequential(
            nn.GroupNorm(32, n_out), nn.SiLU(), nn.Conv2d(n_out, n_out, 3, padding=1)
        )
        self.skip = nn.Conv2d(n_in, n_out, 1) if n_in != n_out else nn.Identity()

    def forward(self, x: Any, time: Any) -> Any:
        hidden = self.first(x) + self.time(time)[:, :, None, None]
        return self.skip(x) + self.second(hidden)


class AttentionBlock(nn.Module):
    """Attention between the places of an image."""

    def __init__(self, n: int, n_heads: int = 4) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.GroupNorm(32, n),
            nn.Conv2d(n, 3 * n, 1),
            nn.Conv2d(n, n, 1),
        )
        self.n_heads = n_heads

    def forward(self, x: Any) -> Any:
        n_batch, n, height, width = x.shape
        qkv = self.qkv(self.norm(x)).reshape(n_batch, 3, self.n_heads, n // self.n_heads, -1)
        query, key, value = qkv.transpose(3, 4).unbind(1)
        attended = functional.scaled_dot_product_attention(query, key, value)
        return x + self.out(attended.transpose(2, 3).reshape(n_batch, n, height, width))


class DenoisingUNet(nn.Module):
    """Predicts the noise in an image, as in https://arxiv.org/abs/2006.11239."""

    def __init__(self, n: int = 128, levels: tuple[int, ...] = (1, 2, 2, 4)) -> None:
        super().__init__()
        n_time, widths = 4 * n, [n * level for level in levels]
        self.time = nn.Sequential(nn.Linear(n, n_time), nn.SiLU(), nn.Linear(n_time, n_time))
        self.head, self.n = nn.Conv2d(3, n, 3, padding=1), n
        self.down, self.up, n_in = nn.ModuleList(), nn.ModuleList(), n
        for width in widths:
            attends = AttentionBlock(width) if width > 2 * n else nn.Identity()
            shrink = nn.Conv2d(width, width, 3, stride=2, padding=1)
            self.down.append(nn.ModuleList([ResidualBlock(n_in, width, n_time), attends, shrink]))
            n_in = width
        self.middle, self.attention = ResidualBlock(n_in, n_in, n_time), AttentionBlock(n_in)
        for width in reversed(widths):
            self.up.append(ResidualBlock(n_in + width, width, n_time))
            n_in = width
        self.tail = nn.Sequential(nn.GroupNorm(32, n), nn.SiLU(), nn.Conv2d(n, 3, 3, padding=1))

    def forward(self, x: Any, times: Any) -> Any:
        rates = torch.exp(-math.log(10000) * torch.arange(self.n // 2, device=x.device) / self.n)
        angles = times[:, None] * rates
        time = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        x, kept = self.head(x), []
        for block, attention, shrink in self.down:
            x = attention(block(x, time))
            kept.append(x)
            x = shrink(x)
        x = self.attention(self.middle(x, time))
        for block in self.up:
            x = functional.interpolate(x, scale_factor=2.0, mode="nearest")
            x = block(torch.cat([x, kept.pop()], 1), time)
        return self.tail(x)


def fit_diffusion(model: Any, average: Any, optimizer: Any, images: Any, alphas: Any) -> None:
    times = torch.randint(0, len(alphas), (len(images),), device=images.device)
    noise = torch.randn_like(images)
    share = alphas[times].view(-1, 1, 1, 1)
    noisy = share.sqrt() * images + (1 - share).sqrt() * noise
    with torch.autocast("cuda", torch.bfloat16):
        loss = functional.mse_loss(model(noisy, times), noise)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for old, new in zip(average.parameters(), model.parameters(), strict=True):
            old.lerp_(new, 0.001)


def diffusion(device: str) -> Case:
    model, average = DenoisingUNet().to(device), DenoisingUNet().to(device).requires_grad_(False)
    average.load_state_dict(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, device=device), 0)
    return fit_diffusion, (
        *(model, average, optimizer),
        *(torch.randn(16, 3, 64, 64, device=device), alphas),
    )


# -- LoRA: frozen bf16 weights, small trained ones, gradient checkpointing -------------------------


class LowRank(nn.Module):
    """A frozen linear layer and a trained one of low rank beside it."""

    def __init__(self, base: nn.Linear, rank: int = 16, alpha: float = 32.0) -> None:
        super().__init__()
        self.base, self.scale = base, alpha / rank
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        self.dropout = nn.Dropout(0.05)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Any) -> Any:
        added = self.up(self.down(self.dropout(x).to(self.down.weight.dtype)))
        return self.base(x) + (added * self.scale).to(x.dtype)


def fit_adapters(model: Any, optimizer: Any, scheduler: Any, batch: dict[str, Any]) -> float:
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(**batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 0.3)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad(set_to_none=True)
    return float(loss.item())


def lora(device: str) -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=12,
        num_attention_heads=32,
        num_key_value_heads=4,
        vocab_size=32000,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16).requires_grad_(False)
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.q_proj = LowRank(attention.q_proj)
        attention.v_proj = LowRank(attention.v_proj)
    model.to(device).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, 2e-4)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 10, 1000)
    tokens = make_tokens(device, 32000, 4, 1024)
    batch = {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "labels": tokens,
        "use_cache": False,
    }
    return fit_adapters, (model, optimizer, scheduler, batch)


# -- A vision transformer with flash attention, bf16 weights ---------------------------------------


def fit_vision_transformer(
    model: Any, optimizer: Any, scheduler: Any, images: Any, labels: Any
) -> None:
    optimizer.zero_grad(set_to_none=True)
    logits = model(pixel_values=images.to(torch.bfloat16)).logits
    loss = functional.cross_entropy(logits.float(), labels, label_smoothing=0.1)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()


def vision_transformer(device: str) -> Case:
    from transformers import Dinov2Config, Dinov2ForImageClassification

    config = Dinov2Config(image_size=224, num_labels=1000, drop_path_rate=0.1)
    config.hidden_size, config.num_hidden_layers, config.num_attention_heads = 1024, 16, 16
    model = Dinov2ForImageClassification(config).to(device, torch.bfloat16).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, weight_decay=0.05, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    return fit_vision_transformer, (model, optimizer, scheduler, *make_images(device, 32))


# -- Gradient accumulation: four batches for each step, bf16 autocast ------------------------------


def fit_accumulated(
    model: Any, optimizer: Any, scheduler: Any, batches: list[dict[str, Any]]
) -> float:
    total = 0.0
    for batch in batches:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(**batch).loss / len(batches)
        loss.backward()
        total += loss.item()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    return total


def accumulation(device: str) -> Case:
    from transformers import (
        RobertaConfig,
        RobertaForSequenceClassification,
        get_linear_schedule_with_warmup,
    )

    model = RobertaForSequenceClassification(RobertaConfig(num_labels=3)).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-5, weight_decay=0.01)
    scheduler = get_linear_schedule_with_warmup(optimizer, 100, 1000)
    batches = []
    for length in (128, 192, 256, 160):
        mask = torch.ones(16, length, dtype=torch.int64)
        mask[::2, length // 2 :] = 0
        tokens = make_tokens("cpu", 50000, 16, length) + 3
        labels = make_tokens("cpu", 3, 16)
        batch = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
        batches.append({name: each.to(device) for name, each in batch.items()})
    return fit_accumulated, (model, optimizer, scheduler, batches)


# -- A mixture of experts in bf16, Adafactor -------------------------------------------------------


def fit_experts(model: Any, optimizer: Any, tokens: Any) -> None:
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def experts(device: str) -> Case:
    from transformers import Adafactor, Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=2816,
        moe_intermediate_size=384,
        num_hidden_layers=6,
        num_attention_heads=16,
        num_key_value_heads=4,
        num_experts=16,
        num_experts_per_tok=4,
        output_router_logits=True,
    )
    model = Qwen3MoeForCausalLM(config).to(device, torch.bfloat16).train()
    optimizer = Adafactor(
        model.parameters(), lr=1e-3, scale_parameter=False, relative_step=False, warmup_init=False
    )
    return fit_experts, (model, optimizer, make_tokens(device, 32000, 4, 1024))


# -- A GAN with a gradient penalty, RMSprop --------------------------------------------------------


def make_generator(n_noise: int = 128, n: int = 64) -> nn.Module:
    layers: list[nn.Module] = [
        nn.ConvTranspose2d(n_noise, 16 * n, 4),
        nn.BatchNorm2d(16 * n),
        nn.ReLU(),
    ]
    for width in (8 * n, 4 * n, 2 * n, n):
        layers += [
            nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1, bias=False),
            *(nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
        ]
    return nn.Sequential(*layers, nn.ConvTranspose2d(n, 3, 4, stride=2, padding=1), nn.Tanh())


def make_critic(n: int = 64) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, n, 4, stride=2, padding=1), nn.LeakyReLU(0.2)]
    for width in (n, 2 * n, 4 * n, 8 * n):
        layers += [
            nn.Conv2d(width, 2 * width, 4, stride=2, padding=1, bias=False),
            *(nn.InstanceNorm2d(2 * width, affine=True), nn.LeakyReLU(0.2)),
        ]
    return nn.Sequential(*layers, nn.Conv2d(16 * n, 1, 4))


def fit_gan(
    generator: Any, critic: Any, of_generator: Any, of_critic: Any, images: Any
) -> tuple[float, float]:
    noise = torch.randn(len(images), 128, 1, 1, device=images.device)
    made = generator(noise)

    of_critic.zero_grad()
    share = torch.rand(len(images), 1, 1, 1, device=images.device)
    mixed = (share * images + (1 - share) * made.detach()).requires_grad_()
    (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
    penalty = ((slope.flatten(1).norm(2, dim=1) - 1) ** 2).mean()
    loss = critic(made.detach()).mean() - critic(images).mean() + 10 * penalty
    loss.backward()
    of_critic.step()

    of_generator.zero_grad()
    own_loss = -critic(made).mean()
    own_loss.backward()
    of_generator.step()
    return loss.item(), own_loss.item()


def gan(device: str) -> Case:
    generator, critic = make_generator().to(device), make_critic().to(device)
    return fit_gan, (
        *(generator, critic),
        torch.optim.RMSprop(generator.parameters(), 5e-5),
        torch.optim.RMSprop(critic.parameters(), 5e-5),
        torch.rand(48, 3, 128, 128, device=device) * 2 - 1,
    )


# -- An evaluation: several batches, metrics that are read, fp16 autocast --------------------------


@torch.inference_mode()
def evaluate(model: Any, batches: list[tuple[Any, Any]]) -> dict[str, float]:
    model.eval()
    n_right, n_within_five, loss, n = 0, 0, 0.0, 0
    for images, labels in batches:
        with torch.autocast("cuda", torch.float16):
            scores = model(images)
        loss += functional.cross_entropy(scores.float(), labels, reduction="sum").item()
        highest = scores.topk(5, dim=1).indices
        n_right += (highest[:, 0] == labels).sum().item()
        n_within_five += (highest == labels[:, None]).any(1).sum().item()
        n += len(labels)
    return {"loss": loss / n, "top-1": n_right / n, "top-5": n_within_five / n}


def evaluation(device: str) -> Case:
    import torchvision

    model = torchvision.models.swin_t().to(device)
    return evaluate, (model, [make_images(device, n) for n in (64, 64, 64, 23)])


# -- Contrastive pairs of images and texts: CLIP, bf16 autocast ------------------------------------


def fit_contrastive(model: Any, optimizer: Any, tokens: Any, images: Any) -> None:
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(input_ids=tokens, pixel_values=images, return_loss=True).loss
    loss.backward()
    nn.utils.clip_grad_value_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model.logit_scale.clamp_(0, math.log(100))


def contrastive(device: str) -> Case:
    from transformers import CLIPConfig, CLIPModel

    model = CLIPModel(CLIPConfig()).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), 5e-4, betas=(0.9, 0.98), foreach=True)
    images = torch.randn(64, 3, 224, 224, device=device)
    return fit_contrastive, (model, optimizer, make_tokens(device, 49000, 64, 77), images)


# -- Translation: PyTorch's own transformer with padding masks, fp32, Noam's schedule --------------


class Translator(nn.Module):
    """Words of one language in, scores of another's out, as in https://arxiv.org/abs/1706.03762."""

    def __init__(self, n_words: int = 16000, n: int = 512) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(n_words, n), nn.Embedding(n_words, n)
        self.places = nn.Parameter(torch.randn(1, 256, n) * 0.02)
        self.transformer = nn.Transformer(n, 8, 6, 6, 2048, 0.1, batch_first=True)
        self.head = nn.Linear(n, n_words)

    def forward(self, source: Any, target: Any) -> Any:
        causal = nn.Transformer.generate_square_subsequent_mask(
            target.shape[1], device=target.device
        )
        hidden = self.transformer(
            self.source(source) + self.places[:, : source.shape[1]],
            self.target(target) + self.places[:, : target.shape[1]],
            tgt_mask=causal,
            src_key_padding_mask=source == 0,
            tgt_key_padding_mask=target == 0,
            memory_key_padding_mask=source == 0,
            tgt_is_causal=True,
        )
        return self.head(hidden)


def fit_translation(model: Any, optimizer: Any, scheduler: Any, source: Any, target: Any) -> None:
    scores = model(source, target[:, :-1])
    loss = functional.cross_entropy(
        scores.flatten(0, 1), target[:, 1:].flatten(), ignore_index=0, label_smoothing=0.1
    )
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()


def translation(device: str) -> Case:
    model = Translator().to(device).train()
    optimizer = torch.optim.Adam(model.parameters(), 1.0, betas=(0.9, 0.98), eps=1e-9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda n: 512**-0.5 * min((n + 1) ** -0.5, (n + 1) * 4000**-1.5)
    )
    batches = []
    for length in (96, 113):
        is_padding = torch.arange(length) >= torch.randint(length // 2, length + 1, (32, 1))
        batches.append((make_tokens("cpu", 15999, 32, length) + 1).masked_fill(is_padding, 0))
    return fit_translation, (model, optimizer, scheduler, *(each.to(device) for each in batches))


# -- Detection: RetinaNet with its images on the host, as torchvision's reference trains it --------


def fit_detector(
    model: Any, optimizer: Any, warmup: Any, images: list[Any], targets: list[dict[str, Any]]
) -> dict[str, float]:
    device = next(model.parameters()).device
    images = [image.to(device) for image in images]
    targets = [{name: each.to(device) for name, each in target.items()} for target in targets]
    losses = model(images, targets)
    loss = sum(each for each in losses.values())
    if not math.isfinite(loss.item()):
        print(f"Loss is {loss.item()}, stopping training")
        sys.exit(1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    warmup.step()
    return {"loss": loss.item(), **{name: each.item() for name, each in losses.items()}}


def retinanet(device: str) -> Case:
    from torchvision.models.detection import retinanet_resnet50_fpn_v2

    model = retinanet_resnet50_fpn_v2(weights=None, weights_backbone=None, num_classes=91)
    model.to(device).train()
    optimizer = torch.optim.AdamW(
        [each for each in model.parameters() if each.requires_grad], 1e-4, weight_decay=0.05
    )
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.001, total_iters=1000)
    images, targets = [], []
    for height, width, n in ((427, 640, 4), (480, 640, 11)):
        corners = torch.rand(n, 2) * torch.tensor([width / 2, height / 2])
        sizes = torch.rand(n, 2) * torch.tensor([width / 2 - 20, height / 2 - 20]) + 16
        images.append(torch.rand(3, height, width))
        targets.append(
            {
                "boxes": torch.cat([corners, corners + sizes], 1),
                "labels": make_tokens("cpu", 90, n) + 1,
                "image_id": torch.tensor(len(images)),
                "area": sizes.prod(1),
                "iscrowd": torch.zeros(n, dtype=torch.int64),
            }
        )
    return fit_detector, (model, optimizer, warmup, images, targets)


# -- Speech: Whisper with checkpointing, bf16 autocast, padded labels ------------------------------


def fit_transcription(
    model: Any, optimizer: Any, scheduler: Any, batch: dict[str, Any]
) -> tuple[float, float]:
    model.train()
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(**batch).loss
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    model.zero_grad()
    return loss.item(), norm.item()


def whisper(device: str) -> Case:
    from transformers import (
        WhisperConfig,
        WhisperForConditionalGeneration,
        get_linear_schedule_with_warmup,
    )

    config = WhisperConfig(
        d_model=768,
        encoder_layers=12,
        decoder_layers=12,
        encoder_attention_heads=12,
        decoder_attention_heads=12,
        encoder_ffn_dim=3072,
        decoder_ffn_dim=3072,
    )
    model = WhisperForConditionalGeneration(config).to(device)
    model.config.use_cache = False
    model.gradient_checkpointing_enable()
    # As Hugging Face's Trainer groups them: biases and norms don't decay.
    decayed = [each for each in model.parameters() if each.dim() > 1]
    others = [each for each in model.parameters() if each.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}], 1e-5
    )
    scheduler = get_linear_schedule_with_warmup(optimizer, 500, 4000)
    lengths = torch.tensor([31, 88, 45, 112, 20, 63, 97, 54])
    is_padding = torch.arange(112) >= lengths[:, None]
    labels = make_tokens("cpu", 50000, 8, 112).masked_fill(is_padding, -100)
    batch = {
        "input_features": torch.randn(8, 80, 3000, device=device),
        "labels": labels.to(device),
    }
    return fit_transcription, (model, optimizer, scheduler, batch)


# -- Segmentation: SegFormer in channels-last, fp16 autocast with a GradScaler ---------------------


def fit_scenes(
    model: Any, optimizer: Any, scaler: Any, scheduler: Any, batch: dict[str, Any]
) -> tuple[float, float]:
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cuda", torch.float16):
        outputs = model(**batch)
    scaler.scale(outputs.loss).backward()
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    labels = batch["labels"]
    with torch.no_grad():
        scores = functional.interpolate(
            outputs.logits, size=labels.shape[-2:], mode="bilinear", align_corners=False
        )
        mask = labels != 255
        is_right = scores.argmax(1)[mask] == labels[mask]
    return outputs.loss.item(), is_right.float().mean().item()


def segformer(device: str) -> Case:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    config = SegformerConfig(
        depths=[3, 4, 6, 3],
        hidden_sizes=[64, 128, 320, 512],
        decoder_hidden_size=768,
        num_labels=150,
    )
    model = SegformerForSemanticSegmentation(config)
    model.to(device, memory_format=torch.channels_last).train()
    optimizer = torch.optim.AdamW(
        [
            {"params": model.segformer.parameters(), "lr": 6e-5},
            {"params": model.decode_head.parameters(), "lr": 6e-4},
        ],
        weight_decay=0.01,
    )
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, 1000, 1.0)
    images = torch.randn(4, 3, 512, 512, device=device).to(memory_format=torch.channels_last)
    labels = make_tokens(device, 150, 4, 512, 512)
    labels[:, :16] = 255
    batch = {"pixel_values": images, "labels": labels}
    return fit_scenes, (model, optimizer, scaler, scheduler, batch)


# -- Greedy generation with a cache: prompts padded on the left, an end that may come early --------


@torch.no_grad()
def answer(model: Any, prompts: dict[str, Any]) -> list[list[int]]:
    made = model.generate(**prompts, max_new_tokens=128, do_sample=False)
    new: list[list[int]] = made[:, prompts["input_ids"].shape[1] :].tolist()
    return new


def greedy_generation(device: str) -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=128000,
        eos_token_id=128001,
        pad_token_id=128001,
    )
    model = LlamaForCausalLM(config).to(device, torch.bfloat16).eval()
    is_padding = torch.arange(640) < torch.randint(0, 400, (12, 1))
    is_padding[5] = False
    tokens = make_tokens("cpu", 128000, 12, 640).masked_fill(is_padding, 128001)
    prompts = {"input_ids": tokens, "attention_mask": (~is_padding).long()}
    return answer, (model, {name: each.to(device) for name, each in prompts.items()})


# -- Captions: a packed GRU over image regions, an LSTM cell that attends, scheduled sampling ------


class Captioner(nn.Module):
    """Words for an image, one at a time, each with a look at the regions of the image."""

    def __init__(self, n_words: int = 12000, n: int = 512) -> None:
        super().__init__()
        self.regions = nn.GRU(1024, n // 2, batch_first=True, bidirectional=True)
        self.words = nn.Embedding(n_words, n)
        self.cell, self.start = nn.LSTMCell(2 * n, n), nn.Linear(n, 2 * n)
        self.key, self.query, self.score = nn.Linear(n, n), nn.Linear(n, n), nn.Linear(n, 1)
        self.dropout, self.head = nn.Dropout(0.4), nn.Linear(n, n_words)

    def forward(self, features: Any, counts: Any, captions: Any) -> Any:
        packed = nn.utils.rnn.pack_padded_sequence(
            features, counts, batch_first=True, enforce_sorted=False
        )
        regions, _ = nn.utils.rnn.pad_packed_sequence(self.regions(packed)[0], batch_first=True)
        is_missing = torch.arange(regions.shape[1], device=regions.device) >= counts.to(
            regions.device
        ).unsqueeze(1)
        keys = self.key(regions)
        hidden, cell = self.start(regions.mean(1)).tanh().chunk(2, 1)
        scores = []
        for words in self.dropout(self.words(captions)).unbind(1):
            energy = self.score(torch.tanh(keys + self.query(hidden).unsqueeze(1))).squeeze(2)
            weights = energy.masked_fill(is_missing, -torch.inf).softmax(1)
            seen = torch.bmm(weights.unsqueeze(1), regions).squeeze(1)
            hidden, cell = self.cell(torch.cat([words, seen], 1), (hidden, cell))
            scores.append(self.head(self.dropout(hidden)))
        return torch.stack(scores, 1)


def fit_captions(model: Any, optimizer: Any, batch: tuple[Any, ...]) -> float:
    features, counts, captions = batch
    optimizer.zero_grad()
    scores = model(features, counts, captions[:, :-1])
    loss = functional.cross_entropy(scores.transpose(1, 2), captions[:, 1:], ignore_index=0)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    return float(loss)


def captions(device: str) -> Case:
    model = Captioner().to(device).train()
    optimizer = torch.optim.RMSprop(model.parameters(), 5e-4, alpha=0.95, momentum=0.5)
    counts = torch.randint(12, 65, (80,))
    features = torch.randn(80, int(counts.max()), 1024, device=device)
    lengths = torch.randint(8, 31, (80, 1))
    words = (make_tokens("cpu", 11999, 80, 30) + 1).masked_fill(torch.arange(30) >= lengths, 0)
    return fit_captions, (model, optimizer, (features, counts, words.to(device)))


# -- Citations: graph attention with a softmax over neighbours, bf16 autocast ----------------------


class GraphAttention(nn.Module):
    """Attention of papers to those that they cite, as in https://arxiv.org/abs/2105.14491."""

    def __init__(self, n_in: int, n: int, n_heads: int = 4) -> None:
        super().__init__()
        self.source, self.target = nn.Linear(n_in, n), nn.Linear(n_in, n)
        self.weight = nn.Parameter(torch.randn(n_heads, n // n_heads) * 0.1)
        self.norm, self.skip = nn.LayerNorm(n), nn.Linear(n_in, n, bias=False)

    def forward(self, x: Any, edges: Any) -> Any:
        sources, targets = edges
        n_heads, n_each = self.weight.shape
        values = self.source(x).view(-1, n_heads, n_each)
        pairs = values[sources] + self.target(x).view(-1, n_heads, n_each)[targets]
        scores = (functional.leaky_relu(pairs, 0.2) * self.weight).sum(-1).float()
        highest = scores.new_full((len(x), n_heads), -torch.inf)
        places = targets[:, None].expand_as(scores)
        highest = highest.scatter_reduce(0, places, scores.detach(), "amax")
        weights = (scores - highest[targets]).exp()
        total = torch.zeros_like(highest).index_add_(0, targets, weights)
        weights = (weights / (total[targets] + 1e-9)).unsqueeze(-1)
        mixed = torch.zeros(len(x), n_heads, n_each, device=x.device)
        mixed = mixed.index_add(0, targets, weights * values[sources].float())
        return self.norm(functional.elu(mixed.flatten(1) + self.skip(x)))


class CitationNetwork(nn.Module):
    """Three rounds of attention, and a class for each paper."""

    def __init__(self, n_in: int = 128, n: int = 256, n_classes: int = 40) -> None:
        super().__init__()
        self.layers = nn.ModuleList([GraphAttention(each, n) for each in (n_in, n, n)])
        self.dropout, self.head = nn.Dropout(0.3), nn.Linear(n, n_classes)

    def forward(self, x: Any, edges: Any) -> Any:
        for layer in self.layers:
            x = self.dropout(layer(x, edges))
        return self.head(x)


def fit_citations(model: Any, optimizer: Any, graph: dict[str, Any]) -> tuple[float, float]:
    model.train()
    optimizer.zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        scores = model(graph["x"], graph["edges"])
    chosen = graph["is_train"]
    loss = functional.cross_entropy(scores[chosen].float(), graph["y"][chosen])
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        right = (scores.argmax(-1) == graph["y"])[~chosen].float().mean()
    return float(loss), float(right)


def citations(device: str) -> Case:
    n_papers, n_edges = 24000, 280000
    model = CitationNetwork().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, fused=True)
    graph = {
        "x": torch.randn(n_papers, 128),
        "edges": torch.randint(0, n_papers, (2, n_edges)),
        "y": make_tokens("cpu", 40, n_papers),
        "is_train": torch.rand(n_papers) < 0.6,
    }
    graph = {name: each.to(device) for name, each in graph.items()}
    return fit_citations, (model, optimizer, graph)


CASES: dict[str, Callable[[str], Case]] = {
    "diffusion": diffusion,
    "lora": lora,
    "retinanet": retinanet,
    "whisper": whisper,
    "vit-flash": vision_transformer,
    "accumulation": accumulation,
    "moe": experts,
    "gan": gan,
    "captions": captions,
    "citations": citations,
    "evaluation": evaluation,
    "generate-greedy": greedy_generation,
    "segformer": segformer,
    "clip": contrastive,
    "translation": translation,
}
