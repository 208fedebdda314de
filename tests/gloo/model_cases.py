"""Cases: kinds of models, what their replicas have in common, and what is kept for later. Two ranks.

A case returns what must be the same on all ranks; what it must be is asserted inside.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from gloo.support import (
    ENGINES,
    Cases,
    EngineCase,
    Net,
    Rank,
    batch,
    close,
    digest,
    loss_of,
    seeded,
    sgd,
    specs,
    train,
    wrap,
)

CASES = Cases()


@CASES.plain
def ranks_start_from_the_values_of_rank_0(rank: Rank, engine: str) -> str:
    model = seeded(Net, seed=rank.index)
    with thinwire.attach(model, compress="int4"):
        for got, expected in zip(model.parameters(), seeded(Net, seed=0).parameters(), strict=True):
            assert torch.equal(got, expected)
    return digest(dict(model.named_parameters()))


def _replicas(text: str) -> EngineCase:
    def replicas_are_identical(rank: Rank, engine: str) -> str:
        model = wrap(engine, seeded(Net))
        optimizer = sgd(model)
        with thinwire.attach(model, optimizer, compress=text, fuse="8KiB") as wire:
            before = loss_of(model, rank.index, 0).item()
            train(model, optimizer, rank.index, [0] * 8)
            assert loss_of(model, rank.index, 0).item() < before, "it does not learn"
            assert wire.stats().skipped_steps == 0
        return digest(dict(model.named_parameters()))

    return replicas_are_identical


for _text in specs():
    for _engine in ENGINES:
        CASES.add(_replicas(_text), _engine, f"replicas_are_identical: {_text}")


def compile_eagerly(model: nn.Module) -> nn.Module:
    """torch.compile with everything but code generation, which takes long."""
    compiled = torch.compile(model, backend="aot_eager")
    assert isinstance(compiled, nn.Module)
    return compiled


@CASES.both
def compiled_models(rank: Rank, engine: str) -> str:
    compiled = compile_eagerly(seeded(Net))
    model = wrap(engine, compiled)
    optimizer = sgd(model)
    with thinwire.attach(model, optimizer, compress="dense") as wire:
        train(model, optimizer, rank.index, range(3))
        assert set(wire.state_dict()["tensors"]) == {name for name, _ in Net().named_parameters()}
    plain = wrap(engine, seeded(Net))
    optimizer = sgd(plain)
    with thinwire.attach(plain, optimizer, compress="dense"):
        train(plain, optimizer, rank.index, range(3))
    for got, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    return digest({str(i): p for i, p in enumerate(model.parameters())})


@CASES.ddp
def compiled_ddp(rank: Rank, engine: str) -> str:
    """torch.compile around DDP, instead of inside: what DDP would average by itself must not be averaged before."""
    gradients = []
    for model in (seeded(Net), compile_eagerly(DistributedDataParallel(seeded(Net)))):
        with thinwire.attach(model, compress="topk(density=0.1)"):
            loss_of(model, rank.index, 0).backward()
        gradients.append([p.grad for p in model.parameters()])
    for expected, got in zip(*gradients, strict=True):
        assert expected is not None
        assert got is not None
        close(got, expected)
    return digest({str(i): gradient for i, gradient in enumerate(gradients[1])})


class Wrapping(nn.Module):
    """A plain module with a part called ``module``, whose names must not be mistaken for DDP's."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(32, 32)
        self.weight = nn.Parameter(torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = (self.module(x) * self.weight).sum()
        return result


@CASES.both
def a_part_called_module(rank: Rank, engine: str) -> str:
    model = wrap(engine, seeded(Wrapping))
    with thinwire.attach(model, compress="dense") as wire:
        assert set(wire.state_dict()["tensors"]) == {"module.weight", "module.bias", "weight"}
        model(torch.full((1, 32), float(rank.index))).backward()
    return digest({name: p.grad for name, p in model.named_parameters()})


class Direct(nn.Module):
    """Gradients that do not depend on the weights, so that what was applied can be added up. Registered out of order."""

    def __init__(self) -> None:
        super().__init__()
        for index in (3, 0, 4, 1, 2):
            self.register_parameter(f"w{index}", nn.Parameter(torch.zeros(40, 30 + index)))

    def forward(self, factors: dict[str, Tensor]) -> Tensor:
        result: Tensor = torch.stack(
            [(getattr(self, f"w{index}") * factors[f"w{index}"]).sum() for index in range(5)]
        ).sum()
        return result


def _factors(rank: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {f"w{index}": torch.randn(40, 30 + index, generator=generator) for index in range(5)}


def _conserves(text: str) -> EngineCase:
    def nothing_is_lost(rank: Rank, engine: str) -> str:
        """Applied + waiting = given, over several buckets and DDP's re-bucketing after step 0."""
        steps = 4
        model = wrap(engine, seeded(Direct), **({"bucket_cap_mb": 0.006} if engine == "ddp" else {}))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with thinwire.attach(model, optimizer, compress=text, fuse="12KiB") as wire:
            for step in range(steps):
                optimizer.zero_grad()
                model(_factors(rank.index, step)).backward()
                optimizer.step()
            state = wire.state_dict()["tensors"]
        for name, parameter in model.named_parameters():
            fqn = name.removeprefix("module.")
            given = sum(_factors(r, step)[fqn] for r in range(rank.world_size) for step in range(steps))
            waiting = state[fqn].get("residual", torch.zeros(parameter.numel())).view(parameter.shape).clone()
            torch.distributed.all_reduce(waiting)
            total = -parameter.detach() + waiting / rank.world_size
            torch.testing.assert_close(total, given / rank.world_size, rtol=1e-4, atol=1e-4)
        return digest(dict(model.named_parameters()))

    return nothing_is_lost


for _text in ("dense", "topk(density=0.05)", "int4", "powersgd(rank=2)", "sign", "randomk(density=0.1)"):
    for _engine in ENGINES:
        CASES.add(_conserves(_text), _engine, f"nothing_is_lost: {_text}")


class Normed(nn.Module):
    """A model with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(24)
        self.net = Net()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        mean = self.norm.running_mean
        assert isinstance(mean, Tensor)
        self.seen.append(mean.clone())
        result: Tensor = self.net(self.norm(x))
        return result


@CASES.both
def buffers_follow_rank_0(rank: Rank, engine: str) -> str:
    normed = seeded(Normed)
    assert isinstance(normed, Normed)
    model = wrap(engine, normed)
    optimizer = sgd(model)
    with thinwire.attach(model, optimizer, compress="int4"):
        train(model, optimizer, rank.index, range(3))
    assert not torch.equal(normed.seen[0], normed.seen[2]), "the buffers do not move at all"
    return digest({str(i): seen for i, seen in enumerate(normed.seen)})


@CASES.plain
def buffers_may_stay_apart(rank: Rank, engine: str) -> None:
    normed = seeded(Normed)
    assert isinstance(normed, Normed)
    with thinwire.attach(normed, compress="int4", broadcast_buffers=False):
        loss_of(normed, rank.index, 0).backward()
        loss_of(normed, rank.index, 1).backward()
    alone = nn.BatchNorm1d(24)
    alone(batch(rank.index, 0)[0])
    assert torch.equal(normed.seen[1], alone.running_mean)  # type: ignore[arg-type]
