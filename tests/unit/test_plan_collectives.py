"""Closed forms of collectives against a message-by-message simulation, and their bytes against real exchanges."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import thinwire.api  # noqa: F401  (fills the registry)
from thinwire.comm import simulate
from thinwire.core import ConfigError, Step, TensorSpec, UnitSpec, make
from thinwire.plan.collectives import (
    ETHERNET_EFFICIENCY,
    Link,
    collective_s,
    doubling_all_reduce_s,
    parse_link,
    ring_all_reduce_s,
    tree_broadcast_s,
)

WORLDS = st.integers(min_value=2, max_value=33)
SIZES = st.floats(min_value=0, max_value=1e9)
LINKS = st.builds(Link, st.floats(min_value=1e6, max_value=1e11), st.floats(min_value=0, max_value=0.1))

Sent = tuple[int, int, float]  # from, to, bytes


def play(rounds: Iterator[list[Sent]], world_size: int, link: Link) -> float:
    """The slow twin: each rank has one port per direction and begins a round when it has all it waits for."""
    has_s = [0.0] * world_size
    for messages in rounds:
        out_free_s, in_free_s, arrived_s = list(has_s), list(has_s), list(has_s)
        for source, target, nbytes in messages:
            began_s = max(out_free_s[source], in_free_s[target])
            done_s = began_s + nbytes * link.seconds_per_byte
            out_free_s[source] = in_free_s[target] = done_s
            arrived_s[target] = max(arrived_s[target], done_s + link.latency_s)
            # The next round of a sender starts a new message, which has a start-up of its own.
            arrived_s[source] = max(arrived_s[source], done_s + link.latency_s)
        has_s = arrived_s
    return max(has_s)


def ring(world_size: int, piece_bytes: float, rounds: int) -> Iterator[list[Sent]]:
    for _ in range(rounds):
        yield [(rank, (rank + 1) % world_size, piece_bytes) for rank in range(world_size)]


def doubling(world_size: int, nbytes: float) -> Iterator[list[Sent]]:
    power = 1 << (world_size.bit_length() - 1)
    surplus = range(power, world_size)
    if surplus:
        yield [(rank, rank - power, nbytes) for rank in surplus]
    distance = 1
    while distance < power:
        yield [(rank, rank ^ distance, nbytes) for rank in range(power)]
        distance *= 2
    if surplus:
        yield [(rank - power, rank, nbytes) for rank in surplus]


def tree(world_size: int, nbytes: float) -> Iterator[list[Sent]]:
    have = 1
    while have < world_size:
        yield [(rank, rank + have, nbytes) for rank in range(have) if rank + have < world_size]
        have *= 2


@given(WORLDS, SIZES, LINKS)
def test_ring_all_reduce(world_size: int, nbytes: float, link: Link) -> None:
    played = play(ring(world_size, nbytes / world_size, 2 * (world_size - 1)), world_size, link)
    assert ring_all_reduce_s(nbytes, world_size, link) == pytest.approx(played)
    sent_bytes = 2 * (world_size - 1) / world_size * nbytes
    assert collective_s("all_reduce", sent_bytes, world_size, link) == pytest.approx(played)


@given(WORLDS, SIZES, LINKS)
def test_doubling_all_reduce(world_size: int, nbytes: float, link: Link) -> None:
    played = play(doubling(world_size, nbytes), world_size, link)
    assert doubling_all_reduce_s(nbytes, world_size, link) == pytest.approx(played)


@given(WORLDS, SIZES, LINKS)
def test_all_gather_by_ring(world_size: int, nbytes: float, link: Link) -> None:
    played = play(ring(world_size, nbytes, world_size - 1), world_size, link)
    assert collective_s("all_gather", (world_size - 1) * nbytes, world_size, link) == pytest.approx(played)


@given(WORLDS, SIZES, LINKS)
def test_broadcast_by_tree(world_size: int, nbytes: float, link: Link) -> None:
    assert tree_broadcast_s(nbytes, world_size, link) == pytest.approx(play(tree(world_size, nbytes), world_size, link))


@given(WORLDS, SIZES, LINKS, st.sampled_from(["all_reduce", "all_gather", "all_to_all", "broadcast"]))
def test_nccl_takes_what_is_faster(world_size: int, nbytes: float, link: Link, kind: str) -> None:
    gloo_s, nccl_s = (collective_s(kind, nbytes, world_size, link, backend) for backend in ("gloo", "nccl"))  # type: ignore[arg-type]
    assert nccl_s <= gloo_s


def test_one_rank_pays_nothing() -> None:
    assert collective_s("all_reduce", 1e6, 1, Link(1e6, 1.0)) == 0.0


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
@pytest.mark.parametrize("spec", ["dense", "topk(density=0.1, indices='int32')", "randomk(density=0.1)"])
def test_bytes_of_the_closed_forms_are_what_exchanges_send(spec: str, world_size: int) -> None:
    """dense 2(p-1)/p·n·4; sparse (p-1)·d·n·(4 + 4) and headers; a shared mask does not grow with p."""
    compressor, unit = make(spec), UnitSpec((TensorSpec("w", (240, 250)),))
    exchanges = [
        compressor.exchange(torch.randn(unit.numel), compressor.init(unit), Step(0, unit, rank, world_size))
        for rank in range(world_size)
    ]
    sent = [0] * world_size
    simulate(exchanges, sent=sent)
    dense_bytes = 2 * (world_size - 1) / world_size * 4 * unit.numel
    expected = {
        "dense": dense_bytes,
        "topk(density=0.1, indices='int32')": (world_size - 1) * 0.1 * unit.numel * (4 + 4),
        "randomk(density=0.1)": 0.1 * dense_bytes,
    }[spec]
    assert sent[0] == pytest.approx(expected, rel=0.02)


def test_links_are_read() -> None:
    assert parse_link("200mbit,1ms") == Link(200e6 * ETHERNET_EFFICIENCY, 1e-3)
    assert parse_link("10gbit, 50us").latency_s == pytest.approx(50e-6)
    assert parse_link("1.5Gbit").latency_s == pytest.approx(1e-4)


@pytest.mark.parametrize("text", ["", "fast", "200", "200mbit,soon", "0mbit,1ms", "200mbit;1ms"])
def test_other_links_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_link(text)
