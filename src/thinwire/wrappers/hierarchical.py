"""Hierarchical reduction: dense inside a host, compressed between hosts."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from thinwire.core import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Compressor,
    ConfigError,
    Exchange,
    Exchanged,
    Layout,
    Reply,
    Request,
    Role,
    State,
    Step,
    UnitSpec,
    Wrapper,
    make,
    memory,
    register,
)
from thinwire.core.request import Partition


@dataclass(frozen=True)
class Hosts:
    """Which ranks share a host: neighbours, ``ranks_per_host`` of them; the last host may have fewer."""

    ranks_per_host: int
    rank: int
    world_size: int

    @property
    def members(self) -> tuple[tuple[int, ...], ...]:
        firsts = range(0, self.world_size, self.ranks_per_host)
        return tuple(tuple(range(first, min(first + self.ranks_per_host, self.world_size))) for first in firsts)

    @property
    def count(self) -> int:
        return len(self.members)

    @property
    def own(self) -> int:
        return self.rank // self.ranks_per_host

    @property
    def inside(self) -> Partition:
        """The ranks of each host among themselves."""
        return Partition(self.members, self.rank)

    @property
    def between(self) -> Partition:
        """The first rank of every host; all others are alone."""
        first = tuple(ranks[0] for ranks in self.members)
        others = tuple((rank,) for ranks in self.members for rank in ranks[1:])
        return Partition((first, *others), self.rank)

    @property
    def weight(self) -> float:
        """What this host's mean counts in a mean over hosts; 1 where all hosts have equally many ranks."""
        return len(self.members[self.own]) * self.count / self.world_size


@register("hierarchical")
@dataclass(frozen=True, kw_only=True)
class Hierarchical(Wrapper):
    """Average densely inside each host, then exchange the hosts' means with the wrapped compressor.

    For hosts with several ranks that share one slow link: a sparsifier gathers p - 1 messages per rank, this H - 1 per
    host, for H hosts. The first rank of a host talks to the other hosts and passes what it hears on; all ranks of a host
    follow the wrapped exchange with the same numbers, so they end with the same mean and the same residual, which is the
    host's. That costs a dense reduction and a round per message more, both inside the host.

    Ranks are taken to be numbered host by host, as torchrun does.

    Args:
        ranks_per_host: how many neighbouring ranks share a host. The last host may have fewer.
    """

    ranks_per_host: int = 2

    def __post_init__(self) -> None:
        if self.ranks_per_host < 1:
            raise ConfigError(f"hierarchical: ranks_per_host is {self.ranks_per_host}; expected at least 1")

    @property
    def exact_bytes(self) -> bool:
        return False

    @property
    def rounds(self) -> int | None:
        return None  # inside hosts and between them, and more of them than what is inside declares

    def partitions(self, rank: int, world_size: int) -> Sequence[Partition]:
        hosts = Hosts(self.ranks_per_host, rank, world_size)
        return hosts.inside, hosts.between

    def exchange(self, x: Tensor, state: State, step: Step) -> Exchange:
        hosts = Hosts(self.ranks_per_host, step.rank, step.world_size)
        host_mean = yield AllReduce(x, partition=hosts.inside)
        inner_step = replace(step, rank=hosts.own, world_size=hosts.count)
        weight = hosts.weight  # hosts average with equal weight, so a host with fewer ranks must count for less
        inner = self.inner.exchange(_scaled(host_mean, weight), self._weighted(state, weight), inner_step)
        done = yield from _between_hosts(inner, hosts)
        residual = None if done.residual is None else _scaled(done.residual, 1 / weight)
        return Exchanged(done.mean, residual, self._weighted(done.state, 1 / weight))

    def _weighted(self, state: State, weight: float) -> State:
        """Residuals at rest are per rank, inside the exchange per host: they count like what they are added to."""
        layouts = self.inner.layout()
        accumulated = [
            key for key, layout in layouts.items() if _accumulates(layout) and state[key].is_floating_point()
        ]
        return {key: _scaled(state[key], weight) if key in accumulated else state[key] for key in layouts}

    def wire_bytes(self, unit: UnitSpec, world_size: int) -> int:
        """The average over the ranks, inside hosts and between them; what is passed on is counted as gathered messages."""
        hosts = Hosts(self.ranks_per_host, 0, world_size)
        dense = sum(2 * (len(ranks) - 1) * unit.dense_bytes for ranks in hosts.members)
        between = self.between_hosts_bytes(unit, world_size)
        heard = between * hosts.count // max(1, hosts.count - 1)
        return (dense + hosts.count * between + (world_size - hosts.count) * heard) // world_size

    def between_hosts_bytes(self, unit: UnitSpec, world_size: int) -> int:
        """What one host sends to the others."""
        return self.inner.wire_bytes(unit, Hosts(self.ranks_per_host, 0, world_size).count)

    @classmethod
    def examples(cls) -> Sequence[Compressor]:
        return [cls(inner=make("topk(density=0.1)")), cls(ranks_per_host=3, inner=make("oktopk(density=0.1)"))]


def _accumulates(layout: Layout) -> bool:
    """Gradients of this rank are added up in it: a residual or a velocity."""
    return layout.elementwise and layout.role is not Role.REPLICATED


def _scaled(tensor: Tensor, factor: float) -> Tensor:
    return tensor if factor == 1 else tensor * factor


def _between_hosts(exchange: Exchange, hosts: Hosts) -> Exchange:
    """Answer the requests of an exchange of hosts: their first ranks ask, the others are told."""
    reply: Any = None
    while True:
        try:
            asked = exchange.send(reply)
        except StopIteration as stop:
            done: Exchanged = stop.value
            return done
        requests = asked if isinstance(asked, tuple) else (asked,)
        replies = yield from _ask(requests, hosts)
        reply = replies if isinstance(asked, tuple) else replies[0]


def _ask(requests: tuple[Request, ...], hosts: Hosts) -> Generator[tuple[Request, ...], Any, tuple[Reply, ...]]:
    heard = yield tuple(replace(request, partition=hosts.between) for request in requests)
    if hosts.world_size == hosts.count:
        return tuple(heard)
    lengths = yield from _lengths(requests, heard, hosts)
    passed_on = [_to_pass_on(r, reply, n) for r, reply, n in zip(requests, heard, lengths, strict=True)]
    replies = yield tuple(Broadcast(one, partition=hosts.inside) for one in passed_on)
    return tuple(
        list(reply.split(length)) if isinstance(request, AllGather) else reply
        for request, reply, length in zip(requests, replies, lengths, strict=True)
    )


def _lengths(
    requests: Sequence[Request], heard: Sequence[Any], hosts: Hosts
) -> Generator[tuple[Request, ...], Any, list[list[int]]]:
    """For every gather, how long each host's message is; where that varies, the first rank tells."""
    varying = [i for i, request in enumerate(requests) if isinstance(request, AllGather) and request.varying]
    lengths = [[r.message.numel()] * hosts.count if isinstance(r, AllGather) else [] for r in requests]
    if varying:
        known = [[one.numel() for one in heard[i]] for i in varying]
        padded = [row + [0] * (hosts.count - len(row)) for row in known]  # the others have heard only themselves
        table = torch.tensor(padded, dtype=torch.int64, device=heard[varying[0]][0].device)
        (told,) = yield (Broadcast(table, partition=hosts.inside),)
        for i, row in zip(varying, told.tolist(), strict=True):
            lengths[i] = row
    return lengths


def _to_pass_on(request: Request, reply: Any, lengths: Sequence[int]) -> Tensor:
    """The reply as one tensor; ranks that have heard nothing give memory for it."""
    match request:
        case AllGather():
            total = sum(lengths)
            heard_all = sum(one.numel() for one in reply) == total and len(reply) == len(lengths)
            if heard_all:
                return memory.cat(list(reply))
            return memory.empty(total, request.message.dtype, request.message.device)
        case AllToAll():
            # Framed transports give rows, others a matrix.
            return reply if isinstance(reply, Tensor) else torch.stack(list(reply))
        case _:
            whole: Tensor = reply
            return whole
