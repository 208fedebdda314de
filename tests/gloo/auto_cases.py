"""Cases of ``compress="auto"``: it plans on what it measures, all ranks change together, and the link is watched."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

import thinwire
from gloo.support import Cases, Rank, close, digest, seeded, sgd, wrap
from thinwire.autopilot import controller, errors
from thinwire.autopilot.controller import (
    FEWEST_DENSE_STEPS,
    FEWEST_ISOLATED_STEPS,
    ISOLATED_STEPS,
    PLANNING_STEPS,
    WARMUP_STEPS,
)
from thinwire.autopilot.quality import MODEL
from thinwire.autopilot.watch import SETTLE_STEPS, TRIAL_STEPS
from thinwire.comm import Pending, Tag, Throttled, TorchDistTransport, Transport
from thinwire.core import AllToAll, Request
from thinwire.plan import Link, network_of_link, search

controller.TIMED_S = float("inf")  # always as many steps as can be, however slow the machine is today
CASES = Cases()
SLOW_BITS_PER_S = 40e6
SIDE = 96


class Wide(nn.Module):
    """290 kB of gradients: 60 ms on the slow link."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(24, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 3))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x)
        return result


class Fixed(nn.Module):
    """The gradient of its weight is its input, whatever the weight is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SIDE, SIDE))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


class SlowScatter:
    """A link on which all-to-all, which int4 needs and dense does not, takes longer than anybody predicts."""

    def __init__(self, inner: Transport) -> None:
        self.inner, self.rank, self.world_size, self.lanes = inner, inner.rank, inner.world_size, inner.lanes

    def start(self, request: Request, tag: Tag) -> Pending:
        if isinstance(request, AllToAll):
            time.sleep(0.03)
        return self.inner.start(request, tag)


class Noting:
    """Notes when gradients begin to travel."""

    def __init__(self, inner: Transport) -> None:
        self.inner, self.rank, self.world_size, self.lanes = inner, inner.rank, inner.world_size, inner.lanes
        self.began_s: list[float] = []

    def start(self, request: Request, tag: Tag) -> Pending:
        if tag.channel:
            self.began_s.append(time.perf_counter())
        return self.inner.start(request, tag)


def plain_transport() -> TorchDistTransport:
    assert dist.group.WORLD is not None
    return TorchDistTransport(dist.group.WORLD)


def draw(rank: int, index: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * index + rank))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: Rank, steps: Iterable[int]) -> None:
    for index in steps:
        optimizer.zero_grad()
        model(draw(rank.index, index, 4, 24)).square().mean().backward()
        optimizer.step()


@contextmanager
def claimed_link(bits_per_s: float) -> Iterator[None]:
    """The network is not measured but taken for this one."""
    measured = controller.link_network
    controller.link_network = lambda link, tensors: network_of_link(Link(bits_per_s, 1e-5), 2)  # type: ignore[assignment]
    try:
        yield
    finally:
        controller.link_network = measured


@CASES.both
def plans_on_a_slow_link_and_resumes(rank: Rank, engine: str) -> object:
    """Dense until the plan, few bits afterwards; a checkpoint of either goes on where it was, bit for bit."""
    model = wrap(engine, seeded(Wide))
    optimizer = sgd(model)
    link = Throttled(plain_transport(), SLOW_BITS_PER_S)
    wire = thinwire.attach(model, optimizer, transport=link)
    unplanned = wire.state_dict()
    train(model, optimizer, rank, range(PLANNING_STEPS - 1))
    assert wire.plan is None
    assert "dense while measuring" in wire.explain()
    train(model, optimizer, rank, [PLANNING_STEPS - 1])
    plan, sent_bytes = wire.plan, wire.stats().wire_bytes
    assert plan is not None
    assert plan.compress in ("int4", "int8"), plan.explain()
    assert plan.compress in wire.explain()
    assert plan.step_s < plan.dense_s
    assert 0 < float(plan.facts["noise_share"]) < 1
    errors = {one.compress: one.relative_error for one in plan.candidates}
    assert 0 < errors["bf16"] < errors["int8"] < errors["int4"] < 0.05
    train(model, optimizer, rank, [PLANNING_STEPS])
    assert wire.stats().wire_bytes - sent_bytes < 4 * 73_000 / 3

    saved: Any = deepcopy((wire.state_dict(), model.state_dict(), optimizer.state_dict()))
    rest = range(PLANNING_STEPS + 1, PLANNING_STEPS + 4)
    train(model, optimizer, rank, rest)
    uninterrupted = digest({"model": model.state_dict(), "wire": wire.state_dict()["tensors"]})
    wire.detach()
    with thinwire.attach(model, optimizer, transport=link) as wire:
        wire.load_state_dict(saved[0])
        model.load_state_dict(saved[1])
        optimizer.load_state_dict(saved[2])
        assert wire.plan == plan
        train(model, optimizer, rank, rest)
        assert digest({"model": model.state_dict(), "wire": wire.state_dict()["tensors"]}) == uninterrupted
        wire.load_state_dict(unplanned)
        assert wire.plan is None
        train(model, optimizer, rank, [99])
    return digest(dict(model.named_parameters())), plan.compress, plan.fuse


@CASES.both
def plans_sooner_where_steps_are_long(rank: Rank, engine: str) -> object:
    """Rank 0 says when enough was timed, and all ranks plan at the same step."""
    model = wrap(engine, seeded(Wide))
    optimizer = sgd(model)
    fewest = WARMUP_STEPS + FEWEST_DENSE_STEPS + FEWEST_ISOLATED_STEPS
    enough_s = 0.0 if rank.index == 0 else float("inf")
    with patch.object(controller, "TIMED_S", enough_s), claimed_link(1e6), thinwire.attach(model, optimizer) as wire:
        train(model, optimizer, rank, range(fewest - 1))
        assert wire.plan is None
        train(model, optimizer, rank, [fewest - 1])
        assert wire.plan is not None
    return digest(dict(model.named_parameters()))


@CASES.plain
def measures_a_network_that_holds_only_once(rank: Rank, engine: str) -> object:
    """Steps that take longer though the network does not: planned anew, with what is known of it."""
    model = seeded(Wide)
    optimizer = sgd(model)
    link = Throttled(plain_transport(), SLOW_BITS_PER_S)
    with (
        patch.object(controller, "link_network", wraps=controller.link_network) as measured,
        thinwire.attach(model, optimizer, transport=link) as wire,
    ):
        train(model, optimizer, rank, range(PLANNING_STEPS + SETTLE_STEPS + TRIAL_STEPS + 2))
        first = wire.plan
        assert first is not None
        model.layers[2].weight.register_hook(lambda gradient: time.sleep(0.1))
        for _ in range(60):
            train(model, optimizer, rank, [0])
            if wire.plan is not first:
                break
        assert wire.plan is not None
        assert wire.plan.floor_s > first.floor_s + 0.05
        assert measured.call_count == 1
    return digest(dict(model.named_parameters()))


@CASES.both
def exchanges_nothing_while_a_rank_is_timed(rank: Rank, engine: str) -> object:
    """In isolated steps a rank that is done waits: where ranks share cores, its exchange would slow the others down."""
    model = wrap(engine, seeded(Wide))
    optimizer = sgd(model)
    link = Noting(plain_transport())
    mine: list[tuple[float, float]] = []
    with thinwire.attach(model, optimizer, transport=link):
        train(model, optimizer, rank, range(PLANNING_STEPS - ISOLATED_STEPS))
        for index in range(ISOLATED_STEPS):
            optimizer.zero_grad()
            loss = model(draw(rank.index, index, 4, 24)).square().mean()
            time.sleep(0.05 * rank.index)
            computing_s = time.perf_counter()
            link.began_s.clear()
            loss.backward()
            optimizer.step()
            mine.append((computing_s, link.began_s[0]))
    ranks: list[Any] = [None] * rank.world_size
    dist.all_gather_object(ranks, mine)
    for step in zip(*ranks, strict=True):  # one machine, one clock
        assert max(computing_s for computing_s, _ in step) < min(began_s for _, began_s in step)
    return digest(dict(model.named_parameters()))


@CASES.both
def stays_dense_where_nothing_helps(rank: Rank, engine: str) -> object:
    model = wrap(engine, seeded(Wide))
    optimizer = sgd(model)
    with claimed_link(100e9), thinwire.attach(model, optimizer) as wire:
        train(model, optimizer, rank, range(PLANNING_STEPS + 1))
        assert wire.plan is not None
        assert wire.plan.compress == "dense", wire.plan.explain()
        assert "best sent as they are" in wire.plan.explain()
    return digest(dict(model.named_parameters()))


@CASES.plain
def sparsifies_for_optimizers_that_know_ages(rank: Rank, engine: str) -> object:
    """``quality="fast"`` with thinwire's own AdamW; the sparsifier that takes over has ages from its first step on."""
    model = seeded(Wide)
    optimizer = thinwire.optim.AdamW(model.parameters(), lr=0.001)
    with claimed_link(1e5), thinwire.attach(model, optimizer, quality="fast", fuse="none") as wire:
        train(model, optimizer, rank, range(PLANNING_STEPS))
        assert wire.plan is not None
        assert wire.plan.compress.startswith("topk"), wire.plan.explain()
        assert wire.plan.fuse == "none"
        train(model, optimizer, rank, range(2))
        received = wire.received(model.get_parameter("layers.2.weight"))
        assert received is not None
        assert 0 < received.mask.float().mean() < 0.2
    return digest(dict(model.named_parameters()))


@CASES.both
def falls_back_to_dense_and_loses_nothing(rank: Rank, engine: str) -> object:
    """A plan that is measured to be slower than dense is dropped; what int4 still owed is paid by the dense step after it."""
    model = wrap(engine, Fixed())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    chosen: list[str] = []
    steps = PLANNING_STEPS + SETTLE_STEPS + TRIAL_STEPS + ISOLATED_STEPS + 3
    with claimed_link(1e6), thinwire.attach(model, optimizer, transport=SlowScatter(plain_transport())) as wire:
        for index in range(steps):
            optimizer.zero_grad()
            model(draw(rank.index, index, SIDE, SIDE)).backward()
            optimizer.step()
            chosen.append("" if wire.plan is None else wire.plan.compress)
        assert wire.plan is not None
        assert "back to dense" in wire.plan.explain()
    assert list(dict.fromkeys(chosen)) == ["", "int4", "dense"], chosen
    total = sum(draw(other, index, SIDE, SIDE) for other in range(rank.world_size) for index in range(steps))
    (weight,) = model.parameters()
    close(weight.detach() / rank.world_size, -total / rank.world_size**2)
    return digest(dict(model.named_parameters())), chosen


@CASES.both
def leaves_what_comes_to_lose_too_much(rank: Rank, engine: str) -> object:
    """Books are the same on all ranks and in checkpoints; when less error is allowed, all ranks leave int4 together."""
    model = wrap(engine, Fixed())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    chosen: list[str] = []

    def step(index: int) -> None:
        optimizer.zero_grad()
        model(draw(rank.index, index, SIDE, SIDE)).backward()
        optimizer.step()

    with patch.object(errors, "EVERY_STEPS", 2), claimed_link(1e6), thinwire.attach(model, optimizer) as wire:
        assert wire.ledger is not None
        for index in range(PLANNING_STEPS + 10):
            step(index)
        assert wire.plan is not None
        assert wire.plan.compress == "int4"
        # Independent gradients are all noise: half of the mean of two, in which int4 adds what was owed and loses anew.
        assert 0.85 < wire.ledger.relative(MODEL, "noise") <= 1.1
        error = wire.ledger.relative(MODEL, "compression")
        assert 1e-3 < error < 0.05
        books = wire.ledger.to_json()
        saved = wire.state_dict()
        step(98)
        step(99)
        assert wire.ledger.to_json() != books
        wire.load_state_dict(saved)
        assert wire.ledger.to_json() == books
        with patch.multiple(search, FEW_BIT_ERROR=1e-3, NOISE_QUOTA=1e-9):
            for index in range(4):
                step(index)
                chosen.append(wire.plan.compress)
        assert chosen[-1] == "int8", wire.plan.explain()
        assert "int4 loses" in wire.plan.explain()
    return digest(dict(model.named_parameters())), books, chosen


@CASES.plain
def follows_a_link_that_falls(rank: Rank, engine: str) -> object:
    """A hundredth of the rate is noticed; all ranks measure and change at the same step."""
    model = seeded(Wide)
    optimizer = sgd(model)
    link = Throttled(plain_transport(), 100 * SLOW_BITS_PER_S)
    falls_at = PLANNING_STEPS + SETTLE_STEPS + TRIAL_STEPS
    with thinwire.attach(model, optimizer, transport=link, quality="exact") as wire:
        train(model, optimizer, rank, range(falls_at))
        assert wire.plan is not None
        first = wire.plan
        link.bits_per_s = SLOW_BITS_PER_S
        for index in range(falls_at, falls_at + 60):
            train(model, optimizer, rank, [index])
            if wire.plan.facts["step"] != first.facts["step"]:
                break
        assert wire.plan.compress == "bf16", wire.plan.explain()
        assert wire.plan.dense_s > 1.5 * first.dense_s
        train(model, optimizer, rank, range(3))
    return digest(dict(model.named_parameters())), index
