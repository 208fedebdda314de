"""Formats that must not be summed as they are: reduce-scatter in fp32 around the wire format, then all-gather.

Rank i owns the i-th shard of a unit. Everybody encodes everything and sends each owner its shard; the owner decodes, adds
in fp32, encodes the mean and gives it to all. Both rounds together move what a ring all-reduce of the same format would,
no sum ever happens in few bits, and block scales need no agreement. What the owner loses in the second encoding goes, times
the world size, into its own residual, so that conservation holds.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from thinwire.core import AllGather, AllToAll, Compressor, Exchange, Exchanged, State, Step, UnitSpec
from thinwire.precision import Encoded, wire_format


class Blockwise(Compressor):
    """The exchange shared by ``fp16``, ``bf16``, ``int8`` and ``int4``."""

    format: ClassVar[str]

    def exchange(self, x: Tensor, state: State, step: Step) -> Exchange:
        fmt, world, numel = wire_format(self.format), step.world_size, x.numel()
        shard = self._shard_elems(numel, world)
        sent = fmt.encode(torch.nn.functional.pad(x, (0, shard * world - numel)))
        received = yield AllToAll(_rows(sent, world))

        mean = x.new_empty(shard)
        for rank, message in enumerate(received):
            self._decode(message, 1 / world, mean, accumulate=rank > 0)
        owned = fmt.encode(mean)
        gathered = yield AllGather(_rows(owned, 1)[0])

        result = x.new_empty(world * shard)
        for rank, message in enumerate(gathered):
            self._decode(message, 1.0, result[rank * shard : (rank + 1) * shard], accumulate=False)
        own = slice(step.rank * shard, (step.rank + 1) * shard)
        sent.residual[own].add_(owned.residual, alpha=world)
        return Exchanged(result[:numel], sent.residual[:numel], state)

    def wire_bytes(self, unit: UnitSpec, world_size: int) -> int:
        shard = self._shard_elems(unit.numel, world_size)
        return 2 * (world_size - 1) * wire_format(self.format).message_bytes(shard)

    def _shard_elems(self, numel: int, world_size: int) -> int:
        """Equal shards of whole blocks (at least 8 values, so that every part of a message is aligned)."""
        block = max(wire_format(self.format).block, 8)
        return -(-numel // (world_size * block)) * block

    def _decode(self, message: Tensor, weight: float, out: Tensor, accumulate: bool) -> None:
        fmt = wire_format(self.format)
        codes, scales = message.split([fmt.code_bytes(out.numel()), fmt.scale_bytes(out.numel())])
        fmt.decode(codes, None if fmt.scale_dtype is None else scales.view(fmt.scale_dtype), weight, out, accumulate)


def _rows(encoded: Encoded, count: int) -> Tensor:
    """The codes and scales of ``count`` equal shards, one message per row."""
    parts = [encoded.codes.view(count, -1)]
    if encoded.scales is not None:
        parts.append(encoded.scales.view(torch.uint8).view(count, -1))
    return torch.cat(parts, dim=1)
