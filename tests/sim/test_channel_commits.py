"""A transaction counts on all ranks or on none, and leaves states as they were or as they should be."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sim.channels import TENSORS, exchange, fill, link_of, make_channel, mean, noise, saved, states_of
from sim.threads import ThreadedWorld, run_ranks
from thinwire.core import ConfigError
from thinwire.fusion.prepare import prepare

LOSSY = (
    "topk(density=0.2)",
    "int4",
    "powersgd(rank=1)",
    "momentum(mu=0.9) | topk(density=0.2)",
    "randomk(density=0.3)",
)


@pytest.mark.parametrize("compressor", ["dense", *LOSSY])
@pytest.mark.parametrize("added", [0, 2, 4])
def test_an_abort_on_one_rank_aborts_on_all_and_changes_nothing(compressor: str, added: int) -> None:
    world = ThreadedWorld(3, lanes=2)

    def work(rank: int) -> tuple[dict[str, object], list[list[float]]]:
        with link_of(world, rank) as link:
            channel = make_channel(link, compressor)
            assert exchange(channel, rank, make=noise).committed
            before = states_of(channel)
            transaction = channel.begin()
            for tensor in TENSORS[: added if rank == 1 else 4]:
                transaction.add(tensor.fqn, noise(tensor, rank, 1))
            if rank == 1:
                transaction.abort()
            else:
                transaction.close()
            outcome = transaction.wait()
            assert not outcome.committed
            assert outcome.error is None
            assert not outcome.report.committed
            assert states_of(channel) == before
            assert channel.index == 2, "it counts: seeds and schedules go on alike on all ranks"
            after = exchange(channel, rank, make=noise)
            assert after.committed
            return states_of(channel), [after.means[tensor.fqn].flatten().tolist() for tensor in TENSORS]

    first, *others = run_ranks(work, 3)
    assert all(means == first[1] for _, means in others)


@pytest.mark.parametrize("compressor", LOSSY)
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_what_is_not_finite_on_one_rank_aborts_on_all(compressor: str, value: float) -> None:
    world = ThreadedWorld(2)

    def work(rank: int) -> None:
        with link_of(world, rank) as link:
            channel = make_channel(link, compressor)
            exchange(channel, rank, make=noise)
            for bad in TENSORS:
                before = states_of(channel)
                transaction = channel.begin()
                for tensor in TENSORS:
                    x = noise(tensor, rank, transaction.index)
                    if rank == 1 and tensor is bad:
                        x.view(-1)[-1] = value
                    transaction.add(tensor.fqn, x)
                transaction.close()
                assert not transaction.wait().committed, bad.fqn
                assert states_of(channel) == before
            assert exchange(channel, rank, make=noise).committed

    run_ranks(work, 2)


@pytest.mark.parametrize("compressor", LOSSY)
def test_rollback_undoes_the_last_commit_exactly(compressor: str) -> None:
    world = ThreadedWorld(2)

    def work(rank: int) -> None:
        with link_of(world, rank) as link:
            channel = make_channel(link, compressor)
            with pytest.raises(ConfigError, match="no commit to undo"):
                channel.rollback()
            exchange(channel, rank, make=noise)
            before = states_of(channel)
            exchange(channel, rank, make=noise)
            after = states_of(channel)
            assert after != before
            channel.rollback()
            assert states_of(channel) == before
            with pytest.raises(ConfigError, match="no commit to undo"):
                channel.rollback()
            exchange(channel, rank, make=noise)
            transaction = channel.begin()
            with pytest.raises(ConfigError, match="before the next transaction begins"):
                channel.rollback()
            fill(transaction, channel, rank, noise)
            transaction.abort()
            transaction.wait()
            with pytest.raises(ConfigError, match="no commit to undo"):
                channel.rollback()

    run_ranks(work, 2)


def test_rollback_brings_back_what_was_carried() -> None:
    """Dense keeps no residual: the one of top-k joins the next input that commits, once."""
    world = ThreadedWorld(2)

    def work(rank: int) -> tuple[Tensor, Tensor]:
        with link_of(world, rank) as link:
            channel = make_channel(link, "topk(density=0.2)")
            exchange(channel, rank, make=noise)
            residual = channel.state_dict()["tensors"]["a"]["residual"]
            assert float(residual.abs().sum()) > 0
            channel.use(prepare("dense"))
            carried = saved(channel)["carried"]
            assert carried.keys() == {tensor.fqn for tensor in TENSORS}
            exchange(channel, rank, ["a", "b"])
            assert saved(channel)["carried"].keys() == {"c", "d"}
            channel.rollback()
            assert saved(channel)["carried"] == carried
            first, second = (exchange(channel, rank).means["a"] for _ in range(2))
            assert saved(channel)["carried"] == {}
            assert second.tolist() == mean(TENSORS[0], 2, 3).tolist()
            return first, residual.view(first.shape)

    (got, mine), (_, other) = run_ranks(work, 2)
    torch.testing.assert_close(got, mean(TENSORS[0], 2, 2) + (mine + other) / 2)
