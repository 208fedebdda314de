"""Cheap checks that turn what callers pass into what kernels may rely on."""

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from thinwire.kernels.rows import CODE_DTYPES, SCALE_DTYPES, row_bytes
from thinwire.kernels.types import Bits

MAX_ELEMS = 2**31 - 1


def flat_fp32(x: Tensor, name: str) -> Tensor:
    """`x` as a contiguous 1-D fp32 tensor: itself when it already is one, else a converted copy."""
    if x.dtype is torch.float32 and x.dim() == 1 and x.is_contiguous():
        fitting = x.detach() if x.requires_grad else x
    else:
        if not x.is_floating_point() or x.dtype is torch.float64:
            raise ValueError(f"{name}: got dtype {x.dtype}, expected float32, float16 or bfloat16; convert it first")
        fitting = x.detach().to(torch.float32).reshape(-1).contiguous()
    if fitting.numel() > MAX_ELEMS:
        raise ValueError(
            f"{name}: got {fitting.numel()} elements, expected at most {MAX_ELEMS} because indices are int32; "
            "split it into several units"
        )
    return fitting


def writable_fp32(x: Tensor, numel: int, name: str) -> Tensor:
    """`x` itself, after checking that a kernel can write `numel` fp32 values straight into it."""
    if x.dtype is not torch.float32 or x.dim() != 1 or x.numel() != numel or not x.is_contiguous():
        raise ValueError(
            f"{name}: got {x.dtype} of shape {tuple(x.shape)}, strides {x.stride()}, expected a contiguous 1-D float32 "
            f"tensor of {numel} elements, since it is written in place; pass None to get a new tensor"
        )
    return x


def unit(grad: Tensor, residual: Tensor | None, out: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
    """The three buffers of an error-feedback kernel, normalised; a missing `out` is allocated."""
    grad = flat_fp32(grad, "grad")
    numel = grad.numel()
    if residual is not None:
        residual = flat_fp32(residual, "residual")
        if residual.numel() != numel:
            raise ValueError(f"residual: got {residual.numel()} elements, expected {numel}, as many as grad has")
        on_device(residual, grad, "residual")
    if out is None:
        return grad, residual, torch.empty_like(grad)
    writable_fp32(out, numel, "out")
    on_device(out, grad, "out")
    _check_overlap(out, grad, "grad")
    if residual is not None:
        _check_overlap(out, residual, "residual")
    return grad, residual, out


def segments(offsets: Sequence[int], numel: int) -> tuple[int, ...]:
    """`offsets` as a tuple, after checking that they ascend from 0 to `numel`."""
    return _checked_segments(offsets if isinstance(offsets, tuple) else tuple(offsets), numel)


def per_segment(values: Sequence[int], bounds: tuple[int, ...], name: str) -> tuple[int, ...]:
    """One non-negative integer per segment."""
    values = tuple(values)
    _check_length(values, bounds, name)
    if values and min(values) < 0:
        raise ValueError(f"{name}: got {min(values)}, expected no negative number")
    return values


def topk_counts(ks: Sequence[int], bounds: tuple[int, ...]) -> tuple[int, ...]:
    """One k per segment, at most the length of the segment."""
    return _checked_topk_counts(per_segment(ks, bounds, "ks"), bounds)


def groupings(sizes: Sequence[int], bounds: tuple[int, ...], name: str) -> tuple[int, ...]:
    """One row length or bank count per segment; positive unless the segment is empty, when it is read as 1."""
    return _checked_groupings(per_segment(sizes, bounds, name), bounds, name)


def thresholds(limits: Sequence[float], bounds: tuple[int, ...]) -> tuple[float, ...]:
    """One threshold per segment, none of them NaN."""
    limits = tuple(limits)
    _check_length(limits, bounds, "thresholds")
    # The sum is NaN if one of them is; only then (or when infinities cancel) is it worth looking at each.
    if math.isnan(sum(limits)) and any(map(math.isnan, limits)):
        raise ValueError(
            "thresholds: got NaN, expected numbers; check that the tensor they were estimated from is finite"
        )
    return limits


def block_size(block: int) -> int:
    """A quantisation block: a multiple of 16, so that vector code needs no remainder inside a block."""
    if block <= 0 or block % 16:
        raise ValueError(f"block: got {block}, expected a positive multiple of 16")
    return block


def codes_and_scales(codes: Tensor, scales: Tensor, bits: Bits, block: int, out: Tensor) -> None:
    """Refuse codes or scales that a decoder would read past, or misread."""
    numel = out.numel()
    for name, tensor, dtype, count in (
        ("codes", codes, CODE_DTYPES[bits], -(-numel * bits // 8)),
        ("scales", scales, SCALE_DTYPES[bits], -(-numel // block_size(block))),
    ):
        if tensor.dtype is not dtype or tensor.numel() != count or not tensor.is_contiguous():
            raise ValueError(
                f"{name}: got {tensor.dtype} with {tensor.numel()} elements, expected contiguous {dtype} with {count}"
            )
        on_device(tensor, out, name)


def rows(messages: Tensor, numel: int, bits: Bits, block: int, like: Tensor) -> None:
    """Refuse a matrix whose rows do not hold `numel` values in all, in equal parts, or do not begin where they may."""
    count = messages.shape[0] if messages.dim() == 2 else 0
    each = numel // max(count, 1)
    fits = count > 0 and numel == count * each and each % block == 0
    if not fits or messages.dtype is not torch.uint8 or messages.shape[1] != row_bytes(bits, each, block):
        raise ValueError(
            f"messages: got {messages.dtype} of shape {tuple(messages.shape)} for {numel} values, expected uint8 with "
            f"one row for each equal part of them, in whole blocks of {block}; of {each} values a row has "
            f"{row_bytes(bits, each, block)} bytes"
        )
    alignment = SCALE_DTYPES[bits].itemsize
    if messages.stride(1) != 1 or messages.data_ptr() % alignment or messages.stride(0) % alignment:
        raise ValueError(
            f"messages: got rows {messages.stride()} bytes apart, expected neighbouring bytes and rows that begin at a "
            f"multiple of {alignment} bytes, for the scales behind the codes"
        )
    on_device(messages, like, "messages")


def sparse_payloads(payloads: Sequence[tuple[Tensor, Tensor]], out: Tensor) -> None:
    """Refuse payloads whose values and indices do not match; their range is checked by the kernel that reads them."""
    for rank, (values, indices) in enumerate(payloads):
        fits = values.dtype is torch.float32 and indices.dtype is torch.int32 and values.shape == indices.shape
        if not (fits and values.dim() == 1 and values.is_contiguous() and indices.is_contiguous()):
            raise ValueError(
                f"payload {rank}: got {values.dtype} values of shape {tuple(values.shape)} and {indices.dtype} indices "
                f"of shape {tuple(indices.shape)}, expected contiguous 1-D float32 and int32 of one length"
            )
        on_device(values, out, f"values of payload {rank}")
        on_device(indices, out, f"indices of payload {rank}")


def bytes_of(x: Tensor, like: Tensor, name: str) -> None:
    """Refuse what is not one byte for every element of `like`."""
    if x.dtype is not torch.uint8 or x.numel() != like.numel() or x.dim() != 1 or not x.is_contiguous():
        raise ValueError(
            f"{name}: got {x.dtype} of shape {tuple(x.shape)}, expected contiguous 1-D uint8 of {like.numel()} elements"
        )
    on_device(x, like, name)


def on_device(x: Tensor, like: Tensor, name: str) -> None:
    """Refuse a tensor that is not where `like` is."""
    if x.device != like.device:  # a CPU kernel handed a GPU pointer would bring the process down
        raise ValueError(f"{name}: got a tensor on {x.device}, expected {like.device}, where the others are")


def _check_overlap(out: Tensor, other: Tensor, name: str) -> None:
    distance = abs(out.data_ptr() - other.data_ptr())
    if 0 < distance < 4 * out.numel():
        raise ValueError(
            f"out: got a tensor that overlaps {name} with a shift of {distance} bytes, expected {name} itself or "
            "separate memory"
        )


def _check_length(values: Sequence[float], bounds: tuple[int, ...], name: str) -> None:
    if len(values) != len(bounds) - 1:
        raise ValueError(f"{name}: got {len(values)} entries, expected {len(bounds) - 1}, one per segment")


# Units keep their layout from step to step: checking 200 bounds once instead of every call saves tens of microseconds.
@lru_cache(maxsize=1024)
def _checked_segments(bounds: tuple[int, ...], numel: int) -> tuple[int, ...]:
    if not bounds or bounds[0] != 0 or bounds[-1] != numel or any(a > b for a, b in itertools.pairwise(bounds)):
        shown = f"{bounds[:3]}...{bounds[-1:]}" if len(bounds) > 4 else f"{bounds}"
        raise ValueError(f"offsets: got {shown}, expected ascending bounds from 0 to {numel}, the number of elements")
    return bounds


@lru_cache(maxsize=1024)
def _checked_topk_counts(ks: tuple[int, ...], bounds: tuple[int, ...]) -> tuple[int, ...]:
    for segment, k in enumerate(ks):
        length = bounds[segment + 1] - bounds[segment]
        if k > length:
            raise ValueError(f"ks: got {k} for segment {segment}, expected at most its length, {length}")
    return ks


@lru_cache(maxsize=1024)
def _checked_groupings(sizes: tuple[int, ...], bounds: tuple[int, ...], name: str) -> tuple[int, ...]:
    lengths = [stop - start for start, stop in itertools.pairwise(bounds)]
    for segment, (size, length) in enumerate(zip(sizes, lengths, strict=True)):
        if size == 0 and length:
            raise ValueError(f"{name}: got 0 for segment {segment} of {length} elements, expected at least 1")
    return tuple(size or 1 for size in sizes)
