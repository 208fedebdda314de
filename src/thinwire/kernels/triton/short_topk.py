"""Top-k of short groups: a program holds several whole groups in registers and finds their cut-offs bit by bit."""

import triton.language as tl
from torch import Tensor

from thinwire.kernels.triton import launch
from thinwire.kernels.triton.launch import (
    compensated,
    kernel,
    magnitude_bits,
    magnitude_key,
    raise_flag,
    rank_of,
    write_payload,
)
from thinwire.kernels.triton.plans import SHORT_TILE_ELEMS, ShortGroups

_WARPS = 8  # 16 elements per thread


def short_topk(
    grad: Tensor,
    residual: Tensor | None,
    plan: ShortGroups,
    strided: bool,
    values: Tensor,
    indices: Tensor,
    out: Tensor,
    nonfinite: Tensor,
) -> None:
    """Compensate, select and pack short groups of one width in one launch."""
    launch.run(
        _short_topk,
        len(plan.program_segments),
        grad,
        grad,
        grad if residual is None else residual,
        out,
        values,
        indices,
        nonfinite,
        plan.segments,
        plan.program_segments,
        plan.program_groups,
        HAS_RESIDUAL=residual is not None,
        STRIDED=strided,
        GROUPS=SHORT_TILE_ELEMS // plan.width_elems,
        WIDTH=plan.width_elems,
        num_warps=_WARPS,
    )


@kernel
def _short_topk(
    grad: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    values: tl.tensor,
    indices: tl.tensor,
    nonfinite: tl.tensor,
    segments: tl.tensor,
    program_segments: tl.tensor,
    program_groups: tl.tensor,
    HAS_RESIDUAL: tl.constexpr,
    STRIDED: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    segment = segments + 5 * tl.load(program_segments + tl.program_id(0))
    start, length, size, k = tl.load(segment), tl.load(segment + 1), tl.load(segment + 2), tl.load(segment + 3)
    group = tl.load(program_groups + tl.program_id(0)) + tl.arange(0, GROUPS)[:, None]
    member = tl.arange(0, WIDTH)[None, :]
    local, inside = _place(group, member, length, size, STRIDED)
    index = start + local

    unit = compensated(grad, residual, index, inside, HAS_RESIDUAL)
    raise_flag(nonfinite, magnitude_bits(unit))

    keep = _largest(tl.where(inside, magnitude_key(unit), -1), inside, k)
    position = tl.load(segment + 4) + _entries_before(group, length, size, k, STRIDED) + rank_of(keep, 1)
    write_payload(unit, keep, index, position, values, indices)
    tl.store(out + index, tl.where(keep, 0.0, unit), mask=inside)


@kernel
def _place(group: tl.tensor, member: tl.tensor, length: tl.tensor, size: tl.tensor, STRIDED: tl.constexpr) -> tl.tensor:
    """Positions of the members within the segment, and which of them exist."""
    if STRIDED:
        local = member * size + group
        inside = (group < size) & (local < length)
    else:
        local = group * size + member
        inside = (member < size) & (local < length)
    return local, inside


@kernel
def _entries_before(
    group: tl.tensor, length: tl.tensor, size: tl.tensor, k: tl.tensor, STRIDED: tl.constexpr
) -> tl.tensor:
    """How many entries the groups before this one keep; only the last row is short, only the first banks are long."""
    if STRIDED:
        kept = tl.minimum(k, length // size)
        before = group * kept + tl.minimum(group, length % size) * (tl.minimum(k, length // size + 1) - kept)
    else:
        before = group * tl.minimum(k, size)
    return before


@kernel
def _largest(keys: tl.tensor, inside: tl.tensor, k: tl.tensor) -> tl.tensor:
    """Mask of the k largest keys of every row of the tile, ties to the left; keys that do not exist are -1."""
    kept = tl.minimum(tl.sum(inside.to(tl.int32), axis=1, keep_dims=True), k)
    cutoff = tl.zeros_like(kept).to(tl.int32)
    for bit in range(31):
        candidate = cutoff | (1 << (30 - bit))
        reached = tl.sum((keys >= candidate).to(tl.int32), axis=1, keep_dims=True)
        cutoff = tl.where(reached >= kept, candidate, cutoff)
    above = keys > cutoff
    tied = (keys == cutoff) & inside
    slots = kept - tl.sum(above.to(tl.int32), axis=1, keep_dims=True)
    return above | (tied & (rank_of(tied, 1) < slots))
