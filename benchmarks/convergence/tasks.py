"""What is trained: small enough for two cores, real data, evaluation on fixed batches nobody trains on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from benchmarks.convergence import data
from torch import Tensor, nn

from thinwire.demo.data import batch_starts, evaluation_starts, windows_at
from thinwire.demo.model import GPT, GPTConfig

WORKERS = 4
Batch = tuple[Tensor, Tensor]


class Source(Protocol):
    """Where batches come from."""

    def batch(self, step: int, rank: int, seed: int) -> Batch:
        """What one worker sees in one step."""

    def evaluation(self) -> list[Batch]:
        """The fixed batches of evaluation."""


@dataclass(frozen=True)
class Text:
    """Windows of a text; targets are the next bytes."""

    name: str
    batch_windows: int
    length: int = 64

    def batch(self, step: int, rank: int, seed: int) -> Batch:
        text = data.text(self.name).train
        starts = batch_starts(len(text), self.length, step, rank, WORKERS, self.batch_windows, seed)
        return windows_at(text, starts, self.length)

    def evaluation(self) -> list[Batch]:
        text = data.text(self.name).evaluation
        starts = evaluation_starts(len(text), self.length, 192, 0, 1)
        return [windows_at(text, chunk, self.length) for chunk in starts.split(32)]


@dataclass(frozen=True)
class Fashion:
    """Fashion-MNIST: images and their classes."""

    batch_images: int

    def batch(self, step: int, rank: int, seed: int) -> Batch:
        images, labels, _, _ = data.fashion()
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step * WORKERS + rank)
        chosen = torch.randint(len(images), (self.batch_images,), generator=generator)
        return images[chosen], labels[chosen]

    def evaluation(self) -> list[Batch]:
        _, _, images, labels = data.fashion()
        return list(zip(images[:2000].split(250), labels[:2000].split(250), strict=True))


class ByteLSTM(nn.Module):
    """One LSTM layer over bytes."""

    def __init__(self, width: int = 64, hidden: int = 288) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.lstm = nn.LSTM(width, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 256)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:  # both [batch, time]
        states, _ = self.lstm(self.embedding(inputs))
        return F.cross_entropy(self.head(states).flatten(0, 1), targets.flatten())


class SmallCNN(nn.Module):
    """Three convolutions and two linear layers for images of 28 x 28."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(64, 128, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.hidden = nn.Linear(512, 512)
        self.head = nn.Linear(512, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        features = self.convolutions(images).flatten(1)
        return F.cross_entropy(self.head(F.relu(self.hidden(features))), labels)


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model, its data, and the learning rate that suits dense AdamW."""

    name: str
    label: str
    source: Source
    model: Callable[[], nn.Module]
    learning_rate: float

    def build(self, seed: int) -> nn.Module:
        """The model with start values that depend on the seed alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.model()


def _gpt(layers: int, width: int, heads: int) -> Callable[[], nn.Module]:
    return lambda: GPT(GPTConfig(layers=layers, width=width, heads=heads), max_time=64)


TASKS = {
    task.name: task
    for task in (
        Task(
            name="gpt1m",
            label="GPT 0.9 M, Python source",
            source=Text("stdlib", batch_windows=3),
            model=_gpt(4, 128, 4),
            learning_rate=1e-3,
        ),
        Task(
            name="shakespeare",
            label="GPT 0.9 M, Shakespeare",
            source=Text("shakespeare", batch_windows=3),
            model=_gpt(4, 128, 4),
            learning_rate=1e-3,
        ),
        Task(
            name="lstm",
            label="LSTM 0.5 M, Python source",
            source=Text("stdlib", batch_windows=4),
            model=ByteLSTM,
            learning_rate=4e-3,
        ),
        Task(
            name="cnn",
            label="CNN 0.4 M, Fashion-MNIST",
            source=Fashion(batch_images=16),
            model=SmallCNN,
            learning_rate=1e-3,
        ),
        Task(
            name="gpt5m",
            label="GPT 4.9 M, Python source",
            source=Text("stdlib", batch_windows=2),
            model=_gpt(6, 256, 8),
            learning_rate=5e-4,
        ),
    )
}
