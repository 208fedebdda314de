"""How long until dense DDP's final evaluation loss? ``auto`` against stock DDP and torch's fp16 and PowerSGD hooks.

``python -m benchmarks.planner.time_to_loss --out runs/time-to-loss`` trains the demo's GPT on the lab (4 hosts at 200 Mbit/s,
300 steps); contestants take turns of 20 steps in one job. The others train a tenth longer than dense, since they may reach
its loss in later steps; the learning rate does not depend on how long a run is. Evaluations are outside the clock, planning
is inside. A contestant that is done is kept: the same command goes on with the rest.
"""

from __future__ import annotations

import argparse
import math
import shutil
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.contest.summary import table
from rich.console import Console

from thinwire.demo.contest import Network, run_contest
from thinwire.demo.live import LiveView
from thinwire.demo.settings import Contestant, Mode, Workload
from thinwire.lab import parse_rate
from thinwire.observe.events import EventError
from thinwire.observe.html.page import write_html
from thinwire.observe.runs import Run, load_contests
from thinwire.observe.summary import LOSS_TOLERANCE, time_to_loss

DENSE = "1-ddp"
EVALUATED_EVERY = 20  # steps
LONGER = 1.1  # than dense, in steps


@dataclass(frozen=True)
class Outcome:
    """One run against dense's final loss.

    Args:
        reached_s: seconds of training until dense's final loss; ``nearly_s`` until 1 % above it. None: never.
    """

    label: str
    steps: int
    median_step_s: float
    final_loss: float
    reached_s: float | None
    nearly_s: float | None


def outcomes(runs: Sequence[Run], target: float) -> list[Outcome]:
    """What every run took to come down to ``target``."""
    return [
        Outcome(
            label=run.label,
            steps=run.evaluations()[-1].step + 1,
            median_step_s=statistics.median(run.step_seconds()),
            final_loss=run.evaluations()[-1].loss,
            reached_s=time_to_loss(run.evaluations(), target),
            nearly_s=time_to_loss(run.evaluations(), target * (1 + LOSS_TOLERANCE)),
        )
        for run in runs
    ]


def markdown(found: Sequence[Outcome], dense_label: str) -> str:
    """A table; times also as a share of dense's."""
    dense = next(one for one in found if one.label == dense_label)
    head = ["contestant", "steps", "step, median", "final loss", "to dense's final loss", "to 1 % above it"]
    return table(
        head,
        [
            [
                one.label,
                str(one.steps),
                f"{one.median_step_s:.3f} s",
                f"{one.final_loss:.4f}",
                _share(one.reached_s, dense.reached_s),
                _share(one.nearly_s, dense.nearly_s),
            ]
            for one in found
        ],
    )


def _share(seconds: float | None, of_dense_s: float | None) -> str:
    if seconds is None or of_dense_s is None:
        return "not reached"
    return f"{seconds:.0f} s ({seconds / of_dense_s:.2f})"


def line_up(model: str, steps: int, network: Network, ranks: Sequence[int]) -> list[Contestant]:
    """Dense first: its loss is what the others are measured by."""

    def contestant(name: str, label: str, mode: Mode, rank: int = 4) -> Contestant:
        own_steps = steps if mode == "ddp" else math.ceil(LONGER * steps / EVALUATED_EVERY) * EVALUATED_EVERY
        workload = Workload(model=model, steps=own_steps, evaluations=max(1, own_steps // EVALUATED_EVERY))
        return Contestant(
            name=name,
            label=label,
            mode=mode,
            workload=workload,
            powersgd_rank=rank,
            network=network.describe(),
            bits_per_s=parse_rate(network.rate),
        )

    hooks = [
        contestant(f"3-powersgd-{rank}", f"DDP PowerSGD hook, rank {rank}", "ddp_powersgd", rank) for rank in ranks
    ]
    return [
        contestant(DENSE, "stock DDP", "ddp"),
        contestant("2-auto", "thinwire auto", "thinwire"),
        *hooks,
        contestant("4-fp16", "DDP fp16 hook", "ddp_fp16"),
    ]


def finished_runs(directory: Path) -> dict[str, Run]:
    """By the contestant's name; in the order in which they ran."""
    try:
        runs = [run for contest in load_contests([directory]) for run in contest.runs]
    except (EventError, OSError):
        return {}
    return {run.directory.name: run for run in runs if run.finished}


def _run(contestants: Sequence[Contestant], network: Network, out: Path, console: Console) -> None:
    done = finished_runs(out)
    missing = [contestant for contestant in contestants if contestant.name not in done]
    for contestant in missing:
        shutil.rmtree(out / contestant.name, ignore_errors=True)  # what a stopped run has left
    if missing:
        with LiveView(console) as view:
            run_contest(missing, network, out, view)


def main() -> None:
    """Run what is missing, and write ``time-to-loss.md`` and ``report.html``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/time-to-loss"))
    parser.add_argument("--model", default="small")
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300, help="of dense; the others take a tenth more")
    parser.add_argument("--powersgd-ranks", type=int, nargs="+", default=[16])
    parser.add_argument("--only", nargs="+", help=f"contestants by name, such as {DENSE} 2-auto (default: all)")
    args = parser.parse_args()
    console = Console()
    network = Network(hosts=args.hosts, rate=args.rate)
    contestants = line_up(args.model, args.steps, network, args.powersgd_ranks)
    names = [contestant.name for contestant in contestants]
    if unknown := set(args.only or ()) - set(names):
        parser.error(f"no contestant is called {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    _run([one for one in contestants if not args.only or one.name in args.only], network, args.out, console)
    runs = finished_runs(args.out)
    target = runs[DENSE].evaluations()[-1].loss
    text = markdown(outcomes(list(runs.values()), target), runs[DENSE].label)
    (args.out / "time-to-loss.md").write_text(text + "\n", encoding="utf-8")
    write_html(load_contests([args.out]), args.out / "report.html")
    console.print(text, markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
