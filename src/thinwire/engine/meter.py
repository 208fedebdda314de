"""What a wire costs: totals since attach, and the trace of the last step."""

from __future__ import annotations

import time

from thinwire.comm import Counting, Scheduler
from thinwire.comm.trace import Span, Trace
from thinwire.engine.recording import Recorder
from thinwire.engine.stats import WireStats


class Meter:
    """Collects what the training thread reports; bytes and the communication thread's seconds are read where they arise."""

    def __init__(self, scheduler: Scheduler, counting: Counting) -> None:
        self._scheduler, self._counting = scheduler, counting
        self._totals = {"steps": 0, "skipped_steps": 0, "dense_bytes": 0}
        self._wait_s = 0.0
        self._spans: list[Span] = []
        self.recorder: Recorder | None = None
        self._ready_s: dict[str, float] = {}
        self._first_ready_cpu_s = 0.0
        self.backward_core_share = 1.0  # of the last step: processor time of backward per second of it
        self.last_ready_s: dict[str, float] = {}  # of the last step: when each gradient was ready
        self.last_trace: Trace | None = None

    def gradient_ready(self, name: str) -> None:
        """Called when a gradient is complete; the first one begins the backward span."""
        if not self._ready_s:
            self._first_ready_cpu_s = time.thread_time()
        self._ready_s[name] = time.perf_counter()

    def backward_ended(self) -> None:
        """Called after the last gradient, before waiting for communication."""
        now_s = time.perf_counter()
        began_s = min(self._ready_s.values(), default=now_s)
        self._spans.append(Span("backward", began_s, now_s))
        self.backward_core_share = (time.thread_time() - self._first_ready_cpu_s) / max(now_s - began_s, 1e-9)

    def waited(self, since_s: float) -> None:
        """The training thread stood still for communication from ``since_s`` until now."""
        now_s = time.perf_counter()
        self._wait_s += now_s - since_s
        self._spans.append(Span("wait", since_s, now_s))

    def exchanged(self, numel: int) -> None:
        """A group of this many elements was submitted."""
        world_size = self._counting.world_size
        self._totals["dense_bytes"] += 2 * (world_size - 1) * 4 * numel // world_size

    def step_ended(self, step: int, *, skipped: bool) -> None:
        """Close the books of a step: its trace replaces the last one, its event is written."""
        self._totals["steps"] += 1
        self._totals["skipped_steps"] += skipped
        spans = sorted([*self._spans, *self._scheduler.take_spans()], key=lambda span: span.start_s)
        self.last_trace = Trace(step, self._counting.rank, tuple(spans))
        self.last_ready_s = self._ready_s
        self._spans, self._ready_s = [], {}
        if self.recorder is not None:
            self.recorder.step(step, self.stats(), self.last_trace, skipped=skipped)

    def stats(self) -> WireStats:
        """The totals as one value."""
        spent = self._scheduler.seconds
        return WireStats(
            **self._totals,
            wire_bytes=self._counting.sent_bytes,
            wait_s=self._wait_s,
            encode_s=spent.encode_s,
            wire_s=spent.wire_s,
            decode_s=spent.decode_s,
        )

    def close(self) -> None:
        """End the record."""
        if self.recorder is not None:
            self.recorder.close(self.stats())
