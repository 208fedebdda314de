"""Regions of a unit that hold equally many selected entries: who owns which positions in a balanced reduction.

Where entries are selected is remembered as a histogram of a few buckets per tensor. It says where to cut for any number of
ranks and for any grouping of the tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.core import TensorSpec, UnitSpec

_BUCKETS = 32
_PRIOR = 1e-3  # entries per bucket that are assumed without any being seen, so that unknown tensors are cut evenly


def buckets(tensor: TensorSpec) -> int:
    """How many buckets a tensor has."""
    return min(_BUCKETS, tensor.numel)


def bucket_elems(unit: UnitSpec) -> int:
    """How many buckets a unit has."""
    return sum(buckets(tensor) for tensor in unit.tensors)


def bucket_edges(unit: UnitSpec) -> Tensor:
    """Where the buckets begin in the flat unit, and where the last one ends."""
    starts = [torch.zeros(0, dtype=torch.int64)]
    for tensor, offset in zip(unit.tensors, unit.offsets, strict=False):
        count = buckets(tensor)
        starts.append(offset + torch.arange(count) * tensor.numel // max(count, 1))
    return torch.cat([*starts, torch.tensor([unit.numel])])


def histogram(indices: Tensor, unit: UnitSpec) -> Tensor:
    """How many of these positions lie in each bucket, as fp32 so that ranks can be summed up."""
    inner = bucket_edges(unit)[1:].to(indices.device)
    bucket = torch.bucketize(indices.long(), inner, right=True)
    return torch.bincount(bucket, minlength=bucket_elems(unit)).float()


def borders(spread: Tensor, unit: UnitSpec, world_size: int) -> list[int]:
    """Ascending positions from 0 to the end: between two neighbours lies the same share of the histogram ``spread``."""
    if not unit.numel:
        return [0] * (world_size + 1)
    edges = bucket_edges(unit).double()
    weights = spread.cpu().double() + _PRIOR * edges.diff() / edges.diff().mean()
    reached = torch.cat([torch.zeros(1, dtype=torch.float64), weights.cumsum(0)])
    wanted = torch.arange(1, world_size, dtype=torch.float64) / world_size * reached[-1]
    bucket = torch.searchsorted(reached, wanted, right=True).clamp(1, weights.numel()) - 1
    inside = (wanted - reached[bucket]) / weights[bucket]
    cuts = edges[bucket] + inside * (edges[bucket + 1] - edges[bucket])
    return [0, *cuts.round().long().tolist(), unit.numel]
