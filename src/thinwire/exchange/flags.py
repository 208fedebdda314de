"""What ranks must agree on at the end of a transaction, as a vector of small numbers that is summed over the ranks.

It holds, one element each: whether this rank is *not* ok; for each tensor whether this rank has used it; the bits of a
signature and their complements; and a slot per rank for every scalar. Reductions have no header by which ranks that are out
of step are found, so the signature goes along: where a bit and its complement are both set, two ranks differ.

A scalar travels as the eight half-bytes of its fp32, in the slot of its rank; all other ranks add zeros. Numbers up to 15
that are non-zero on one rank survive a mean in bf16: every rank reads every scalar bit for bit, whatever message carries it.
"""

from __future__ import annotations

import ctypes
import struct
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire.comm.piggyback import SCALAR_SLOTS, SIGNATURE_BITS, flag_elems
from thinwire.core import DesyncError


@dataclass(frozen=True)
class Flags:
    """What the ranks have agreed on.

    Args:
        ok: no rank refuses the transaction.
        used: tensors that some rank has used.
        scalars: by name, the value of each rank.
    """

    ok: bool
    used: frozenset[str] = frozenset()
    scalars: Mapping[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class FlagLayout:
    """Which element means what; the same on all ranks."""

    tensors: Sequence[str]
    scalars: Sequence[str]
    rank: int
    world_size: int

    @property
    def numel(self) -> int:
        return flag_elems(len(self.tensors), len(self.scalars), self.world_size)

    def encode(self, *, ok: bool, used: Collection[str], scalars: Mapping[str, float], signature: str) -> Tensor:
        """The numbers of this rank, as uint8."""
        bits = _bits(signature)
        slots = [0] * (SCALAR_SLOTS * len(self.scalars) * self.world_size)
        for position, name in enumerate(self.scalars):
            start = SCALAR_SLOTS * (position * self.world_size + self.rank)
            slots[start : start + SCALAR_SLOTS] = _half_bytes(scalars.get(name, 0.0))
        flags = [not ok, *(name in used for name in self.tensors), *bits, *(not bit for bit in bits)]
        return torch.tensor([*map(int, flags), *slots], dtype=torch.uint8)

    def decode(self, sums: Sequence[int], where: str) -> Flags:
        """From the sums over the ranks.

        Raises:
            DesyncError: the ranks are at different transactions or have different settings.
        """
        count = len(self.tensors)
        used, rest = sums[1 : 1 + count], sums[1 + count :]
        ones, rest = rest[:SIGNATURE_BITS], rest[SIGNATURE_BITS:]
        zeros, slots = rest[:SIGNATURE_BITS], rest[SIGNATURE_BITS:]
        if any(one and zero for one, zero in zip(ones, zeros, strict=True)):
            raise DesyncError(
                "step or settings", rank=None, got="another", expected=f"those of this rank at {where}", where=where
            )
        values = [_from_half_bytes(slots[start : start + SCALAR_SLOTS]) for start in range(0, len(slots), SCALAR_SLOTS)]
        world = self.world_size
        return Flags(
            ok=not sums[0],
            used=frozenset(name for name, count in zip(self.tensors, used, strict=True) if count),
            scalars={name: values[i * world : (i + 1) * world] for i, name in enumerate(self.scalars)},
        )


def _bits(signature: str) -> list[bool]:
    digest = zlib.crc32(signature.encode())
    return [bool(digest >> bit & 1) for bit in range(SIGNATURE_BITS)]


def _half_bytes(value: float) -> list[int]:
    # Not struct.pack, which raises where a double is too large for fp32: a loss that diverges is infinite, no error.
    rounded = struct.pack("<f", ctypes.c_float(value).value)
    return [half for byte in rounded for half in (byte & 15, byte >> 4)]


def _from_half_bytes(halves: Sequence[int]) -> float:
    low, high = halves[::2], halves[1::2]
    value: float = struct.unpack("<f", bytes(one | other << 4 for one, other in zip(low, high, strict=True)))[0]
    return value
