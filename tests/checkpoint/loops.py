"""A small training with everything that a checkpoint must bring back, for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "nesterov, foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw, fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adam, amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5),
}


class Job:
    """Model with buffers and dropout, optimizer, scheduler, scaler, clipping, a generator that draws the data."""

    def __init__(self, optimizer: str = "adamw", *, seed: int = 0, width: int = 64, scaler: bool = False) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Linear(16, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 4)
        )
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.99)
        self.data = torch.Generator().manual_seed(seed + 1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3, enabled=scaler)
        self.position = {"batches": 0}

    @property
    def extra(self) -> dict[str, Any]:
        return {
            "scheduler": self.scheduler, "data": self.data, "scaler": self.scaler, "position": self.position,
        }  # fmt: skip

    def step(self) -> None:
        x = torch.randn(8, 16, generator=self.data)
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(x), x[:, :4].argmax(1))
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.position["batches"] += 1

    def everything(self) -> dict[str, Any]:
        """All that must be the same, as bits."""
        moments = {f"{i}/{k}": v for i, s in enumerate(self.optimizer.state.values()) for k, v in s.items()}
        tensors = {**self.model.state_dict(), **moments, "data": self.data.get_state(), "rng": torch.get_rng_state()}
        bits = {name: _bits(value) for name, value in tensors.items()}
        return {**bits, "lr": [group["lr"] for group in self.optimizer.param_groups],
                "scheduler": self.scheduler.state_dict(), "scaler": self.scaler.state_dict(), **self.position}  # fmt: skip


def _bits(value: Any) -> Any:
    return value.reshape(-1).view(torch.uint8).tolist() if isinstance(value, Tensor) else value
