"""What an attached wire has done so far: totals since ``attach``, and the flat dictionary that trackers take."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, fields

from thinwire.observe.report import StepReport

_WINDOW_STEPS = 20


@dataclass(frozen=True)
class WireStats:
    """Totals since ``attach``.

    Args:
        steps: synchronised backward passes, skipped ones included.
        skipped_steps: those in which some rank had a NaN or Inf gradient.
        wire_bytes: sent by this rank, headers included.
        dense_bytes: what a ring all-reduce of fp32 gradients would have sent.
        wait_s: the training thread waited for communication.
        encode_s, wire_s, decode_s: the link's threads encoded, waited for the network, decoded; on gloo side by side.
    """

    steps: int = 0
    skipped_steps: int = 0
    wire_bytes: int = 0
    dense_bytes: int = 0
    wait_s: float = 0.0
    encode_s: float = 0.0
    wire_s: float = 0.0
    decode_s: float = 0.0

    def __add__(self, other: WireStats) -> WireStats:
        return WireStats(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(WireStats)})

    @property
    def reduction_factor(self) -> float:
        """Dense wire bytes per byte really sent."""
        return self.dense_bytes / self.wire_bytes if self.wire_bytes else 1.0


class Totals:
    """Adds up reports, and keeps the last ones for rates."""

    def __init__(self) -> None:
        self._stats = WireStats()
        self._recent: deque[StepReport] = deque(maxlen=_WINDOW_STEPS + 1)

    def add(self, report: StepReport) -> None:
        """One more transaction."""
        before = self._stats
        own = {"steps": 1, "skipped_steps": int(not report.committed)}
        added = {f.name: own.get(f.name, getattr(report, f.name, 0)) for f in fields(WireStats)}
        self._stats = WireStats(**{name: getattr(before, name) + value for name, value in added.items()})
        self._recent.append(report)

    def stats(self, other_bytes: int = 0) -> WireStats:
        """The totals.

        Args:
            other_bytes: sent outside of transactions: barriers, objects, measurements.
        """
        values = {f.name: getattr(self._stats, f.name) for f in fields(WireStats)}
        return WireStats(**{**values, "wire_bytes": values["wire_bytes"] + other_bytes})

    def metrics(self) -> dict[str, float]:
        """Rates and seconds per step over the last steps; empty before the second step has ended."""
        if len(self._recent) < 2:
            return {}
        first, *steps = self._recent
        elapsed_s = max(steps[-1].ended_s - first.ended_s, 1e-9)
        count = len(steps)
        sent_bytes = sum(report.wire_bytes for report in steps)
        wait_s = sum(report.wait_s for report in steps) / count
        busy_s = sum(report.trace.seconds("wire") for report in steps) / count
        return {
            "thinwire/step_s": elapsed_s / count,
            "thinwire/exposed_s": wait_s,
            "thinwire/hidden_s": max(0.0, busy_s - wait_s),
            "thinwire/encode_s": sum(report.encode_s for report in steps) / count,
            "thinwire/decode_s": sum(report.decode_s for report in steps) / count,
            "thinwire/wire_bytes": sent_bytes / count,
            "thinwire/tx_mbit_s": 8e-6 * sent_bytes / elapsed_s,
            "thinwire/reduction_factor": sum(r.dense_bytes for r in steps) / max(sent_bytes, 1),
            "thinwire/skipped": float(self._stats.skipped_steps),
        }
