"""Cases of ``compress="auto"``: it plans on what it measures, all ranks change together, and the link is watched."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

import thinwire
from gloo.support import Cases, Rank, digest, seeded, sgd, wrap
from thinwire.comm import Throttled, TorchDistTransport
from thinwire.engine.autopilot import PLANNING_STEPS

CASES = Cases()
SLOW_BITS_PER_S = 20e6
MANY_STEPS = 120


class Wide(nn.Module):
    """330 kB of gradients: an eighth of a second on the slow link."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(24, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 3))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x)
        return result


def throttled(bits_per_s: float) -> Throttled:
    assert dist.group.WORLD is not None
    return Throttled(TorchDistTransport(dist.group.WORLD), bits_per_s)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: Rank, index: int) -> None:
    generator = torch.Generator().manual_seed(1000 * index + rank.index)
    optimizer.zero_grad()
    model(torch.randn(4, 24, generator=generator)).square().mean().backward()
    optimizer.step()


@CASES.both
def plans_on_a_slow_link_and_resumes(rank: Rank, engine: str) -> object:
    """Dense until the plan, int4 afterwards; a checkpoint of either goes on where it was, bit for bit."""
    model = wrap(engine, seeded(Wide))
    optimizer = sgd(model)
    wire = thinwire.attach(model, optimizer, transport=throttled(SLOW_BITS_PER_S))
    before = wire.state_dict()
    assert wire.plan is None
    for index in range(PLANNING_STEPS):
        assert wire.plan is None
        step(model, optimizer, rank, index)
    dense_bytes = wire.stats().wire_bytes
    plan = wire.plan
    assert plan is not None
    assert plan.compress in ("int4", "int8"), plan.explain()
    assert plan.compress in plan.explain()
    assert plan.compress in wire.explain()
    assert float(plan.facts["planning_s"]) < 10
    step(model, optimizer, rank, PLANNING_STEPS)
    assert wire.stats().wire_bytes - dense_bytes < 4 * 80_000 / 3
    saved = wire.state_dict(), {k: v.clone() for k, v in model.state_dict().items()}, optimizer.state_dict()
    optimizer_state = {k: {n: t.clone() for n, t in s.items()} for k, s in saved[2]["state"].items()}
    steps = range(PLANNING_STEPS + 1, PLANNING_STEPS + 4)
    for index in steps:
        step(model, optimizer, rank, index)
    through = digest({"model": model.state_dict(), "wire": wire.state_dict()["tensors"]})
    wire.detach()

    wire = thinwire.attach(model, optimizer, transport=throttled(SLOW_BITS_PER_S))
    wire.load_state_dict(saved[0])
    model.load_state_dict(saved[1])
    optimizer.load_state_dict({**saved[2], "state": optimizer_state})
    assert wire.plan == plan
    for index in steps:
        step(model, optimizer, rank, index)
    assert digest({"model": model.state_dict(), "wire": wire.state_dict()["tensors"]}) == through
    wire.load_state_dict(before)
    assert wire.plan is None
    step(model, optimizer, rank, 99)
    wire.detach()
    return digest(dict(model.named_parameters())), plan.compress, plan.fuse


@CASES.both
def stays_dense_where_nothing_helps(rank: Rank, engine: str) -> object:
    """Loopback is faster than encoding; two ranks on the same cores gain nothing."""
    model = wrap(engine, seeded(Wide))
    optimizer = sgd(model)
    with thinwire.attach(model, optimizer) as wire:
        for index in range(PLANNING_STEPS + 1):
            step(model, optimizer, rank, index)
        assert wire.plan is not None
        assert wire.plan.compress == "dense", wire.plan.explain()
        assert "best sent as they are" in wire.plan.explain()
    return digest(dict(model.named_parameters()))


@CASES.plain
def follows_a_link_that_changes(rank: Rank, engine: str) -> object:
    """A link that falls to a hundredth is noticed, and so is one that rises again; replicas stay identical."""
    model = seeded(Wide)
    optimizer = sgd(model)
    link = throttled(100 * SLOW_BITS_PER_S)
    chosen: list[tuple[int, str]] = []
    with thinwire.attach(model, optimizer, transport=link) as wire:
        for index in range(2 * MANY_STEPS):
            step(model, optimizer, rank, index)
            if wire.plan is not None and (not chosen or chosen[-1][1] != wire.plan.compress):
                chosen.append((index, wire.plan.compress))
            if index == PLANNING_STEPS + 12:
                link.bits_per_s = SLOW_BITS_PER_S
            if len(chosen) == 2 and index == chosen[1][0] + 3:
                break
    return digest(dict(model.named_parameters())), chosen
