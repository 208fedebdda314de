"""The checksums of `thinwire.kernels.reference_codings`, in C."""

from ctypes import c_uint32
from functools import cache

from torch import Tensor

from thinwire.kernels import reference_codings
from thinwire.kernels.native.library import library


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
