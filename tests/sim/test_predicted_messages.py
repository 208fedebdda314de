"""What the planner predicts is what is sent: kind, bytes, number and order of the messages of a step.

``sent_messages`` is where real messages come from; a test of whole steps need only replace it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import cache
from typing import Any

import pytest
import torch

import thinwire.api  # noqa: F401  (fills the registry)
from thinwire.comm import Framed, Pending, Tag, simulate
from thinwire.comm.merge import merge
from thinwire.comm.piggyback import SmallSum, flag_elems
from thinwire.comm.transport import Later
from thinwire.core import AllGather, AllReduce, AllToAll, Request, Step, TensorSpec
from thinwire.fusion import Group, ModelProfile, make_groups
from thinwire.fusion.prepare import prepare
from thinwire.plan import Cluster, CodecCost, Link, Pricer, candidate_specs, measure_codec, network_of_link

STABLE = candidate_specs()
FUSIONS = ("auto", "none", "40kB", "64MiB", "safusion", "optimal")
KINDS = {AllReduce: "all_reduce", AllGather: "all_gather", AllToAll: "all_to_all"}
# Matrices of odd sizes, biases in between, something too small to compress, and a first layer that is ready last.
SHAPES = [(10, 77), (10,), (77, 130), (77,), (3, 5), (130, 64, 3, 3), (130,), (64, 3, 3, 3), (64,)]
TENSORS = [TensorSpec(f"t{i}", shape) for i, shape in enumerate(SHAPES)]

Messages = list[list[list[tuple[str, int]]]]  # by group and round: kind, and bytes that one rank sends


def sent_messages(groups: Sequence[Group], world_size: int, flags: int) -> Messages:
    """Those of the first rank in its second step, as they leave ``Framed``; flags leave with the last group."""
    sent: Messages = []
    states: dict[tuple[int, int, int], Any] = {}
    for index in range(2):
        sent = []
        for number, group in enumerate(groups):
            rounds: list[list[tuple[str, int]]] = []
            merged = []
            for rank in range(world_size):
                exchanges: list[Generator[Any, Any, Any]] = []
                for place, unit in enumerate(group.units):
                    state = states.get((rank, number, place)) or unit.compressor.init(unit.spec)
                    x = torch.randn(unit.spec.numel, generator=torch.Generator().manual_seed(17 * index + rank))
                    exchanges.append(unit.compressor.exchange(x, state, Step(index, unit.spec, rank, world_size)))
                if group is groups[-1]:
                    exchanges.append(_flags(flags, world_size))
                merged.append(merge(exchanges))
            results = simulate([_noted(merged[0], world_size, rounds), *merged[1:]])
            for rank, of_rank in enumerate(results):
                for place in range(len(group.units)):
                    states[rank, number, place] = of_rank[place].state
            sent.append(rounds)
    return sent


def _flags(count: int, world_size: int) -> Generator[SmallSum, Any, Any]:
    return (yield SmallSum(torch.zeros(count, dtype=torch.uint8), world_size))


def _noted(
    merged: Generator[tuple[Request, ...], Any, Any], world_size: int, rounds: list[list[tuple[str, int]]]
) -> Generator[tuple[Request, ...], Any, Any]:
    reply: Any = None
    while True:
        try:
            requests = merged.send(reply)
        except StopIteration as stop:
            return stop.value
        counting = _Counting(world_size)
        for request in requests:
            Framed(counting).start(request, Tag())
        rounds.append(counting.sent)
        reply = yield requests


class _Counting:
    """A transport that notes what it would send."""

    rank, lanes = 0, 1

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.sent: list[tuple[str, int]] = []

    def start(self, request: Request, tag: Tag) -> Pending:
        self.sent.append((KINDS[type(request)], request.sent_bytes(self.world_size)))
        return Later(list)


@cache
def _codec(spec: str) -> CodecCost:
    return measure_codec(spec, (32, 64), repeats=1)


def _pricer(spec: str, world_size: int, scalars: int = 0) -> Pricer:
    ready_s = {tensor: 0.002 * (i + 1) for i, tensor in enumerate(TENSORS)}
    profile = ModelProfile.in_ready_order(ready_s, forward_s=0.01, backward_s=0.02)
    network = network_of_link(Link(1e9, 1e-4), world_size)
    codecs = {one: _codec(one) for one in ("dense", spec)}
    return Pricer(profile, network, codecs, Cluster(world_size=world_size, cores=8), scalars=scalars)


def _compare(spec: str, fuse: str, world_size: int, scalars: int = 0) -> Messages:
    pricer = _pricer(spec, world_size, scalars)
    groups = make_groups(pricer.group_plans(spec, fuse), {t.fqn: t for t in TENSORS}, prepare(spec))
    predicted = [
        [[(message.kind, message.sent_bytes) for message in one] for one in work.rounds]
        for work in pricer.works(spec, groups)
    ]
    sent = sent_messages(groups, world_size, flag_elems(len(TENSORS), scalars, world_size))
    assert predicted == sent
    assert pricer.price(spec, fuse).messages == sum(len(one) for rounds in sent for one in rounds)
    return sent


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("fuse", FUSIONS)
@pytest.mark.parametrize("spec", STABLE)
def test_stable_compressors(spec: str, fuse: str, world_size: int) -> None:
    _compare(spec, fuse, world_size)


@pytest.mark.parametrize("world_size", [3, 8])
@pytest.mark.parametrize("spec", STABLE)
def test_other_world_sizes_and_scalars(spec: str, world_size: int) -> None:
    _compare(spec, "40kB", world_size, scalars=3)


@pytest.mark.parametrize(
    ("spec", "fuse"),
    [
        ("fp16(scale='agreed')", "auto"),
        ("topk(density=0.05)", "auto"),
        ("topk(density=0.05)", "ssfusion"),
        ("randomk(density=0.05)", "auto"),
        ("randomk(density=0.05)", "ssfusion"),
    ],
)
def test_forms_that_cannot_be_merged_are_messages_of_their_own(spec: str, fuse: str) -> None:
    """Halves and fp32 are two reductions; what is selected is gathered beside what stays dense."""
    _compare(spec, fuse, 4)


def test_the_cases_differ() -> None:
    """Some group has several units, some round several messages, and flags travel with each kind of message."""
    last = {spec: _compare(spec, "40kB", 4)[-1] for spec in STABLE}
    assert [kind for kind, _ in last["dense"][0]] == ["all_reduce"]
    assert [kind for kind, _ in last["int4"][0]] == ["all_to_all"], "biases and flags are piggybacked"
    assert [kind for kind, _ in _compare("topk(density=0.05)", "64MiB", 4)[-1][0]] == ["all_gather", "all_reduce"]
