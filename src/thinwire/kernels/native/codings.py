"""The codings and checksums of `thinwire.kernels.reference_codings`, in C."""

from ctypes import c_uint32
from functools import cache

import torch
from torch import Tensor

from thinwire.kernels import reference_codings
from thinwire.kernels.native.library import library
from thinwire.kernels.reference_codings import BITMAP_ERROR, DELTA16_ERROR, ESCAPE, ORDER_ERROR


def delta16_pack(indices: Tensor, numel: int) -> Tensor:
    """See `reference_codings.delta16_pack`."""
    count = indices.numel()
    # Indices that ascend below numel cannot need more escapes than this.
    words = torch.empty(count + max(numel, 0) // ESCAPE, dtype=torch.int16)
    written = library().tw_delta16_pack(indices.data_ptr(), count, numel, words.data_ptr())
    if written < 0:
        raise ValueError(ORDER_ERROR.format(last=numel - 1))
    return words[:written].view(torch.uint8)


def delta16_unpack(buffer: Tensor, count: int, numel: int) -> Tensor:
    """See `reference_codings.delta16_unpack`."""
    indices = torch.empty(count, dtype=torch.int32)
    words = buffer.numel() // 2
    if library().tw_delta16_unpack(buffer.data_ptr(), words, count, numel, indices.data_ptr()):
        raise ValueError(DELTA16_ERROR.format(count=count, numel=numel))
    return indices


def bitmap_pack(indices: Tensor, numel: int) -> Tensor:
    """See `reference_codings.bitmap_pack`."""
    bits = torch.zeros(-(-numel // 8), dtype=torch.uint8)
    if library().tw_bitmap_pack(indices.data_ptr(), indices.numel(), numel, bits.data_ptr()):
        raise ValueError(ORDER_ERROR.format(last=numel - 1))
    return bits


def bitmap_unpack(buffer: Tensor, count: int, numel: int) -> Tensor:
    """See `reference_codings.bitmap_unpack`."""
    indices = torch.empty(count, dtype=torch.int32)
    found = library().tw_bitmap_unpack(buffer.data_ptr(), buffer.numel(), count, numel, indices.data_ptr())
    if found:
        raise ValueError(BITMAP_ERROR.format(count=count, numel=numel))
    return indices


def crc32(data: Tensor) -> int:
    """See `reference_codings.crc32`; the same number, from zlib where the processor cannot multiply without carry."""
    if not _has_crc32():
        return reference_codings.crc32(data)
    checksum: int = library().tw_crc32(data.data_ptr(), data.numel())
    return checksum


def crc32_rows(rows: Tensor) -> list[int]:
    """See `reference_codings.crc32_rows`."""
    if not _has_crc32():
        return reference_codings.crc32_rows(rows)
    count, length = rows.shape
    checksums = (c_uint32 * count)()
    library().tw_crc32_rows(rows.data_ptr(), count, rows.stride(0), length, checksums)
    return checksums[:]


@cache
def _has_crc32() -> bool:
    return bool(library().tw_has_crc32())
