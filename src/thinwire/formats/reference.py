"""The slow, obvious twin of every block-scaled format: the nearest entry of a table, found by searching it in fp64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.formats import floats, fp8, grids
from thinwire.formats.blocks import as_blocks, bf16_scales_above, power_of_two_scales


@dataclass(frozen=True)
class Table:
    """What a format can write.

    Args:
        magnitudes: all of them, ascending from 0, for a scale of 1.
        power_of_two: scales are powers of two; otherwise bfloat16, rounded up.
        ties_to_even: a value in the middle goes to the even entry; otherwise to the larger one.
    """

    magnitudes: Sequence[float]
    block: int
    power_of_two: bool
    ties_to_even: bool


def table_of(name: str) -> Table:
    """The table of a block-scaled format that is written in torch (``int8`` and ``int4`` have their own reference)."""
    cpu = torch.device("cpu")
    if name == "fp16":
        return Table(floats.fp16_table(cpu)[: 1 << 15].tolist(), floats.FP16_BLOCK, True, True)
    if name in grids.GRIDS:
        return Table(grids.GRIDS[name], grids.BLOCK, False, False)
    variant = {"fp8": fp8.E4M3, "fp8_e5m2": fp8.E5M2}[name]
    magnitudes = fp8.table(variant, cpu)[:128]
    return Table(magnitudes[torch.isfinite(magnitudes)].tolist(), fp8.BLOCK, True, True)


def round_trip(x: Tensor, table: Table) -> Tensor:
    """``x`` encoded and decoded again."""
    blocks = as_blocks(x, table.block)
    amax, largest = blocks.abs().amax(dim=1), table.magnitudes[-1]
    scales = power_of_two_scales(amax, largest) if table.power_of_two else bf16_scales_above(amax * (1.0 / largest))
    decoded = torch.stack([_nearest(row, scale, table) for row, scale in zip(blocks, scales, strict=True)])
    return decoded.view(-1)[: x.numel()].float()


def _nearest(values: Tensor, scale: Tensor, table: Table) -> Tensor:
    """The nearest table entries to ``values / scale``, times ``scale``; NaN for a block that is not finite."""
    if not scale > 0:
        return torch.full_like(values, torch.nan if torch.isnan(scale) else 0.0, dtype=torch.float64)
    magnitudes = torch.tensor(table.magnitudes, dtype=torch.float64)
    sizes = (values * (1.0 / scale)).abs().double()
    above = torch.searchsorted(magnitudes, sizes).clamp(1, len(magnitudes) - 1)
    up, down = magnitudes[above] - sizes, sizes - magnitudes[above - 1]
    tie_up = above % 2 == 0 if table.ties_to_even else torch.ones_like(above, dtype=torch.bool)
    chosen = torch.where((up < down) | ((up == down) & tie_up), above, above - 1)
    return magnitudes[chosen] * values.sign() * scale
