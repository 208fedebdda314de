"""1 and 2 bits per value under the mean magnitude of a block."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.reference_coarse import LARGEST_SCALE, MEAN_LANES, SCALE_OF_MEAN
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
from thinwire.kernels.types import Coarse, Quantized

_LANES = tl.constexpr(MEAN_LANES)
_LARGEST_SCALE = tl.constexpr(LARGEST_SCALE)
_SMALLEST_NORMAL = tl.constexpr(2.0**-126)


def coarse_encode(bits: Coarse, grad: Tensor, residual: Tensor | None, block: int, out: Tensor) -> Quantized:
    """See `reference.coarse_encode`; waits for the device once, to tell whether all was finite."""
    numel = out.numel()
    codes = torch.empty(launch.tiles(numel * bits, 8), dtype=torch.uint8, device=out.device)
    scales = torch.empty(launch.tiles(numel, block), dtype=torch.bfloat16, device=out.device)
    nonfinite = launch.zero_flag(out)
    chunk = min(triton.next_power_of_2(block), TILE_ELEMS)
    blocks = TILE_ELEMS // chunk
    launch.run(
        _encode_coarse,
        launch.tiles(len(scales), blocks),
        out,
        grad,
        grad if residual is None else residual,
        out,
        codes,
        scales.view(torch.int16),
        nonfinite,
        numel,
        HAS_RESIDUAL=residual is not None,
        BITS=bits,
        SCALE_OF_MEAN=SCALE_OF_MEAN[bits],
        BLOCK=block,
        BLOCKS=blocks,
        CHUNK=chunk,
    )
    return Quantized(codes, scales, out, launch.is_unset(nonfinite))


def coarse_decode(
    bits: Coarse, codes: Tensor, scales: Tensor, block: int, weight: float, out: Tensor, accumulate: bool
) -> None:
    """See `reference.coarse_decode`."""
    arguments = codes, scales.view(torch.int16), out, float(weight), out.numel()
    constants = {"ACCUMULATE": accumulate, "BITS": bits, "BLOCK": block, "TILE": TILE_ELEMS}
    launch.run(_decode_coarse, launch.tiles(out.numel()), out, *arguments, **constants)


@kernel
def _encode_coarse(
    grad: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    nonfinite: tl.tensor,
    numel: tl.tensor,
    HAS_RESIDUAL: tl.constexpr,
    BITS: tl.constexpr,
    SCALE_OF_MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Two turns over each block: its mean, sixteen values at a time so that the order of additions is the reference's, then
    its codes, chunk by chunk; `out` may be an input, so written last."""
    PER_BYTE: tl.constexpr = 8 // BITS
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)[:, None]
    length = tl.maximum(tl.minimum(numel - block * BLOCK, BLOCK), 1).to(tl.float32)
    share = tl.div_rn(tl.full([BLOCKS, 1], 1.0, tl.float32), length)
    largest = tl.zeros([BLOCKS, 1], tl.int32)
    lanes = tl.zeros([BLOCKS, _LANES], tl.float32)
    for first in range(0, BLOCK, _LANES):
        index = block * BLOCK + first + tl.arange(0, _LANES)[None, :]
        unit = compensated(grad, residual, index, index < numel, HAS_RESIDUAL)
        largest = tl.maximum(largest, tl.max(magnitude_bits(unit), axis=1, keep_dims=True))
        lanes = lanes + tl.abs(unit) * share
    raise_flag(nonfinite, largest)
    poisoned = largest >= INFINITY_KEY
    scale = _mean_scale(_folded(lanes, BLOCKS) * SCALE_OF_MEAN, poisoned)
    bits = tl.where(poisoned, 0x7FC00000, scale.to(tl.int32, bitcast=True))
    tl.store(scales + block, (bits >> 16).to(tl.int16), mask=block * BLOCK < numel)
    for first in range(0, BLOCK, CHUNK):
        member = first + tl.arange(0, CHUNK)[None, :]
        index = block * BLOCK + member
        inside = (member < BLOCK) & (index < numel)
        unit = tl.where(poisoned, 0.0, compensated(grad, residual, index, inside, HAS_RESIDUAL))
        sign = unit.to(tl.int32, bitcast=True) & -2147483648
        far = tl.abs(unit) >= scale
        if BITS == 1:
            level = tl.where(inside, scale, 0.0)
            code = tl.where(sign != 0, 1, 0)
        else:
            level = tl.where(far, 1.5 * scale, 0.5 * scale)
            code = tl.where(sign != 0, 2, 0) | tl.where(far, 1, 0)
        signed = (level.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
        tl.store(out + index, unit - signed, mask=inside)
        code = tl.reshape(tl.where(inside, code, 0), [BLOCKS, CHUNK // PER_BYTE, PER_BYTE])
        packed = tl.sum(code << (BITS * tl.arange(0, PER_BYTE))[None, None, :], axis=2)
        opening = first + PER_BYTE * tl.arange(0, CHUNK // PER_BYTE)[None, :]
        index = block * BLOCK + opening
        tl.store(codes + index // PER_BYTE, packed.to(tl.uint8), mask=(opening < BLOCK) & (index < numel))


@kernel
def _folded(lanes: tl.tensor, BLOCKS: tl.constexpr) -> tl.tensor:
    """The sum of 16 lanes, each taking the one 8, then 4, 2 and 1 further on; `tl.sum` promises no order."""
    low, high = tl.split(tl.permute(tl.reshape(lanes, [BLOCKS, 2, 8]), [0, 2, 1]))
    low, high = tl.split(tl.permute(tl.reshape(low + high, [BLOCKS, 2, 4]), [0, 2, 1]))
    low, high = tl.split(tl.permute(tl.reshape(low + high, [BLOCKS, 2, 2]), [0, 2, 1]))
    low, high = tl.split(low + high)
    return tl.reshape(low + high, [BLOCKS, 1])


@kernel
def _mean_scale(mean: tl.tensor, poisoned: tl.tensor) -> tl.tensor:
    """The scaled mean rounded to what bf16 holds; 0 when that is subnormal or the block is not finite."""
    bits = tl.minimum(tl.where(poisoned, 0.0, mean), _LARGEST_SCALE).to(tl.int32, bitcast=True)
    scale = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return tl.where(scale < _SMALLEST_NORMAL, 0.0, scale)


@kernel
def _decode_coarse(
    codes: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    weight: tl.tensor,
    numel: tl.tensor,
    ACCUMULATE: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    PER_BYTE: tl.constexpr = 8 // BITS
    index = tile_index(TILE)
    inside = index < numel
    bits = tl.load(scales + index // BLOCK, mask=inside, other=0).to(tl.int32) << 16
    byte = tl.load(codes + index // PER_BYTE, mask=inside, other=0).to(tl.int32)
    code = byte >> (BITS * (index % PER_BYTE)).to(tl.int32)
    if BITS == 1:
        level = tl.where((code & 1) != 0, -1.0, 1.0)
    else:
        level = tl.where((code & 1) != 0, 1.5, 0.5)
        level = tl.where((code & 2) != 0, -level, level)
    decoded = level * bits.to(tl.float32, bitcast=True) * weight
    if ACCUMULATE:
        decoded = tl.load(out + index, mask=inside, other=0.0) + decoded
    tl.store(out + index, decoded, mask=inside)
