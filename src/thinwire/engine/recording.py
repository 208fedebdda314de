"""One event per step, for ``thinwire report``: bytes sent and where the time went."""

from __future__ import annotations

import platform
import time
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from thinwire.comm.trace import Trace
from thinwire.engine.stats import WireStats
from thinwire.observe.events import EventWriter
from thinwire.plan.ledger import ErrorLedger
from thinwire.plan.quality import MODEL, Measured
from thinwire.plan.result import Plan

_TRACE_EVERY = 10  # steps
_PER_STEP = ("wire_bytes", "wait_s", "encode_s", "wire_s", "decode_s")


class Recorder:
    """Writes ``rank<N>.jsonl`` into ``directory``; see ``thinwire.observe.events`` for the schema."""

    def __init__(self, directory: Path, *, rank: int, world_size: int, compress: str, explanation: str) -> None:
        self._events = EventWriter(directory / f"rank{rank}.jsonl")
        self._before = WireStats()
        self._began_s = self._last_s = time.perf_counter()
        self._events.write(
            "run",
            label=f"thinwire {compress}",
            mode="thinwire",
            rank=rank,
            world_size=world_size,
            settings={"compress": compress},
            versions={"python": platform.python_version(), "torch": torch.__version__},
            started_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            sent_bytes_from="thinwire's own count",
            explanation=explanation,
        )

    def step(self, step: int, stats: WireStats, trace: Trace, *, skipped: bool) -> None:
        """Write what the step that just ended has added to ``stats``; now and then also its trace."""
        now_s = time.perf_counter()
        before, after = asdict(self._before), asdict(stats)
        spent = {name: after[name] - before[name] for name in _PER_STEP}
        self._events.write(
            "step",
            step=step,
            step_s=now_s - self._last_s,
            elapsed_s=now_s - self._began_s,
            sent_bytes=spent["wire_bytes"],
            skipped=skipped,
            **spent,
        )
        if step % _TRACE_EVERY == _TRACE_EVERY - 1:
            self._events.write("trace", **trace.to_event())
        self._before, self._last_s = stats, now_s

    def plan(self, step: int, plan: Plan) -> None:
        """Write the plan that is in force from ``step`` on."""
        self._events.write("plan", **plan_event(step, plan))

    def ledger(self, step: int, ledger: ErrorLedger, found: Measured | None) -> None:
        """Write what was booked after ``step``."""
        worst = ledger.worst("compression")
        self._events.write(
            "ledger",
            step=step,
            noise=ledger.relative(MODEL, "noise"),
            compression=ledger.relative(MODEL, "compression"),
            worst_unit=None if worst is None else worst[0],
            worst_share=None if worst is None else worst[1],
            error=None if found is None else found.error,
            noise_share=None if found is None else found.noise_share,
        )

    def close(self, stats: WireStats) -> None:
        """Write the end of the run and close the file."""
        self._events.write("end", steps=stats.steps, elapsed_s=time.perf_counter() - self._began_s)
        self._events.close()


def plan_event(step: int, plan: Plan) -> dict[str, Any]:
    """The fields of a ``plan`` event."""
    names = ("compress", "fuse", "step_s", "dense_s", "floor_s")
    return {"step": step, **{name: getattr(plan, name) for name in names}, "explanation": plan.explain()}
