"""Bits and checksums in plain torch: the definition of their bytes. Bit 0 of a byte is the lowest; unused bits are zero."""

import zlib

import torch
from torch import Tensor


def pack_bits(mask: Tensor) -> Tensor:
    """A bool mask as bytes."""
    padded = torch.nn.functional.pad(mask.to(torch.uint8), (0, -mask.numel() % 8)).view(-1, 8)
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=mask.device)
    return (padded * weights).sum(dim=1, dtype=torch.uint8)


def unpack_bits(buffer: Tensor, numel: int) -> Tensor:
    """The first `numel` bits as a bool mask."""
    shifts = torch.arange(8, dtype=torch.uint8, device=buffer.device)
    return ((buffer.unsqueeze(1) >> shifts) & 1).flatten()[:numel].to(torch.bool)


def aligned(buffer: Tensor, itemsize_bytes: int) -> Tensor:
    """`buffer`, copied when it starts where a wider element type may not."""
    misplaced = buffer.storage_offset() % itemsize_bytes or buffer.data_ptr() % itemsize_bytes
    return buffer.clone() if misplaced else buffer


def crc32(data: Tensor) -> int:
    """zlib's CRC-32 of bytes."""
    return zlib.crc32(data.cpu().numpy().data)


def crc32_rows(rows: Tensor) -> list[int]:
    """The CRC-32 of each row of bytes."""
    return [crc32(row) for row in rows.cpu()]
