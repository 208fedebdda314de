"""How a budget of blocks is shared among layers: in proportion to the root of their scores, within limits."""

from __future__ import annotations

import torch
from torch import Tensor

LOWEST_SHARE = 0.1  # times the density: no layer starves
HIGHEST_DENSITY = 0.25  # no layer takes all
_SMALLEST_ROOT = 1e-6  # relative to the largest: anything below is as good as nothing
_HALVINGS = 60


def layer_blocks(scores: Tensor, blocks: Tensor, budget: int, capacity: Tensor) -> Tensor:
    """How many blocks each layer sends: ``budget`` in all, never more than its ``capacity``.

    The density of a layer is proportional to the root of its score, clipped to 0.1·density and 0.25 (or 2·density, where
    that is more); the factor is found by bisection. What the limits leave over goes to layers with capacity left. All
    arithmetic is fp64 on replicated numbers: the ranks get the same result.

    Args:
        scores: one per layer, not negative.
        blocks: how many each layer has.
        budget: how many may be sent; at most the sum of ``capacity``.
        capacity: how many of each layer can be sent at all.
    """
    total = int(blocks.sum())
    if budget <= 0 or total == 0:
        return torch.zeros_like(blocks)
    density = budget / total
    highest = max(HIGHEST_DENSITY, min(1.0, 2 * density))
    shares = _clipped_shares(scores.double(), blocks.double(), budget, LOWEST_SHARE * density, highest)
    return _whole(_filled(torch.minimum(shares, capacity.double()), budget, capacity.double()), budget, capacity)


def _clipped_shares(scores: Tensor, blocks: Tensor, budget: int, lowest: float, highest: float) -> Tensor:
    """Blocks per layer, fractional. The bisection is plain Python: on a few numbers that is faster than tensors."""
    largest = scores.max().sqrt()
    relative = (scores.sqrt() / largest).clamp_min(_SMALLEST_ROOT) if bool(largest > 0) else torch.ones_like(scores)
    roots, sizes = relative.tolist(), blocks.tolist()
    low, high = 0.0, highest / _SMALLEST_ROOT
    for _ in range(_HALVINGS):
        factor = (low + high) / 2
        spent = sum(min(max(factor * root, lowest), highest) * size for root, size in zip(roots, sizes, strict=True))
        low, high = (factor, high) if spent < budget else (low, factor)
    return (high * relative).clamp(lowest, highest) * blocks


def _filled(shares: Tensor, budget: int, capacity: Tensor) -> Tensor:
    """What the limits left over, spread over the capacity that is left: the budget is always spent."""
    spare = capacity - shares
    left = (budget - shares.sum()).clamp_min(0.0)
    return shares + spare * (left / spare.sum()) if bool(spare.sum() > 0) else shares


def _whole(shares: Tensor, budget: int, capacity: Tensor) -> Tensor:
    """Whole numbers that add up to the budget: rounded down, then one more each in order of what was cut off."""
    counts = shares.floor().to(capacity.dtype)
    while (missing := budget - int(counts.sum())) != 0:
        step = 1 if missing > 0 else -1
        open_layers = counts < capacity if step > 0 else counts > 0
        assert bool(open_layers.any()), f"{budget} blocks do not fit into a capacity of {int(capacity.sum())}"
        wanted_more = torch.where(open_layers, step * (shares - counts), -torch.inf)
        chosen = wanted_more.sort(descending=True, stable=True).indices[: min(abs(missing), int(open_layers.sum()))]
        counts[chosen] += step
    return counts
