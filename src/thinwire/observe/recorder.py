"""One event per step, for ``thinwire report``: bytes sent and where the time went."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol

import torch

from thinwire.observe.events import EventWriter
from thinwire.observe.observer import Observer
from thinwire.observe.report import StepReport

_TRACE_EVERY = 10  # steps
_PER_STEP = ("wire_bytes", "wait_s", "encode_s", "wire_s", "decode_s")


class Planned(Protocol):
    """What a ``plan`` event tells of a plan."""

    @property
    def compress(self) -> str: ...

    @property
    def fuse(self) -> str: ...

    @property
    def step_s(self) -> float: ...

    @property
    def dense_s(self) -> float: ...

    @property
    def floor_s(self) -> float: ...

    def explain(self) -> str: ...


class Recorder(Observer):
    """Writes ``rank<N>.jsonl`` into ``directory``; see ``thinwire.observe.events`` for the schema."""

    def __init__(self, directory: Path, *, rank: int, world_size: int, compress: str, explanation: str) -> None:
        self._events = EventWriter(directory / f"rank{rank}.jsonl")
        self._steps = 0
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

    def on_step(self, report: StepReport) -> None:
        """Write what the step has cost; now and then also its trace."""
        now_s = time.perf_counter()
        self._steps += 1
        self._events.write(
            "step",
            step=report.index,
            step_s=now_s - self._last_s,
            elapsed_s=now_s - self._began_s,
            sent_bytes=report.wire_bytes,
            skipped=not report.committed,
            **{name: getattr(report, name) for name in _PER_STEP},
        )
        if report.index % _TRACE_EVERY == _TRACE_EVERY - 1:
            self._events.write("trace", **report.trace.to_event())
        self._last_s = now_s

    def on_plan(self, step: int, plan: Planned) -> None:
        """Write the plan that is in force from ``step`` on."""
        self._events.write("plan", **plan_event(step, plan))

    def on_event(self, name: str, fields: Mapping[str, Any]) -> None:
        """Write it as it is."""
        self._events.write(name, **fields)

    def close(self) -> None:
        """Write the end of the run and close the file."""
        self._events.write("end", steps=self._steps, elapsed_s=time.perf_counter() - self._began_s)
        self._events.close()


def plan_event(step: int, plan: Planned) -> dict[str, Any]:
    """The fields of a ``plan`` event."""
    names = ("compress", "fuse", "step_s", "dense_s", "floor_s")
    return {"step": step, **{name: getattr(plan, name) for name in names}, "explanation": plan.explain()}
