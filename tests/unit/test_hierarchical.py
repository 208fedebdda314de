"""Dense inside a host, compressed between hosts; and requests to part of the ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from contract.world import run_unit
from thinwire.comm.merge import merge
from thinwire.comm.simulate import answer
from thinwire.core import AllGather, AllReduce, AllToAll, Broadcast, ConfigError, TensorSpec, UnitSpec, make
from thinwire.core.request import Partition
from thinwire.wrappers.hierarchical import Hierarchical, Hosts

UNIT = UnitSpec((TensorSpec("a", (20, 30)), TensorSpec("b", (7,))))
PAIRS = ((0, 1), (2, 3))


def _gradients(steps: int, world_size: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(11)
    return [[torch.randn(UNIT.numel, generator=generator) for _ in range(world_size)] for _ in range(steps)]


def test_each_group_is_answered_by_itself() -> None:
    own = [torch.tensor([float(rank)]) for rank in range(4)]
    partitions = [Partition(PAIRS, rank) for rank in range(4)]
    sums = answer([AllReduce(own[r].clone(), "sum", partitions[r]) for r in range(4)])
    assert [float(one) for one in sums] == [1, 1, 5, 5]  # type: ignore[arg-type]
    heard = answer([AllGather(own[r], partition=partitions[r]) for r in range(4)])
    assert [[float(m) for m in one] for one in heard] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    told = answer([Broadcast(own[r], 1, partitions[r]) for r in range(4)])
    assert [float(one) for one in told] == [1, 1, 3, 3]  # type: ignore[arg-type]
    rows = [torch.tensor([[10 * r], [10 * r + 1]]) for r in range(4)]
    dealt = answer([AllToAll(rows[r], partitions[r]) for r in range(4)])
    assert [one.flatten().tolist() for one in dealt] == [[0, 10], [1, 11], [20, 30], [21, 31]]  # type: ignore[union-attr]


def test_requests_to_part_of_the_ranks_cost_what_those_cost() -> None:
    tensor, members = torch.zeros(12), ((0, 1, 2), (3,))
    assert AllReduce(tensor, partition=Partition(members, 0)).sent_bytes(4) == AllReduce(tensor).sent_bytes(3)
    assert AllGather(tensor, partition=Partition(members, 1)).sent_bytes(4) == 2 * 48
    assert AllReduce(tensor, partition=Partition(members, 3)).sent_bytes(4) == 0


def test_only_requests_to_the_same_ranks_are_merged() -> None:
    def ask(partition: Partition | None):  # type: ignore[no-untyped-def]
        return (yield AllReduce(torch.ones(2), partition=partition))

    pairs, all_ranks = Partition(PAIRS, 0), None
    requests = next(merge([ask(pairs), ask(all_ranks), ask(pairs)]))
    assert [(r.tensor.numel(), r.partition) for r in requests] == [(4, pairs), (2, None)]  # type: ignore[union-attr]


def test_hosts_are_neighbours_and_the_last_may_be_smaller() -> None:
    hosts = Hosts(2, rank=4, world_size=5)
    assert hosts.members == ((0, 1), (2, 3), (4,))
    assert (hosts.count, hosts.own) == (3, 2)
    assert hosts.between.members == ((0, 2, 4), (1,), (3,))
    assert hosts.weight == pytest.approx(3 / 5)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_without_compression_it_is_the_plain_mean(world_size: int) -> None:
    gradients = _gradients(1, world_size)
    done = run_unit(make("hierarchical | dense"), UNIT, gradients)[0]
    torch.testing.assert_close(done.results[0].mean, torch.stack(gradients[0]).mean(dim=0))


def test_one_rank_per_host_is_the_wrapped_compressor() -> None:
    gradients = _gradients(3, 3)
    for inner in ("ef | topk(density=0.1)", "ef | oktopk(density=0.1)"):
        plain = run_unit(make(inner), UNIT, gradients)
        wrapped = run_unit(make(f"hierarchical(ranks_per_host=1) | {inner}"), UNIT, gradients)
        assert all(
            torch.equal(a.results[r].mean, b.results[r].mean)
            for a, b in zip(plain, wrapped, strict=True)
            for r in range(3)
        )


@pytest.mark.parametrize(
    "inner", ["topk(density=0.1)", "oktopk(density=0.1)", "adtopk(density=0.1, reuse=True)", "int4"]
)
def test_ranks_of_a_host_share_its_residual(inner: str) -> None:
    for done in run_unit(make(f"hierarchical | ef | {inner}"), UNIT, _gradients(3, 4)):
        residuals = [result.state["residual"] for result in done.results]
        assert torch.equal(residuals[0], residuals[1])
        assert torch.equal(residuals[2], residuals[3])
        assert not torch.equal(residuals[0], residuals[2])


@pytest.mark.parametrize("world_size", [3, 4, 5])
def test_nothing_is_lost_over_many_steps(world_size: int) -> None:
    """Also where messages vary in length, and where the last host is smaller."""
    given = _gradients(8, world_size)
    rounds = run_unit(make("hierarchical | ef | threshold(value=1.5)"), UNIT, given)
    applied = sum(done.results[0].mean for done in rounds)
    waiting = torch.stack([result.state["residual"] for result in rounds[-1].results]).mean(dim=0)
    total = torch.stack([torch.stack(ranks).mean(dim=0) for ranks in given]).sum(dim=0)
    torch.testing.assert_close(applied + waiting, total, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("world_size", [3, 4, 5])
def test_momentum_of_unequal_hosts_is_that_of_the_mean(world_size: int) -> None:
    """What a host accumulates counts like its gradients: the velocity of a smaller host must not weigh too much."""
    gradients = _gradients(4, world_size)
    for plain, wrapped in zip(
        run_unit(make("momentum | dense"), UNIT, gradients),
        run_unit(make("hierarchical | momentum | dense"), UNIT, gradients),
        strict=True,
    ):
        torch.testing.assert_close(wrapped.results[0].mean, plain.results[0].mean)


def test_between_hosts_goes_what_the_hosts_alone_would_send() -> None:
    compressor = make("hierarchical | topk(density=0.1)")
    assert isinstance(compressor, Hierarchical)
    sent = run_unit(compressor, UNIT, _gradients(1, 4))[0].sent_bytes
    between = make("topk(density=0.1)").wire_bytes(UNIT, 2)
    assert compressor.between_hosts_bytes(UNIT, 4) == between
    assert sent[0] == sent[2] == sent[1] + between
    assert sent[1] == sent[3]
    assert sum(sent) // 4 == pytest.approx(compressor.wire_bytes(UNIT, 4), rel=0.05)


def test_a_host_has_at_least_one_rank() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        make("hierarchical(ranks_per_host=0) | dense")
