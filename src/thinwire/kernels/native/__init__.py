"""The C kernels behind the same functions as `thinwire.kernels.reference`; `load` must come first."""

import ctypes
from array import array
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from thinwire.core import memory
from thinwire.kernels.native.ages import aged_adamw, count_ages
from thinwire.kernels.native.checksums import crc32, crc32_rows
from thinwire.kernels.native.library import LEVELS, library
from thinwire.kernels.native.plans import bank_plan, c_int64s, row_plan
from thinwire.kernels.native.scratch import SCRATCH
from thinwire.kernels.reference import SCATTER_ERROR
from thinwire.kernels.types import Bits, Coarse, Quantized, Selected

__all__ = [
    "NAME",
    "aged_adamw",
    "all_finite",
    "bank_topk",
    "coarse_decode",
    "coarse_encode",
    "compensate",
    "count_ages",
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
    "load",
    "pack_bits",
    "row_topk",
    "scatter_mean",
    "segment_amax",
    "segment_moments",
    "sum_rows",
    "unpack_bits",
    "use_level",
]

NAME = "native"


def load() -> None:
    """Open the library and choose the best instruction set of this machine; ImportError when it was not built."""
    use_level(LEVELS[library().tw_best_level()])


def use_level(level: str) -> None:
    """Run the kernels of one instruction set; refuses what the machine lacks. For tests and benchmarks."""
    global NAME
    runnable = LEVELS[: library().tw_best_level() + 1]
    if level not in runnable:
        raise ValueError(f"level: got {level!r}, expected one that this machine runs: {', '.join(runnable)}")
    library().tw_use_level(LEVELS.index(level))
    NAME = f"native-{level}"


def compensate(
    grad: Tensor, residual: Tensor | None, decay: float, velocity: Tensor | None, momentum: float, out: Tensor
) -> bool:
    """See `reference.compensate`."""
    pointers = grad.data_ptr(), _pointer(residual), decay, _pointer(velocity), momentum, out.data_ptr()
    return bool(library().tw_compensate(*pointers, grad.numel()))


def ef_topk(
    grad: Tensor, residual: Tensor | None, offsets: tuple[int, ...], ks: tuple[int, ...], out: Tensor
) -> Selected:
    """See `reference.ef_topk`; a segment is one long row."""
    return row_topk(grad, residual, offsets, None, ks, out)


def row_topk(
    grad: Tensor,
    residual: Tensor | None,
    offsets: tuple[int, ...],
    row_lengths: tuple[int, ...] | None,
    ks: tuple[int, ...],
    out: Tensor,
) -> Selected:
    """See `reference.row_topk`."""
    plan = row_plan(offsets, row_lengths, ks)
    values, indices = memory.empty(plan.total), memory.empty(plan.total, torch.int32)
    finite = library().tw_row_topk(
        grad.data_ptr(),
        _pointer(residual),
        out.data_ptr(),
        len(ks),
        plan.offsets,
        plan.groupings,
        plan.ks,
        values.data_ptr(),
        indices.data_ptr(),
        SCRATCH.for_groups_of(plan.longest, with_columns=False),
    )
    return Selected(values, indices, plan.counts, out, bool(finite))


def bank_topk(
    grad: Tensor, residual: Tensor | None, offsets: tuple[int, ...], banks: tuple[int, ...], k: int, out: Tensor
) -> Selected:
    """See `reference.bank_topk`."""
    plan = bank_plan(offsets, banks, k)
    values, indices = memory.empty(plan.total), memory.empty(plan.total, torch.int32)
    finite = library().tw_bank_topk(
        grad.data_ptr(),
        _pointer(residual),
        out.data_ptr(),
        len(banks),
        plan.offsets,
        plan.groupings,
        k,
        values.data_ptr(),
        indices.data_ptr(),
        SCRATCH.for_groups_of(plan.longest, with_columns=True),
    )
    return Selected(values, indices, plan.counts, out, bool(finite))


def ef_threshold_pack(
    grad: Tensor, residual: Tensor | None, offsets: tuple[int, ...], thresholds: tuple[float, ...], out: Tensor
) -> Selected:
    """See `reference.ef_threshold_pack`."""
    # How much will be selected is unknown: pack into scratch that could hold all (untouched pages cost no memory).
    values, indices = SCRATCH.for_selection_from(grad.numel())
    limits = array("f", thresholds)
    counts = (ctypes.c_int64 * len(thresholds))()
    finite = library().tw_threshold_pack(
        grad.data_ptr(),
        _pointer(residual),
        out.data_ptr(),
        len(thresholds),
        c_int64s(offsets),
        limits.buffer_info()[0],
        values.data_ptr(),
        indices.data_ptr(),
        counts,
    )
    per_segment = tuple(counts[:])  # slicing first is ten times as fast as iterating
    total = sum(per_segment)
    kept = memory.empty(total).copy_(values[:total]), memory.empty(total, torch.int32).copy_(indices[:total])
    return Selected(*kept, per_segment, out, bool(finite))


def scatter_mean(payloads: Sequence[tuple[Tensor, Tensor]], world_size: int, out: Tensor) -> None:
    """See `reference.scatter_mean`."""
    pointers = ctypes.c_void_p * len(payloads)
    damaged = library().tw_scatter_mean(
        len(payloads),
        pointers(*(values.data_ptr() for values, _ in payloads)),
        pointers(*(indices.data_ptr() for _, indices in payloads)),
        (ctypes.c_int64 * len(payloads))(*(values.numel() for values, _ in payloads)),
        1.0 / world_size,
        out.data_ptr(),
        out.numel(),
    )
    if damaged >= 0:
        raise ValueError(SCATTER_ERROR.format(rank=damaged, last=out.numel() - 1))


def int8_encode(grad: Tensor, residual: Tensor | None, block: int, out: Tensor) -> Quantized:
    """See `reference.int8_encode`."""
    numel = grad.numel()
    codes, scales = memory.empty(numel, torch.int8), memory.empty(-(-numel // block))
    pointers = grad.data_ptr(), _pointer(residual), out.data_ptr()
    finite = library().tw_int8_encode(*pointers, numel, block, codes.data_ptr(), scales.data_ptr())
    return Quantized(codes, scales, out, bool(finite))


def int8_decode(codes: Tensor, scales: Tensor, block: int, weight: float, out: Tensor, accumulate: bool) -> None:
    """See `reference.int8_decode`."""
    sizes = out.numel(), block
    library().tw_int8_decode(codes.data_ptr(), scales.data_ptr(), *sizes, weight, accumulate, out.data_ptr())


def int4_encode(grad: Tensor, residual: Tensor | None, block: int, out: Tensor) -> Quantized:
    """See `reference.int4_encode`."""
    numel = grad.numel()
    codes = memory.empty((numel + 1) // 2, torch.uint8)
    scales = memory.empty(-(-numel // block), torch.bfloat16)
    pointers = grad.data_ptr(), _pointer(residual), out.data_ptr()
    finite = library().tw_int4_encode(*pointers, numel, block, codes.data_ptr(), scales.data_ptr())
    return Quantized(codes, scales, out, bool(finite))


def int4_decode(codes: Tensor, scales: Tensor, block: int, weight: float, out: Tensor, accumulate: bool) -> None:
    """See `reference.int4_decode`."""
    sizes = out.numel(), block
    library().tw_int4_decode(codes.data_ptr(), scales.data_ptr(), *sizes, weight, accumulate, out.data_ptr())


def coarse_encode(bits: Coarse, grad: Tensor, residual: Tensor | None, block: int, out: Tensor) -> Quantized:
    """See `reference.coarse_encode`."""
    numel = grad.numel()
    codes = memory.empty(-(-numel * bits // 8), torch.uint8)
    scales = memory.empty(-(-numel // block), torch.bfloat16)
    pointers = grad.data_ptr(), _pointer(residual), out.data_ptr()
    finite = library().tw_coarse_encode(bits, *pointers, numel, block, codes.data_ptr(), scales.data_ptr())
    return Quantized(codes, scales, out, bool(finite))


def coarse_decode(
    bits: Coarse, codes: Tensor, scales: Tensor, block: int, weight: float, out: Tensor, accumulate: bool
) -> None:
    """See `reference.coarse_decode`."""
    sizes = out.numel(), block
    library().tw_coarse_decode(bits, codes.data_ptr(), scales.data_ptr(), *sizes, weight, accumulate, out.data_ptr())


def encode_rows(bits: Bits, grad: Tensor, residual: Tensor | None, block: int, messages: Tensor, out: Tensor) -> bool:
    """See `rows.Rows`."""
    pointers = grad.data_ptr(), _pointer(residual), out.data_ptr()
    sizes = messages.shape[0], grad.numel() // messages.shape[0], block
    return bool(library().tw_encode_rows(bits, *pointers, *sizes, messages.data_ptr(), messages.stride(0)))


def decode_rows(bits: Bits, messages: Tensor, block: int, out: Tensor) -> None:
    """See `rows.Rows`."""
    rows, numel = messages.shape[0], out.numel() // messages.shape[0]
    library().tw_decode_rows(bits, messages.data_ptr(), rows, messages.stride(0), numel, block, out.data_ptr())


def sum_rows(bits: Bits, messages: Tensor, block: int, weight: float, out: Tensor) -> None:
    """See `rows.Rows`."""
    sizes = messages.shape[0], messages.stride(0), out.numel(), block
    library().tw_sum_rows(bits, messages.data_ptr(), *sizes, weight, out.data_ptr())


def segment_amax(x: Tensor, offsets: tuple[int, ...]) -> Tensor:
    """See `reference.segment_amax`."""
    amax = torch.empty(len(offsets) - 1)
    library().tw_segment_amax(x.data_ptr(), len(amax), c_int64s(offsets), amax.data_ptr())
    return amax


def segment_moments(x: Tensor, offsets: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """See `reference.segment_moments`."""
    sums, squares = torch.empty(2, len(offsets) - 1, dtype=torch.float64).unbind()
    library().tw_segment_moments(x.data_ptr(), len(sums), c_int64s(offsets), sums.data_ptr(), squares.data_ptr())
    return sums, squares


def all_finite(x: Tensor) -> bool:
    """See `reference.all_finite`."""
    return bool(library().tw_all_finite(x.data_ptr(), x.numel()))


def pack_bits(mask: Tensor) -> Tensor:
    """See `reference.pack_bits`."""
    return torch.from_numpy(np.packbits(mask.numpy(), bitorder="little"))


def unpack_bits(buffer: Tensor, numel: int) -> Tensor:
    """See `reference.unpack_bits`."""
    return torch.from_numpy(np.unpackbits(buffer.numpy(), count=numel, bitorder="little").view(np.bool_))


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
