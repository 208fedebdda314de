"""Masks as bytes and back."""

import torch
import triton.language as tl
from torch import Tensor

from thinwire.kernels.triton import launch
from thinwire.kernels.triton.launch import TILE_ELEMS, kernel, tile_index


def pack_bits(mask: Tensor) -> Tensor:
    """See `reference.pack_bits`."""
    packed = torch.empty(launch.tiles(mask.numel(), 8), dtype=torch.uint8, device=mask.device)
    bytes_ = mask.contiguous().view(torch.uint8)
    launch.run(_pack_bits, launch.tiles(mask.numel()), mask, bytes_, packed, mask.numel(), BYTES=TILE_ELEMS // 8)
    return packed


def unpack_bits(buffer: Tensor, numel: int) -> Tensor:
    """See `reference.unpack_bits`."""
    mask = torch.empty(numel, dtype=torch.bool, device=buffer.device)
    launch.run(_unpack_bits, launch.tiles(numel), mask, buffer, mask.view(torch.uint8), numel, TILE=TILE_ELEMS)
    return mask


@kernel
def _pack_bits(mask: tl.tensor, packed: tl.tensor, numel: tl.tensor, BYTES: tl.constexpr) -> None:
    byte = tile_index(BYTES)
    bit = tl.arange(0, 8)[None, :]
    index = byte[:, None] * 8 + bit
    chosen = tl.load(mask + index, mask=index < numel, other=0).to(tl.int32)
    tl.store(packed + byte, tl.sum(chosen << bit, axis=1).to(tl.uint8), mask=byte * 8 < numel)


@kernel
def _unpack_bits(buffer: tl.tensor, mask: tl.tensor, numel: tl.tensor, TILE: tl.constexpr) -> None:
    index = tile_index(TILE)
    inside = index < numel
    byte = tl.load(buffer + index // 8, mask=inside, other=0).to(tl.int32)
    tl.store(mask + index, ((byte >> (index % 8).to(tl.int32)) & 1).to(tl.uint8), mask=inside)
