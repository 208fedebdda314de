"""Every kernel in plain torch, slow and obvious: the definition that faster kernels must equal bit for bit.

Arguments arrive checked and normalised by `thinwire.kernels`: `grad`, `residual` and `out` are flat contiguous fp32
tensors of one length, `offsets` holds S + 1 ascending bounds from 0 to that length, and `out` (which may be `grad` or
`residual` itself) receives the new residual. Arithmetic is fp32, every operation rounded on its own, never fused.
"""

import itertools
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from thinwire.kernels.reference_ages import aged_adamw, count_ages
from thinwire.kernels.reference_coarse import coarse_decode, coarse_encode
from thinwire.kernels.reference_codings import (
    crc32,
    crc32_rows,
    pack_bits,
    unpack_bits,
)
from thinwire.kernels.rows import Rows
from thinwire.kernels.types import Quantized, Selected

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
    "pack_bits",
    "row_topk",
    "scatter_mean",
    "segment_amax",
    "segment_moments",
    "sum_rows",
    "unpack_bits",
]

NAME = "reference"
MOMENT_LANES = 16
SCATTER_ERROR = "payload {rank}: got an index outside 0..{last}; the payload is damaged or belongs to another unit"
INT8_LIMIT, INT4_LIMIT = 127, 7
_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny
_NAN_KEY = 0x7F800001  # all NaNs share one key just above infinity, so their payload bits decide nothing
_INT4_ZERO = 8  # the nibble of code 0


def compensate(
    grad: Tensor, residual: Tensor | None, decay: float, velocity: Tensor | None, momentum: float, out: Tensor
) -> bool:
    """`out = decay * residual + v`, v being `velocity = momentum * velocity + grad` or else `grad`; says if finite."""
    if velocity is not None:
        grad = velocity.mul_(momentum).add_(grad)
    out.copy_(grad if residual is None else residual * decay + grad)
    return all_finite(out)


def ef_topk(
    grad: Tensor, residual: Tensor | None, offsets: tuple[int, ...], ks: tuple[int, ...], out: Tensor
) -> Selected:
    """Keep exactly `ks[s]` entries of segment s, largest magnitude first; ties go to the lowest index."""
    finite = compensate(grad, residual, 1.0, None, 0.0, out)
    chosen = [
        _largest(_keys(segment).unsqueeze(0), k).squeeze(0).nonzero().squeeze(1)
        for segment, k in zip(_segments(out, offsets), ks, strict=True)
    ]
    return _take(out, offsets, chosen, finite)


def ef_threshold_pack(
    grad: Tensor, residual: Tensor | None, offsets: tuple[int, ...], thresholds: tuple[float, ...], out: Tensor
) -> Selected:
    """Keep what exceeds its segment's threshold (as fp32) in magnitude; a NaN exceeds nothing."""
    finite = compensate(grad, residual, 1.0, None, 0.0, out)
    limits = torch.tensor(thresholds, dtype=torch.float32, device=out.device)
    chosen = [
        (segment.abs() > limit).nonzero().squeeze(1)
        for segment, limit in zip(_segments(out, offsets), limits, strict=True)
    ]
    return _take(out, offsets, chosen, finite)


def row_topk(
    grad: Tensor,
    residual: Tensor | None,
    offsets: tuple[int, ...],
    row_lengths: tuple[int, ...],
    ks: tuple[int, ...],
    out: Tensor,
) -> Selected:
    """Keep `ks[s]` entries of every row of segment s; a short last row keeps at most its length."""
    finite = compensate(grad, residual, 1.0, None, 0.0, out)
    chosen = [
        _largest(_as_table(_keys(segment), row_length), k).flatten()[: segment.numel()].nonzero().squeeze(1)
        for segment, row_length, k in zip(_segments(out, offsets), row_lengths, ks, strict=True)
    ]
    return _take(out, offsets, chosen, finite)


def bank_topk(
    grad: Tensor, residual: Tensor | None, offsets: tuple[int, ...], banks: tuple[int, ...], k: int, out: Tensor
) -> Selected:
    """Keep `k` entries of every bank, element i of a segment being in bank `i % banks[s]`; bank-major order."""
    finite = compensate(grad, residual, 1.0, None, 0.0, out)
    chosen = []
    for segment, bank_count in zip(_segments(out, offsets), banks, strict=True):
        bank, row = _largest(_as_table(_keys(segment), bank_count).t(), k).nonzero(as_tuple=True)
        chosen.append(row * bank_count + bank)
    return _take(out, offsets, chosen, finite)


def scatter_mean(payloads: Sequence[tuple[Tensor, Tensor]], world_size: int, out: Tensor) -> None:
    """`out[i] = ((0 + v0 * w) + v1 * w) + ...` in payload order, w being 1 / world_size rounded to fp32."""
    out.zero_()
    weight = torch.tensor(1.0 / world_size, dtype=torch.float32, device=out.device)
    for rank, (values, indices) in enumerate(payloads):
        if indices.numel() and not (int(indices.min()) >= 0 and int(indices.max()) < out.numel()):
            raise ValueError(SCATTER_ERROR.format(rank=rank, last=out.numel() - 1))
        out.index_add_(0, indices, values * weight)


def int8_encode(grad: Tensor, residual: Tensor | None, block: int, out: Tensor) -> Quantized:
    """One fp32 scale `amax / 127` and codes in -127..127 per block."""
    finite = compensate(grad, residual, 1.0, None, 0.0, out)
    blocks = _as_blocks(out, block)
    codes, scales, rest = _quantize(blocks, blocks.abs().amax(1) / INT8_LIMIT, INT8_LIMIT)
    numel = out.numel()
    out.copy_(rest.flatten()[:numel])
    return Quantized(codes.flatten()[:numel].to(torch.int8), scales, out, finite)


def int8_decode(codes: Tensor, scales: Tensor, block: int, weight: float, out: Tensor, accumulate: bool) -> None:
    """`(code * scale) * weight`, written to `out` or added to it."""
    decoded = (_as_blocks(codes.to(torch.float32), block) * scales.unsqueeze(1)).flatten()[: out.numel()] * weight
    out.copy_(out + decoded if accumulate else decoded)


def int4_encode(grad: Tensor, residual: Tensor | None, block: int, out: Tensor) -> Quantized:
    """One bf16 scale, `amax / 7` rounded to nearest even, and codes in -7..7 per block, as nibbles code + 8."""
    finite = compensate(grad, residual, 1.0, None, 0.0, out)
    blocks = _as_blocks(out, block)
    scales_bf16 = (blocks.abs().amax(1) / INT4_LIMIT).to(torch.bfloat16)
    codes, scales, rest = _quantize(blocks, scales_bf16.to(torch.float32), INT4_LIMIT)
    numel = out.numel()
    out.copy_(rest.flatten()[:numel])
    # The zero padding of the last block has code 0, hence the odd tail's spare nibble is 8.
    nibbles = (codes.flatten()[: numel + numel % 2] + _INT4_ZERO).to(torch.uint8)
    return Quantized(nibbles[0::2] | (nibbles[1::2] << 4), scales.to(torch.bfloat16), out, finite)


def int4_decode(codes: Tensor, scales: Tensor, block: int, weight: float, out: Tensor, accumulate: bool) -> None:
    """The nibbles minus 8, then as `int8_decode`."""
    unpacked = torch.stack((codes & 15, codes >> 4), dim=1).flatten()[: out.numel()].to(torch.int8) - _INT4_ZERO
    int8_decode(unpacked, scales.to(torch.float32), block, weight, out, accumulate)


_ROWS = Rows(
    {1: partial(coarse_encode, 1), 2: partial(coarse_encode, 2), 4: int4_encode, 8: int8_encode},
    {1: partial(coarse_decode, 1), 2: partial(coarse_decode, 2), 4: int4_decode, 8: int8_decode},
)
encode_rows, decode_rows, sum_rows = _ROWS.encode_rows, _ROWS.decode_rows, _ROWS.sum_rows


def segment_amax(x: Tensor, offsets: tuple[int, ...]) -> Tensor:
    """The largest magnitude of every segment, fp32; 0 when it is empty, NaN when it holds one."""
    largest = [segment.abs().amax() if segment.numel() else x.new_zeros(()) for segment in _segments(x, offsets)]
    return torch.stack(largest) if largest else x.new_zeros(0)


def segment_moments(x: Tensor, offsets: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The fp64 sum and sum of squares of every segment, in a defined order.

    Element i of a segment is added to lane `i % 16`, ascending; then lane j takes lane j + 8, j + 4, j + 2, j + 1.
    """
    sums = [_lane_sum(segment.to(torch.float64)) for segment in _segments(x, offsets)]
    squares = [_lane_sum(segment.to(torch.float64).square()) for segment in _segments(x, offsets)]
    empty = x.new_zeros(0, dtype=torch.float64)
    return (torch.stack(sums), torch.stack(squares)) if sums else (empty, empty.clone())


def all_finite(x: Tensor) -> bool:
    """Whether `x` holds neither NaN nor infinity."""
    return bool(torch.isfinite(x).all())


def _segments(x: Tensor, offsets: tuple[int, ...]) -> list[Tensor]:
    return [x[start:stop] for start, stop in itertools.pairwise(offsets)]


def _keys(x: Tensor) -> Tensor:
    """Magnitudes as integers that sort alike: the bits without the sign."""
    return (x.view(torch.int32) & 0x7FFFFFFF).clamp_max(_NAN_KEY)


def _as_table(keys: Tensor, columns: int) -> Tensor:
    """The keys as rows of `columns`, the last one padded with a key below all others."""
    rows = -(-keys.numel() // columns) if keys.numel() else 0
    return torch.nn.functional.pad(keys, (0, rows * columns - keys.numel()), value=-1).view(rows, columns)


def _largest(table: Tensor, k: int) -> Tensor:
    """Mask of the `k` largest keys of every row (fewer where the row has fewer), ties to the left."""
    order = table.sort(dim=1, descending=True, stable=True).indices[:, :k]
    return torch.zeros_like(table, dtype=torch.bool).scatter_(1, order, True) & (table >= 0)


def _take(compensated: Tensor, offsets: tuple[int, ...], chosen: Sequence[Tensor], finite: bool) -> Selected:
    """Move the chosen positions (counted within their segment) out of the compensated unit."""
    flat = [positions + start for positions, start in zip(chosen, offsets, strict=False)]
    indices = torch.cat(flat) if flat else torch.zeros(0, dtype=torch.int64, device=compensated.device)
    values = compensated[indices]
    compensated[indices] = 0.0
    counts = tuple(positions.numel() for positions in chosen)
    return Selected(values, indices.to(torch.int32), counts, compensated, finite)


def _as_blocks(x: Tensor, block: int) -> Tensor:
    blocks = -(-x.numel() // block)
    return torch.nn.functional.pad(x, (0, blocks * block - x.numel())).view(blocks, block)


def _quantize(blocks: Tensor, raw_scales: Tensor, limit: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes (as fp32), scales and residual of blocks that are still padded with zeros.

    A scale below the smallest normal number becomes 0, and so do its codes. A block that holds a NaN or an infinity
    gets a NaN scale, zero codes and a zero residual: its decoder sees NaN, and the error memory stays clean.
    """
    poisoned = ~torch.isfinite(raw_scales)
    scales = torch.where(poisoned | (raw_scales < _SMALLEST_NORMAL), 0.0, raw_scales)
    inverses = torch.where(scales > 0, 1.0 / scales, 0.0)
    blocks = torch.where(poisoned.unsqueeze(1), 0.0, blocks)
    codes = (blocks * inverses.unsqueeze(1)).round().clamp(-limit, limit)
    return codes, torch.where(poisoned, torch.nan, scales), blocks - codes * scales.unsqueeze(1)


def _lane_sum(x: Tensor) -> Tensor:
    """Sum fp64 `x` over the lanes; cumsum adds one by one, which `sum` does not."""
    if not x.numel():
        return x.new_zeros(())
    lanes = _as_blocks(x, MOMENT_LANES).cumsum(0)[-1]
    while lanes.numel() > 1:
        half = lanes.numel() // 2
        lanes = lanes[:half] + lanes[half:]
    return lanes[0] + 0.0  # lanes start from +0, so a sum of negative zeros is +0
