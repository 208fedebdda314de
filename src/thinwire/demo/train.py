"""The demo's worker: ``python -m thinwire.demo.train SETTINGS.json ...``, once per host, rendezvous from the environment.

Contestants take turns, from one evaluation to the next. Each has a file of settings, beside which ``rank<N>.jsonl`` is
written; rank 0 repeats all events on standard output for a watching program.
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from datetime import datetime, timedelta, timezone
from pathlib import Path

import torch
import torch.distributed as dist

from thinwire.demo.contender import Contender, make_contender
from thinwire.demo.data import Corpus, batch_starts, evaluation_starts, load_corpus, windows_at
from thinwire.demo.model import build_model
from thinwire.demo.settings import Contestant, Workload
from thinwire.demo.turns import order_of_turn
from thinwire.observe.events import EventWriter
from thinwire.observe.recorder import plan_event

MIN_TIMEOUT_S = 60.0
EVALUATION_BATCH = 8


def collective_timeout_s(contestant: Contestant) -> float:
    """How long one collective may take: plenty for all gradients on this link, so that only a hang is cut."""
    model = build_model(contestant.workload.model, contestant.workload.seq, contestant.workload.seed)
    gradient_bits = 32 * sum(parameter.numel() for parameter in model.parameters())
    return MIN_TIMEOUT_S + 10 * gradient_bits / (contestant.bits_per_s or 1e9)


def learning_rate_at(step: int, workload: Workload) -> float:
    """Linear warm-up, then constant: the loss at any step does not depend on how many steps were asked for."""
    return workload.learning_rate * min(1.0, (step + 1) / workload.warmup_steps)


def train_step(contender: Contender, corpus: Corpus, workload: Workload, step: int) -> tuple[float, float]:
    """Run one step; return its loss on this rank and its seconds."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    starts = batch_starts(len(corpus.train), workload.seq, step, rank, world_size, workload.batch, workload.seed)
    inputs, targets = windows_at(corpus.train, starts, workload.seq)
    for group in contender.optimizer.param_groups:
        group["lr"] = learning_rate_at(step, workload)
    began_s = time.perf_counter()
    contender.optimizer.zero_grad()
    loss = contender.module(inputs, targets)
    loss.backward()
    contender.optimizer.step()
    return float(loss.detach()), time.perf_counter() - began_s


@torch.no_grad()
def evaluate(contender: Contender, corpus: Corpus, workload: Workload) -> float:
    """Return the mean loss over the fixed evaluation windows; every rank takes its share of them."""
    starts = evaluation_starts(
        len(corpus.evaluation), workload.seq, workload.evaluation_windows, dist.get_rank(), dist.get_world_size()
    )
    total_and_count = torch.zeros(2, dtype=torch.float64)
    for chunk in torch.split(starts, EVALUATION_BATCH):
        loss = contender.model(*windows_at(corpus.evaluation, chunk, workload.seq))
        total_and_count += torch.tensor([float(loss) * len(chunk), len(chunk)], dtype=torch.float64)
    dist.all_reduce(total_and_count)
    return float(total_and_count[0] / total_and_count[1])


def write_header(events: EventWriter, contestant: Contestant, contender: Contender) -> None:
    """Describe the run, so that its events can be understood without anything else."""
    events.write(
        "run",
        label=contestant.label,
        mode=contestant.mode,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        started_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        parameters=sum(parameter.numel() for parameter in contender.model.parameters()),
        sent_bytes_from=contender.sent_bytes_from,
        settings=asdict(contestant),
        versions={"python": platform.python_version(), "torch": torch.__version__},
        explanation=contender.explain(),
    )


def train(contestant: Contestant, contender: Contender, corpus: Corpus, events: EventWriter) -> Iterator[None]:
    """Run all steps and evaluations of one contestant and write their events; others may have a turn at every yield."""
    workload = contestant.workload
    elapsed_s, plan = 0.0, None
    events.write("turn", contestant=contestant.name)
    for step in range(workload.steps):
        before = contender.counters()
        loss, step_s = train_step(contender, corpus, workload, step)
        elapsed_s += step_s
        spent = {name: value - before[name] for name, value in contender.counters().items()}
        events.write("step", step=step, loss=loss, step_s=step_s, elapsed_s=elapsed_s, **spent)
        if contender.plan is not plan:
            plan = contender.plan
            assert plan is not None
            events.write("plan", **plan_event(step + 1, plan))
        if workload.evaluates_after(step):
            events.write("eval", step=step, loss=evaluate(contender, corpus, workload), elapsed_s=elapsed_s)
            if step + 1 < workload.steps:
                yield
                events.write("turn", contestant=contestant.name)
    if contender.wire is not None:
        events.write("trace", **contender.wire.trace().to_event())
    events.write("end", steps=workload.steps, elapsed_s=elapsed_s)


def take_turns(runs: Sequence[Iterator[None]]) -> None:
    """All runs to their ends; all ranks begin every turn together."""
    over: set[int] = set()
    turn = 0
    while len(over) < len(runs):
        for index in order_of_turn(turn, len(runs)):
            if index in over:
                continue
            dist.barrier()
            if next(runs[index], over) is over:
                over.add(index)
        turn += 1


def run_worker(settings: Sequence[Path]) -> None:
    """Join the process group that the environment describes and train as each of ``settings`` says."""
    torch.set_num_threads(1)  # one thread per host: the hosts share this machine's cores
    contestants = [Contestant.load(path) for path in settings]
    corpus = load_corpus()
    timeout_s = max(collective_timeout_s(one) for one in contestants)
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    rank = dist.get_rank()
    try:
        with ExitStack() as stack:
            runs = []
            for path, contestant in zip(settings, contestants, strict=True):
                echo = sys.stdout if rank == 0 else None
                events = stack.enter_context(EventWriter(path.parent / f"rank{rank}.jsonl", echo=echo))
                contender = stack.enter_context(make_contender(contestant, timeout_s))
                write_header(events, contestant, contender)
                runs.append(train(contestant, contender, corpus, events))
            take_turns(runs)
            dist.barrier()  # nobody leaves while another still needs it
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    run_worker([Path(one) for one in sys.argv[1:]])
