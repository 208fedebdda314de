"""Bits and index codings in plain torch: the definition of their bytes.

`delta16` is a stream of little-endian 16-bit words. An index is written as its gap, the number of skipped positions
since the previous index (since the start for the first); each full 65535 of the gap is one word 0xFFFF, the rest one
word below that. `bitmap` has one bit per position, bit 0 of a byte being the lowest, unused bits zero.
"""

import zlib

import torch
from torch import Tensor

ESCAPE = 0xFFFF
DELTA16_ERROR = "delta16: got bytes that do not decode to {count} indices below {numel}; the payload is damaged"
BITMAP_ERROR = "bitmap: got bytes that do not hold exactly {count} of {numel} bits; the payload is damaged"
ORDER_ERROR = "indices: got positions that do not ascend strictly within 0..{last}; sort them or use the int32 coding"


def pack_bits(mask: Tensor) -> Tensor:
    """A bool mask as bytes."""
    padded = torch.nn.functional.pad(mask.to(torch.uint8), (0, -mask.numel() % 8)).view(-1, 8)
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=mask.device)
    return (padded * weights).sum(dim=1, dtype=torch.uint8)


def unpack_bits(buffer: Tensor, numel: int) -> Tensor:
    """The first `numel` bits as a bool mask."""
    shifts = torch.arange(8, dtype=torch.uint8, device=buffer.device)
    return ((buffer.unsqueeze(1) >> shifts) & 1).flatten()[:numel].to(torch.bool)


def delta16_pack(indices: Tensor, numel: int) -> Tensor:
    """Strictly ascending int32 indices as gap words, in bytes."""
    _check_ascending(indices, numel)
    gaps = indices.long().diff(prepend=indices.new_full((1,), -1)) - 1
    escapes = gaps // ESCAPE
    last_words = (escapes + 1).cumsum(0) - 1
    total = int(last_words[-1]) + 1 if len(last_words) else 0
    words = torch.full((total,), ESCAPE, dtype=torch.int64, device=indices.device)
    words[last_words] = gaps % ESCAPE
    return words.to(torch.int16).view(torch.uint8)


def delta16_unpack(buffer: Tensor, count: int, numel: int) -> Tensor:
    """Int32 indices; bytes that do not decode to exactly `count` indices below `numel` are refused."""
    words = aligned(buffer, 2).view(torch.int16).long() & ESCAPE
    ends = words != ESCAPE
    positions = torch.where(ends, words + 1, ESCAPE).cumsum(0) - 1
    complete = count == 0 if not len(words) else bool(ends[-1]) and int(positions[-1]) < numel
    if not complete or int(ends.sum()) != count:
        raise ValueError(DELTA16_ERROR.format(count=count, numel=numel))
    return positions[ends].to(torch.int32)


def bitmap_pack(indices: Tensor, numel: int) -> Tensor:
    """Strictly ascending int32 indices as one bit per position, in bytes."""
    _check_ascending(indices, numel)
    mask = torch.zeros(numel, dtype=torch.bool, device=indices.device)
    mask[indices.long()] = True
    return pack_bits(mask)


def bitmap_unpack(buffer: Tensor, count: int, numel: int) -> Tensor:
    """Int32 indices of the set bits; a wrong number of them, or a set bit past `numel`, is refused."""
    found = unpack_bits(buffer, 8 * buffer.numel()).nonzero().squeeze(1)
    if len(found) != count or (count and int(found[-1]) >= numel):
        raise ValueError(BITMAP_ERROR.format(count=count, numel=numel))
    return found.to(torch.int32)


def aligned(buffer: Tensor, itemsize_bytes: int) -> Tensor:
    """`buffer`, copied when it starts where a wider element type may not."""
    misplaced = buffer.storage_offset() % itemsize_bytes or buffer.data_ptr() % itemsize_bytes
    return buffer.clone() if misplaced else buffer


def _check_ascending(indices: Tensor, numel: int) -> None:
    if not len(indices):
        return
    if int(indices[0]) < 0 or int(indices[-1]) >= numel or not bool((indices[1:] > indices[:-1]).all()):
        raise ValueError(ORDER_ERROR.format(last=numel - 1))


def crc32(data: Tensor) -> int:
    """zlib's CRC-32 of bytes."""
    return zlib.crc32(data.cpu().numpy().data)


def crc32_rows(rows: Tensor) -> list[int]:
    """The CRC-32 of each row of bytes."""
    return [crc32(row) for row in rows.cpu()]
