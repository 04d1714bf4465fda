"""Clean programs: generation of text with its caches of keys, values, masks and positions."""

from __future__ import annotations

from tests.growth.programs import Program, order_cells

__all__ = ["PROGRAMS"]

#: A small decoder whose attention takes the keys and values of earlier tokens, with one cell left
#: to be added: how these are kept.
_DECODER = """
            import math
            import torch
            from torch import nn
            import torch.nn.functional as F

            torch.manual_seed(0)
            VOCAB, WIDTH, HEADS, LAYERS = 512, 256, 4, 3

            class Attention(nn.Module):
                def __init__(self, index):
                    super().__init__()
                    self.index = index
                    self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
                    self.out = nn.Linear(WIDTH, WIDTH)

                def forward(self, x, cache):
                    n, t, _ = x.shape
                    q, k, v = (y.view(n, t, HEADS, -1).transpose(1, 2)
                               for y in self.qkv(x).chunk(3, dim=-1))
                    k, v = cache.update(self.index, k, v)
                    y = F.scaled_dot_product_attention(q, k, v, is_causal=t > 1)
                    return self.out(y.transpose(1, 2).reshape(n, t, WIDTH))

            class Decoder(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.embed = nn.Embedding(VOCAB, WIDTH)
                    self.attention = nn.ModuleList(Attention(i) for i in range(LAYERS))
                    self.mlp = nn.ModuleList(
                        nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(),
                                      nn.Linear(2 * WIDTH, WIDTH)) for _ in range(LAYERS))
                    self.head = nn.Linear(WIDTH, VOCAB, bias=False)

                def forward(self, tokens, cache):
                    x = self.embed(tokens)
                    for attention, mlp in zip(self.attention, self.mlp):
                        x = x + attention(x, cache)
                        x = x + mlp(x)
                    return self.head(x[:, -1])

            model = Decoder().to(DEVICE).eval()
"""

PROGRAMS = (
    Program(
        name="kv_cache_preallocated",
        source="The static cache of gpt-fast and of transformers (StaticCache)",
        runs=order_cells(
            _DECODER
            + """
            # %%
            class StaticCache:
                def __init__(self, batch, length):
                    shape = (LAYERS, batch, HEADS, length, WIDTH // HEADS)
                    self.k = torch.zeros(shape, device=DEVICE)
                    self.v = torch.zeros(shape, device=DEVICE)
                    self.filled = [0] * LAYERS

                def update(self, layer, k, v):
                    start, end = self.filled[layer], self.filled[layer] + k.size(2)
                    self.k[layer, :, :, start:end] = k
                    self.v[layer, :, :, start:end] = v
                    self.filled[layer] = end
                    return self.k[layer, :, :, :end], self.v[layer, :, :, :end]

            @torch.inference_mode()
            def generate(prompt, max_new_tokens):
                cache = StaticCache(len(prompt), prompt.size(1) + max_new_tokens)
                tokens, step = prompt, prompt
                for _ in range(max_new_tokens):
                    step = model(step, cache).argmax(-1, keepdim=True)
                    tokens = torch.cat([tokens, step], dim=1)
                return tokens

            # %%
            prompt = torch.randint(0, VOCAB, (16, 24), device=DEVICE)
            text = generate(prompt, 40)
            print(text[0, -8:].tolist())
            """,
            "1 2 3 3 3 3 3",
        ),
    ),
    Program(
        name="kv_cache_concatenated_each_token",
        source="past_key_values as tuples, as in transformers before its cache classes",
        runs=order_cells(
            _DECODER
            + """
            # %%
            class Past(dict):
                def update(self, layer, k, v):
                    if layer in self:
                        k = torch.cat([self[layer][0], k], dim=2)
                        v = torch.cat([self[layer][1], v], dim=2)
                    self[layer] = (k, v)
                    return k, v

            def sample(logits, temperature=0.8, top_k=50):
                values, indices = torch.topk(logits / temperature, top_k)
                choice = torch.multinomial(F.softmax(values, dim=-1), 1)
                return indices.gather(-1, choice)

            # %%
            past = Past()
            generated = torch.randint(0, VOCAB, (32, 8), device=DEVICE)
            with torch.no_grad():
                next_token = generated
                for _ in range(48):
                    next_token = sample(model(next_token, past))
                    generated = torch.cat((generated, next_token), dim=1)
            print(generated.shape, past[0][0].shape)
            """,
            "1 2 3 3 3 3 3",
        ),
    ),
    Program(
        name="kv_cache_object_with_growing_layers",
        source="transformers' DynamicCache: lists of keys and of values, one entry for each layer",
        runs=order_cells(
            _DECODER
            + """
            # %%
            class DynamicCache:
                def __init__(self):
                    self.key_cache = []
                    self.value_cache = []

                def update(self, layer, k, v):
                    if len(self.key_cache) <= layer:
                        self.key_cache.append(k)
                        self.value_cache.append(v)
                    else:
                        self.key_cache[layer] = torch.cat([self.key_cache[layer], k], dim=-2)
                        self.value_cache[layer] = torch.cat([self.value_cache[layer], v], dim=-2)
                    return self.key_cache[layer], self.value_cache[layer]

                def get_seq_length(self):
                    return self.key_cache[0].shape[-2] if self.key_cache else 0

            # %%
            prompts = [torch.randint(0, VOCAB, (8, n), device=DEVICE) for n in (12, 30, 18)]
            answers = []
            for prompt in prompts:
                cache = DynamicCache()
                with torch.inference_mode():
                    out = model(prompt, cache).argmax(-1, keepdim=True)
                    answer = [out]
                    while cache.get_seq_length() < prompt.size(1) + 20:
                        out = model(out, cache).argmax(-1, keepdim=True)
                        answer.append(out)
                answers.append(torch.cat(answer, dim=1).cpu())
            """,
            "1 2 3 3 3 3 3",
        ),
    ),
    Program(
        name="chat_with_a_sliding_window",
        source="A chat whose cache keeps the last tokens only (sliding-window attention)",
        runs=order_cells(
            _DECODER
            + """
            # %%
            class WindowCache:
                '''Carries the conversation from turn to turn, but no more than the window.'''

                def __init__(self, window):
                    self.window = window
                    self.layers = [None] * LAYERS

                def update(self, layer, k, v):
                    if self.layers[layer] is not None:
                        k = torch.cat([self.layers[layer][0], k], dim=2)
                        v = torch.cat([self.layers[layer][1], v], dim=2)
                    kept = slice(-self.window, None)
                    self.layers[layer] = (k[:, :, kept].clone(), v[:, :, kept].clone())
                    return k, v

            chat = WindowCache(window=48)

            # %%
            message = torch.randint(0, VOCAB, (16, 16), device=DEVICE)
            with torch.inference_mode():
                token = model(message, chat).argmax(-1, keepdim=True)
                for _ in range(12):
                    token = model(token, chat).argmax(-1, keepdim=True)
            print("in memory:", chat.layers[0][0].size(2), "tokens")
            """,
            "1 2 3 3 3 3 3 3",
        ),
    ),
    Program(
        name="lru_cache_of_positional_encodings",
        source="functools.lru_cache(maxsize=…) on sinusoids and masks, keyed by the length",
        runs=order_cells(
            """
            import functools
            import math
            import random
            import torch
            from torch import nn

            torch.manual_seed(12)
            random.seed(12)

            @functools.lru_cache(maxsize=8)
            def sinusoids(length, width):
                position = torch.arange(length, device=DEVICE)[:, None]
                rates = torch.exp(
                    torch.arange(0, width, 2, device=DEVICE) * (-math.log(1e4) / width)
                )
                return torch.cat([torch.sin(position * rates), torch.cos(position * rates)], dim=1)

            @functools.lru_cache(maxsize=8)
            def causal_mask(length):
                return torch.full((length, length), float("-inf"), device=DEVICE).triu(1)

            attention = nn.MultiheadAttention(64, 2, batch_first=True).to(DEVICE)

            # %%
            for _ in range(20):
                length = random.randint(100, 400)
                x = torch.randn(1, length, 64, device=DEVICE) + sinusoids(length, 64)
                with torch.no_grad():
                    y, _ = attention(x, x, x, attn_mask=causal_mask(length), need_weights=False)
            sinusoids.cache_info()
            """,
            "1 2 2 2 2 2",
        ),
    ),
    Program(
        name="cache_without_limit_for_few_lengths",
        source="functools.lru_cache(maxsize=None) keyed by the four lengths of the buckets",
        runs=order_cells(
            """
            import random
            from functools import lru_cache
            import torch
            from torch import nn

            torch.manual_seed(13)
            random.seed(13)
            BUCKETS = (128, 256, 384, 512)

            @lru_cache(maxsize=None)
            def relative_bias(length):
                distance = torch.arange(length)[None, :] - torch.arange(length)[:, None]
                return torch.exp(-distance.abs().float() / 16).to(DEVICE)

            layer = nn.Linear(16, 16).to(DEVICE)
            optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

            # %%
            for step in range(12):
                length = random.choice(BUCKETS)
                x = torch.randn(4, length, 16, device=DEVICE)
                mixed = relative_bias(length) @ layer(x)
                loss = mixed.square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            """,
            "1 2 2 2 2 2",
        ),
    ),
    Program(
        name="rotary_cache_that_doubles",
        source="Rotary embeddings whose tables are extended when a longer sequence comes",
        runs=order_cells(
            """
            import torch
            from torch import nn

            torch.manual_seed(14)

            class Rotary(nn.Module):
                def __init__(self, dim):
                    super().__init__()
                    self.register_buffer("inv_freq", 1.0 / 1e4 ** (torch.arange(0, dim, 2) / dim))
                    self.max_seq_len_cached = 0

                def _set_cos_sin_cache(self, length, device):
                    self.max_seq_len_cached = length
                    t = torch.arange(length, device=device).float()
                    emb = torch.outer(t, self.inv_freq).repeat(1, 2)
                    self.register_buffer("cos_cached", emb.cos(), persistent=False)
                    self.register_buffer("sin_cached", emb.sin(), persistent=False)

                def forward(self, x):
                    length = x.size(-2)
                    if length > self.max_seq_len_cached:
                        self._set_cos_sin_cache(max(length, 2 * self.max_seq_len_cached), x.device)
                    half = x.size(-1) // 2
                    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
                    return x * self.cos_cached[:length] + turned * self.sin_cached[:length]

            rotary = Rotary(128).to(DEVICE)
            project = nn.Linear(128, 128).to(DEVICE)
            longest = 500

            # %%
            with torch.no_grad():
                for length in range(100, longest, 100):
                    q = rotary(project(torch.randn(2, length, 128, device=DEVICE)))
                    score = (q @ q.transpose(1, 2)).amax().item()
            longest = min(2000, 2 * longest)
            """,
            "1 2 2 2 2 2 2",
        ),
    ),
    Program(
        name="scoring_documents_by_length",
        source="Scoring a corpus sorted by length, shortest first, without an optimizer",
        runs=order_cells(
            """
            import torch
            from torch import nn

            torch.manual_seed(9)
            documents = sorted((torch.randint(0, 256, (n,)) for n in range(100, 2100, 50)), key=len)
            model = nn.Sequential(nn.Embedding(256, 128), nn.Linear(128, 512), nn.ReLU(),
                                  nn.Linear(512, 256)).to(DEVICE).eval()

            # %%
            perplexities = []
            for document in documents:
                ids = document.to(DEVICE)
                with torch.no_grad():
                    logits = model(ids[:-1])
                    log_probs = logits.log_softmax(-1)
                    nll = -log_probs.gather(1, ids[1:, None]).mean()
                perplexities.append(nll.exp().item())
            print(min(perplexities), max(perplexities))
            """,
            "1 2 2 2 2",
        ),
    ),
    Program(
        name="beam_search_that_prunes",
        source="Beam search as in OpenNMT and fairseq: the best hypotheses alone go on",
        runs=order_cells(
            """
            import torch
            from torch import nn

            torch.manual_seed(16)
            vocabulary, width = 1000, 384
            embed, cell = (
                nn.Embedding(vocabulary, width).to(DEVICE),
                nn.LSTMCell(width, width).to(DEVICE),
            )
            head = nn.Linear(width, vocabulary).to(DEVICE)

            @torch.no_grad()
            def beam_search(start, beams=64, max_length=30):
                tokens = torch.full((1, 1), start, device=DEVICE)
                scores = torch.zeros(1, device=DEVICE)
                h = c = torch.zeros(1, width, device=DEVICE)
                for _ in range(max_length):
                    h, c = cell(embed(tokens[:, -1]), (h, c))
                    total = scores[:, None] + head(h).log_softmax(-1)
                    scores, flat = total.flatten().topk(beams)
                    parent, word = flat // vocabulary, flat % vocabulary
                    tokens = torch.cat([tokens[parent], word[:, None]], dim=1)
                    h, c = h[parent], c[parent]
                return tokens[0], scores[0]

            # %%
            sentence, score = beam_search(start=1)
            sentence
            """,
            "1 2 2 2 2 2",
        ),
    ),
)
