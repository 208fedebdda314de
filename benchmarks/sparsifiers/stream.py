"""Gradients of a real training: four workers, and a model that follows the mean of what they find."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from benchmarks.convergence.tasks import WORKERS, Batch, Task
from torch import Tensor, nn

from thinwire.core import TensorSpec


@dataclass(frozen=True, eq=False)
class Sample:
    """One step of the training.

    Args:
        gradients: of each worker, flat, by name.
        weights: where they were taken, flat, by name.
    """

    step: int
    gradients: list[dict[str, Tensor]]
    weights: dict[str, Tensor]


def samples(task: Task, steps: int, *, before: int = 0, seed: int = 0) -> Iterator[Sample]:
    """Gradients of so many steps, after ``before`` steps of which none are shown; the same each time it is called.

    Dense AdamW trains the model, so all methods can be given the same gradients.
    """
    model = task.build(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.learning_rate)
    for step in range(before + steps):
        gradients = [_gradients(model, task.source.batch(step, rank, seed)) for rank in range(WORKERS)]
        if step >= before:
            weights = {name: p.detach().reshape(-1).clone() for name, p in model.named_parameters()}
            yield Sample(step - before, gradients, weights)
        for name, parameter in model.named_parameters():
            parameter.grad = torch.stack([mine[name] for mine in gradients]).mean(dim=0).view_as(parameter)
        optimizer.step()


def tensors_of(task: Task) -> list[TensorSpec]:
    """The task's parameters, in the order in which backward is expected to finish them."""
    named = task.build(0).named_parameters()
    return [TensorSpec(name, tuple(parameter.shape)) for name, parameter in named][::-1]


def _gradients(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    model(*batch).backward()
    return {name: p.grad.reshape(-1) for name, p in model.named_parameters() if p.grad is not None}
