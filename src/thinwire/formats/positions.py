"""How the positions of selected values look on the wire. Positions are ascending and below ``numel``.

========== ============================================= ==================================
coding     bytes                                         note
========== ============================================= ==================================
``int32``  4 per position
``paged``  2 per position + 4 per page of 65 536 values  low half; how many are in each page
``bitmap`` 1 bit per value                               smallest above density 1/16
========== ============================================= ==================================

All sizes are functions of (count, numel): ranks that send equally many entries send equally many bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.core import memory
from thinwire.core.errors import ConfigError, PayloadError
from thinwire.core.payload import Payload

CODINGS = ("auto", "int32", "paged", "bitmap")
_PAGE = 1 << 16


def _pages(numel: int) -> int:
    return -(-numel // _PAGE)


def sizes(coding: str, count: int, numel: int) -> dict[str, tuple[torch.dtype, int]]:
    """Names, dtypes and lengths of the tensors that ``pack`` adds to a payload."""
    coding = resolve(coding, count, numel)
    if coding == "int32":
        return {"index": (torch.int32, count)}
    if coding == "paged":
        return {"low": (torch.uint8, 2 * count), "pages": (torch.int32, _pages(numel))}
    return {"bitmap": (torch.uint8, -(-numel // 8))}


def resolve(coding: str, count: int, numel: int) -> str:
    """Replace ``auto`` by the coding that takes the fewest bytes."""
    if coding not in CODINGS:
        raise ConfigError(f"unknown index coding {coding!r}. Available: {', '.join(CODINGS)}.")
    if coding != "auto":
        return coding
    cost = {"int32": 4 * count, "paged": 2 * count + 4 * _pages(numel), "bitmap": -(-numel // 8)}
    return min(cost, key=lambda name: cost[name])


def pack(indices: Tensor, numel: int, coding: str) -> dict[str, Tensor]:
    """Positions (int32, ascending) as payload tensors."""
    coding = resolve(coding, indices.numel(), numel)
    if coding == "int32":
        return {"index": indices}
    if coding == "paged":
        low = memory.empty(indices.numel(), torch.int16, indices.device).copy_(indices)  # keeps the low half
        return {"low": low.view(torch.uint8), "pages": _page_ends(indices, numel).diff(prepend=indices.new_zeros(1))}
    mask = torch.zeros(numel, dtype=torch.bool, device=indices.device)
    mask[indices.long()] = True
    return {"bitmap": kernels.pack_bits(mask)}


def unpack(payload: Payload, count: int, numel: int) -> Tensor:
    """The positions in a payload that holds ``count`` values.

    Raises:
        PayloadError: they are missing, not as many as the values, or out of range.
    """
    indices = _read(payload, numel)
    if indices.numel() != count:
        raise PayloadError(f"a sparse payload has {count} values and {indices.numel()} positions; they must be equal")
    if count and (int(indices.min()) < 0 or int(indices.max()) >= numel):
        raise PayloadError(f"a sparse payload has positions outside 0..{numel - 1}; the ranks differ in their model")
    return indices


def _read(payload: Payload, numel: int) -> Tensor:
    if "index" in payload:
        return payload["index"]
    if "bitmap" in payload:
        _expect(payload["bitmap"].numel(), -(-numel // 8), "bitmap bytes")
        return kernels.unpack_bits(payload["bitmap"], numel).nonzero().view(-1).to(torch.int32)
    if "low" not in payload or "pages" not in payload:
        raise PayloadError(f"a sparse payload has no positions, only {sorted(payload)}; expected index, low or bitmap")
    counts = payload["pages"]
    _expect(counts.numel(), _pages(numel), "pages")
    if bool((counts < 0).any()) or int(counts.sum()) * 2 != payload["low"].numel():
        raise PayloadError("a sparse payload's page counts do not add up to its positions")
    low = payload["low"].view(torch.uint16)
    indices = memory.empty(low.numel(), torch.int32, low.device).copy_(low)
    first = counts.cumsum(0)[:-1]  # of each page but page 0, in which nothing is to add
    jumps = memory.zeros(low.numel() + 1, torch.int32, low.device)
    jumps.index_add_(0, first, jumps.new_full((first.numel(),), _PAGE))
    return indices.add_(torch.cumsum(jumps, 0, dtype=torch.int32, out=jumps)[:-1])


def _page_ends(indices: Tensor, numel: int) -> Tensor:
    """How many positions are in each page and those before it."""
    bounds = torch.arange(1, _pages(numel) + 1, device=indices.device) * _PAGE
    return torch.searchsorted(indices, bounds, out_int32=True)


def _expect(got: int, expected: int, what: str) -> None:
    if got != expected:
        raise PayloadError(f"a sparse payload has {got} {what}, expected {expected}; the ranks differ in their model")
