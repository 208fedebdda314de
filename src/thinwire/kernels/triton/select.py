"""Top-k and threshold selection with error feedback."""

from itertools import pairwise

import torch
import triton.language as tl
from torch import Tensor

from thinwire.kernels.triton import launch
from thinwire.kernels.triton.launch import (
    TILE_ELEMS,
    compensated,
    kernel,
    magnitude_bits,
    raise_flag,
    rank_of,
    write_payload,
)
from thinwire.kernels.triton.long_topk import long_topk
from thinwire.kernels.triton.plans import TopkPlan, bank_plan, row_plan
from thinwire.kernels.triton.short_topk import short_topk
from thinwire.kernels.triton.tiling import segment_tiling, tile_members_of
from thinwire.kernels.types import Selected


def ef_topk(
    grad: Tensor, residual: Tensor | None, offsets: tuple[int, ...], ks: tuple[int, ...], out: Tensor
) -> Selected:
    """See `reference.ef_topk`; a segment is one row."""
    lengths = tuple(max(1, stop - start) for start, stop in pairwise(offsets))
    return row_topk(grad, residual, offsets, lengths, ks, out)


def row_topk(
    grad: Tensor,
    residual: Tensor | None,
    offsets: tuple[int, ...],
    row_lengths: tuple[int, ...],
    ks: tuple[int, ...],
    out: Tensor,
) -> Selected:
    """See `reference.row_topk`; waits for the device once, to tell whether all was finite."""
    return _topk(grad, residual, row_plan(offsets, row_lengths, ks, grad), False, out)


def bank_topk(
    grad: Tensor, residual: Tensor | None, offsets: tuple[int, ...], banks: tuple[int, ...], k: int, out: Tensor
) -> Selected:
    """See `reference.bank_topk`; waits for the device once, to tell whether all was finite."""
    return _topk(grad, residual, bank_plan(offsets, banks, k, grad), True, out)


def _topk(grad: Tensor, residual: Tensor | None, plan: TopkPlan, strided: bool, out: Tensor) -> Selected:
    values, indices = _payload(sum(plan.counts), out)
    nonfinite = launch.zero_flag(out)
    for groups in plan.short:
        short_topk(grad, residual, groups, strided, values, indices, out, nonfinite)
    if plan.long:
        long_topk(grad, residual, plan.long, values, indices, out, nonfinite)
    return Selected(values, indices, plan.counts, out, launch.is_unset(nonfinite))


def ef_threshold_pack(
    grad: Tensor, residual: Tensor | None, offsets: tuple[int, ...], thresholds: tuple[float, ...], out: Tensor
) -> Selected:
    """See `reference.ef_threshold_pack`.

    Two passes, because the payload's size has to reach the host before it can be allocated: that is the one wait.
    """
    tiling = segment_tiling(offsets, grad)
    # Pinned memory lets the copy queue up behind running kernels instead of waiting for them.
    limits = torch.tensor(thresholds, dtype=torch.float32, pin_memory=out.is_cuda).to(out.device, non_blocking=True)
    counts = torch.zeros(tiling.tiles + 1, dtype=torch.int64, device=out.device)
    nonfinite = launch.zero_flag(out)
    launch.run(
        _compensate_and_count,
        tiling.tiles,
        out,
        grad,
        grad if residual is None else residual,
        out,
        *tiling.tensors,
        limits,
        counts,
        nonfinite,
        HAS_RESIDUAL=residual is not None,
        TILE=TILE_ELEMS,
    )
    before = counts.cumsum(0) - counts
    *ends, not_finite = torch.cat((before[tiling.first_tiles], nonfinite)).tolist()
    values, indices = _payload(ends[-1], out)
    arguments = out, *tiling.tensors, limits, before, values, indices
    launch.run(_pack_above, tiling.tiles, out, *arguments, TILE=TILE_ELEMS)
    per_segment = tuple(stop - start for start, stop in pairwise(ends))
    return Selected(values, indices, per_segment, out, not not_finite)


def _payload(entries: int, like: Tensor) -> tuple[Tensor, Tensor]:
    values = torch.empty(entries, dtype=torch.float32, device=like.device)
    return values, torch.empty(entries, dtype=torch.int32, device=like.device)


@kernel
def _compensate_and_count(
    grad: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    tile_groups: tl.tensor,
    tile_members: tl.tensor,
    starts: tl.tensor,
    strides: tl.tensor,
    lengths: tl.tensor,
    limits: tl.tensor,
    counts: tl.tensor,
    nonfinite: tl.tensor,
    HAS_RESIDUAL: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    segment, index, inside = tile_members_of(tile_groups, tile_members, starts, strides, lengths, TILE)
    unit = compensated(grad, residual, index, inside, HAS_RESIDUAL)
    tl.store(out + index, unit, mask=inside)
    raise_flag(nonfinite, magnitude_bits(unit))
    keep = inside & (tl.abs(unit) > tl.load(limits + segment))
    tl.store(counts + tl.program_id(0), tl.sum(keep.to(tl.int32), axis=0))


@kernel
def _pack_above(
    out: tl.tensor,
    tile_groups: tl.tensor,
    tile_members: tl.tensor,
    starts: tl.tensor,
    strides: tl.tensor,
    lengths: tl.tensor,
    limits: tl.tensor,
    before: tl.tensor,
    values: tl.tensor,
    indices: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    segment, index, inside = tile_members_of(tile_groups, tile_members, starts, strides, lengths, TILE)
    unit = tl.load(out + index, mask=inside, other=0.0)
    keep = inside & (tl.abs(unit) > tl.load(limits + segment))
    write_payload(unit, keep, index, tl.load(before + tl.program_id(0)) + rank_of(keep, 0), values, indices)
    tl.store(out + index, tl.zeros_like(unit), mask=keep)
