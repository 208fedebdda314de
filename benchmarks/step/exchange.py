"""What does an exchange cost by itself? Wall-clock and processor time of steps that only exchange, on the lab.

``python -m benchmarks.step.exchange --compress dense int4 int4/4MiB`` gives the gradients of a demo model to autograd instead
of computing them, contestants taking turns in one job. Whole steps vary from turn to turn by more than an exchange takes
where hosts share cores; these do not. What the same loop takes without any exchange is subtracted. A fusion may follow the
compressor after a slash. (Stock DDP cannot take part: it exchanges only after a forward pass.)
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from benchmarks.contest.lineup import workload_of
from benchmarks.step.on_lab import COLLECTIVE_TIMEOUT_S, run_workers
from rich.console import Console
from torch import nn

from thinwire.demo.contender import make_contender
from thinwire.demo.fairness import KEEP_FREED_MEMORY
from thinwire.demo.settings import Contestant
from thinwire.demo.turns import order_of_turn

FLOOR = "floor"
WARMUP_STEPS = 6


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the workers are told."""

    compress: list[str]
    model: str
    rounds: int
    steps: int


class Turn(NamedTuple):
    """Seconds per step: of the clock, and of all ranks' processor time."""

    wall_s: float
    cpu_s: float


def contestant(name: str, model: str) -> Contestant:
    """From ``floor``, ``int4`` or ``int4/4MiB``."""
    spec, _, fuse = name.partition("/")
    workload = workload_of(model)
    if spec == FLOOR:
        return Contestant(name=name, label=name, mode="floor", workload=workload)
    return Contestant(name=name, label=name, mode="thinwire", workload=workload, compress=spec, fuse=fuse or "auto")


class Exchanging:
    """A model whose gradients fall from the sky."""

    def __init__(self, module: nn.Module) -> None:
        self._parameters = list(module.parameters())[::-1]
        generator = torch.Generator().manual_seed(dist.get_rank())
        self._gradients = [torch.randn(p.shape, generator=generator) for p in self._parameters]

    def run(self, steps: int) -> Turn:
        """Seconds of each step, timed from barrier to barrier."""
        dist.barrier()
        began_s, cpu_s = time.perf_counter(), _processor_s()
        for _ in range(steps):
            for parameter in self._parameters:
                parameter.grad = None
            torch.autograd.backward(self._parameters, [gradient.clone() for gradient in self._gradients])
        spent = torch.tensor([_processor_s() - cpu_s], dtype=torch.float64)
        dist.barrier()
        wall_s = time.perf_counter() - began_s
        dist.all_reduce(spent)
        return Turn(wall_s / steps, spent.item() / steps)


def _processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def work(settings: Settings, out: Path) -> None:
    """One rank: everybody takes turns; rank 0 writes the times."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S))
    names = [FLOOR, *settings.compress]
    with ExitStack() as stack:
        made = [
            stack.enter_context(make_contender(contestant(name, settings.model), COLLECTIVE_TIMEOUT_S))
            for name in names
        ]
        contenders = [Exchanging(one.module) for one in made]
        for one in contenders:
            one.run(WARMUP_STEPS)
        turns: dict[str, list[Turn]] = {name: [] for name in names}
        for turn in range(settings.rounds):
            for index in order_of_turn(turn, len(names)):
                turns[names[index]].append(contenders[index].run(settings.steps))
    if dist.get_rank() == 0:
        out.write_text(json.dumps(turns), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def measure(settings: Settings, rate: str, hosts: int, say: Callable[[str], None]) -> dict[str, list[Turn]]:
    """The turns of every contestant at this rate."""
    found = run_workers("benchmarks.step.exchange", settings, rate, hosts, say, KEEP_FREED_MEMORY)
    return {name: [Turn(*turn) for turn in turns] for name, turns in found.items()}


def row(rate: str, name: str, turns: Sequence[Turn], floor: Sequence[Turn]) -> str:
    """Medians of what each turn took more than the floor's of the same round, with standard errors, in milliseconds."""
    cells = []
    for own, its in zip(zip(*turns, strict=True), zip(*floor, strict=True), strict=True):
        more_ms = [1e3 * (mine_s - floor_s) for mine_s, floor_s in zip(own, its, strict=True)]
        error_ms = statistics.stdev(more_ms) / len(more_ms) ** 0.5 if len(more_ms) > 1 else float("nan")
        cells.append(f"{statistics.median(more_ms):.1f} ± {error_ms:.1f} ms")
    return f"| {rate} | `{name}` | {' | '.join(cells)} |"


def main() -> None:
    """Print the table, a row for each rate and contestant."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step.exchange", description=__doc__)
    parser.add_argument("--rates", default="unshaped", help="link rates, separated by commas")
    parser.add_argument("--compress", nargs="+", default=["dense", "int8", "int4"])
    parser.add_argument("--model", default="small", help="a model of the contest: small, lstm or cnn")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=6, help="turns of every contestant")
    parser.add_argument("--steps", type=int, default=10, help="steps per turn")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(Settings(**json.loads(arguments.worker[0])), Path(arguments.worker[1]))
        return
    chosen = {name: getattr(arguments, name) for name in ("compress", "model", "rounds", "steps")}
    console = Console(stderr=True)
    print("| rate | exchange | wall-clock time | processor time, all ranks |\n" + "|---" * 4 + "|")
    for rate in arguments.rates.split(","):
        with console.status(f"exchanging at {rate}"):
            turns = measure(Settings(**chosen), rate, arguments.hosts, console.log)
        for name in arguments.compress:
            print(row(rate, name, turns[name], turns[FLOOR]), flush=True)


if __name__ == "__main__":
    main()
