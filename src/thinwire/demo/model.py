"""A small pre-norm GPT over bytes: the demo's model, kept plain so that the network is the only interesting part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinwire.demo.cnn import VOCABULARY, ByteCNN
from thinwire.demo.lstm import ByteLSTM

# Not GPTs, for benchmarks: many small tensors, and a few large ones that are all ready late.
OTHERS: dict[str, Callable[[], nn.Module]] = {"cnn": ByteCNN, "lstm": ByteLSTM}


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Shape of a model; parameters are about ``12 * layers * width**2``."""

    layers: int
    width: int
    heads: int


SIZES: dict[str, GPTConfig] = {
    "tiny": GPTConfig(layers=4, width=128, heads=4),
    "small": GPTConfig(layers=6, width=256, heads=8),
    "medium": GPTConfig(layers=6, width=512, heads=8),
}


class Attention(nn.Module):
    """Causal self-attention with one fused projection for queries, keys and values."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [batch, time, width] -> the same
        batch, time, width = x.shape
        heads = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)  # each [batch, heads, time, width / heads]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        projected: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return projected


class Block(nn.Module):
    """Attention and a feed-forward layer, each normalised first and added to the stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.feed_norm = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        fed: Tensor = x + self.down(F.gelu(self.up(self.feed_norm(x))))
        return fed


class GPT(nn.Module):
    """Bytes in, the mean cross-entropy (nats per byte) of predicting the next byte out."""

    def __init__(self, config: GPTConfig, max_time: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, config.width)
        self.position = nn.Embedding(max_time, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        self._initialise(config.layers)

    def _initialise(self, layers: int) -> None:
        """Normal weights; what writes to the stream starts smaller, so that its variance does not grow with depth."""
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            writes_to_stream = name.endswith(("attention.out.weight", "down.weight"))
            nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if writes_to_stream else 0.02)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:  # both [batch, time], int64
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        x = self.token(inputs) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))  # [batch, time, VOCABULARY]
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def check_size(size: str) -> None:
    """Raise a ValueError unless ``size`` is one of :data:`SIZES` or :data:`OTHERS`."""
    if size not in SIZES and size not in OTHERS:
        raise ValueError(f"unknown model {size!r}: expected one of {', '.join([*SIZES, *OTHERS])}")


def build_model(size: str, max_time: int, seed: int) -> nn.Module:
    """Build the model called ``size``; the same seed gives the same weights on every rank."""
    check_size(size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return OTHERS[size]() if size in OTHERS else GPT(SIZES[size], max_time)
