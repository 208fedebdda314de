"""Is PowerSGD here behind torch's hook at the same rank, and `int4` behind dense on a small ResNet with SGD? With seeds.

``python -m benchmarks.convergence.against_torch --seeds 5`` trains every contestant on the same batches and start values, two
gloo ranks on loopback, and writes ``benchmarks/results/against-torch.json``. Ctrl-C keeps what has ended; the same command
goes on from there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from benchmarks.convergence import data
from benchmarks.convergence.tasks import TASKS, Fashion
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import thinwire

RANKS = 2
RESULTS = Path("benchmarks/results/against-torch.json")
DENSE_STEPS = 2  # the fewest that torch's hook allows with error feedback and warm start
RANK = 4
GPT_STEPS, RESNET_STEPS = 200, 150
Losses = dict[str, dict[str, dict[str, float]]]  # by task, method and seed


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.norms[0](self.first(x)))
        return F.relu(x + self.norms[1](self.second(hidden)))


class ResNet(nn.Module):
    """Three blocks for images of 28 x 28."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = F.relu(self.stem(images))
        for block in self.blocks:
            x = F.max_pool2d(block(x), 2) if x.shape[-1] > 4 else block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


def _seeded(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


@contextmanager
def _averaging(model: nn.Module, optimizer: torch.optim.Optimizer, method: str) -> Iterator[nn.Module]:
    if method == "torch powersgd":
        module = DistributedDataParallel(model, bucket_cap_mb=4096)  # with several buckets the hook dies on gloo
        state = PowerSGDState(dist.group.WORLD, matrix_approximation_rank=RANK, start_powerSGD_iter=DENSE_STEPS)
        module.register_comm_hook(state, powerSGD_hook)
        yield module
    else:
        with thinwire.attach(model, optimizer, compress=method):
            yield model


def train(task: str, method: str, seed: int) -> float:
    """The evaluation loss after training, on this rank."""
    rank = dist.get_rank()
    if task == "gpt1m":
        chosen, steps = TASKS["gpt1m"], GPT_STEPS
        model, source = chosen.build(seed), chosen.source
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=chosen.learning_rate)
    else:
        model, source, steps = _seeded(ResNet, seed), Fashion(batch_images=32), RESNET_STEPS
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with _averaging(model, optimizer, method) as module:
        for step in range(steps):
            optimizer.zero_grad()
            module(*source.batch(step, rank, seed)).backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        return statistics.fmean(float(model(*batch)) for batch in source.evaluation())


CONTESTS = {
    "gpt1m": ("dense", f"powersgd(rank={RANK})", "torch powersgd"),
    "resnet": ("dense", "int4", "noef | int4", "int8"),
}


def work(arguments: list[str]) -> None:
    """One rank of one run; rank 0 prints the loss."""
    task, method, seed, rank, store = arguments
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=RANKS)
    loss = train(task, method, int(seed))
    if int(rank) == 0:
        print(json.dumps(loss))
    dist.barrier()
    dist.destroy_process_group()


def run(task: str, method: str, seed: int) -> float:
    """One run of all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.convergence.against_torch", "--worker", task, method, str(seed)]
        ranks = [
            subprocess.Popen([*command, str(rank), f"{folder}/store"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            for rank in range(RANKS)
        ]
        out = [rank.communicate(timeout=1200) for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"{task}, {method}, seed {seed} failed:\n{out[0][1].decode()}")
    loss: float = json.loads(out[0][0].decode().strip().splitlines()[-1])
    return loss


def study(losses: Losses) -> dict[str, Any]:
    """What ``benchmarks.results`` reads: losses by seed, their mean, and how far they are above dense's of the same seed."""
    rows = []
    for task, methods in losses.items():
        dense = methods.get("dense", {})
        for method, by_seed in methods.items():
            values = list(by_seed.values())
            above = [100 * (by_seed[seed] / dense[seed] - 1) for seed in by_seed if seed in dense]
            error = statistics.stdev(above) / len(above) ** 0.5 if len(above) > 1 else float("nan")
            shown = ", ".join(f"{value:.3f}" for value in values)
            mean, relative = f"{statistics.fmean(values):.3f}", f"{statistics.fmean(above):+.1f} ± {error:.1f} %"
            rows.append([task, f"`{method}`", shown, mean, "" if method == "dense" else relative])
    return {
        "study": "against-torch",
        "commands": ["python -m benchmarks.convergence.against_torch --seeds 5"],
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "machine": "one virtual machine with two cores; two ranks on loopback",
        "setting": (
            f"GPT of 0.9 M parameters with AdamW, {GPT_STEPS} steps, PowerSGD of rank {RANK} on both sides; a ResNet of "
            f"three blocks on Fashion-MNIST with SGD (momentum 0.9), {RESNET_STEPS} steps. Evaluation loss by seed, and the "
            "mean difference from dense of the same seed with its standard error"
        ),
        "facts": {},
        "tables": {"table": {"columns": ["task", "method", "by seed", "mean", "above dense"], "rows": rows}},
        "losses": losses,
    }


def main() -> None:
    """Run what is missing; every run is kept as it ends."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.convergence.against_torch", description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--worker", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.worker)
        return
    data.text("stdlib")
    data.fashion()
    losses: Losses = json.loads(RESULTS.read_text(encoding="utf-8"))["losses"] if RESULTS.exists() else {}
    for seed in range(arguments.seeds):
        for task, methods in CONTESTS.items():
            for method in methods:
                by_seed = losses.setdefault(task, {}).setdefault(method, {})
                if str(seed) not in by_seed:
                    by_seed[str(seed)] = run(task, method, seed)
                    print(f"seed {seed}, {task}, {method}: {by_seed[str(seed)]:.4f}", file=sys.stderr, flush=True)
                RESULTS.write_text(json.dumps(study(losses), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
