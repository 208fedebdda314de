"""One host of a cell: ``python -m benchmarks.contest.worker SETTINGS.json``, rendezvous from the environment.

As the worker of ``benchmarks.step``; besides, it tells what ``auto`` plans and what the planner predicts for the others.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from benchmarks.contest.predict import predictions_s, with_codecs
from benchmarks.step.interleaved import Turns, run_worker

from thinwire.demo.contender import Contender
from thinwire.demo.settings import Contestant
from thinwire.observe.events import EventWriter
from thinwire.plan import Plan


def plan_fields(plan: Plan) -> dict[str, Any]:
    """What a cell keeps of a plan."""
    values = plan.to_json()
    return {key: values[key] for key in ("compress", "fuse", "step_s", "dense_s", "floor_s", "candidates", "facts")}


class PlanWatcher:
    """Follows ``auto``: writes every plan, and after the first one what it means for all contestants."""

    def __init__(self, contestants: Sequence[Contestant]) -> None:
        self._contestants = contestants
        self._plan: Plan | None = None

    def __call__(self, turn: int, contestant: Contestant, contender: Contender, events: EventWriter) -> None:
        """Look after a turn whether there is a new plan."""
        plan, pricer = contender.plan, contender.pricer
        if contestant.compress != "auto" or plan is None or plan is self._plan or dist.get_rank() != 0:
            return
        events.write("plan", round=turn, **plan_fields(plan))
        if self._plan is None and pricer is not None:
            specs = [one.compress for one in self._contestants if one.mode == "thinwire" and one.compress != "auto"]
            events.write("prediction", step_s=predictions_s(with_codecs(pricer, specs), plan, self._contestants))
        self._plan = plan


if __name__ == "__main__":
    given = Path(sys.argv[1])
    run_worker(given, PlanWatcher(Turns.load(given).contestants))
