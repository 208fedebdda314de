"""How selected values and their indices become bytes, and back; damaged bytes are refused with a ValueError."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from thinwire.kernels import check
from thinwire.kernels.dispatch import kernels_for
from thinwire.kernels.reference_codings import aligned

IndexCoding = Literal["int32", "delta16", "bitmap"]
NarrowCoding = Literal["uint8", "uint16"]
ValueCoding = Literal["fp32", "fp16", "bf16", "int8"]

_INT8_BLOCK_ELEMS = 256
_VALUE_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_NARROW_ITEM_BYTES = {"uint8": 1, "uint16": 2}


def pack_bits(mask: Tensor) -> Tensor:
    """A bool mask as bytes, bit 0 of a byte being the lowest index."""
    if mask.dtype is not torch.bool or mask.dim() != 1:
        raise ValueError(f"mask: got {mask.dtype} with {mask.dim()} dimensions, expected a 1-D bool tensor")
    return kernels_for(mask.device.type).pack_bits(mask)


def unpack_bits(buffer: Tensor, numel: int) -> Tensor:
    """The bool mask of `numel` bits that `pack_bits` wrote."""
    _check_bytes(buffer, -(-numel // 8), "bits")
    return kernels_for(buffer.device.type).unpack_bits(buffer, numel)


def pack_indices(indices: Tensor, numel: int, coding: IndexCoding) -> Tensor:
    """Int32 indices below `numel` as bytes.

    `int32` keeps any order in 4 bytes each; `delta16` (2 bytes each, plus 2 per full 65535 of a gap) and `bitmap`
    (`numel` bits in all) need strictly ascending indices.
    """
    if indices.dtype is not torch.int32 or indices.dim() != 1:
        raise ValueError(f"indices: got {indices.dtype} with {indices.dim()} dimensions, expected a 1-D int32 tensor")
    indices = indices.contiguous()
    if coding == "delta16":
        return kernels_for(indices.device.type).delta16_pack(indices, numel)
    if coding == "bitmap":
        return kernels_for(indices.device.type).bitmap_pack(indices, numel)
    _check_index_coding(coding)
    _check_range(indices, numel)
    return indices.view(torch.uint8)


def unpack_indices(buffer: Tensor, count: int, numel: int, coding: IndexCoding) -> Tensor:
    """The `count` int32 indices that `pack_indices` wrote; out of range or (but for int32) out of order is refused."""
    if not 0 <= count <= numel:
        raise ValueError(f"count: got {count} indices, expected 0..{numel}; the payload is damaged")
    if coding == "delta16":
        _check_bytes(buffer, buffer.numel() // 2 * 2, coding)
        return kernels_for(buffer.device.type).delta16_unpack(buffer, count, numel)
    if coding == "bitmap":
        _check_bytes(buffer, -(-numel // 8), coding)
        return kernels_for(buffer.device.type).bitmap_unpack(buffer, count, numel)
    _check_index_coding(coding)
    _check_bytes(buffer, 4 * count, coding)
    indices = aligned(buffer, 4).view(torch.int32)
    _check_range(indices, numel)
    return indices


@dataclass(frozen=True, eq=False)
class NarrowLayout:
    """Where each entry of a row-wise or bank-wise selection may lie: `index = base + stride * local`, local < limit.

    Build it once per unit with `row_layout` or `bank_layout`. All tensors are int32, one element per entry.
    """

    base: Tensor
    stride: Tensor
    limit: Tensor
    continues: Tensor  # bool: the entry before lies in the same row or bank, so its local index must be smaller

    def to(self, device: torch.device) -> NarrowLayout:
        """The same layout on another device; do it once, not per call."""
        return NarrowLayout(*(t.to(device) for t in (self.base, self.stride, self.limit, self.continues)))


def row_layout(offsets: Sequence[int], row_lengths: Sequence[int], ks: Sequence[int]) -> NarrowLayout:
    """The layout of what `row_topk` returns for the same arguments, on the CPU; `.to(device)` for indices elsewhere."""
    bounds = check.segments(offsets, offsets[-1])
    parts = []
    for start, stop, length, k in zip(bounds[:-1], bounds[1:], row_lengths, ks, strict=True):
        base = torch.arange(start, stop, length or 1, dtype=torch.int32)
        parts.append((base, torch.ones_like(base), (stop - base).clamp_max(length), k))
    return _narrow_layout(parts)


def bank_layout(offsets: Sequence[int], banks: Sequence[int], k: int) -> NarrowLayout:
    """The layout of what `bank_topk` returns for the same arguments, on the CPU; `.to(device)` for indices elsewhere."""
    bounds = check.segments(offsets, offsets[-1])
    parts = []
    for start, stop, bank_count in zip(bounds[:-1], bounds[1:], banks, strict=True):
        base = torch.arange(start, min(stop, start + bank_count), dtype=torch.int32)
        parts.append((base, torch.full_like(base, bank_count), (stop - base + bank_count - 1) // (bank_count or 1), k))
    return _narrow_layout(parts)


def pack_narrow_indices(indices: Tensor, layout: NarrowLayout, coding: NarrowCoding) -> Tensor:
    """Int32 indices as positions inside their row or bank, one (`uint8`) or two (`uint16`) bytes each."""
    item_bytes = _narrow_item_bytes(coding)
    if indices.shape != layout.base.shape:
        raise ValueError(f"indices: got {indices.numel()}, expected {layout.base.numel()}, one per entry of the layout")
    if len(indices) and int(layout.limit.max()) > 256**item_bytes:
        raise ValueError(f"coding: got {coding} for rows or banks of {int(layout.limit.max())}; use a wider one")
    local = (indices - layout.base) // layout.stride
    return local.to(torch.uint8) if item_bytes == 1 else local.to(torch.int16).view(torch.uint8)


def unpack_narrow_indices(buffer: Tensor, layout: NarrowLayout, coding: NarrowCoding) -> Tensor:
    """The int32 indices that `pack_narrow_indices` wrote; positions outside their row or out of order are refused."""
    item_bytes = _narrow_item_bytes(coding)
    _check_bytes(buffer, item_bytes * layout.base.numel(), coding)
    if item_bytes == 1:
        local = buffer.to(torch.int32)
    else:
        local = aligned(buffer, 2).view(torch.int16).to(torch.int32) & 0xFFFF
    ordered = (local[1:] > local[:-1]) | ~layout.continues[1:]
    if not bool((local < layout.limit).all() and ordered.all()):
        raise ValueError(f"{coding}: got positions out of order or outside their row or bank; the payload is damaged")
    return layout.base + layout.stride * local


def pack_values(values: Tensor, coding: ValueCoding) -> Tensor:
    """Fp32 values as bytes; `int8` puts one fp32 scale per 256 values first, then one code per value."""
    values = check.flat_fp32(values, "values")
    if coding == "int8":
        coded = kernels_for(values.device.type).int8_encode(values, None, _INT8_BLOCK_ELEMS, torch.empty_like(values))
        return torch.cat((coded.scales.view(torch.uint8), coded.codes.view(torch.uint8)))
    return values.to(_value_dtype(coding)).view(torch.uint8)


def unpack_values(buffer: Tensor, count: int, coding: ValueCoding) -> Tensor:
    """The `count` fp32 values that `pack_values` wrote."""
    if coding != "int8":
        dtype = _value_dtype(coding)
        _check_bytes(buffer, count * dtype.itemsize, coding)
        return aligned(buffer, dtype.itemsize).view(dtype).to(torch.float32)
    scale_bytes = 4 * -(-count // _INT8_BLOCK_ELEMS)
    _check_bytes(buffer, scale_bytes + count, coding)
    scales = aligned(buffer[:scale_bytes], 4).view(torch.float32)
    values = torch.empty(count, dtype=torch.float32, device=buffer.device)
    codes = buffer[scale_bytes:].view(torch.int8)
    kernels_for(buffer.device.type).int8_decode(codes, scales, _INT8_BLOCK_ELEMS, 1.0, values, False)
    return values


def crc32(x: Tensor) -> int:
    """CRC-32 (zlib's) of the bytes of a tensor; a contiguous CPU tensor is not copied."""
    flat = x.detach().contiguous().view(-1)
    return kernels_for(x.device.type).crc32(flat.view(torch.uint8)) if flat.numel() else 0


def crc32_rows(rows: Tensor) -> list[int]:
    """The CRC-32 of each row of a matrix of bytes; where only the rows lie apart in memory, it is not copied."""
    if rows.dtype is not torch.uint8 or rows.dim() != 2:
        raise ValueError(f"rows: got {rows.dtype} of shape {tuple(rows.shape)}, expected a matrix of bytes")
    if not rows.numel():
        return [0] * rows.shape[0]
    return kernels_for(rows.device.type).crc32_rows(rows if rows.stride(1) == 1 else rows.contiguous())


def _narrow_layout(parts: list[tuple[Tensor, Tensor, Tensor, int]]) -> NarrowLayout:
    """Repeat base, stride and limit of each row or bank for each entry it keeps."""
    repeated = [
        torch.stack((base, stride, limit)).repeat_interleave(limit.clamp_max(k).long(), dim=1)
        for base, stride, limit, k in parts
    ]
    entries = torch.cat(repeated, dim=1) if repeated else torch.zeros(3, 0, dtype=torch.int32)
    base, stride, limit = entries.unbind()
    continues = torch.zeros_like(base, dtype=torch.bool)
    continues[1:] = base[1:] == base[:-1]
    return NarrowLayout(base, stride, limit, continues)


def _narrow_item_bytes(coding: str) -> int:
    if coding not in _NARROW_ITEM_BYTES:
        raise ValueError(f"coding: got {coding!r}, expected one of {', '.join(_NARROW_ITEM_BYTES)}")
    return _NARROW_ITEM_BYTES[coding]


def _value_dtype(coding: str) -> torch.dtype:
    if coding not in _VALUE_DTYPES:
        raise ValueError(f"coding: got {coding!r}, expected one of {', '.join(_VALUE_DTYPES)}, int8")
    return _VALUE_DTYPES[coding]


def _check_index_coding(coding: str) -> None:
    if coding != "int32":
        raise ValueError(f"coding: got {coding!r}, expected one of int32, delta16, bitmap")


def _check_bytes(buffer: Tensor, expected: int, coding: str) -> None:
    fits = buffer.dtype is torch.uint8 and buffer.dim() == 1 and buffer.is_contiguous()
    if not fits or buffer.numel() != expected:
        raise ValueError(
            f"{coding}: got {buffer.dtype} with {buffer.numel()} elements, expected {expected} contiguous bytes; "
            "the payload is damaged or belongs to another layout"
        )


def _check_range(indices: Tensor, numel: int) -> None:
    if len(indices) and not (int(indices.min()) >= 0 and int(indices.max()) < numel):
        raise ValueError(f"indices: got {int(indices.min())}..{int(indices.max())}, expected 0..{numel - 1}")
