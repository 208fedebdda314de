"""Every element is averaged exactly once, whatever the shapes, caps, compressors and completion times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from contract.menagerie import BY_NAME
from contract.world import World, run_unit
from sim.threads import ThreadedWorld, link_threads, run_ranks
from thinwire import make
from thinwire.comm import Delayed, Link, Tag, Transport, simulate
from thinwire.comm.merge import merge
from thinwire.comm.simulate import answer
from thinwire.core import AllReduce, Compressor, Exchange, Exchanged, Reply, Request, Step, TensorSpec, UnitSpec
from thinwire.exchange import Channel, Fixed
from thinwire.fusion import fixed_groups, parse_fusion
from thinwire.fusion.groups import GroupPlan, names_of
from thinwire.fusion.prepare import prepare

MIXED = (
    "dense",
    "ef | topk(density=0.1) | fp16",
    "powersgd(rank=2)",
    "int4",
    "threshold(value=0.5)",
    "sign",
    "randomk",
)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_units_in_a_merged_group_do_as_they_do_alone(world_size: int) -> None:
    names = ("conv", "unlike", "low_rank", "scalar", "ties", "prime", "huge")
    pairs = [(make(text), BY_NAME[name]) for text, name in zip(MIXED, names, strict=True)]
    alone = [
        run_unit(compressor, one.unit, [[one.gradient(rank, 0) for rank in range(world_size)]])[0].results
        for compressor, one in pairs
    ]

    def group(rank: int) -> list[Exchange]:
        return [
            compressor.exchange(one.gradient(rank, 0), compressor.init(one.unit), Step(0, one.unit, rank, world_size))
            for compressor, one in pairs
        ]

    for rank, results in enumerate(simulate([merge(group(rank)) for rank in range(world_size)])):
        for expected, result in zip(alone, results, strict=True):
            assert torch.equal(result.mean, expected[rank].mean)
            assert result.state.keys() == expected[rank].state.keys()
            assert all(torch.equal(result.state[key], value) for key, value in expected[rank].state.items())


def _alone(request: Request) -> Reply:
    """What a world of one replies."""
    (reply,) = answer([request])
    return reply


def test_a_group_sends_one_message_per_kind_and_round() -> None:
    units = [UnitSpec.flat(100, f"u{i}") for i in range(5)]
    compressors = [make(text) for text in ("dense", "dense", "topk", "sign", "powersgd")]
    rounds: list[list[str]] = []
    merged = merge(
        [c.exchange(torch.randn(100), c.init(u), Step(0, u)) for c, u in zip(compressors, units, strict=True)]
    )
    replies: tuple[Reply, ...] | None = None
    while True:
        try:
            requests = merged.send(replies)
        except StopIteration:
            break
        rounds.append([type(request).__name__ for request in requests])
        replies = tuple(_alone(request) for request in requests)
    assert rounds == [["AllReduce", "AllGather"], ["AllReduce"]]


shapes = st.lists(st.lists(st.integers(0, 7), min_size=0, max_size=3).map(tuple), min_size=1, max_size=9)


@given(shapes=shapes, cap_bytes=st.integers(0, 600))
def test_groups_partition_the_tensors_in_order(shapes: list[tuple[int, ...]], cap_bytes: int) -> None:
    tensors = [TensorSpec(f"t{i}", shape) for i, shape in enumerate(shapes)]
    groups = fixed_groups(tensors, cap_bytes)
    assert [tensor for group in groups for tensor in group] == tensors
    assert all(len(group) == 1 or 4 * sum(t.numel for t in group) <= cap_bytes for group in groups)


@given(
    shapes=shapes,
    fuse=st.sampled_from(["none", "auto", "64", "1KiB"]),
    spec=st.sampled_from(
        ["dense", "topk(density=1.0)", "route(min_elems=8) | topk(density=1.0)", "threshold(value=0)"]
    ),
    delays=st.lists(st.sampled_from([0.0, 0.0, 0.003]), min_size=16, max_size=16),
)
def test_every_element_is_averaged_exactly_once(
    shapes: list[tuple[int, ...]], fuse: str, spec: str, delays: Sequence[float]
) -> None:
    """Through link, framing and merging, with ranks and messages that complete late, each in its own way."""
    tensors = [TensorSpec(f"t{i}", shape) for i, shape in enumerate(shapes)]
    plans = [GroupPlan(names_of(group)) for group in parse_fusion(fuse)(tensors)]
    world = ThreadedWorld(2)

    def rank(index: int) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
        def delay_s(tag: Tag) -> float:
            return delays[(tag.group + tag.round + 5 * index) % len(delays)]

        written = []
        with _channel(Delayed(world.transport(index), delay_s), tensors, prepare(spec), plans) as channel:
            covered = [tensor.fqn for group in channel.groups for tensor in group.tensors]
            assert sorted(covered) == sorted(tensor.fqn for tensor in tensors), "each in one group, once"
            for step in range(2):
                outs = {tensor.fqn: torch.full(tensor.shape, float("nan")) for tensor in tensors}
                transaction = channel.begin()
                for tensor in tensors:
                    transaction.add(tensor.fqn, _gradient(tensor, index, step), out=outs[tensor.fqn])
                transaction.close()
                outcome = transaction.wait()
                assert outcome.committed
                written.append((dict(outcome.means), outs))
        return written

    for written in run_ranks(rank, 2):
        for step, (means, outs) in enumerate(written):
            assert means.keys() == outs.keys()
            for tensor in tensors:
                expected = (_gradient(tensor, 0, step) + _gradient(tensor, 1, step)) / 2
                assert means[tensor.fqn].tolist() == outs[tensor.fqn].tolist() == expected.tolist()


@contextmanager
def _channel(
    transport: Transport, tensors: Sequence[TensorSpec], compressor: Compressor, plans: Sequence[GroupPlan]
) -> Iterator[Channel]:
    link = Link(transport, config=1)
    yield Channel("grad", tensors, Fixed(link), compressor, plans)
    link.close()


def _gradient(tensor: TensorSpec, rank: int, step: int) -> Tensor:
    """Whole numbers, so that sums are exact; never zero, so that a threshold of 0 sends them."""
    values = torch.arange(tensor.numel, dtype=torch.float32).view(tensor.shape)
    return values * 4 + 1 + 2 * rank + 8 * step


class _Chatty(Compressor):
    """Needs many rounds."""

    name = "chatty"

    def exchange(self, x: Tensor, state: dict[str, Tensor], step: Step) -> Exchange:
        for _ in range(step.unit.numel):
            x = yield AllReduce(x)
        return Exchanged(x, None, state)

    def wire_bytes(self, unit: UnitSpec, world_size: int) -> int:
        return unit.numel * AllReduce(torch.empty(unit.numel)).sent_bytes(world_size)


def test_messages_are_started_in_the_same_order_on_all_ranks() -> None:
    """Groups of one to five rounds, ranks that are late in opposite ways: only the order of submission counts."""
    orders: list[list[Tag]] = [[] for _ in range(2)]
    world = ThreadedWorld(2)
    tensors = [TensorSpec(f"t{rounds}", (rounds,)) for rounds in (5, 1, 3, 2, 4)]

    plans = [GroupPlan((tensor.fqn,)) for tensor in tensors]

    def rank(index: int) -> None:
        transport = Delayed(world.transport(index, orders[index]), lambda tag: 0.002 * ((tag.group + index) % 2))
        with _channel(transport, tensors, _Chatty(), plans) as channel:
            transaction = channel.begin()
            for tensor in tensors:
                transaction.add(tensor.fqn, torch.ones(tensor.shape))
            transaction.close()
            assert transaction.wait().committed

    run_ranks(rank, 2)
    assert orders[0] == orders[1]
    assert len(orders[0]) == 5 + 1 + 3 + 2 + 4, "every round; the flags travel with the last group"
    assert not link_threads()


class _TwoRounds(_Chatty):
    """Says so."""

    rounds = 2

    def exchange(self, x: Tensor, state: dict[str, Tensor], step: Step) -> Exchange:
        for _ in range(2):
            x = yield AllReduce(x)
        return Exchanged(x, None, state)


@given(
    ready=st.lists(st.permutations(range(9)), min_size=2, max_size=2),
    unused=st.sets(st.integers(min_value=0, max_value=8)),
    per_group=st.integers(min_value=1, max_value=4),
    delays=st.lists(st.sampled_from([0.0, 0.0, 0.002]), min_size=7, max_size=7),
)
def test_every_lane_has_the_same_order_on_all_ranks(
    ready: list[list[int]], unused: set[int], per_group: int, delays: Sequence[float]
) -> None:
    """Whatever becomes ready or arrives first, and also where the second rank has no gradient for some."""
    tensors = [TensorSpec(f"t{i}", (2,)) for i in range(9)]
    plans = [GroupPlan(names_of(tensors[i : i + per_group])) for i in range(0, 9, per_group)]
    orders: list[list[Tag]] = [[] for _ in range(2)]
    world = ThreadedWorld(2, lanes=2)

    def rank(index: int) -> list[Tensor]:
        transport = Delayed(
            world.transport(index, orders[index]), lambda tag: delays[(tag.group + 3 * tag.round + index) % 7]
        )
        means: list[Tensor] = []
        with _channel(transport, tensors, _TwoRounds(), plans) as channel:
            assert channel.members.link().rounds_in_lanes
            for _ in range(2):
                transaction = channel.begin()
                for i in ready[index]:
                    if index == 0 or i not in unused:
                        transaction.add(f"t{i}", torch.ones(2))
                transaction.close()
                outcome = transaction.wait()
                assert outcome.used == {tensor.fqn for tensor in tensors}
                means += outcome.means.values()
        return means

    for means in run_ranks(rank, 2):
        assert len(means) == 18
    for lane in range(2):
        mine, other = ([tag for tag in order if tag.round == lane] for order in orders)
        assert mine == other
        assert [(tag.step, tag.group) for tag in mine] == [
            (step, group) for step in range(2) for group in range(len(plans))
        ]
    assert not link_threads()


def test_regrouping_keeps_the_residuals() -> None:
    """DDP rebuilds its buckets after the first step; what waits in residuals must move along."""
    specimen = BY_NAME["unlike"]
    tensors = specimen.unit.tensors
    world = World(tensors, make("ef | topk(density=0.2)"), 2)
    given_sum, got_sum = torch.zeros(specimen.unit.numel), torch.zeros(specimen.unit.numel)
    for step, groups in enumerate(([tensors], [tensors[:2], tensors[2:]], [tensors[3:], tensors[:3]])):
        gradients = [specimen.gradient(rank, step) for rank in range(2)]
        given_sum += (gradients[0] + gradients[1]) / 2
        split = [dict(zip([t.fqn for t in tensors], g.split(specimen.unit.sizes), strict=True)) for g in gradients]
        means = world.step([world.group(group) for group in groups], split)[0]
        got_sum += torch.cat([means[tensor.fqn] for tensor in tensors])
    waiting = [torch.cat([at_rest[t.fqn]["residual"] for t in tensors]) for at_rest in world.at_rest]
    applied_or_waiting = (got_sum + (waiting[0] + waiting[1]) / 2).split(specimen.unit.sizes)
    for got, expected in zip(applied_or_waiting, given_sum.split(specimen.unit.sizes), strict=True):
        magnitude = float(expected.abs().max()) if expected.numel() else 0.0
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5 * magnitude)
