"""Where selected entries lie, on the wire: in the flat unit, or inside a row or bank in one or two bytes each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.core import Payload, PayloadError
from thinwire.formats import positions
from thinwire.kernels.codings import NarrowCoding, NarrowLayout

Sizes = dict[str, tuple[torch.dtype, int]]

_ONE_BYTE, _TWO_BYTES = 1 << 8, 1 << 16
_LAYOUTS_KEPT = 64  # one per unit is in use; a density that follows a schedule makes new ones until it has settled


class Places(Protocol):
    """How the positions of selected entries become payload tensors, and back."""

    def sizes(self, count: int) -> Sizes:
        """Names, dtypes and lengths of what ``pack`` gives for ``count`` positions."""

    def pack(self, indices: Tensor) -> dict[str, Tensor]:
        """Int32 positions as payload tensors."""

    def unpack(self, payload: Payload, count: int) -> Tensor:
        """The int32 positions of ``count`` values; raises PayloadError where they do not fit."""


@dataclass(frozen=True)
class FlatPlaces:
    """Ascending positions in the flat unit; see ``thinwire.formats.positions``."""

    numel: int
    coding: str = "auto"

    def sizes(self, count: int) -> Sizes:
        return positions.sizes(self.coding, count, self.numel)

    def pack(self, indices: Tensor) -> dict[str, Tensor]:
        return positions.pack(indices, self.numel, self.coding)

    def unpack(self, payload: Payload, count: int) -> Tensor:
        return positions.unpack(payload, count, self.numel)


@dataclass(frozen=True, eq=False)
class _Share:
    """The entries that are written with the same number of bytes; ``where`` they are among all, None for everywhere."""

    name: str
    item_bytes: int
    layout: NarrowLayout
    where: Tensor | None

    @property
    def count(self) -> int:
        return self.layout.base.numel()


class NarrowPlaces:
    """Positions inside rows or banks: one byte where those have at most 256 elements, else two.

    How many entries each row or bank sends is known beforehand, so nothing else is needed.
    """

    def __init__(self, layout: NarrowLayout) -> None:
        self._count = layout.base.numel()
        small = layout.limit <= _ONE_BYTE
        shares = [_share("byte", 1, layout, small), _share("word", 2, layout, ~small)]
        self._shares = [share for share in shares if share.count]

    def sizes(self, count: int) -> Sizes:
        assert count == self._count, f"a layout of {self._count} entries was asked for {count}"
        return {share.name: (torch.uint8, share.item_bytes * share.count) for share in self._shares}

    def pack(self, indices: Tensor) -> dict[str, Tensor]:
        packed = {}
        for share in self._shares:
            own = indices if share.where is None else indices[share.where]
            packed[share.name] = kernels.pack_narrow_indices(own, share.layout, _coding(share))
        return packed

    def unpack(self, payload: Payload, count: int) -> Tensor:
        if count != self._count or any(share.name not in payload for share in self._shares):
            raise PayloadError(
                f"a payload with {count} values and {sorted(payload)} does not fit rows that send {self._count} entries; "
                "the ranks differ in their model or settings"
            )
        indices = torch.empty(self._count, dtype=torch.int32, device=payload["values"].device)
        for share in self._shares:
            own = _read(payload[share.name], share)
            if share.where is None:
                return own
            indices[share.where] = own
        return indices


@lru_cache(maxsize=_LAYOUTS_KEPT)
def row_places(
    offsets: tuple[int, ...], row_lengths: tuple[int, ...], ks: tuple[int, ...], device: torch.device
) -> Places:
    """For what ``kernels.row_topk`` selects with the same arguments."""
    if max(row_lengths, default=0) > _TWO_BYTES:
        return FlatPlaces(offsets[-1])
    return NarrowPlaces(kernels.row_layout(offsets, row_lengths, ks).to(device))


@lru_cache(maxsize=_LAYOUTS_KEPT)
def bank_places(offsets: tuple[int, ...], banks: tuple[int, ...], k: int, device: torch.device) -> Places:
    """For what ``kernels.bank_topk`` selects with the same arguments; banks have at most 65 536 elements."""
    return NarrowPlaces(kernels.bank_layout(offsets, banks, k).to(device))


def _share(name: str, item_bytes: int, layout: NarrowLayout, chosen: Tensor) -> _Share:
    if bool(chosen.all()):
        return _Share(name, item_bytes, layout, None)
    where = chosen.nonzero().squeeze(1)
    parts = (one[where] for one in (layout.base, layout.stride, layout.limit, layout.continues))
    return _Share(name, item_bytes, NarrowLayout(*parts), where)


def _coding(share: _Share) -> NarrowCoding:
    return "uint8" if share.item_bytes == 1 else "uint16"


def _read(buffer: Tensor, share: _Share) -> Tensor:
    try:
        return kernels.unpack_narrow_indices(buffer, share.layout, _coding(share))
    except ValueError as error:
        raise PayloadError(str(error)) from None
