"""What the cases share: models, data, reference gradients, digests."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.core.registry import compressor_class


@dataclass(frozen=True)
class Rank:
    """Which process this is."""

    index: int
    world_size: int
    folder: Path


Case = Callable[[Rank], Any]
EngineCase = Callable[[Rank, str], Any]
ENGINES = ("plain", "ddp")


class Cases(dict[str, Case]):
    """Cases by name; the decorators register one for each engine, or for one of them."""

    def both(self, body: EngineCase) -> EngineCase:
        for engine in ENGINES:
            self.add(body, engine, body.__name__)
        return body

    def plain(self, body: EngineCase) -> EngineCase:
        return self.add(body, "plain", body.__name__)

    def ddp(self, body: EngineCase) -> EngineCase:
        return self.add(body, "ddp", body.__name__)

    def add(self, body: EngineCase, engine: str, name: str) -> EngineCase:
        self[f"{name} [{engine}]"] = lambda rank: body(rank, engine)
        return body


def error_of(kind: type[BaseException], action: Callable[[], object]) -> BaseException:
    """What ``action`` raises, which must be of this kind."""
    try:
        action()
    except kind as error:
        return error
    raise AssertionError(f"expected {kind.__name__}, but nothing was raised")


def specs() -> list[str]:
    """The examples of every registered compressor, as text."""
    return sorted({str(e) for listing in thinwire.available() for e in compressor_class(listing.name).examples()})


class Net(nn.Module):
    """Two matrices that are worth compressing, one that is not, and biases."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(24, 56)
        self.second = nn.Linear(56, 40)
        self.last = nn.Linear(40, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.second(torch.relu(self.first(x))))
        result: Tensor = self.last(hidden)
        return result


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """A model with the same start values everywhere."""
    torch.manual_seed(seed)
    return make()


def wrap(engine: str, model: nn.Module, **ddp_options: Any) -> nn.Module:
    """The model as this engine wants it."""
    return DistributedDataParallel(model, **ddp_options) if engine == "ddp" else model


def batch(rank: int, step: int, features: int = 24) -> tuple[Tensor, Tensor]:
    """Data that any rank can make, so that each can compute what the others do."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, features, generator=generator), torch.randint(0, 3, (8,), generator=generator)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    """The loss on this rank's batch of this step."""
    x, labels = batch(rank, step)
    return nn.functional.cross_entropy(model(x), labels)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: Iterable[int]) -> None:
    """A plain training loop."""
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer with state."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def mean_gradients(model: nn.Module, world_size: int, step: int) -> dict[str, Tensor]:
    """What the averaged gradients must be, computed alone from everybody's data."""
    losses = [loss_of(model, rank, step) for rank in range(world_size)]
    named = dict(model.named_parameters())
    gradients = torch.autograd.grad(torch.stack(losses).mean(), list(named.values()))
    return dict(zip(named, gradients, strict=True))


def digest(tensors: Mapping[str, Any]) -> str:
    """A hash of the bits of (nested) tensors and numbers by name."""
    sha = hashlib.sha256()
    for name, value in sorted(tensors.items(), key=lambda item: str(item[0])):
        sha.update(str(name).encode())
        if isinstance(value, Mapping):
            sha.update(digest(value).encode())
        elif isinstance(value, Tensor):
            sha.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        else:
            sha.update(repr(value).encode())
    return sha.hexdigest()


def close(got: Tensor, expected: Tensor) -> None:
    """Equal up to the rounding of fp32 sums."""
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
