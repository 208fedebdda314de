"""Top-k of long groups by radix selection: many programs count the digits of the magnitudes of one group.

The 31 bits of a magnitude are looked at in four digits, the first of which is the exponent. Each round counts, per
group, the digits of those magnitudes that still agree with the cut-off, then fixes its next digit. What lies above the
cut-off is kept, and of what equals it as many as there are slots left, lowest index first. Nothing waits for the device.
"""

import torch
import triton.language as tl
from torch import Tensor

from thinwire.kernels.triton import launch
from thinwire.kernels.triton.launch import (
    TILE_ELEMS,
    compensated,
    kernel,
    magnitude_bits,
    magnitude_key,
    raise_flag,
    rank_of,
    write_payload,
)
from thinwire.kernels.triton.plans import LongGroups
from thinwire.kernels.triton.tiling import Tiling, tile_members_of

_BINS = 256
_LATER_DIGITS = ((15, 23), (7, 15), (0, 7))  # lowest bit, and the lowest bit of the digit before
_FIRST_SHIFT = 23


def long_topk(
    grad: Tensor,
    residual: Tensor | None,
    plan: LongGroups,
    values: Tensor,
    indices: Tensor,
    out: Tensor,
    nonfinite: Tensor,
) -> None:
    """Compensate, select and pack the long groups of a plan."""
    tiling = plan.tiling
    cutoffs, slots = _cutoffs(grad, residual, plan, out, nonfinite)
    counts = torch.zeros(2, tiling.tiles + 1, dtype=torch.int64, device=out.device)
    arguments = out, *tiling.tensors, cutoffs
    launch.run(_count_kept, tiling.tiles, out, *arguments, counts[0], counts[1], TILE=TILE_ELEMS)
    above_before, tied_before = counts.cumsum(1) - counts
    launch.run(
        _pack_kept,
        tiling.tiles,
        out,
        *arguments,
        slots,
        tiling.first_tiles,
        plan.entries,
        above_before,
        tied_before,
        values,
        indices,
        TILE=TILE_ELEMS,
    )


def _cutoffs(
    grad: Tensor, residual: Tensor | None, plan: LongGroups, out: Tensor, nonfinite: Tensor
) -> tuple[Tensor, Tensor]:
    """The smallest key that each group keeps, and how many of those that equal it."""
    tiling, groups = plan.tiling, len(plan.ks)
    histogram = torch.zeros(groups, _BINS, dtype=torch.int32, device=out.device)
    cutoffs = torch.zeros(groups, dtype=torch.int32, device=out.device)
    slots = plan.ks.to(torch.int32, copy=True)
    sources = grad, grad if residual is None else residual, out
    launch.run(
        _compensate_and_count_digits,
        tiling.tiles,
        out,
        *sources,
        *tiling.tensors,
        histogram,
        nonfinite,
        HAS_RESIDUAL=residual is not None,
        TILE=TILE_ELEMS,
        BINS=_BINS,
        SHIFT=_FIRST_SHIFT,
    )
    launch.run(_fix_digit, groups, out, histogram, cutoffs, slots, BINS=_BINS, SHIFT=_FIRST_SHIFT)
    for shift, shift_before in _LATER_DIGITS:
        _count_later_digit(tiling, out, histogram, cutoffs, shift, shift_before)
        launch.run(_fix_digit, groups, out, histogram, cutoffs, slots, BINS=_BINS, SHIFT=shift)
    return cutoffs, slots


def _count_later_digit(
    tiling: Tiling, out: Tensor, histogram: Tensor, cutoffs: Tensor, shift: int, shift_before: int
) -> None:
    histogram.zero_()
    arguments = out, *tiling.tensors, histogram, cutoffs
    constants = {"TILE": TILE_ELEMS, "BINS": _BINS, "SHIFT": shift, "SHIFT_BEFORE": shift_before}
    launch.run(_count_digits, tiling.tiles, out, *arguments, **constants)


@kernel
def _compensate_and_count_digits(
    grad: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    tile_groups: tl.tensor,
    tile_members: tl.tensor,
    starts: tl.tensor,
    strides: tl.tensor,
    lengths: tl.tensor,
    histogram: tl.tensor,
    nonfinite: tl.tensor,
    HAS_RESIDUAL: tl.constexpr,
    TILE: tl.constexpr,
    BINS: tl.constexpr,
    SHIFT: tl.constexpr,
) -> None:
    group, index, inside = tile_members_of(tile_groups, tile_members, starts, strides, lengths, TILE)
    unit = compensated(grad, residual, index, inside, HAS_RESIDUAL)
    tl.store(out + index, unit, mask=inside)
    raise_flag(nonfinite, magnitude_bits(unit))
    _add_digits(histogram + group * BINS, magnitude_key(unit) >> SHIFT, inside, TILE, BINS)


@kernel
def _count_digits(
    out: tl.tensor,
    tile_groups: tl.tensor,
    tile_members: tl.tensor,
    starts: tl.tensor,
    strides: tl.tensor,
    lengths: tl.tensor,
    histogram: tl.tensor,
    cutoffs: tl.tensor,
    TILE: tl.constexpr,
    BINS: tl.constexpr,
    SHIFT: tl.constexpr,
    SHIFT_BEFORE: tl.constexpr,
) -> None:
    group, index, inside = tile_members_of(tile_groups, tile_members, starts, strides, lengths, TILE)
    key = magnitude_key(tl.load(out + index, mask=inside, other=0.0))
    undecided = inside & ((key >> SHIFT_BEFORE) == (tl.load(cutoffs + group) >> SHIFT_BEFORE))
    digit = (key >> SHIFT) & ((1 << (SHIFT_BEFORE - SHIFT)) - 1)
    _add_digits(histogram + group * BINS, digit, undecided, TILE, BINS)


@kernel
def _add_digits(
    histogram: tl.tensor, digit: tl.tensor, counted: tl.tensor, TILE: tl.constexpr, BINS: tl.constexpr
) -> None:
    """Older Triton has no mask for histograms: what is not counted goes to bin 0 and is subtracted there."""
    bins = tl.arange(0, BINS)
    uncounted = TILE - tl.sum(counted.to(tl.int32), axis=0)
    counts = tl.histogram(tl.where(counted, digit, 0), BINS) - tl.where(bins == 0, uncounted, 0)
    tl.atomic_add(histogram + bins, counts, mask=counts > 0, sem="relaxed")


@kernel
def _fix_digit(
    histogram: tl.tensor, cutoffs: tl.tensor, slots: tl.tensor, BINS: tl.constexpr, SHIFT: tl.constexpr
) -> None:
    """The digit at which the counts, from the largest digit down, reach the slots left."""
    group = tl.program_id(0).to(tl.int64)
    digit = tl.arange(0, BINS)
    counts = tl.load(histogram + group * BINS + digit)
    wanted = tl.load(slots + group)
    reached = tl.cumsum(counts, axis=0, reverse=True)
    here = (reached >= wanted) & (reached - counts < wanted)
    fixed = tl.load(cutoffs + group) | (tl.sum(tl.where(here, digit, 0), axis=0) << SHIFT)
    # A group that keeps nothing gets a cut-off above every key.
    tl.store(cutoffs + group, tl.where(wanted > 0, fixed, 0x7FFFFFFF))
    tl.store(slots + group, wanted - tl.sum(tl.where(here, reached - counts, 0), axis=0))


@kernel
def _count_kept(
    out: tl.tensor,
    tile_groups: tl.tensor,
    tile_members: tl.tensor,
    starts: tl.tensor,
    strides: tl.tensor,
    lengths: tl.tensor,
    cutoffs: tl.tensor,
    above_counts: tl.tensor,
    tied_counts: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    group, index, inside = tile_members_of(tile_groups, tile_members, starts, strides, lengths, TILE)
    key = magnitude_key(tl.load(out + index, mask=inside, other=0.0))
    cutoff = tl.load(cutoffs + group)
    tl.store(above_counts + tl.program_id(0), tl.sum((inside & (key > cutoff)).to(tl.int32), axis=0))
    tl.store(tied_counts + tl.program_id(0), tl.sum((inside & (key == cutoff)).to(tl.int32), axis=0))


@kernel
def _pack_kept(
    out: tl.tensor,
    tile_groups: tl.tensor,
    tile_members: tl.tensor,
    starts: tl.tensor,
    strides: tl.tensor,
    lengths: tl.tensor,
    cutoffs: tl.tensor,
    slots: tl.tensor,
    first_tiles: tl.tensor,
    entries: tl.tensor,
    above_before: tl.tensor,
    tied_before: tl.tensor,
    values: tl.tensor,
    indices: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    group, index, inside = tile_members_of(tile_groups, tile_members, starts, strides, lengths, TILE)
    unit = tl.load(out + index, mask=inside, other=0.0)
    key, cutoff = magnitude_key(unit), tl.load(cutoffs + group)
    first = tl.load(first_tiles + group)
    above = tl.load(above_before + tl.program_id(0)) - tl.load(above_before + first)
    tied = tl.load(tied_before + tl.program_id(0)) - tl.load(tied_before + first)

    ties = inside & (key == cutoff)
    keep = (inside & (key > cutoff)) | (ties & (tied + rank_of(ties, 0) < tl.load(slots + group)))
    before = tl.load(entries + group) + above + tl.minimum(tied, tl.load(slots + group))
    write_payload(unit, keep, index, before + rank_of(keep, 0), values, indices)
    tl.store(out + index, tl.zeros_like(unit), mask=keep)
