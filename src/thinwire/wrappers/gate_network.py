"""The hypernetwork: from a layer's embedding and features to the probability that it is worth sending.

z = w2·tanh(W1·[embedding, features] + b1) + b2 and p = σ(z / T). Objective, this project's own:

    -Σ p·u + λ(Σ p·c - budget)² + κ·mean((1 - p)·age / max_age)

with u each layer's share of the usefulness, c its share of the bytes. The gradient is written out: it takes a dozen small
products, and nothing of autograd runs beside the user's own backward pass. Everything is computed in fp64 on the CPU, the
same on all ranks because everything that goes in is.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

FEATURES = 8
EMBEDDING = 8
_HIDDEN = 32
_INPUTS = EMBEDDING + FEATURES
_SHAPES = ((_INPUTS, _HIDDEN), (_HIDDEN,), (_HIDDEN,), (1,))  # W1, b1, w2, b2
_SIZES = [_INPUTS * _HIDDEN, _HIDDEN, _HIDDEN, 1]
NETWORK = sum(_SIZES)  # weights that all layers share
ROW = NETWORK + EMBEDDING  # what is stored with every tensor

TEMPERATURE = 1.0
BUDGET_WEIGHT = 4.0  # λ
AGE_WEIGHT = 0.05  # κ
_LEARNING_RATE, _BETAS, _EPSILON = 3e-3, (0.9, 0.999), 1e-8


@dataclass(frozen=True)
class Situation:
    """What is known about the layers at the end of a step; one entry or row per layer, fp64.

    Args:
        features: layers × FEATURES, of comparable magnitude.
        usefulness: u, which adds up to 1 or is all zero.
        shares: c, which adds up to 1.
        waited: age / max_age.
        budget: fraction of the bytes.
    """

    features: Tensor
    usefulness: Tensor
    shares: Tensor
    waited: Tensor
    budget: float

    def objective(self, p: Tensor) -> Tensor:
        """What training makes small."""
        overspent = (p * self.shares).sum() - self.budget
        aging = ((1 - p) * self.waited).mean()
        return -(p * self.usefulness).sum() + BUDGET_WEIGHT * overspent.square() + AGE_WEIGHT * aging

    def slope(self, p: Tensor) -> Tensor:
        """The derivative of the objective by p."""
        overspent = (p * self.shares).sum() - self.budget
        return -self.usefulness + 2 * BUDGET_WEIGHT * overspent * self.shares - AGE_WEIGHT * self.waited / p.numel()


def initial_row(name: str) -> Tensor:
    """The network, the same for all, and a tensor's own embedding; fp32."""
    shared, own = (_generator(text) for text in ("network", f"embedding of {name}"))
    parts = [torch.randn(shape, generator=shared) / shape[0] ** 0.5 for shape in _SHAPES]
    biases = (1, 3)
    network = [torch.zeros_like(part) if i in biases else part for i, part in enumerate(parts)]
    return torch.cat([part.reshape(-1) for part in network] + [torch.randn(EMBEDDING, generator=own)])


def _generator(text: str) -> torch.Generator:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def gates(network: Tensor, embeddings: Tensor, features: Tensor) -> Tensor:
    """p of every layer."""
    _, _, p = _forward(network, embeddings, features)
    return p


def gradients(network: Tensor, embeddings: Tensor, situation: Situation) -> tuple[Tensor, Tensor, Tensor]:
    """p of every layer, and the derivatives of the objective by the network and by the embeddings."""
    w1, _, w2, _ = _unpacked(network)
    inputs, hidden, p = _forward(network, embeddings, situation.features)
    by_z = situation.slope(p) * p * (1 - p) / TEMPERATURE
    by_hidden = by_z[:, None] * w2 * (1 - hidden.square())
    by_parts = (inputs.T @ by_hidden, by_hidden.sum(dim=0), hidden.T @ by_z, by_z.sum())
    return p, torch.cat([part.reshape(-1) for part in by_parts]), (by_hidden @ w1.T)[:, :EMBEDDING]


def _forward(network: Tensor, embeddings: Tensor, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    w1, b1, w2, b2 = _unpacked(network)
    inputs = torch.cat([embeddings, features], dim=1)
    hidden = torch.tanh(inputs @ w1 + b1)
    return inputs, hidden, torch.sigmoid((hidden @ w2 + b2) / TEMPERATURE)


def _unpacked(network: Tensor) -> list[Tensor]:
    return [part.view(shape) for part, shape in zip(network.split(_SIZES), _SHAPES, strict=True)]


def adam(weights: Tensor, slope: Tensor, first: Tensor, second: Tensor, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """One step of Adam after ``steps`` others; new weights and moments."""
    first = _BETAS[0] * first + (1 - _BETAS[0]) * slope
    second = _BETAS[1] * second + (1 - _BETAS[1]) * slope.square()
    unbiased = [moment / (1 - beta ** (steps + 1)) for moment, beta in zip((first, second), _BETAS, strict=True)]
    return weights - _LEARNING_RATE * unbiased[0] / (unbiased[1].sqrt() + _EPSILON), first, second
