"""Formats that must not be summed as they are: reduce-scatter in fp32 around the wire format, then all-gather.

Rank i owns the i-th shard of a unit. Everybody encodes everything and sends each owner its shard; the owner decodes, adds
in fp32, encodes the mean and gives it to all. Both rounds together move what a ring all-reduce of the same format would,
no sum ever happens in few bits, and block scales need no agreement. What the owner loses in the second encoding goes, times
the world size, into its own residual, so that conservation holds.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.compressors.shared.coders import Coder, FormatCoder
from thinwire.core import (
    AllGather,
    AllToAll,
    Compressor,
    ConfigError,
    Exchange,
    Exchanged,
    Reply,
    Request,
    State,
    Step,
    UnitSpec,
    memory,
)
from thinwire.core.blocks import aligned_elems, from_blocks, is_aligned, to_blocks
from thinwire.formats import WireFormat, wire_format


def shard_elems(numel: int, world_size: int, block: int) -> int:
    """Equal shards of whole blocks (at least 8 values, so that every part of a message is aligned)."""
    block = max(block, 8)
    return -(-numel // (world_size * block)) * block


def average_shard(messages: Reply, coder: Coder, step: Step, shard: int, device: torch.device) -> Tensor:
    """The mean of the shard that this rank owns."""
    mean = memory.empty(shard, device=device)
    coder.average(messages, step.rank * shard, mean)
    return mean


def share_shards(
    mean: Tensor, residual: Tensor, coder: Coder, step: Step, generator: torch.Generator | None = None
) -> Generator[Request, Any, tuple[Tensor, Tensor]]:
    """The second round: give the own shard to all; returns the whole mean and residual, padding included."""
    shard = mean.numel()
    own = slice(step.rank * shard, (step.rank + 1) * shard)
    owned = coder.write(mean, own.start, 1, generator)
    gathered = yield AllGather.of(owned.headroom)
    whole = memory.empty(step.world_size * shard, device=mean.device)
    coder.read(gathered, whole)
    residual[own].add_(owned.residual, alpha=step.world_size)
    return whole, residual


def sharded_mean(
    x: Tensor,
    coder: Coder,
    block: int,
    state: State,
    step: Step,
    *,
    stochastic: bool = False,
    owner: Coder | None = None,
) -> Exchange:
    """Both rounds; ``owner`` writes the second one, if that differs from the first."""
    world, numel = step.world_size, x.numel()
    shard = shard_elems(numel, world, block)
    first, second = (step.generator(p, per_rank=True) if stochastic else None for p in ("sent", "owned"))
    sent = coder.write(memory.padded(x, shard * world), 0, world, first, step.residual)
    if not sent.finite:
        step.refuse(sent.residual)
    received = yield AllToAll.of(sent.headroom)
    mean = average_shard(received, coder, step, shard, x.device)
    whole, residual = yield from share_shards(mean, sent.residual, owner or coder, step, second)
    return Exchanged(whole[:numel], residual[:numel], state)


class Blockwise(Compressor):
    """A compressor that is one wire format, for all values alike."""

    @property
    def format(self) -> WireFormat:
        return wire_format(self.name)

    def exchange(self, x: Tensor, state: State, step: Step) -> Exchange:
        if not x.numel():  # nothing to say, and some collectives stumble over empty messages
            return Exchanged(x, x.clone(), state)
        fmt, unit = self.format, step.unit
        coder, aligned = self.coder(unit), to_blocks(x, unit, fmt.block)
        done = yield from sharded_mean(aligned, coder, fmt.block, state, step, stochastic=self.stochastic)
        assert done.residual is not None
        mean, residual = (from_blocks(one, unit, fmt.block) for one in (done.mean, done.residual))
        return Exchanged(mean, residual, state)

    def coder(self, unit: UnitSpec) -> Coder:
        """How the unit is written, aligned to blocks."""
        return FormatCoder(self.format)

    @property
    def stochastic(self) -> bool:
        return False

    @property
    def rounds(self) -> int | None:
        return 2 if type(self).exchange is Blockwise.exchange else None

    def adds_residual(self, step: Step) -> bool:
        fmt, unit, world = self.format, step.unit, step.world_size
        if fmt.by_rows is None or self.stochastic or not unit.numel:
            return False
        # Nothing is copied before it is encoded: neither to align tensors nor to fill the last shard.
        return is_aligned(unit, fmt.block) and unit.numel == world * shard_elems(unit.numel, world, fmt.block)

    def wire_bytes(self, unit: UnitSpec, world_size: int) -> int:
        block = self.format.block
        shard = shard_elems(aligned_elems(unit, block), world_size, block)
        return 2 * (world_size - 1) * self.format.message_bytes(shard)


@dataclass(frozen=True, kw_only=True)
class FewBits(Blockwise):
    """A format of few bits, with a choice of rounding.

    Args:
        rounding: ``nearest``, or ``stochastic``: up or down at random, so that the expectation is the value itself. More
            noise in every step, but no bias; useful without error feedback.
    """

    rounding: str = "nearest"

    def __post_init__(self) -> None:
        if self.rounding not in ("nearest", "stochastic"):
            raise ConfigError(f"{self.name}: rounding is {self.rounding!r}; expected 'nearest' or 'stochastic'")

    @property
    def stochastic(self) -> bool:
        return self.rounding == "stochastic"

    @classmethod
    def examples(cls) -> Sequence[Compressor]:
        return [cls(), cls(rounding="stochastic")]
