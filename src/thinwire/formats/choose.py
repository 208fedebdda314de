"""Which 4-bit grid, and how much clipping, suits a tensor best: tried on a sample, decided by the measured error."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from thinwire.core.spec import UnitSpec
from thinwire.formats import grids
from thinwire.formats.blocks import as_blocks

CLIPS = (1.0, 0.9, 0.8, 0.65)
CANDIDATES = tuple((grid, clip) for grid in range(len(grids.GRID_NAMES)) for clip in CLIPS)
SAMPLE_BLOCKS = 64  # per tensor; 4096 values tell grids apart that differ by a few per cent


def measured_errors(x: Tensor, unit: UnitSpec) -> Tensor:
    """Per tensor and candidate, the squared error relative to the squared norm, on blocks spread over the tensor.

    Being relative, ranks with small gradients count as much as others, and nothing underflows.
    """
    return torch.stack([_errors(part) for part in x.split(unit.sizes)])


def chosen(errors: Tensor, *, may_clip: bool) -> Tensor:
    """Per tensor, the candidate of the smallest error; the first of equals."""
    allowed = torch.tensor([may_clip or clip == 1.0 for _, clip in CANDIDATES], device=errors.device)
    return torch.where(allowed, errors.nan_to_num(nan=torch.inf), torch.inf).argmin(dim=1)


def per_block(choice: Tensor, unit: UnitSpec, blocks: int) -> tuple[Tensor, Tensor]:
    """Grid and clip of every block of a unit (padded to ``blocks``): those of the tensor in which the block starts."""
    starts = [-(-offset // grids.BLOCK) for offset in unit.offsets]
    starts[-1] = blocks
    counts = torch.tensor([after - before for before, after in pairwise(starts)])
    table = torch.tensor(CANDIDATES, device=choice.device)[choice.repeat_interleave(counts.to(choice.device))]
    return table[:, 0].long(), table[:, 1].contiguous()


def _errors(values: Tensor) -> Tensor:
    """Of one tensor, for every candidate; zeros for an empty one."""
    if not values.numel():
        return values.new_zeros(len(CANDIDATES))
    sample = _sample(values)
    energy = sample.square().sum().clamp(min=torch.finfo(torch.float32).tiny)
    one = torch.ones(1, device=values.device)
    tried = [
        grids.encode_mixed(sample.clone(), (one * grid).long(), one * clip).residual.square().sum()
        for grid, clip in CANDIDATES
    ]
    return torch.stack(tried) / energy


def _sample(values: Tensor) -> Tensor:
    """Evenly spread blocks, scaled to a largest magnitude of 1."""
    blocks = as_blocks(values, grids.BLOCK)
    sample = blocks[:: max(1, blocks.shape[0] // SAMPLE_BLOCKS)].reshape(-1)
    amax = sample.abs().amax()
    return sample / amax if bool(amax > 0) and bool(torch.isfinite(amax)) else torch.zeros_like(sample)
