"""Flags and scalars: every rank hears the same, whatever carries them, and agreement may reach further than the data."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.channels import TENSORS, ReducedInBf16, exchange, fill, link_of, make_channel, noise, states_of
from sim.threads import ThreadedWorld, run_ranks
from thinwire.core import Compressor, DesyncError
from thinwire.exchange import Fixed
from thinwire.exchange.flags import FlagLayout
from thinwire.fusion.groups import GroupPlan

# What the flags leave with differs: a reduction, in fp32 or bf16, an all-to-all, a gather, a message of their own.
CARRIERS = ("dense", ReducedInBf16(), "bf16", "int4", "topk(density=0.2)", "threshold(value=0.5)", "powersgd(rank=1)")
SPECIAL = [0.0, -0.0, float("nan"), float("inf"), float("-inf"), 1e-45, -1e-45, 1.1754942e-38, 3.4028234663852886e38]
numbers = st.one_of(st.sampled_from(SPECIAL), st.floats(width=32))


def bits(values: Sequence[float]) -> list[bytes]:
    return [struct.pack("<f", value) for value in values]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("compressor", CARRIERS)
@settings(max_examples=6)
@given(values=st.lists(st.tuples(numbers, numbers), min_size=4, max_size=4))
def test_scalars_reach_every_rank_bit_for_bit(
    world_size: int, compressor: str | Compressor, values: list[tuple[float, float]]
) -> None:
    world = ThreadedWorld(world_size, lanes=2)

    def work(rank: int) -> None:
        with link_of(world, rank) as link:
            channel = make_channel(link, compressor, scalars=["loss", "drift"])
            mine = dict(zip(channel.scalars, values[rank], strict=True))
            outcome = exchange(channel, rank, make=noise, scalars=mine)
            assert outcome.committed, "a scalar may be anything; it is no reason to abort"
            for position, name in enumerate(channel.scalars):
                expected = [values[one][position] for one in range(world_size)]
                assert bits(outcome.scalars[name]) == bits(expected), name

    run_ranks(work, world_size)


@pytest.mark.parametrize("compressor", CARRIERS)
def test_scalars_also_come_with_an_abort_and_default_to_zero(compressor: str | Compressor) -> None:
    world = ThreadedWorld(2)

    def work(rank: int) -> None:
        with link_of(world, rank) as link:
            channel = make_channel(link, compressor, scalars=["loss", "drift"])
            transaction = channel.begin()
            fill(transaction, channel, rank, noise)
            if rank == 0:
                transaction.close(scalars={"drift": 2.5})
            else:
                transaction.abort()
            outcome = transaction.wait()
            assert not outcome.committed
            assert outcome.scalars == {"loss": [0.0, 0.0], "drift": [2.5, 0.0]}

    run_ranks(work, 2)


def test_a_scalar_too_large_for_fp32_is_infinite() -> None:
    """Losses diverge: that must reach the policy, and not end the link's thread."""
    world, agreement = ThreadedWorld(2), ThreadedWorld(2)

    def work(rank: int) -> None:
        with link_of(world, rank) as link, link_of(agreement, rank) as wider:
            for members in (Fixed(link), Fixed(link, wider)):
                channel = make_channel(members, scalars=["loss"])
                outcome = exchange(channel, rank, scalars={"loss": (-1) ** rank * 1e300})
                assert outcome.scalars == {"loss": [float("inf"), float("-inf")]}

    run_ranks(work, 2)


@pytest.mark.parametrize("compressor", ["dense", "int4", "topk(density=0.2)"])
def test_used_is_what_some_rank_has_used(compressor: str) -> None:
    world = ThreadedWorld(3)

    def work(rank: int) -> None:
        with link_of(world, rank) as link:
            channel = make_channel(link, compressor)
            before = states_of(channel)
            transaction = channel.begin()
            transaction.add(TENSORS[rank].fqn, noise(TENSORS[rank], rank, 0))
            if rank == 2:
                transaction.close(used=["a"])
            else:
                transaction.close()
            outcome = transaction.wait()
            assert outcome.committed
            assert outcome.used == {"a", "b"}, "what rank 2 has added it says it has not used"
            after = states_of(channel)
            for key, value in after["tensors"].items():
                assert key[0] in "ab" or value == before["tensors"][key], "for others nobody applies a mean"

    run_ranks(work, 3)


@pytest.mark.parametrize("compressor", ["dense", "topk(density=0.2)"])
@pytest.mark.parametrize("bad", range(4))
def test_agreement_reaches_further_than_the_data(compressor: str, bad: int) -> None:
    """Two groups of two average, all four agree: with sharded parameters a NaN in one shard must stop all."""
    data, everybody = [ThreadedWorld(2), ThreadedWorld(2)], ThreadedWorld(4)

    def work(rank: int) -> list[list[float]]:
        pair, place = divmod(rank, 2)
        with link_of(data[pair], place) as link, link_of(everybody, rank) as agreement:
            channel = make_channel(Fixed(link, agreement), compressor, scalars=["loss"])
            kept = []
            for index in range(3):
                before = states_of(channel)
                transaction = channel.begin()
                for tensor in TENSORS:
                    x = noise(tensor, rank, index)
                    if (index, rank, tensor.fqn) == (1, bad, "b"):
                        x[-1] = float("nan")
                    transaction.add(tensor.fqn, x)
                transaction.close(scalars={"loss": float(10 * index + rank)})
                outcome = transaction.wait()
                assert outcome.scalars["loss"] == [10.0 * index + one for one in range(4)], "by rank of the agreement"
                assert outcome.committed is (index != 1)
                if index == 1:
                    assert states_of(channel) == before
                else:
                    kept.append(outcome.means["a"].flatten().tolist())
            assert (channel.index, link.open, agreement.open) == (3, 0, 0)
            return kept

    first, second, third, fourth = run_ranks(work, 4)
    assert first == second
    assert third == fourth
    assert first != third, "the data stays within a pair"


def test_an_abort_reaches_all_who_agree() -> None:
    data, everybody = [ThreadedWorld(2), ThreadedWorld(2)], ThreadedWorld(4)

    def work(rank: int) -> None:
        pair, place = divmod(rank, 2)
        with link_of(data[pair], place) as link, link_of(everybody, rank) as agreement:
            channel = make_channel(Fixed(link, agreement))
            transaction = channel.begin()
            if rank == 3:
                transaction.abort()
            else:
                fill(transaction, channel, rank)
                transaction.close()
            assert not transaction.wait().committed
            assert exchange(channel, place).committed

    run_ranks(work, 4)


@pytest.mark.parametrize("compressor", ["dense", ReducedInBf16()])
@pytest.mark.parametrize("difference", ["index", "name", "config"])
def test_ranks_that_are_out_of_step_are_found_without_headers(compressor: str | Compressor, difference: str) -> None:
    """Reductions carry no header: the signature among the flags says it."""
    world = ThreadedWorld(2)

    def work(rank: int) -> None:
        with link_of(world, rank) as link:
            if difference == "config":
                link.config = rank
            plans = [GroupPlan(tuple(tensor.fqn for tensor in TENSORS))]
            channel = make_channel(link, compressor, plans=plans, name=f"n{rank}" if difference == "name" else "grad")
            if difference == "index":
                channel.index = 5 + rank
            with pytest.raises(DesyncError, match="step or settings"):
                exchange(channel, rank)

    run_ranks(work, 2)


@given(
    values=st.lists(st.tuples(numbers, st.booleans(), st.sets(st.sampled_from("abc"))), min_size=1, max_size=5),
)
def test_flags_are_read_back_from_sums(values: list[tuple[float, bool, set[str]]]) -> None:
    layouts = [FlagLayout("abc", ("x", "y"), rank, len(values)) for rank in range(len(values))]
    encoded = [
        layout.encode(ok=ok, used=used, scalars={"y": value}, signature="s")
        for layout, (value, ok, used) in zip(layouts, values, strict=True)
    ]
    assert {one.numel() for one in encoded} == {layouts[0].numel}
    assert int(max(one.max() for one in encoded)) <= 15
    flags = layouts[0].decode(sum(one.long() for one in encoded).tolist(), "here")  # type: ignore[union-attr]
    assert flags.ok is all(ok for _, ok, _ in values)
    assert flags.used == set().union(*(used for _, _, used in values))
    assert bits(flags.scalars["y"]) == bits([value for value, _, _ in values])
    assert flags.scalars["x"] == [0.0] * len(values)
