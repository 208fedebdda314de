"""A header on every message of bytes, so that ranks that have lost step are found out instead of mixing their data.

gloo delivers silently wrong data when ranks gather unequal lengths, or issue two same-shaped collectives in swapped order.
Layout of the 40 bytes (little endian):

====== ======== ==================================================
bytes  field    meaning
====== ======== ==================================================
4      magic    ``TWM2``
4      step     transaction in its channel; for gradients the training step
4      group    fusion group within the transaction
4      round    round within the group
4      channel  number of the channel; 0 belongs to the link
8      config   hash of model, compressors and grouping
8      length   bytes of the body
4      crc      CRC-32 of the body
====== ======== ==================================================
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.comm.transport import Pending, Tag, Transport
from thinwire.core import AllGather, AllToAll, DesyncError, Reply, Request, memory

_MAGIC = b"TWM2"
_HEADER = struct.Struct("<4sIIIIQQI")
HEADER_BYTES = _HEADER.size
assert HEADER_BYTES == memory.HEADROOM_BYTES


class Framed:
    """A transport whose gathered and scattered messages carry a checked header. Reductions pass as they are.

    Args:
        config: a 64-bit hash that must be the same on all ranks.
    """

    def __init__(self, inner: Transport, config: int = 0) -> None:
        self.inner, self.config = inner, config
        self.rank, self.world_size, self.lanes = inner.rank, inner.world_size, inner.lanes

    def start(self, request: Request, tag: Tag) -> Pending:
        if isinstance(request, AllGather):
            whole = self._frame(request.message[None], request.headroom, tag)
            framed: Request = replace(request, message=whole[0], headroom=None)
        elif isinstance(request, AllToAll):
            framed = replace(request, messages=self._frame(request.messages, request.headroom, tag), headroom=None)
        else:
            return self.inner.start(request, tag)
        ranks = range(self.world_size) if request.partition is None else request.partition.own
        return _Opening(self, self.inner.start(framed, tag), ranks, tag)

    def _frame(self, bodies: Tensor, headroom: Tensor | None, tag: Tag) -> Tensor:
        """Each row behind its header."""
        length = bodies.shape[1]
        headers = b"".join(self._header(tag, length, crc) for crc in kernels.crc32_rows(bodies))
        table = torch.frombuffer(bytearray(headers), dtype=torch.uint8).view(-1, HEADER_BYTES).to(bodies.device)
        if headroom is None:
            return memory.cat([table, bodies], dim=1)
        headroom[:, :HEADER_BYTES] = table
        return headroom

    def _header(self, tag: Tag, length: int, crc: int) -> bytes:
        return _HEADER.pack(_MAGIC, *tag, self.config, length, crc)

    def check(self, messages: Tensor, senders: Sequence[int], tag: Tag) -> Tensor:
        """The rows without their headers; raises if they do not begin with what all ranks must have sent."""
        length = messages.shape[1] - HEADER_BYTES
        if length < 0:
            at_least = f">= {HEADER_BYTES}"
            raise DesyncError("length", rank=senders[0], got=messages.shape[1], expected=at_least, where=str(tag))
        headers, bodies = messages[:, :HEADER_BYTES].cpu().numpy().tobytes(), messages[:, HEADER_BYTES:]
        arrived = _HEADER.iter_unpack(headers)
        for rank, got, crc in zip(senders, arrived, kernels.crc32_rows(bodies), strict=True):
            expected = (_MAGIC, *tag, self.config, length, crc)
            if got != expected:
                field, one, other = next(row for row in zip(_FIELDS, got, expected, strict=True) if row[1] != row[2])
                raise DesyncError(field, rank=rank, got=one, expected=other, where=str(tag))
        return bodies


@dataclass(slots=True)
class _Opening:
    """A framed message under way; ``wait`` gives the bodies. Messages of equal length come, and go, as one matrix."""

    framed: Framed
    inner: Pending
    ranks: Sequence[int]
    tag: Tag

    @property
    def sent_bytes(self) -> int:
        return self.inner.sent_bytes

    def wait(self) -> Reply:
        messages = self.inner.wait()
        # In a group of one an all-to-all gives back all its rows, whatever rank they were meant for.
        senders = self.ranks if len(self.ranks) > 1 else [self.ranks[0]] * len(messages)
        if isinstance(messages, Tensor):
            return self.framed.check(messages, senders, self.tag)
        return [self.framed.check(one[None], [rank], self.tag)[0] for rank, one in zip(senders, messages, strict=True)]


_FIELDS = ("magic", "step", "group", "round", "channel", "config", "length", "checksum")
