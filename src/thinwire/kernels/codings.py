"""How masks and the positions of selected values become bytes, and back; damaged bytes are refused with a ValueError."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from thinwire.kernels import check
from thinwire.kernels.dispatch import kernels_for
from thinwire.kernels.reference_codings import aligned

NarrowCoding = Literal["uint8", "uint16"]

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


def _check_bytes(buffer: Tensor, expected: int, coding: str) -> None:
    fits = buffer.dtype is torch.uint8 and buffer.dim() == 1 and buffer.is_contiguous()
    if not fits or buffer.numel() != expected:
        raise ValueError(
            f"{coding}: got {buffer.dtype} with {buffer.numel()} elements, expected {expected} contiguous bytes; "
            "the payload is damaged or belongs to another layout"
        )
