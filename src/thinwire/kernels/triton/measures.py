"""Compensation, finiteness, and amax and moments per segment."""

import torch
import triton.language as tl
from torch import Tensor

from thinwire.kernels.reference import MOMENT_LANES
from thinwire.kernels.triton import launch
from thinwire.kernels.triton.launch import TILE_ELEMS, kernel, magnitude_bits, raise_flag, tile_index
from thinwire.kernels.triton.tiling import segment_tiling, tile_members_of

_MOMENT_ROWS = 8  # rows of lanes loaded per turn: loads run ahead of the additions, which must not be reordered


def compensate(
    grad: Tensor, residual: Tensor | None, decay: float, velocity: Tensor | None, momentum: float, out: Tensor
) -> bool:
    """See `reference.compensate`; waits for the device once, to tell whether all was finite."""
    nonfinite = launch.zero_flag(out)
    launch.run(
        _compensate,
        launch.tiles(out.numel()),
        out,
        grad,
        grad if residual is None else residual,
        grad if velocity is None else velocity,
        out,
        nonfinite,
        float(decay),
        float(momentum),
        out.numel(),
        HAS_RESIDUAL=residual is not None,
        HAS_VELOCITY=velocity is not None,
        TILE=TILE_ELEMS,
    )
    return launch.is_unset(nonfinite)


def all_finite(x: Tensor) -> bool:
    """See `reference.all_finite`; waits for the device once."""
    nonfinite = launch.zero_flag(x)
    launch.run(_look_for_nonfinite, launch.tiles(x.numel()), x, x, nonfinite, x.numel(), TILE=TILE_ELEMS)
    return launch.is_unset(nonfinite)


def segment_amax(x: Tensor, offsets: tuple[int, ...]) -> Tensor:
    """See `reference.segment_amax`; magnitudes are compared as integers, so atomics in any order agree."""
    tiling = segment_tiling(offsets, x)
    largest = torch.zeros(len(offsets) - 1, dtype=torch.int32, device=x.device)
    launch.run(_segment_amax, tiling.tiles, x, x, *tiling.tensors, largest, TILE=TILE_ELEMS)
    return largest.view(torch.float32)


def segment_moments(x: Tensor, offsets: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """See `reference.segment_moments`.

    One program per segment adds in the defined order. That keeps the bits, not the GPU busy: long segments take long.
    """
    tiling = segment_tiling(offsets, x)
    segments = len(offsets) - 1
    lanes = torch.empty(2, segments, MOMENT_LANES, dtype=torch.float64, device=x.device)
    arguments = x, tiling.starts, tiling.lengths, lanes[0], lanes[1]
    launch.run(_add_lanes, segments, x, *arguments, LANES=MOMENT_LANES, ROWS=_MOMENT_ROWS, num_warps=1)
    while lanes.shape[2] > 1:
        lower, upper = lanes.chunk(2, dim=2)
        lanes = lower + upper
    sums, squares = lanes.squeeze(2)
    return sums, squares


@kernel
def _compensate(
    grad: tl.tensor,
    residual: tl.tensor,
    velocity: tl.tensor,
    out: tl.tensor,
    nonfinite: tl.tensor,
    decay: tl.tensor,
    momentum: tl.tensor,
    numel: tl.tensor,
    HAS_RESIDUAL: tl.constexpr,
    HAS_VELOCITY: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    index = tile_index(TILE)
    inside = index < numel
    unit = tl.load(grad + index, mask=inside, other=0.0)
    if HAS_VELOCITY:
        unit = tl.load(velocity + index, mask=inside, other=0.0) * momentum + unit
        tl.store(velocity + index, unit, mask=inside)
    if HAS_RESIDUAL:
        unit = tl.load(residual + index, mask=inside, other=0.0) * decay + unit
    tl.store(out + index, unit, mask=inside)
    raise_flag(nonfinite, magnitude_bits(unit))


@kernel
def _look_for_nonfinite(x: tl.tensor, nonfinite: tl.tensor, numel: tl.tensor, TILE: tl.constexpr) -> None:
    index = tile_index(TILE)
    raise_flag(nonfinite, magnitude_bits(tl.load(x + index, mask=index < numel, other=0.0)))


@kernel
def _segment_amax(
    x: tl.tensor,
    tile_groups: tl.tensor,
    tile_members: tl.tensor,
    starts: tl.tensor,
    strides: tl.tensor,
    lengths: tl.tensor,
    largest: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    segment, index, inside = tile_members_of(tile_groups, tile_members, starts, strides, lengths, TILE)
    bits = magnitude_bits(tl.load(x + index, mask=inside, other=0.0))
    tl.atomic_max(largest + segment, tl.max(bits, axis=0), sem="relaxed")


@kernel
def _add_lanes(
    x: tl.tensor,
    starts: tl.tensor,
    lengths: tl.tensor,
    sums: tl.tensor,
    squares: tl.tensor,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    segment = tl.program_id(0).to(tl.int64)
    start, length = tl.load(starts + segment), tl.load(lengths + segment)
    lane = tl.arange(0, LANES)
    lane_sums = tl.zeros([LANES], tl.float64)
    lane_squares = tl.zeros([LANES], tl.float64)
    for first in range(0, length, LANES * ROWS):
        for row in tl.static_range(ROWS):
            member = first + row * LANES + lane
            element = tl.load(x + start + member, mask=member < length, other=0.0).to(tl.float64)
            lane_sums += element
            lane_squares += element * element
    tl.store(sums + segment * LANES + lane, lane_sums)
    tl.store(squares + segment * LANES + lane, lane_squares)
