"""Policies over ranks that are threads: a small model per rank, attached through a transport of a simulated world."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import thinwire
from sim.threads import ThreadedWorld, run_ranks

Model = nn.Module


class Tiny(nn.Module):
    """Two matrices that are compressed, biases and a norm that are not, and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(24, 56), nn.BatchNorm1d(56), nn.Linear(56, 24)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(torch.relu(self.norm(self.first(x))))
        return result


def model_of(seed: int = 0) -> Model:
    """The same start on every rank, without the global generator, which threads share."""
    model, generator = Tiny(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    return model


def loss_of(model: Model, rank: int, step: int) -> Tensor:
    """A task that can be learned: undo a fixed linear map. Every rank has data of its own."""
    generator = torch.Generator().manual_seed(1 + 1000 * step + rank)
    x = torch.randn(16, 24, generator=generator)
    target = x.roll(1, dims=1) - 0.5 * x
    return (model(x) - target).square().mean()


class Worker:
    """One rank: model, optimizer and wire."""

    def __init__(self, wire: thinwire.Attached, model: Model, optimizer: torch.optim.Optimizer, rank: int) -> None:
        self.wire, self.model, self.optimizer, self.rank, self.step = wire, model, optimizer, rank, 0
        self.losses: list[float] = []

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = loss_of(self.model, self.rank, self.step)
            loss.backward()
            self.wire.report_loss(loss.detach())
            self.optimizer.step()
            self.losses.append(float(loss.detach()))
            self.step += 1

    def saved(self) -> dict[str, Any]:
        """Everything a resumed run needs, as copies."""
        model = {name: value.clone() for name, value in self.model.state_dict().items()}
        optimizer = torch.optim.Optimizer.state_dict(self.optimizer)
        return {"model": model, "optimizer": _copied(optimizer), "wire": self.wire.state_dict(), "step": self.step}

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(_copied(state["optimizer"]))
        self.wire.load_state_dict(state["wire"])
        self.step = state["step"]

    def anchor(self) -> dict[str, Tensor]:
        with self.wire.averaged():
            return {name: value.clone() for name, value in self.model.state_dict().items() if value.is_floating_point()}


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copied(one) for key, one in value.items()}
    return [_copied(one) for one in value] if isinstance(value, list | tuple) else value


@contextmanager
def worker(world: ThreadedWorld, rank: int, sync: str, **settings: Any) -> Iterator[Worker]:
    model = model_of()
    make = settings.pop("optimizer", torch.optim.AdamW)
    optimizer = make(model.parameters(), lr=settings.pop("lr", 0.01))
    with thinwire.attach(model, optimizer, sync=sync, transport=world.transport(rank), **settings) as wire:
        yield Worker(wire, model, optimizer, rank)


def on_ranks(work: Callable[[Worker], Any], sync: str, world_size: int = 2, **settings: Any) -> list[Any]:
    """``work`` on every rank at the same time; two lanes, as gloo has."""
    world = ThreadedWorld(world_size, lanes=2)

    def run(rank: int) -> Any:
        with worker(world, rank, sync, **dict(settings)) as one:
            return work(one)

    return run_ranks(run, world_size)
