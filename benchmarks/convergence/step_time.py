"""The time of an optimizer step: thinwire.optim.AdamW against torch's for-each AdamW, in turns.

    python -m benchmarks.convergence.step_time

A GPT of 4.9 M parameters, one thread. Prints medians of all rounds and their ratios, which hold on a busy machine too.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import thinwire.api  # noqa: F401  (registers the compressors)
from thinwire.core import TensorSpec
from thinwire.demo.model import GPT, SIZES
from thinwire.engine.ages import Ages
from thinwire.fusion.prepare import prepare
from thinwire.optim import AdamW

SHARES = (0.05, 0.2, 0.4)  # of the coordinates received: one rank's top-k 0.05, the union of four ranks' 0.05 and 0.1


class Contestant:
    """A model with gradients, and the optimizer whose steps are timed."""

    def __init__(self, label: str, share: float, compress: str | None) -> None:
        torch.manual_seed(0)
        model = GPT(SIZES["small"], max_time=128)
        named = dict(model.named_parameters())
        self.label, self.model, self.seconds, self.count_seconds = label, model, list[float](), list[float]()
        self._means = {name: _mean(parameter, share) for name, parameter in named.items()}
        for name, parameter in named.items():
            parameter.grad = self._means[name].clone()
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        if compress is not None:
            tensors = [TensorSpec(name, tuple(p.shape)) for name, p in named.items()]
            self._ages = Ages(named, tensors, prepare(compress))
            self.optimizer = AdamW(model.parameters(), foreach=True)
        self._sparse = compress is not None

    def step(self) -> None:
        """One timed step; counting ages is the wire's work and is timed apart."""
        if self._sparse:
            began_s = time.perf_counter()
            self._ages.end_step(self._means)
            self.count_seconds.append(time.perf_counter() - began_s)
        began_s = time.perf_counter()
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - began_s)


def _mean(parameter: nn.Parameter, share: float) -> Tensor:
    full = torch.randn(parameter.shape) * 1e-3
    return full if parameter.dim() < 2 else torch.where(torch.rand(parameter.shape) < share, full, 0.0)


def main() -> None:
    """Time everybody in turns and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    stock = Contestant("torch AdamW, foreach", 1.0, None)
    ours = [Contestant("ours, all dense (int4)", 1.0, "int4")]
    ours += [Contestant(f"ours, {share:.0%} received", share, "topk(density=0.05)") for share in SHARES]
    for _ in range(rounds + 2):
        for contestant in (stock, *ours):
            contestant.step()
    table = Table("optimizer", "step", "x torch", "counting ages")
    base = stock.seconds[2:]
    for contestant in (stock, *ours):
        times = contestant.seconds[2:]  # the first two make states and fill caches
        ratio = statistics.median(mine / theirs for mine, theirs in zip(times, base, strict=True))
        counting = statistics.median(contestant.count_seconds or [0.0])
        table.add_row(
            contestant.label, f"{1e3 * statistics.median(times):.2f} ms", f"{ratio:.2f}", f"{1e3 * counting:.2f} ms"
        )
    Console().print(table)


if __name__ == "__main__":
    main()
