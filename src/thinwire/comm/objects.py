"""Small collectives between transactions, over a link: barrier, objects, maxima, and tensors of rank 0."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.comm.link import Link, ask
from thinwire.core import AllGather, AllReduce, Broadcast


def barrier(link: Link) -> None:
    """Wait until all ranks are at this point."""
    link.run(ask(AllGather(torch.zeros(1, dtype=torch.uint8, device=link.device))))


def all_gather_object(link: Link, mine: Any) -> list[Any]:
    """Every rank's value (JSON), by rank. All ranks call it at the same point."""
    text = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8).to(link.device)
    return [json.loads(bytes(one.cpu().tolist())) for one in link.run(ask(AllGather(text, varying=True)))]


def broadcast_object(link: Link, mine: Any) -> Any:
    """Rank 0's value (JSON); the others' is not looked at."""
    return all_gather_object(link, mine if link.rank == 0 else None)[0]


def all_reduce_max(link: Link, mine: Tensor) -> Tensor:
    """The largest over the ranks, element by element."""
    largest: Tensor = link.run(ask(AllReduce(mine.to(link.device), "max")))
    return largest.cpu()


@torch.no_grad()
def broadcast_tensors(link: Link, tensors: Sequence[Tensor]) -> None:
    """Overwrite ``tensors`` with rank 0's, all in one message. They travel as bytes: every dtype, on every backend."""
    if not tensors:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor.detach())
    flats = [torch.cat([tensor.reshape(-1) for tensor in members]) for members in by_dtype.values()]
    parts = [flat.view(torch.uint8) for flat in flats]
    received = link.run(ask(Broadcast(torch.cat(parts))))
    if link.rank == 0:
        return
    for members, flat, part, got in zip(
        by_dtype.values(), flats, parts, received.split([part.numel() for part in parts]), strict=True
    ):
        part.copy_(got)  # to an address that the dtype can be read from
        pieces = flat.split([tensor.numel() for tensor in members])
        torch._foreach_copy_(members, [one.view(tensor.shape) for one, tensor in zip(pieces, members, strict=True)])
