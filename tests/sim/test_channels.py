"""Channels that share links: several transactions in flight, and transactions of some tensors."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.channels import (
    EXACT,
    TENSORS,
    ManyRounds,
    TwoRounds,
    assert_exact,
    exchange,
    fill,
    link_of,
    make_channel,
    noise,
    saved,
    whole,
)
from sim.threads import ThreadedWorld, link_threads, run_ranks
from thinwire.comm import Delayed, Tag
from thinwire.core import Compressor, ConfigError
from thinwire.exchange import Transaction
from thinwire.fusion.groups import GroupPlan

# By mode: lanes of the network, whether a link then uses them, and the compressors of three channels.
MODES: dict[str, tuple[int, bool, tuple[str | Compressor, ...]]] = {
    "wavefront": (1, False, ("dense", TwoRounds(), ManyRounds())),
    "lanes": (2, True, ("dense", TwoRounds(), "topk(density=1.0)")),
    "wavefront over lanes": (2, False, (TwoRounds(), ManyRounds(), "threshold(value=0)")),
}
# Of three channels: every how many steps a transaction begins, and how many steps later it is waited for.
PERIODS = ((1, 0), (2, 1), (5, 3))
STEPS = 11


def _train(mode: str, links: int, ranks: int, delays: Sequence[float]) -> list[list[list[Tag]]]:
    """Three channels of different periods; the messages that were started, by link, rank and lane."""
    lanes, in_lanes, compressors = MODES[mode]
    worlds = [ThreadedWorld(ranks, lanes) for _ in range(links)]
    orders: list[list[list[Tag]]] = [[[] for _ in range(ranks)] for _ in worlds]

    def delay_s(rank: int, tag: Tag) -> float:
        return delays[(tag.step + 2 * tag.group + 3 * tag.round + 5 * rank + tag.channel) % len(delays)]

    def work(rank: int) -> None:
        with ExitStack() as stack:
            opened = [
                stack.enter_context(
                    link_of(world, rank, lambda t: Delayed(t, partial(delay_s, rank)), order=orders[i][rank])
                )
                for i, world in enumerate(worlds)
            ]
            channels = [
                make_channel(opened[number % links], compressor, name=f"channel {number}")
                for number, compressor in enumerate(compressors)
            ]
            assert links > 1 or opened[0].rounds_in_lanes is in_lanes
            flying: list[tuple[int, Transaction]] = []
            for step in range(STEPS + max(late for _, late in PERIODS)):
                for channel, (period, late) in zip(channels, PERIODS, strict=True):
                    if step < STEPS and step % period == 0:
                        transaction = channel.begin()
                        fill(transaction, channel, rank)
                        transaction.close()
                        flying.append((step + late, transaction))
                for _, due in [one for one in flying if one[0] == step]:
                    assert_exact(due.wait(), ranks)
                flying = [one for one in flying if one[0] > step]
            assert not flying
            assert [channel.index for channel in channels] == [11, 6, 3]
            assert all(link.open == 0 for link in opened)

    run_ranks(work, ranks)
    assert not link_threads()
    return [
        [[tag for tag in order if min(tag.round, lanes - 1) == lane] for order in of_link for lane in range(lanes)]
        for of_link in orders
    ]


@pytest.mark.parametrize("links", [1, 2])
@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=8)
@given(
    ranks=st.sampled_from([2, 4]), delays=st.lists(st.sampled_from([0.0, 0.0, 0.001, 0.004]), min_size=13, max_size=13)
)
def test_three_channels_of_different_periods(mode: str, links: int, ranks: int, delays: Sequence[float]) -> None:
    """Every mean is exact, and the order in each lane is the same whatever is late, on this rank or another."""
    started = _train(mode, links, ranks, delays)
    undisturbed = _train(mode, links, ranks, [0.0])
    assert started == undisturbed
    lanes = MODES[mode][0]
    for of_link in started:
        for rank in range(1, ranks):
            assert of_link[rank * lanes : (rank + 1) * lanes] == of_link[:lanes]
    assert sum(len(lane) for lane in started[0][:lanes]) > 0


@pytest.mark.parametrize("compressor", [*EXACT, "two rounds"])
@pytest.mark.parametrize("lanes", [1, 2])
def test_disjoint_subsets_of_one_channel_fly_together(compressor: str, lanes: int) -> None:
    world = ThreadedWorld(2, lanes)

    def work(rank: int) -> None:
        with link_of(world, rank, lambda t: Delayed(t, lambda tag: 0.002 * ((tag.group + rank) % 3))) as link:
            channel = make_channel(link, TwoRounds() if compressor == "two rounds" else compressor)
            for _ in range(2):
                one, other = channel.begin(["a", "c"]), channel.begin({"b", "d"})
                assert set(one.names) == {"a", "c"}
                assert set(other.names) == {"b", "d"}
                for transaction, name in ((one, "a"), (other, "d"), (other, "b"), (one, "c")):
                    transaction.add(name, whole(channel.tensors[name], rank, transaction.index))
                other.close()
                one.close()
                assert_exact(one.wait(), 2, {"a", "c"})
                assert_exact(other.wait(), 2, {"b", "d"})
            assert channel.index == 4
            assert_exact(exchange(channel, rank), 2)

    run_ranks(work, 2)


def test_subsets_keep_states_of_their_own() -> None:
    """Both commits stand, whichever comes first; an aborted subset leaves the other's commit alone."""
    world = ThreadedWorld(2)

    def work(rank: int) -> None:
        with link_of(world, rank) as link:
            channel = make_channel(link, "topk(density=0.2)")
            fresh = saved(channel)["tensors"]
            one, other = channel.begin(["a", "c"]), channel.begin(["b", "d"])
            fill(one, channel, rank, noise)
            one.close()
            fill(other, channel, rank, noise)
            other.abort()
            assert not other.wait().committed
            assert saved(channel)["tensors"] == fresh
            assert one.wait().committed
            changed = {key for key, value in saved(channel)["tensors"].items() if value != fresh[key]}
            assert changed == {"a.residual", "c.residual"}

    run_ranks(work, 2)


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["a"], r"\['b'\] do not make up whole fusion groups"),
        (["a", "b", "c"], r"\['d'\] do not make up whole"),
        (["a", "b", "z"], r"\['z'\] do not make up whole"),
        ([], "no tensor"),
    ],
)
def test_names_that_are_not_whole_groups_are_refused(names: list[str], problem: str) -> None:
    with link_of(ThreadedWorld(1), 0) as link:
        channel = make_channel(link, plans=[GroupPlan(("a", "b")), GroupPlan(("c", "d"))])
        with pytest.raises(ConfigError, match=problem):
            channel.begin(names)
        assert (channel.index, link.open) == (0, 0)
        assert_exact(exchange(channel, 0, ["d", "c"]), 1, {"c", "d"})


def test_subsets_that_overlap_are_refused() -> None:
    with link_of(ThreadedWorld(1), 0) as link:
        channel = make_channel(link)
        transaction = channel.begin(["a", "c"])
        for names in (["c"], ["b", "c"], None):
            with pytest.raises(
                ConfigError, match=r"[ac] is part of an open transaction of 'grad'; wait for that first"
            ):
                channel.begin(names)
        assert (channel.index, link.open) == (1, 1)
        fill(transaction, channel, 0)
        transaction.close()
        with pytest.raises(ConfigError, match="part of an open transaction"):
            channel.begin(["a"])
        transaction.wait()
        assert_exact(exchange(channel, 0, ["a"]), 1, {"a"})


def test_mistakes_are_errors_at_once_in_the_calling_thread() -> None:
    with link_of(ThreadedWorld(1), 0) as link:
        channel = make_channel(link, scalars=["loss"])
        transaction = channel.begin(["a", "b"])
        transaction.add("a", whole(TENSORS[0], 0, 0))
        for name, problem in (("a", "twice"), ("c", "not part of it"), ("z", "not part of it")):
            with pytest.raises(ConfigError, match=f"{name} was added to transaction 0 of 'grad' .*{problem}"):
                transaction.add(name, torch.ones(1))
        with pytest.raises(ConfigError, match=r"'lose'.*'loss'"):
            transaction.close(scalars={"lose": 1.0})
        transaction.add("b", whole(TENSORS[1], 0, 0))
        transaction.close()
        with pytest.raises(ConfigError, match=r"b was added to transaction 0 of 'grad' after close\(\)"):
            transaction.add("b", torch.ones(5))
        assert_exact(transaction.wait(), 1, {"a", "b"})
        assert_exact(exchange(channel, 0), 1)
