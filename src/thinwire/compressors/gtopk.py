"""gTop-k: Shi et al., A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification (ICDCS'19)."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.compressors.shared.entries import Entries, contains, summed, swap, swap_bytes
from thinwire.compressors.shared.sparse import check_density, kept
from thinwire.core import Compressor, Exchange, Exchanged, Request, State, Step, UnitSpec, register


class _Group(NamedTuple):
    """What a group of ranks has agreed on so far."""

    entries: Entries
    carried: Tensor  # which of them have been kept in every round since the rank itself joined in


@register("gtopk")
@dataclass(frozen=True, kw_only=True)
class GTopK(Compressor):
    """Apply k entries of every tensor in all: pairs of ranks add their top-k and keep the k largest, until all agree.

    Recursive doubling: log2(p) rounds of k entries, where an all-gather of top-k sends p - 1 times k. Ranks beyond the
    largest power of two first join a partner and get the result from it at the end. What a round drops goes back into the
    residual of the ranks that sent it, also where another group carries the same position through: every rank follows its
    own entries from round to round. (A residual restored from the final positions alone would lose those.)

    A pairwise exchange costs twice its message here (see ``entries.swap``): fewer bytes than ``topk`` beyond 8 ranks only.

    Args:
        density: fraction of the entries to apply: k = max(1, floor(density·n)) of every tensor, over all ranks together.
    """

    feedback = True
    scheduled = ("density",)

    density: float = 0.01

    def __post_init__(self) -> None:
        check_density(self.density)

    @property
    def sparse(self) -> bool:
        return True

    def exchange(self, x: Tensor, state: State, step: Step) -> Exchange:
        ks = self.at(step.index)._ks(step.unit)
        chosen = kernels.ef_topk(x, None, step.unit.offsets, ks, out=x)
        own = Entries(chosen.indices, chosen.values)
        entries, survived = yield from _agree(own, ks, step)

        returned = own.take(~survived)
        x[returned.indices.long()] = returned.values
        mean = torch.zeros_like(x)
        mean[entries.indices.long()] = entries.values / step.world_size
        return Exchanged(mean, x, state)

    def wire_bytes(self, unit: UnitSpec, world_size: int) -> int:
        return len(pairings(world_size)) * swap_bytes(2 * sum(self._ks(unit)), world_size)

    def _ks(self, unit: UnitSpec) -> list[int]:
        return [kept(self.density, size) for size in unit.sizes]

    @classmethod
    def examples(cls) -> Sequence[Compressor]:
        return [cls(density=0.1)]


def pairings(world_size: int) -> list[list[int]]:
    """For each round the partner of every rank; a rank that sits out is its own partner.

    A first and a last round pair the ranks beyond the largest power of two with those that stand for them.
    """
    core = 1 << (world_size.bit_length() - 1)
    everybody = range(world_size)
    rounds = [[rank ^ distance if rank < core else rank for rank in everybody] for distance in _powers_below(core)]
    if core == world_size:
        return rounds
    beyond = world_size - core
    joining = [rank - core if rank >= core else rank + core if rank < beyond else rank for rank in everybody]
    return [joining, *rounds, joining]


def _powers_below(limit: int) -> list[int]:
    return [1 << bit for bit in range(limit.bit_length() - 1)]


def _agree(own: Entries, ks: Sequence[int], step: Step) -> Generator[Request, Any, tuple[Entries, Tensor]]:
    """The entries that all ranks end with, and which of this rank's own are part of them."""
    rounds = pairings(step.world_size)
    joined = step.world_size & (step.world_size - 1) != 0
    group = _Group(own, torch.ones_like(own.indices, dtype=torch.bool))
    for number, partners in enumerate(rounds):
        got = _decoded((yield from swap(_encoded(group), partners, step)))
        if partners[step.rank] == step.rank:
            continue
        if joined and number == len(rounds) - 1:
            group = got if partners[step.rank] < step.rank else group
            continue
        group = _merged(group, got, ks, step.unit)
        if joined and number == 0:  # a pair goes on as one: from here on both follow what the pair has carried
            group = group._replace(carried=torch.ones_like(group.carried))
    return group.entries, contains(group.entries.indices[group.carried], own.indices)


def _merged(mine: _Group, other: _Group, ks: Sequence[int], unit: UnitSpec) -> _Group:
    """Both partners add the same two numbers and break ties alike, so they end with the same bits."""
    both = zip(mine.entries, other.entries, strict=True)
    entries = summed(*(torch.cat(pair) for pair in both)).largest(unit, ks)
    return _Group(entries, contains(mine.entries.indices[mine.carried], entries.indices))


def _encoded(group: _Group) -> Tensor:
    """Positions and values as int32; the position of what was not carried is complemented, which costs no byte."""
    indices = torch.where(group.carried, group.entries.indices, ~group.entries.indices)
    return torch.cat([indices, group.entries.values.view(torch.int32)])


def _decoded(message: Tensor) -> _Group:
    marked, values = message.view(2, -1)
    carried = marked >= 0
    return _Group(Entries(torch.where(carried, marked, ~marked), values.contiguous().view(torch.float32)), carried)
