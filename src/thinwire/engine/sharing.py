"""Give every rank the tensors of rank 0, all in one message."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.core import Broadcast
from thinwire.engine.session import Session


@torch.no_grad()
def share(tensors: Sequence[Tensor], session: Session) -> None:
    """Overwrite ``tensors`` with rank 0's. They travel as bytes: every dtype, on every backend."""
    if not tensors:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor.detach())
    flats = [torch.cat([tensor.reshape(-1) for tensor in members]) for members in by_dtype.values()]
    parts = [flat.view(torch.uint8) for flat in flats]
    received = session.ask(Broadcast(torch.cat(parts)))
    if session.rank == 0:
        return
    for members, flat, part, got in zip(
        by_dtype.values(), flats, parts, received.split([part.numel() for part in parts]), strict=True
    ):
        part.copy_(got)  # to an address that the dtype can be read from
        pieces = flat.split([tensor.numel() for tensor in members])
        torch._foreach_copy_(members, [one.view(tensor.shape) for one, tensor in zip(pieces, members, strict=True)])
