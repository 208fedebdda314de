"""Which program works on which elements: small index tensors, made once per layout and kept on the device.

A *group* is what a selection or a reduction is over: a segment, a row or a bank. Its member j is element
`start + stride * j` of the unit.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton.language as tl
from torch import Tensor

from thinwire.kernels.triton.launch import TILE_ELEMS, kernel

KEPT_LAYOUTS = 256


@dataclass(frozen=True, eq=False)
class Tiling:
    """Groups cut into tiles, none of which spans two groups. All tensors are int64."""

    starts: Tensor  # per group: its first element
    strides: Tensor  # per group
    lengths: Tensor  # per group: its members
    first_tiles: Tensor  # per group: its first tile; a last entry holds the number of tiles
    tile_groups: Tensor  # per tile: its group
    tile_members: Tensor  # per tile: its first member

    @property
    def tiles(self) -> int:
        """How many there are."""
        return len(self.tile_groups)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """What `tile_members_of` needs in a kernel, in its order."""
        return self.tile_groups, self.tile_members, self.starts, self.strides, self.lengths


@kernel
def tile_members_of(
    tile_groups: tl.tensor,
    tile_members: tl.tensor,
    starts: tl.tensor,
    strides: tl.tensor,
    lengths: tl.tensor,
    TILE: tl.constexpr,
) -> tl.tensor:
    """This program's group, the elements of its tile, and which of them exist."""
    group = tl.load(tile_groups + tl.program_id(0))
    member = tl.load(tile_members + tl.program_id(0)) + tl.arange(0, TILE)
    index = tl.load(starts + group) + tl.load(strides + group) * member
    return group, index, member < tl.load(lengths + group)


def stream_of(like: Tensor) -> int:
    """The current stream, to be part of a cache's key.

    A tensor dropped by a cache is reused by its own stream: no other stream may still be reading it.
    """
    return int(torch.cuda.current_stream(like.device).cuda_stream) if like.is_cuda else 0


def segment_tiling(offsets: tuple[int, ...], like: Tensor) -> Tiling:
    """The tiling whose groups are the segments."""
    return _segment_tiling(offsets, like.device, stream_of(like))


@lru_cache(maxsize=KEPT_LAYOUTS)
def _segment_tiling(offsets: tuple[int, ...], device: torch.device, stream: int) -> Tiling:
    bounds = torch.tensor(offsets, dtype=torch.int64)
    return tiling_of(bounds[:-1], torch.ones_like(bounds[:-1]), bounds.diff(), device)


def tiling_of(starts: Tensor, strides: Tensor, lengths: Tensor, device: torch.device) -> Tiling:
    """The tiling of any groups; its tensors go to `device`."""
    counts = (lengths + TILE_ELEMS - 1) // TILE_ELEMS
    first_tiles = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    owner, rank = spread(counts)
    host = starts, strides, lengths, first_tiles, owner, rank * TILE_ELEMS
    return Tiling(*(tensor.to(device) for tensor in host))


def spread(counts: Tensor) -> tuple[Tensor, Tensor]:
    """For every item, owner i having `counts[i]` of them: its owner, and its rank among the owner's."""
    owner = torch.arange(len(counts)).repeat_interleave(counts)
    return owner, torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner]
