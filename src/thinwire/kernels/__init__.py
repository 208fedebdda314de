"""Kernels over flat units of one or many segments: compensate, select, pack, quantise, scatter.

Each function takes flat tensors (fp16, bf16 and strided ones are converted first), segment bounds `offsets` (S + 1
ascending positions) and writes the new residual to `out`: None makes a new tensor, `grad` or `residual` itself works in
place. Semantics are defined by `thinwire.kernels.reference`; faster kernels equal it bit for bit. No autograd.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.core import memory
from thinwire.kernels import check
from thinwire.kernels.codings import (
    NarrowLayout,
    bank_layout,
    crc32,
    crc32_rows,
    pack_bits,
    pack_narrow_indices,
    row_layout,
    unpack_bits,
    unpack_narrow_indices,
)
from thinwire.kernels.dispatch import backend, kernels_for
from thinwire.kernels.types import Bits, Coarse, Quantized, Selected

__all__ = [
    "Bits",
    "Coarse",
    "NarrowLayout",
    "Quantized",
    "Selected",
    "all_finite",
    "backend",
    "bank_layout",
    "bank_topk",
    "coarse_decode",
    "coarse_encode",
    "compensate",
    "crc32",
    "crc32_rows",
    "decode_rows",
    "ef_threshold_pack",
    "ef_topk",
    "encode_rows",
    "int4_decode",
    "int4_encode",
    "int8_decode",
    "int8_encode",
    "pack_bits",
    "pack_narrow_indices",
    "row_layout",
    "row_topk",
    "scatter_mean",
    "segment_amax",
    "segment_moments",
    "sum_rows",
    "unpack_bits",
    "unpack_narrow_indices",
]


def compensate(
    grad: Tensor,
    residual: Tensor | None,
    *,
    decay: float = 1.0,
    velocity: Tensor | None = None,
    momentum: float = 0.0,
    out: Tensor | None = None,
) -> tuple[Tensor, bool]:
    """`c = decay * residual + grad`, and whether c is finite.

    With `velocity` (updated in place) the gradient is replaced by `velocity = momentum * velocity + grad`, the momentum
    correction of Deep Gradient Compression (Lin et al. 2018, section 3.1).
    """
    grad, residual, out = check.unit(grad, residual, out)
    if velocity is not None:
        check.writable_fp32(velocity, grad.numel(), "velocity")
    return out, kernels_for(grad.device.type).compensate(grad, residual, decay, velocity, momentum, out)


def ef_topk(
    grad: Tensor, residual: Tensor | None, offsets: Sequence[int], ks: Sequence[int], *, out: Tensor | None = None
) -> Selected:
    """Exactly the `ks[s]` largest magnitudes of each segment of `grad + residual`, in ascending index order.

    Ties go to the lowest index. A NaN counts as larger than infinity, and `finite` tells.
    """
    grad, residual, out = check.unit(grad, residual, out)
    bounds = check.segments(offsets, grad.numel())
    return kernels_for(grad.device.type).ef_topk(grad, residual, bounds, check.topk_counts(ks, bounds), out)


def ef_threshold_pack(
    grad: Tensor,
    residual: Tensor | None,
    offsets: Sequence[int],
    thresholds: Sequence[float],
    *,
    out: Tensor | None = None,
) -> Selected:
    """What exceeds `thresholds[s]` in magnitude in each segment of `grad + residual`, in ascending index order.

    A NaN is never selected: it stays in the residual, and `finite` tells.
    """
    grad, residual, out = check.unit(grad, residual, out)
    bounds = check.segments(offsets, grad.numel())
    limits = check.thresholds(thresholds, bounds)
    return kernels_for(grad.device.type).ef_threshold_pack(grad, residual, bounds, limits, out)


def row_topk(
    grad: Tensor,
    residual: Tensor | None,
    offsets: Sequence[int],
    row_lengths: Sequence[int],
    ks: Sequence[int],
    *,
    out: Tensor | None = None,
) -> Selected:
    """The `ks[s]` largest magnitudes of every row (of `row_lengths[s]`) of segment s, in ascending index order.

    A short last row keeps `min(ks[s], its length)`.
    """
    grad, residual, out = check.unit(grad, residual, out)
    bounds = check.segments(offsets, grad.numel())
    lengths = check.groupings(row_lengths, bounds, "row_lengths")
    counts = check.per_segment(ks, bounds, "ks")
    return kernels_for(grad.device.type).row_topk(grad, residual, bounds, lengths, counts, out)


def bank_topk(
    grad: Tensor,
    residual: Tensor | None,
    offsets: Sequence[int],
    banks: Sequence[int],
    k: int,
    *,
    out: Tensor | None = None,
) -> Selected:
    """The `min(k, bank length)` largest magnitudes of every bank; element i of segment s is in bank `i % banks[s]`.

    Entries come bank by bank, ascending inside a bank.
    """
    grad, residual, out = check.unit(grad, residual, out)
    bounds = check.segments(offsets, grad.numel())
    bank_counts = check.groupings(banks, bounds, "banks")
    if k < 0:
        raise ValueError(f"k: got {k}, expected no negative number")
    return kernels_for(grad.device.type).bank_topk(grad, residual, bounds, bank_counts, k, out)


def scatter_mean(
    payloads: Sequence[tuple[Tensor, Tensor]], numel: int, *, world_size: int, out: Tensor | None = None
) -> Tensor:
    """The mean over ranks of sparse payloads `(values fp32, indices int32)` as a dense tensor of `numel` elements."""
    if world_size < 1:
        raise ValueError(f"world_size: got {world_size}, expected at least 1")
    if out is None:
        device = payloads[0][0].device if payloads else torch.device("cpu")
        out = memory.empty(numel, device=device)
    check.writable_fp32(out, numel, "out")
    check.sparse_payloads(payloads, out)
    kernels_for(out.device.type).scatter_mean(payloads, world_size, out)
    return out


def int8_encode(grad: Tensor, residual: Tensor | None, *, block: int = 256, out: Tensor | None = None) -> Quantized:
    """`grad + residual` as int8 codes with one fp32 scale per `block` values."""
    grad, residual, out = check.unit(grad, residual, out)
    return kernels_for(grad.device.type).int8_encode(grad, residual, check.block_size(block), out)


def int8_decode(
    codes: Tensor,
    scales: Tensor,
    numel: int,
    *,
    block: int = 256,
    weight: float = 1.0,
    out: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:
    """`code * scale * weight` as fp32, written to `out` or, with `accumulate`, added to it."""
    out = _decode_target(codes, numel, out, accumulate)
    check.codes_and_scales(codes, scales, 8, block, out)
    kernels_for(out.device.type).int8_decode(codes, scales, block, weight, out, accumulate)
    return out


def int4_encode(grad: Tensor, residual: Tensor | None, *, block: int = 64, out: Tensor | None = None) -> Quantized:
    """`grad + residual` as 4-bit codes, two per byte, with one bf16 scale per `block` values."""
    grad, residual, out = check.unit(grad, residual, out)
    return kernels_for(grad.device.type).int4_encode(grad, residual, check.block_size(block), out)


def int4_decode(
    codes: Tensor,
    scales: Tensor,
    numel: int,
    *,
    block: int = 64,
    weight: float = 1.0,
    out: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:
    """`code * scale * weight` as fp32, written to `out` or, with `accumulate`, added to it."""
    out = _decode_target(codes, numel, out, accumulate)
    check.codes_and_scales(codes, scales, 4, block, out)
    kernels_for(out.device.type).int4_decode(codes, scales, block, weight, out, accumulate)
    return out


def coarse_encode(
    grad: Tensor, residual: Tensor | None, *, bits: Coarse, block: int = 64, out: Tensor | None = None
) -> Quantized:
    """`grad + residual` in 1 or 2 bits per value, with one bf16 scale per `block` values, from their mean
    magnitude."""
    grad, residual, out = check.unit(grad, residual, out)
    return kernels_for(grad.device.type).coarse_encode(bits, grad, residual, check.block_size(block), out)


def coarse_decode(
    codes: Tensor,
    scales: Tensor,
    numel: int,
    *,
    bits: Coarse,
    block: int = 64,
    weight: float = 1.0,
    out: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:
    """`level * scale * weight` as fp32, written to `out` or, with `accumulate`, added to it."""
    out = _decode_target(codes, numel, out, accumulate)
    check.codes_and_scales(codes, scales, bits, block, out)
    kernels_for(out.device.type).coarse_decode(bits, codes, scales, block, weight, out, accumulate)
    return out


def encode_rows(
    grad: Tensor, residual: Tensor | None, messages: Tensor, *, bits: Bits, block: int, out: Tensor | None = None
) -> tuple[Tensor, bool]:
    """`grad + residual` in equal parts, one per row of `messages` (uint8): codes of `bits`, then scales, as
    `int8_encode`, `int4_encode` and `coarse_encode` write them. The rounding error, and whether all was finite."""
    grad, residual, out = check.unit(grad, residual, out)
    check.rows(messages, grad.numel(), bits, check.block_size(block), grad)
    return out, kernels_for(grad.device.type).encode_rows(bits, grad, residual, block, messages, out)


def decode_rows(messages: Tensor, out: Tensor, *, bits: Bits, block: int) -> Tensor:
    """The values of all rows that `encode_rows` wrote, one row behind the other."""
    check.rows(messages, out.numel(), bits, check.block_size(block), check.writable_fp32(out, out.numel(), "out"))
    kernels_for(out.device.type).decode_rows(bits, messages, block, out)
    return out


def sum_rows(messages: Tensor, out: Tensor, *, bits: Bits, block: int, weight: float = 1.0) -> Tensor:
    """The sum over the rows of `weight` times their values, added in the order of the rows."""
    check.writable_fp32(out, out.numel(), "out")
    check.rows(messages, len(messages) * out.numel(), bits, check.block_size(block), out)
    kernels_for(out.device.type).sum_rows(bits, messages, block, weight, out)
    return out


def segment_amax(x: Tensor, offsets: Sequence[int]) -> Tensor:
    """The largest magnitude of every segment, fp32; 0 when it is empty, NaN when it holds one."""
    x = check.flat_fp32(x, "x")
    return kernels_for(x.device.type).segment_amax(x, check.segments(offsets, x.numel()))


def segment_moments(x: Tensor, offsets: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The sum and the sum of squares of every segment, fp64, added in an order that every backend keeps."""
    x = check.flat_fp32(x, "x")
    return kernels_for(x.device.type).segment_moments(x, check.segments(offsets, x.numel()))


def all_finite(x: Tensor) -> bool:
    """Whether `x` holds neither NaN nor infinity."""
    x = check.flat_fp32(x, "x")
    return kernels_for(x.device.type).all_finite(x)


def _decode_target(codes: Tensor, numel: int, out: Tensor | None, accumulate: bool) -> Tensor:
    if out is not None:
        return check.writable_fp32(out, numel, "out")
    if accumulate:
        raise ValueError("out: got None with accumulate=True, expected the tensor to add to")
    return memory.empty(numel, device=codes.device)
