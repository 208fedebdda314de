"""One run: train a task over a simulated wire and evaluate as it goes."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from benchmarks.convergence.tasks import TASKS, WORKERS, Batch, Task
from benchmarks.convergence.variants import VARIANTS, ExperimentalAdamW
from benchmarks.convergence.wire import SimulatedWire
from torch import Tensor, nn

from thinwire import optim

EVALUATIONS = 10
WARMUP_STEPS = 50
COOLDOWN_SHARE, COOLDOWN_TO = 0.3, 0.1  # of the steps, and of the learning rate: it takes the noise out of the end
STOCK, OURS = "stock", "ours"
SGD = "stock SGD"
MASKED_SGD: dict[str, Literal["age", "dgc"]] = {"SGD, masked by age": "age", "SGD, masked as in DGC": "dgc"}
SGD_LR_FACTOR = 50  # times the learning rate that suits Adam


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one run does; its text identifies it among the results."""

    task: str
    compress: str
    optimizer: str = STOCK  # stock, ours, one of the SGDs, or the name of a variant
    steps: int = 500
    seed: int = 0
    lr_factor: float = 1.0  # times the task's learning rate
    beta2: float = 0.999
    clip: float | None = None  # the largest norm of what is received

    @property
    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True, ensure_ascii=False)

    def __str__(self) -> str:
        return f"{self.task}: {self.compress}, {self.optimizer}, seed {self.seed}"


def recipe(task: Task) -> str:
    """Everything else that a result depends on; results of another recipe are not mixed with those of this one."""
    schedule_text = f"warm-up {WARMUP_STEPS} steps, cool-down in {COOLDOWN_SHARE} of them to {COOLDOWN_TO}"
    return f"{task.source}, {task.label}, {WORKERS} workers, learning rate {task.learning_rate}, {schedule_text}"


def train(run: Run) -> dict[str, Any]:
    """The run's settings and what came of it; needs only numbers and strings to be written down."""
    torch.set_num_threads(1)
    task = TASKS[run.task]
    model = task.build(run.seed)
    wire = SimulatedWire(model, run.compress, WORKERS, run.seed)
    optimizer = wire.optimizer = _optimizer(run, task, model, wire)
    evaluation, curve, share = task.source.evaluation(), [], 0.0
    learning_rate = run.lr_factor * task.learning_rate * (SGD_LR_FACTOR if "SGD" in run.optimizer else 1)
    began_s = time.perf_counter()
    for step in range(run.steps):
        gradients = [_gradients(model, task.source.batch(step, rank, run.seed)) for rank in range(WORKERS)]
        means = wire.exchange(gradients)
        share += sum(float((mean != 0).sum()) for mean in means.values())
        if run.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), run.clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * schedule(step, run.steps)
        optimizer.step()
        if (step + 1) * EVALUATIONS // run.steps > step * EVALUATIONS // run.steps:
            curve.append([step + 1, evaluate(model, evaluation)])
    numel = sum(parameter.numel() for parameter in model.parameters())
    return {
        **asdict(run),
        "recipe": recipe(task),
        "curve": curve,
        "loss": curve[-1][1],
        "seconds": time.perf_counter() - began_s,
        "sent_bytes_per_step": wire.sent[0] / run.steps,
        "received_share": share / run.steps / numel,
        "parameters": numel,
    }


def schedule(step: int, steps: int) -> float:
    """The factor of the learning rate: linear warm-up, constant, linear cool-down."""
    cooling = max(0.0, 1 - (steps - step) / (COOLDOWN_SHARE * steps))
    return min(1.0, (step + 1) / WARMUP_STEPS) * (1 - (1 - COOLDOWN_TO) * cooling)


def _optimizer(run: Run, task: Task, model: nn.Module, wire: SimulatedWire) -> torch.optim.Optimizer:
    lr, betas = task.learning_rate, (0.9, run.beta2)
    if run.optimizer == STOCK:
        return torch.optim.AdamW(model.parameters(), lr=lr, betas=betas)
    if run.optimizer == OURS:
        return optim.AdamW(model.parameters(), lr=lr, betas=betas)
    if run.optimizer == SGD:
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    if run.optimizer in MASKED_SGD:
        return optim.SGD(model.parameters(), lr=lr, momentum=0.9, masking=MASKED_SGD[run.optimizer])
    named = dict(model.named_parameters())
    return ExperimentalAdamW(named, set(wire.ages.names), VARIANTS[run.optimizer], lr=lr, betas=betas)


def _gradients(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    model(*batch).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@torch.no_grad()
def evaluate(model: nn.Module, batches: list[Batch]) -> float:
    """The mean loss over the fixed batches."""
    model.eval()
    losses = [float(model(*batch)) for batch in batches]
    model.train()
    return sum(losses) / len(losses)
