"""How a top-k over rows or banks is divided: *short* groups, several per program, and *long* ones, many programs each."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from thinwire.kernels.triton.tiling import KEPT_LAYOUTS, Tiling, spread, stream_of, tiling_of

SHORT_TILE_ELEMS = 4096  # a group of at most so many members is short
_SMALLEST_WIDTH_ELEMS = 16


@dataclass(frozen=True, eq=False)
class ShortGroups:
    """Segments whose groups fill the same width of tile. All tensors are int64."""

    segments: Tensor  # per segment: start, length, size (of a row, or number of banks), k, first entry of the payload
    program_segments: Tensor  # per program: its segment
    program_groups: Tensor  # per program: its first group within that segment
    width_elems: int  # of a tile: the power of two that the longest group of each segment fits in


@dataclass(frozen=True, eq=False)
class LongGroups:
    """Long groups. All tensors are int64."""

    tiling: Tiling
    ks: Tensor  # per group: how many entries it keeps
    entries: Tensor  # per group: where its first one goes in the payload


@dataclass(frozen=True, eq=False)
class TopkPlan:
    """What a top-k has to do, and how many entries each segment will return."""

    short: tuple[ShortGroups, ...]  # one launch each
    long: LongGroups | None
    counts: tuple[int, ...]


@dataclass(frozen=True)
class _Segment:
    start: int
    length: int
    size: int  # of a row; if strided, the number of banks
    k: int
    strided: bool

    @property
    def groups(self) -> int:
        """Rows, or banks that hold anything."""
        return min(self.size, self.length) if self.strided else -(-self.length // self.size)

    @property
    def longest(self) -> int:
        return -(-self.length // self.size) if self.strided else min(self.size, self.length)

    @property
    def width_elems(self) -> int:
        return max(_SMALLEST_WIDTH_ELEMS, 1 << (self.longest - 1).bit_length())

    @property
    def count(self) -> int:
        """Entries kept, all groups together."""
        full, rest = divmod(self.length, self.size)
        if self.strided:
            return rest * min(self.k, full + 1) + (self.size - rest) * min(self.k, full)
        return full * min(self.k, self.size) + min(self.k, rest)

    def group_lengths(self) -> Tensor:
        group = torch.arange(self.groups)
        if self.strided:
            return (self.length - group + self.size - 1) // self.size
        return (self.length - group * self.size).clamp_max(self.size)


def row_plan(offsets: tuple[int, ...], row_lengths: tuple[int, ...], ks: tuple[int, ...], like: Tensor) -> TopkPlan:
    """The plan for rows of `row_lengths[s]` that keep `ks[s]` entries each."""
    return _topk_plan(offsets, row_lengths, ks, False, like.device, stream_of(like))


def bank_plan(offsets: tuple[int, ...], banks: tuple[int, ...], k: int, like: Tensor) -> TopkPlan:
    """The plan for `banks[s]` banks that keep `k` entries each."""
    return _topk_plan(offsets, banks, (k,) * len(banks), True, like.device, stream_of(like))


@lru_cache(maxsize=KEPT_LAYOUTS)
def _topk_plan(
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
    ks: tuple[int, ...],
    strided: bool,
    device: torch.device,
    stream: int,
) -> TopkPlan:
    bounds = pairwise(offsets)
    segments = [_Segment(a, b - a, size, k, strided) for (a, b), size, k in zip(bounds, sizes, ks, strict=True)]
    counts = tuple(segment.count for segment in segments)
    placed = [pair for pair in zip(segments, accumulate(counts, initial=0), strict=False) if pair[0].length]
    widths = sorted({segment.width_elems for segment, _ in placed if segment.longest <= SHORT_TILE_ELEMS})
    short = [[pair for pair in placed if pair[0].width_elems == width] for width in widths]
    long = [pair for pair in placed if pair[0].longest > SHORT_TILE_ELEMS]
    return TopkPlan(tuple(_short_groups(same, device) for same in short), _long_groups(long, device), counts)


def _short_groups(placed: list[tuple[_Segment, int]], device: torch.device) -> ShortGroups:
    """For segments of one width: a mixed tile would leave most of its lanes idle in the narrow ones."""
    width_elems = placed[0][0].width_elems
    groups_per_program = SHORT_TILE_ELEMS // width_elems
    owner, rank = spread(torch.tensor([-(-segment.groups // groups_per_program) for segment, _ in placed]))
    fields = torch.tensor([(segment.start, segment.length, segment.size, segment.k, at) for segment, at in placed])
    return ShortGroups(fields.to(device), owner.to(device), (rank * groups_per_program).to(device), width_elems)


def _long_groups(placed: list[tuple[_Segment, int]], device: torch.device) -> LongGroups | None:
    if not placed:
        return None
    columns = []
    for segment, entry in placed:
        lengths = segment.group_lengths()
        ks = lengths.clamp_max(segment.k)
        stride, distance = (segment.size, 1) if segment.strided else (1, segment.size)
        starts = segment.start + distance * torch.arange(segment.groups)
        columns.append(torch.stack((starts, torch.full_like(lengths, stride), lengths, ks, entry + ks.cumsum(0) - ks)))
    starts, strides, lengths, ks, entries = torch.cat(columns, dim=1).unbind()
    return LongGroups(tiling_of(starts, strides, lengths, device), ks.to(device), entries.to(device))
