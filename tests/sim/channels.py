"""What the tests of channels share: ranks with links, inputs whose means are exact, and states to compare."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sim.threads import ThreadedWorld
from thinwire.comm import Link, Transport
from thinwire.core import AllReduce, Compressor, Exchange, Exchanged, Step, TensorSpec, UnitSpec
from thinwire.exchange import Channel, Fixed, Membership, Outcome, Transaction
from thinwire.fusion.groups import GroupPlan
from thinwire.fusion.prepare import prepare

TENSORS = (TensorSpec("a", (6, 8)), TensorSpec("b", (5,)), TensorSpec("c", (9, 4)), TensorSpec("d", (3, 7)))
PLANS = tuple(GroupPlan((tensor.fqn,)) for tensor in TENSORS)
EXACT = ("dense", "topk(density=1.0)", "threshold(value=0)")
Wrap = Callable[[Transport], Transport]


class TwoRounds(Compressor):
    """Averages, then averages the mean: exact, and says that it takes two rounds."""

    name = "two_rounds"
    rounds: int | None = 2

    def exchange(self, x: Tensor, state: dict[str, Tensor], step: Step) -> Exchange:
        for _ in range(2):
            x = yield AllReduce(x)
        return Exchanged(x, None, state)

    def wire_bytes(self, unit: UnitSpec, world_size: int) -> int:
        return 2 * AllReduce(torch.empty(unit.numel)).sent_bytes(world_size)


class ManyRounds(TwoRounds):
    """As many as the unit has dimensions in its first tensor, which it does not say beforehand."""

    name = "many_rounds"
    rounds = None

    def exchange(self, x: Tensor, state: dict[str, Tensor], step: Step) -> Exchange:
        for _ in range(1 + len(step.unit.tensors[0].shape)):
            x = yield AllReduce(x)
        return Exchanged(x, None, state)


class ReducedInBf16(TwoRounds):
    """One reduction of 16-bit floats: what is piggybacked on it is rounded too."""

    name = "reduced_in_bf16"
    rounds = 1

    def exchange(self, x: Tensor, state: dict[str, Tensor], step: Step) -> Exchange:
        got = yield AllReduce(x.bfloat16())
        return Exchanged(got.float(), None, state)


@contextmanager
def link_of(world: ThreadedWorld, rank: int, wrap: Wrap = lambda transport: transport, **order: Any) -> Iterator[Link]:
    """A link of one rank, closed at the end; ``order`` goes to ``ThreadedWorld.transport``."""
    link = Link(wrap(world.transport(rank, **order)), name=f"rank{rank}")
    try:
        yield link
    finally:
        link.close()


def make_channel(
    link: Link | Membership,
    compressor: str | Compressor = "dense",
    *,
    name: str = "grad",
    tensors: Sequence[TensorSpec] = TENSORS,
    plans: Sequence[GroupPlan] = PLANS,
    **settings: Any,
) -> Channel:
    """A channel of one rank. Small tensors are compressed too: nothing is routed."""
    chosen = prepare(f"route(min_elems=0, min_dims=0) | {compressor}") if isinstance(compressor, str) else compressor
    members = Fixed(link) if isinstance(link, Link) else link
    return Channel(name, tensors, members, chosen, plans, **settings)


def whole(tensor: TensorSpec, rank: int, index: int) -> Tensor:
    """Whole numbers, so that means over 1, 2 or 4 ranks are exact; never zero, so that a threshold of 0 sends them."""
    values = torch.arange(tensor.numel, dtype=torch.float32).view(tensor.shape)
    return values * 4 + 1 + 2 * rank + 8 * index


def mean(tensor: TensorSpec, ranks: int, index: int) -> Tensor:
    """The mean of ``whole`` over the ranks."""
    return torch.stack([whole(tensor, rank, index) for rank in range(ranks)]).mean(dim=0)


def noise(tensor: TensorSpec, rank: int, index: int) -> Tensor:
    """Numbers that compressors lose something of."""
    generator = torch.Generator().manual_seed(1000 * index + 10 * rank + len(tensor.fqn) + tensor.numel)
    return torch.randn(tensor.shape, generator=generator)


def fill(transaction: Transaction, channel: Channel, rank: int, make: Any = whole) -> None:
    """Add everything that the transaction covers, by its own index."""
    for name in transaction.names:
        transaction.add(name, make(channel.tensors[name], rank, transaction.index))


def exchange(
    channel: Channel,
    rank: int,
    names: Collection[str] | None = None,
    *,
    make: Any = whole,
    scalars: Mapping[str, float] | None = None,
) -> Outcome:
    """One transaction from begin to end."""
    transaction = channel.begin(names)
    fill(transaction, channel, rank, make)
    transaction.close(scalars=scalars or {})
    return transaction.wait()


def assert_exact(outcome: Outcome, ranks: int, names: Collection[str] | None = None) -> None:
    """Every mean is the mean, and there are no others."""
    specs = {tensor.fqn: tensor for tensor in TENSORS if names is None or tensor.fqn in names}
    assert outcome.committed
    assert outcome.means.keys() == specs.keys() == outcome.used
    for name, tensor in specs.items():
        assert outcome.means[name].tolist() == mean(tensor, ranks, outcome.index).tolist(), name


def saved(channel: Channel) -> dict[str, Any]:
    """Everything that a commit may change, as bytes: NaN equals NaN, and -0.0 does not equal 0.0."""
    state = channel.state_dict()
    tensors = {
        f"{name}.{key}": value.numpy().tobytes()
        for name, piece in state.pop("tensors").items()
        for key, value in piece.items()
    }
    carried = {name: value.numpy().tobytes() for name, value in state.pop("carried").items()}
    return {**state, "tensors": tensors, "carried": carried}


def states_of(channel: Channel) -> dict[str, Any]:
    """What ``saved`` gives, without the index: an aborted transaction counts there."""
    return {key: value for key, value in saved(channel).items() if key != "index"}
