"""Does it pay to send first what the next forward needs first (ByteScheduler, SOSP'19)? Measured on the lab.

``python -m benchmarks.step.priority --rates 200mbit`` trains the demo's GPT, contestants taking turns in one job: with the
barrier at the end of backward that training loops have (thinwire as it is), and without it (``without_barrier.py``), messages
in order of readiness and in order of need.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from benchmarks.step.on_lab import COLLECTIVE_TIMEOUT_S, run_workers
from benchmarks.step.without_barrier import WithoutBarrier, urgent_first
from rich.console import Console
from torch import Tensor, nn

import thinwire
from thinwire.comm import TorchDistTransport
from thinwire.core import TensorSpec
from thinwire.demo.data import Corpus, batch_starts, load_corpus, windows_at
from thinwire.demo.model import build_model
from thinwire.demo.settings import Workload
from thinwire.engine.regroup import Regrouping
from thinwire.engine.session import Session
from thinwire.fusion import parse_fusion
from thinwire.fusion.prepare import prepare

BARRIER, AS_READY, AS_NEEDED = "barrier", "no barrier, as ready", "no barrier, as needed"
PROFILED_STEPS = 5


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the workers are told."""

    compress: list[str]
    fuse: str
    batch: int
    rounds: int
    steps: int


class Contestant:
    """A model of its own, and one way to train it."""

    def __init__(self, compress: str, how: str, settings: Settings, corpus: Corpus) -> None:
        self.name, self._how, self._corpus, self._step = f"{compress} | {how}", how, corpus, 0
        self._workload = Workload(batch=settings.batch)
        self._model = build_model(self._workload.model, self._workload.seq, 0)
        self._engine: WithoutBarrier | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        if how == BARRIER:
            self._optimizer = _adamw(list(self._model.parameters()))
            thinwire.attach(self._model, compress=compress, fuse=settings.fuse, timeout_s=COLLECTIVE_TIMEOUT_S)
        else:
            self._engine = _without_barrier(self._model, compress, settings.fuse)

    def warm_up(self) -> None:
        """The first steps; where messages have an order of their own, it follows from what they show."""
        self.run(PROFILED_STEPS)
        if self._how == AS_NEEDED:
            assert self._engine is not None
            order = _urgent_order(self._engine)
            self._engine.reorder(order)
            if dist.get_rank() == 0:
                print(json.dumps({"order": order, "contestant": self.name}), flush=True)
        self.run(1)

    def digest(self) -> float:
        """Equal for two contestants only if they have trained the same."""
        return sum(float(parameter.detach().double().abs().sum()) for parameter in self._model.parameters())

    def run(self, steps: int) -> float:
        """Train so many steps; their mean time, from barrier to barrier, everything applied."""
        dist.barrier()
        began_s = time.perf_counter()
        for _ in range(steps):
            self._train_step()
        if self._engine is not None:
            self._engine.finish()
        dist.barrier()
        return (time.perf_counter() - began_s) / steps

    def _train_step(self) -> None:
        loss: Tensor = self._model(*self._batch())
        loss.backward()
        if self._optimizer is not None:
            self._optimizer.step()
            self._optimizer.zero_grad()
        self._step += 1

    def _batch(self) -> tuple[Tensor, Tensor]:
        train, work = self._corpus.train, self._workload
        ranks = (dist.get_rank(), dist.get_world_size())
        return windows_at(train, batch_starts(len(train), work.seq, self._step, *ranks, work.batch, 0), work.seq)


def _adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def _without_barrier(model: nn.Module, compress: str, fuse: str) -> WithoutBarrier:
    compressor = prepare(compress)
    parameters = dict(model.named_parameters())
    tensors = [TensorSpec(name, tuple(p.shape), p.dtype, p.device) for name, p in parameters.items()]
    group = dist.new_group(timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S))
    assert isinstance(group, dist.ProcessGroup)
    transport = TorchDistTransport(group, None)
    session = Session(transport, parameters, tensors, compressor, config=0, seed=0, scaler=None)
    regrouping = Regrouping(parse_fusion(fuse), tensors[::-1], session)
    return WithoutBarrier(model, regrouping, session, _adamw)


def _urgent_order(engine: WithoutBarrier) -> list[int]:
    """The same on all ranks: from when the last of them had a group, and how long the last of them waited for its message.

    The others' messages also wait for that rank.
    """
    mine = _last_times_s(engine)
    everybody: list[list[tuple[float, float]]] = [mine] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    by_group = list(zip(*everybody, strict=True))
    ready_s = [max(ready for ready, _ in times) for times in by_group]
    return urgent_first(ready_s, [min(wire for _, wire in times) for times in by_group])


def _last_times_s(engine: WithoutBarrier) -> list[tuple[float, float]]:
    """Of the last step, for each group: when it was complete, and how long it was on the wire."""
    meter = engine.session.meter
    assert meter.last_trace is not None
    start_s = min(meter.last_ready_s.values())
    ready_s = [max(meter.last_ready_s[tensor.fqn] for tensor in group.tensors) - start_s for group in engine.groups]
    wire_s, free_s = [0.0] * len(ready_s), 0.0
    for span in sorted((s for s in meter.last_trace.spans if s.activity == "wire"), key=lambda s: s.end_s):
        if (
            span.group >= 0
        ):  # messages queue behind each other: a message's own time begins when the one before has ended
            wire_s[span.group] += span.end_s - max(span.start_s, free_s)
        free_s = span.end_s
    return list(zip(ready_s, wire_s, strict=True))


def work(settings: Settings, out: Path) -> None:
    """One rank: everybody takes turns; rank 0 writes the times."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S))
    corpus = load_corpus()
    ways = (BARRIER, AS_READY, AS_NEEDED)
    contestants = [Contestant(spec, how, settings, corpus) for spec in settings.compress for how in ways]
    for contestant in contestants:
        contestant.warm_up()
    times_s: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    for _ in range(settings.rounds):
        for contestant in contestants:
            times_s[contestant.name].append(contestant.run(settings.steps))
    for spec in settings.compress:
        digests = {one.name: one.digest() for one in contestants if one.name.startswith(f"{spec} | ")}
        assert len(set(digests.values())) == 1, f"the contestants did not train the same: {digests}"
    if dist.get_rank() == 0:
        out.write_text(json.dumps(times_s), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def measure(settings: Settings, rate: str, hosts: int, say: Callable[[str], None]) -> dict[str, list[float]]:
    """Step times of every contestant at this rate, one per turn."""
    found: dict[str, list[float]] = run_workers("benchmarks.step.priority", settings, rate, hosts, say)
    return found


def main() -> None:
    """Print the table, a row for each rate and compressor."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step.priority", description=__doc__)
    parser.add_argument("--rates", default="200mbit", help="link rates, separated by commas")
    parser.add_argument("--compress", nargs="+", default=["dense", "int4", "topk(density=0.01)"])
    parser.add_argument("--fuse", default="auto", help="as in attach")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--batch", type=int, default=7, help="windows per host and step")
    parser.add_argument("--rounds", type=int, default=5, help="turns of every contestant")
    parser.add_argument("--steps", type=int, default=6, help="steps per turn")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(Settings(**json.loads(arguments.worker[0])), Path(arguments.worker[1]))
        return
    chosen = {name: getattr(arguments, name) for name in ("compress", "fuse", "batch", "rounds", "steps")}
    console = Console(stderr=True)
    print(
        "| rate | compressor | barrier | no barrier, as ready | no barrier, as needed | gain of the order |\n"
        + "|---" * 6
    )
    for rate in arguments.rates.split(","):
        with console.status(f"training at {rate}"):
            times_s = measure(Settings(**chosen), rate, arguments.hosts, console.log)
        for spec in arguments.compress:
            print(row(rate, spec, [times_s[f"{spec} | {how}"] for how in (BARRIER, AS_READY, AS_NEEDED)]), flush=True)


def row(rate: str, spec: str, times_s: list[list[float]]) -> str:
    """One line of the table: medians with the fastest and slowest turn, and the median of the ratio turn by turn."""
    cells = [f"{statistics.median(one):.3f} s ({min(one):.2f}-{max(one):.2f})" for one in times_s]
    gains = [1 - needed / ready for ready, needed in zip(times_s[1], times_s[2], strict=True)]
    return f"| {rate} | {spec} | {' | '.join(cells)} | {statistics.median(gains):+.1%} |"


if __name__ == "__main__":
    main()
