"""The worker of ``benchmarks.step`` and ``benchmarks.contest``: all contestants in one job, a few steps of each in turn.

Step times on a shared machine drift; contestants that take turns drift together, so their ratios hold.
``python -m benchmarks.step.interleaved SETTINGS.json`` runs once per host, rendezvous from the environment.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from thinwire.autopilot.controller import PLANNING_STEPS as AUTO_STEPS
from thinwire.demo.contender import Contender, make_contender
from thinwire.demo.data import load_corpus
from thinwire.demo.ddp_hooks import POWERSGD_DENSE_STEPS
from thinwire.demo.settings import Contestant, Workload
from thinwire.demo.train import collective_timeout_s, train_step
from thinwire.demo.turns import order_of_turn
from thinwire.fusion import parse_fusion
from thinwire.observe.events import EventWriter

WARMUP_STEPS = 2  # connections, allocations and DDP's new buckets
PLANNING_STEPS = 13  # until a planner has measured, planned and changed its groups
CLOSE = 1.3  # times a rival's step

# Called outside the clock, with the number of the round (0: the warm-up), whose turn it was, and where events go.
AfterTurn = Callable[[int, Contestant, Contender, EventWriter], None]


def nothing(turn: int, contestant: Contestant, contender: Contender, events: EventWriter) -> None:
    """Nothing is to be done after a turn."""


@dataclass(frozen=True, kw_only=True)
class Turns:
    """Who takes part, and how long a turn is.

    Args:
        rounds: in which everybody takes a turn.
        close_rounds: further ones, only of those who took at most ``CLOSE`` times as long as ``rival`` until then. Small
            differences need many turns to be seen; large ones do not, and their turns are the long ones.
        rival: the name of a contestant.
    """

    contestants: tuple[Contestant, ...]
    rounds: int = 4
    steps_per_turn: int = 4
    close_rounds: int = 0
    rival: str = ""

    def save(self, path: Path) -> None:
        """Write the settings as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Turns:
        """Read what :meth:`save` wrote."""
        fields = json.loads(path.read_text(encoding="utf-8"))
        contestants = (Contestant(**{**c, "workload": Workload(**c["workload"])}) for c in fields["contestants"])
        return cls(**{**fields, "contestants": tuple(contestants)})


def take_turns(turns: Turns, contenders: list[Contender], events: EventWriter, after_turn: AfterTurn = nothing) -> None:
    """All rounds; every step leaves an event that says whose it was, every turn one with its mean step time.

    A turn is timed from barrier to barrier: the floor's ranks wait for nobody, and where they share cores some are done
    early and others late; only the whole turn says how long its steps took.
    """
    corpus, steps = load_corpus(), [0] * len(contenders)
    taken_s: dict[str, list[float]] = {one.name: [] for one in turns.contestants}
    playing = list(taken_s)
    for turn in range(1 + turns.rounds + turns.close_rounds):
        if turn == 1 + turns.rounds:
            playing = _as_rank_0_sees_it(close_ones(taken_s, turns.rival))
        for index in order_of_turn(turn, len(contenders)):
            if turns.contestants[index].name not in playing:
                continue
            contestant, contender = turns.contestants[index], contenders[index]
            length = warmup_steps(contestant) if turn == 0 else turns.steps_per_turn
            named = {"contestant": contestant.name, "warmup": turn == 0}
            dist.barrier()
            began_s = time.perf_counter()
            for _ in range(length):
                before = contender.counters()
                loss, step_s = train_step(contender, corpus, contestant.workload, steps[index])
                spent = {name: value - before[name] for name, value in contender.counters().items()}
                events.write("step", step=steps[index], loss=loss, step_s=step_s, **named, **spent)
                steps[index] += 1
            dist.barrier()
            step_s = (time.perf_counter() - began_s) / length
            events.write("turn", step_s=step_s, **named)
            if turn > 0:
                taken_s[contestant.name].append(step_s)
            after_turn(turn, contestant, contender, events)


def close_ones(taken_s: Mapping[str, Sequence[float]], rival: str) -> list[str]:
    """Those who took at most ``CLOSE`` times as long as the rival, given their turns; the rival among them."""
    steps_s = {name: median(turns_s) for name, turns_s in taken_s.items()}
    return [name for name, step_s in steps_s.items() if step_s <= CLOSE * steps_s[rival]]


def _as_rank_0_sees_it(mine: list[str]) -> list[str]:
    verdict = [mine]
    dist.broadcast_object_list(verdict)
    return verdict[0]


def warmup_steps(contestant: Contestant) -> int:
    """Steps before anything is timed."""
    if contestant.mode != "thinwire":
        return WARMUP_STEPS + (POWERSGD_DENSE_STEPS if contestant.mode == "ddp_powersgd" else 0)
    chooses = AUTO_STEPS if contestant.compress == "auto" else 0
    return chooses + (PLANNING_STEPS if parse_fusion(contestant.fuse).needs_profile else WARMUP_STEPS)


def run_worker(settings: Path, after_turn: AfterTurn = nothing) -> None:
    """Join the process group that the environment describes and run what ``settings`` says."""
    torch.set_num_threads(1)
    turns = Turns.load(settings)
    timeout_s = collective_timeout_s(turns.contestants[0])
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    rank = dist.get_rank()
    try:
        with (
            EventWriter(settings.parent / f"rank{rank}.jsonl", echo=sys.stdout if rank == 0 else None) as events,
            ExitStack() as stack,
        ):
            contenders = [
                stack.enter_context(make_contender(contestant, timeout_s)) for contestant in turns.contestants
            ]
            take_turns(turns, contenders, events, after_turn)
            dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    run_worker(Path(sys.argv[1]))
