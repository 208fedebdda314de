"""Block-scaled int8 and 4-bit codes."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.reference import INT4_LIMIT, INT8_LIMIT
from thinwire.kernels.triton import launch
from thinwire.kernels.triton.launch import (
    INFINITY_KEY,
    TILE_ELEMS,
    compensated,
    kernel,
    magnitude_bits,
    raise_flag,
    tile_index,
)
from thinwire.kernels.types import Quantized

_SMALLEST_NORMAL = tl.constexpr(2.0**-126)
_ROUNDER = tl.constexpr(2.0**23)  # adding it to a number in 0..2^22 leaves no bits behind the point: ties to even


def int8_encode(grad: Tensor, residual: Tensor | None, block: int, out: Tensor) -> Quantized:
    """See `reference.int8_encode`; waits for the device once, to tell whether all was finite."""
    codes = torch.empty(out.numel(), dtype=torch.int8, device=out.device)
    scales = torch.empty(launch.tiles(out.numel(), block), dtype=torch.float32, device=out.device)
    finite = _encode(grad, residual, block, out, codes, scales, INT8_LIMIT)
    return Quantized(codes, scales, out, finite)


def int4_encode(grad: Tensor, residual: Tensor | None, block: int, out: Tensor) -> Quantized:
    """See `reference.int4_encode`; waits for the device once, to tell whether all was finite."""
    codes = torch.empty((out.numel() + 1) // 2, dtype=torch.uint8, device=out.device)
    scales = torch.empty(launch.tiles(out.numel(), block), dtype=torch.bfloat16, device=out.device)
    finite = _encode(grad, residual, block, out, codes, scales.view(torch.int16), INT4_LIMIT)
    return Quantized(codes, scales, out, finite)


def int8_decode(codes: Tensor, scales: Tensor, block: int, weight: float, out: Tensor, accumulate: bool) -> None:
    """See `reference.int8_decode`."""
    _decode(codes, scales, block, weight, out, accumulate, int4=False)


def int4_decode(codes: Tensor, scales: Tensor, block: int, weight: float, out: Tensor, accumulate: bool) -> None:
    """See `reference.int4_decode`."""
    _decode(codes, scales.view(torch.int16), block, weight, out, accumulate, int4=True)


def _encode(
    grad: Tensor, residual: Tensor | None, block: int, out: Tensor, codes: Tensor, scales: Tensor, limit: int
) -> bool:
    nonfinite = launch.zero_flag(out)
    chunk = min(triton.next_power_of_2(block), TILE_ELEMS)
    blocks = TILE_ELEMS // chunk
    launch.run(
        _encode_blocks,
        launch.tiles(len(scales), blocks),
        out,
        grad,
        grad if residual is None else residual,
        out,
        codes,
        scales,
        nonfinite,
        out.numel(),
        HAS_RESIDUAL=residual is not None,
        LIMIT=limit,
        INT4=limit == INT4_LIMIT,
        BLOCK=block,
        BLOCKS=blocks,
        CHUNK=chunk,
    )
    return launch.is_unset(nonfinite)


def _decode(
    codes: Tensor, scales: Tensor, block: int, weight: float, out: Tensor, accumulate: bool, *, int4: bool
) -> None:
    arguments = codes, scales, out, float(weight), out.numel()
    constants = {"ACCUMULATE": accumulate, "INT4": int4, "BLOCK": block, "TILE": TILE_ELEMS}
    launch.run(_decode_tile, launch.tiles(out.numel()), out, *arguments, **constants)


@kernel
def _encode_blocks(
    grad: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    nonfinite: tl.tensor,
    numel: tl.tensor,
    HAS_RESIDUAL: tl.constexpr,
    LIMIT: tl.constexpr,
    INT4: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Two turns over each block, chunk by chunk: its amax, then its codes; `out` may be an input, so written last."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)[:, None]
    largest = tl.zeros([BLOCKS, 1], tl.int32)
    for first in range(0, BLOCK, CHUNK):
        member = first + tl.arange(0, CHUNK)[None, :]
        index = block * BLOCK + member
        inside = (member < BLOCK) & (index < numel)
        bits = magnitude_bits(compensated(grad, residual, index, inside, HAS_RESIDUAL))
        largest = tl.maximum(largest, tl.max(bits, axis=1, keep_dims=True))
    raise_flag(nonfinite, largest)
    poisoned = largest >= INFINITY_KEY
    scale = _scale(largest, poisoned, LIMIT, INT4)
    _store_scale(scales + block, scale, poisoned, block * BLOCK < numel, INT4)
    # The divisor 1 stands in for zero scales, whose inverse is not used.
    inverse = tl.where(
        scale > 0, tl.div_rn(tl.full([BLOCKS, 1], 1.0, tl.float32), tl.where(scale > 0, scale, 1.0)), 0.0
    )
    for first in range(0, BLOCK, CHUNK):
        member = first + tl.arange(0, CHUNK)[None, :]
        index = block * BLOCK + member
        inside = (member < BLOCK) & (index < numel)
        unit = compensated(grad, residual, index, inside, HAS_RESIDUAL)
        unit = tl.where(poisoned, 0.0, unit)
        code = _round(unit * inverse, LIMIT)
        tl.store(out + index, unit - code * scale, mask=inside)
        if INT4:
            _store_nibbles(codes, code, block, first, numel, BLOCK, BLOCKS, CHUNK)
        else:
            tl.store(codes + index, code.to(tl.int8), mask=inside)


@kernel
def _scale(largest: tl.tensor, poisoned: tl.tensor, LIMIT: tl.constexpr, INT4: tl.constexpr) -> tl.tensor:
    """`amax / LIMIT`, for int4 rounded to what bf16 holds; 0 when that is subnormal or the block is not finite."""
    amax = tl.where(poisoned, 0, largest).to(tl.float32, bitcast=True)
    scale = tl.div_rn(amax, tl.full(amax.shape, LIMIT, tl.float32))  # `/` may be off by two units in the last place
    if INT4:
        bits = scale.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        scale = bits.to(tl.float32, bitcast=True)
    return tl.where(scale < _SMALLEST_NORMAL, 0.0, scale)


@kernel
def _store_scale(
    target: tl.tensor, scale: tl.tensor, poisoned: tl.tensor, inside: tl.tensor, INT4: tl.constexpr
) -> None:
    """The scale, or NaN; int4 stores the upper half of the bits, which is bf16."""
    bits = tl.where(poisoned, 0x7FC00000, scale.to(tl.int32, bitcast=True))
    if INT4:
        tl.store(target, (bits >> 16).to(tl.int16), mask=inside)
    else:
        tl.store(target, bits.to(tl.float32, bitcast=True), mask=inside)


@kernel
def _round(scaled: tl.tensor, LIMIT: tl.constexpr) -> tl.tensor:
    """The nearest integer in -LIMIT..LIMIT as a float, ties to even; keeps the sign of zero, which the residual shows."""
    magnitude = tl.minimum((tl.abs(scaled) + _ROUNDER) - _ROUNDER, LIMIT * 1.0)
    sign = scaled.to(tl.int32, bitcast=True) & -2147483648
    return (magnitude.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@kernel
def _store_nibbles(
    codes: tl.tensor,
    code: tl.tensor,
    block: tl.tensor,
    first: tl.tensor,
    numel: tl.tensor,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Two codes per byte, low nibble first, each as code + 8; blocks are even, so no pair spans two of them."""
    nibbles = (code + 8.0).to(tl.int32)
    low, high = tl.split(tl.reshape(nibbles, [BLOCKS, CHUNK // 2, 2]))
    member = first + 2 * tl.arange(0, CHUNK // 2)[None, :]
    index = block * BLOCK + member
    tl.store(codes + index // 2, (low | (high << 4)).to(tl.uint8), mask=(member < BLOCK) & (index < numel))


@kernel
def _decode_tile(
    codes: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    weight: tl.tensor,
    numel: tl.tensor,
    ACCUMULATE: tl.constexpr,
    INT4: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    index = tile_index(TILE)
    inside = index < numel
    scale = tl.load(scales + index // BLOCK, mask=inside, other=0)
    if INT4:
        byte = tl.load(codes + index // 2, mask=inside, other=0).to(tl.int32)
        code = ((byte >> (4 * (index % 2)).to(tl.int32)) & 15) - 8
        scale = (scale.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        code = tl.load(codes + index, mask=inside, other=0)
    decoded = code.to(tl.float32) * scale * weight
    if ACCUMULATE:
        decoded = tl.load(out + index, mask=inside, other=0.0) + decoded
    tl.store(out + index, decoded, mask=inside)
