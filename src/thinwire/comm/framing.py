"""A header on every message of bytes, so that ranks that have lost step are found out instead of mixing their data.

gloo delivers silently wrong data when ranks gather unequal lengths, or issue two same-shaped collectives in swapped order.
Layout of the 40 bytes (little endian):

====== ======== ==================================================
bytes  field    meaning
====== ======== ==================================================
4      magic    ``TWM1``
4      step     training step
4      group    fusion group within the step
4      round    round within the group
8      config   hash of model, compressors and grouping
8      length   bytes of the body
4      crc      CRC-32 of the body
4      zero
====== ======== ==================================================
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.comm.transport import Later, Pending, Tag, Transport
from thinwire.core import AllGather, AllToAll, DesyncError, Reply, Request, memory

_MAGIC = b"TWM1"
_HEADER = struct.Struct("<4sIIIQQI4x")
HEADER_BYTES = _HEADER.size


class Framed:
    """A transport whose gathered and scattered messages carry a checked header. Reductions pass as they are.

    Args:
        config: a 64-bit hash that must be the same on all ranks.
    """

    def __init__(self, inner: Transport, config: int = 0) -> None:
        self.inner, self.config = inner, config
        self.rank, self.world_size = inner.rank, inner.world_size

    def start(self, request: Request, tag: Tag) -> Pending:
        if isinstance(request, AllGather):
            framed: Request = replace(request, message=self._frame(request.message[None], tag)[0])
        elif isinstance(request, AllToAll):
            framed = replace(request, messages=self._frame(request.messages, tag))
        else:
            return self.inner.start(request, tag)
        pending = self.inner.start(framed, tag)
        ranks = range(self.world_size) if request.groups is None else request.groups.own
        return Later(lambda: self._open(pending.wait(), ranks, tag))

    def _frame(self, bodies: Tensor, tag: Tag) -> Tensor:
        """Each row behind its header."""
        length = bodies.shape[1]
        headers = b"".join(_HEADER.pack(_MAGIC, *tag, self.config, length, kernels.crc32(body)) for body in bodies)
        table = torch.frombuffer(bytearray(headers), dtype=torch.uint8).view(-1, HEADER_BYTES)
        return memory.cat([table.to(bodies.device), bodies], dim=1)

    def _open(self, messages: Reply, ranks: Sequence[int], tag: Tag) -> Reply:
        # In a group of one an all-to-all gives back all its rows, whoever they were meant for.
        senders = ranks if len(ranks) > 1 else [ranks[0]] * len(messages)
        return [self._check(message, rank, tag) for rank, message in zip(senders, messages, strict=True)]

    def _check(self, message: Tensor, rank: int, tag: Tag) -> Tensor:
        if message.numel() < HEADER_BYTES:
            raise DesyncError("length", rank=rank, got=message.numel(), expected=f">= {HEADER_BYTES}", where=str(tag))
        body = message[HEADER_BYTES:]
        got = _HEADER.unpack(bytes(message[:HEADER_BYTES].cpu().numpy()))
        expected = (_MAGIC, *tag, self.config, body.numel(), kernels.crc32(body))
        for field, one, other in zip(_FIELDS, got, expected, strict=True):
            if one != other:
                raise DesyncError(field, rank=rank, got=one, expected=other, where=str(tag))
        return body


_FIELDS = ("magic", "step", "group", "round", "config", "length", "checksum")
