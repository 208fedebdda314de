"""What one step did when: spans of the training thread and of the communication thread."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

Activity = Literal["backward", "encode", "wire", "decode", "wait"]
# Rows of the timeline, top to bottom.
TRACKS: dict[Activity, str] = {
    "backward": "training",
    "wait": "training",
    "encode": "communication",
    "decode": "communication",
    "wire": "network",
}


@dataclass(frozen=True)
class Span:
    """One activity from ``start_s`` to ``end_s`` (of ``time.perf_counter``); group -1 belongs to no fusion group."""

    activity: Activity
    start_s: float
    end_s: float
    group: int = -1
    sent_bytes: int = 0

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Trace:
    """The spans of one step on one rank."""

    step: int
    rank: int
    spans: tuple[Span, ...]

    def seconds(self, activity: Activity) -> float:
        """Time spent on an activity; overlapping spans (two messages on the wire) count once."""
        return _covered([(span.start_s, span.end_s) for span in self.spans if span.activity == activity])

    def to_event(self) -> dict[str, Any]:
        """As fields of a ``trace`` event; times count from the first span."""
        origin_s = min((span.start_s for span in self.spans), default=0.0)
        moved = ({**asdict(s), "start_s": s.start_s - origin_s, "end_s": s.end_s - origin_s} for s in self.spans)
        return {"step": self.step, "rank": self.rank, "spans": list(moved)}


def _covered(intervals: list[tuple[float, float]]) -> float:
    total_s, until_s = 0.0, float("-inf")
    for start_s, end_s in sorted(intervals):
        total_s += max(0.0, end_s - max(start_s, until_s))
        until_s = max(until_s, end_s)
    return total_s


def write_chrome_trace(traces: Sequence[Trace], path: Path) -> None:
    """Write traces in the JSON format that Perfetto and chrome://tracing open; one process per rank."""
    origin_s = min((span.start_s for trace in traces for span in trace.spans), default=0.0)
    events = [_chrome_event(trace.rank, span, origin_s) for trace in traces for span in trace.spans]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


def _chrome_event(rank: int, span: Span, origin_s: float) -> dict[str, Any]:
    label = span.activity if span.group < 0 else f"{span.activity} {span.group}"
    return {
        "name": label,
        "cat": span.activity,
        "ph": "X",
        "ts": (span.start_s - origin_s) * 1e6,
        "dur": span.seconds * 1e6,
        "pid": rank,
        "tid": TRACKS[span.activity],
        "args": {"group": span.group, "sent_bytes": span.sent_bytes},
    }
