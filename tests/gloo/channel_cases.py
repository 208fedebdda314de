"""Cases: several channels at work at once over real process groups, with replies that are late at random. Two ranks."""

from __future__ import annotations

import random
from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from gloo.support import Case, Rank
from thinwire.comm import Delayed, Link, TorchDistTransport
from thinwire.core import TensorSpec
from thinwire.exchange import Channel, Fixed, Transaction
from thinwire.fusion.groups import GroupPlan
from thinwire.fusion.prepare import prepare

TENSORS = [TensorSpec(f"t{i}", (40, 30 + i)) for i in range(4)]
PLAN = [GroupPlan((tensor.fqn,)) for tensor in TENSORS]
PERIODS = {"fast": 1, "middle": 2, "slow": 3}
STEPS = 12


def _link(rank: Rank, name: str) -> Link:
    lanes = [dist.new_group(), dist.new_group()]
    late = random.Random(rank.index)
    transport = Delayed(TorchDistTransport(lanes[0], later=lanes[1:]), lambda tag: late.choice([0.0, 0.0, 0.004]))
    return Link(transport, name=name)


def _value(tensor: TensorSpec, rank: int, step: int) -> Tensor:
    """Whole numbers: their mean over two ranks is exact."""
    return torch.full(tensor.shape, float(2 * rank + 4 * step + tensor.shape[1]))


def _mean(tensor: TensorSpec, world_size: int, step: int) -> float:
    return sum(float(_value(tensor, rank, step)[0, 0]) for rank in range(world_size)) / world_size


def _channels(compress: str, links: int) -> Case:
    def run(rank: Rank) -> None:
        made = [_link(rank, f"link{i}") for i in range(links)]
        channels = {
            name: Channel(name, TENSORS, Fixed(made[i % links]), prepare(compress), PLAN)
            for i, name in enumerate(PERIODS)
        }
        flying: deque[tuple[int, int, str, Transaction]] = deque()
        for step in range(STEPS):
            while flying and flying[0][0] <= step:  # at a fixed step, never by arrival
                _check(flying.popleft(), rank)
            for name, period in PERIODS.items():
                if step % period == 0:
                    transaction = channels[name].begin()
                    for tensor in TENSORS:
                        transaction.add(tensor.fqn, _value(tensor, rank.index, step))
                    transaction.close()
                    flying.append((step + 1, step, name, transaction))
        while flying:
            _check(flying.popleft(), rank)
        for link in made:
            link.close()

    return run


def _check(flight: tuple[int, int, str, Transaction], rank: Rank) -> None:
    _, step, name, transaction = flight
    outcome = transaction.wait()
    assert outcome.committed
    for tensor in TENSORS:
        expected = _mean(tensor, rank.world_size, step)
        error = float((outcome.means[tensor.fqn] - expected).abs().max())
        assert error <= 0.01 * abs(expected), (name, step, tensor.fqn, error)


def two_disjoint_subsets(rank: Rank) -> None:
    link = _link(rank, "subsets")
    channel = Channel("parts", TENSORS, Fixed(link), prepare("dense"), PLAN)
    for step in range(4):
        parts = [TENSORS[:2], TENSORS[2:]]
        open_ = [channel.begin([tensor.fqn for tensor in part]) for part in parts]
        for transaction, part in zip(open_[::-1], parts[::-1], strict=True):
            for tensor in part:
                transaction.add(tensor.fqn, _value(tensor, rank.index, step))
            transaction.close()
        for transaction, part in zip(open_, parts, strict=True):
            means = transaction.wait().means
            for tensor in part:
                assert torch.equal(means[tensor.fqn], torch.full(tensor.shape, _mean(tensor, rank.world_size, step)))
    link.close()


CASES: dict[str, Case] = {"two disjoint subsets of a channel": two_disjoint_subsets}
for _compress in ("dense", "int8", "powersgd(rank=2)"):
    for _links in (1, 3):
        CASES[f"three channels, {_compress}, {_links} link(s)"] = _channels(_compress, _links)
