"""LayerScaler against GradScaler and fp32: gradients layer by layer, a real task, and what it costs.

    python benchmarks/precision/layer_scaler.py

The network is a deep causal CNN over bytes, without normalisation and with torch's default start values; it learns to
predict the next byte of Python's standard library. Its first layers' gradients vanish in fp16. Prints tables, writes JSON.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from thinwire.amp import LayerScaler
from thinwire.demo.data import Corpus, load_corpus, windows_at

MODES = ("fp32", "GradScaler", "LayerScaler")
WINDOWS, LENGTH = 16, 64
EVALUATION_BATCHES = 20
DEFAULT_REFRESH = int(inspect.signature(LayerScaler).parameters["refresh"].default)
NEVER, SETTLING_STEPS = 10**9, 20
Scaler = torch.amp.GradScaler | LayerScaler


class DeepCNN(nn.Module):
    """Causal convolutions over bytes, one after the other."""

    def __init__(self, layers: int, width: int = 48) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.layers = nn.ModuleList(nn.Conv1d(width, width, 3) for _ in range(layers))
        self.head = nn.Linear(width, 256)

    def forward(self, inputs: Tensor) -> Tensor:  # [batch, time] -> [batch, time, 256]
        x = self.embedding(inputs).mT
        for layer in self.layers:
            x = F.gelu(layer(F.pad(x, (2, 0))))
        logits: Tensor = self.head(x.mT)
        return logits


def batch(text: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return windows_at(text, torch.randint(0, len(text) - LENGTH - 1, (WINDOWS,), generator=generator), LENGTH)


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor, half: bool) -> Tensor:
    with torch.autocast("cpu", torch.float16, enabled=half):
        logits = model(inputs)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def make(mode: str, layers: int, seed: int) -> tuple[DeepCNN, Scaler | None]:
    torch.manual_seed(seed)
    model = DeepCNN(layers)
    if mode == "fp32":
        return model, None
    return model, LayerScaler(model) if mode == "LayerScaler" else torch.amp.GradScaler("cpu")


def step(
    model: nn.Module, scaler: Scaler | None, optimizer: torch.optim.Optimizer, data: tuple[Tensor, Tensor]
) -> None:
    """One step of training, with the gradients clipped as usual for such a network."""
    optimizer.zero_grad()
    loss = loss_of(model, *data, half=scaler is not None)
    if scaler is None:
        loss.backward()
    else:
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()


def gradients(mode: str, layers: int, corpus: Corpus) -> dict[str, Tensor]:
    """Of the start values, after a few steps that change nothing, so that scales have settled."""
    model, scaler = make(mode, layers, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(1 if scaler is None else 6):
        optimizer.zero_grad()
        loss = loss_of(model, *batch(corpus.train, 0), half=scaler is not None)
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None:
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None and name.endswith("weight")}


def gradient_errors(layers: int, corpus: Corpus) -> dict[str, dict[str, float]]:
    """By parameter and scaler, the relative L2 distance from fp32."""
    exact = gradients("fp32", layers, corpus)
    half = {mode: gradients(mode, layers, corpus) for mode in MODES[1:]}
    return {
        name: {mode: float((got[name] - right).norm() / right.norm()) for mode, got in half.items()}
        for name, right in exact.items()
    }


@torch.no_grad()
def evaluate(model: nn.Module, corpus: Corpus) -> float:
    """The mean loss on text that was not trained on, in fp32 for all."""
    losses = [
        float(loss_of(model, *batch(corpus.evaluation, 10_000 + i), half=False)) for i in range(EVALUATION_BATCHES)
    ]
    return statistics.fmean(losses)


def train(mode: str, layers: int, steps: int, learning_rate: float, seed: int, corpus: Corpus) -> list[float]:
    """Evaluation losses at five points of the run."""
    model, scaler = make(mode, layers, seed)
    # eps below the gradients that matter: Adam divides by their size, and would otherwise ignore them in any precision.
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate, eps=1e-16)
    losses = []
    for index in range(steps):
        step(model, scaler, optimizer, batch(corpus.train, index))
        if (index + 1) % (steps // 5) == 0:
            losses.append(evaluate(model, corpus))
    return losses


def cost(layers: int, rounds: int, corpus: Corpus) -> dict[str, float]:
    """How much longer a step takes than with GradScaler: median of turns, measured steps as often as by default."""
    torch.manual_seed(0)
    models = [DeepCNN(layers) for _ in range(3)]
    scalers = (torch.amp.GradScaler("cpu"), LayerScaler(models[1], refresh=NEVER), LayerScaler(models[2], refresh=1))
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-6) for model in models]
    times: list[list[float]] = [[], [], []]
    for index in range(SETTLING_STEPS + rounds):
        data = batch(corpus.train, index)
        for which in range(3):
            began_s = time.perf_counter()
            step(models[which], scalers[which], optimizers[which], data)
            if index >= SETTLING_STEPS:
                times[which].append(time.perf_counter() - began_s)
    # Ratios within a turn: whatever else the machine does slows all three alike.
    plain, measured = (
        statistics.median(one / floor for one, floor in zip(values, times[0], strict=True)) - 1 for values in times[1:]
    )
    return {"plain": plain, "measured": measured, "at default refresh": plain + (measured - plain) / DEFAULT_REFRESH}


def show(results: dict[str, Any]) -> None:
    console = Console()
    table = Table("weight", *MODES[1:], title="gradient error against fp32 (relative L2)", header_style="bold")
    for name, errors in results["gradient_errors"].items():
        table.add_row(name, *(f"{errors[mode]:.4f}" for mode in MODES[1:]))
    console.print(table)
    table = Table("mode", "seed", "evaluation losses", title="next byte, nats", header_style="bold")
    for each in results["training"]:
        table.add_row(each["mode"], str(each["seed"]), "  ".join(f"{loss:.3f}" for loss in each["losses"]))
    console.print(table)
    console.print("cost of a step, against GradScaler:", {k: f"{v:+.2%}" for k, v in results["cost"].items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gradient-layers", type=int, default=20)
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--cost-rounds", type=int, default=120)
    parser.add_argument("--out", type=Path, default=Path("runs/precision-layer-scaler.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    corpus, rate = load_corpus(), arguments.learning_rate
    results: dict[str, Any] = {"gradient_errors": gradient_errors(arguments.gradient_layers, corpus)}
    results["cost"] = cost(arguments.layers, arguments.cost_rounds, corpus)
    runs = [(mode, seed) for seed in range(arguments.seeds) for mode in MODES]
    results["training"] = [
        {"mode": mode, "seed": seed, "losses": train(mode, arguments.layers, arguments.steps, rate, seed, corpus)}
        for mode, seed in runs
    ]
    show(results)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
