"""Measures the first steps of a training for ``Checkpointer.auto``, then chooses once, the same on all ranks."""

from __future__ import annotations

import time
import zlib
from statistics import median
from typing import Any

from thinwire.checkpoint.interval import Intervals, Measured, choose
from thinwire.checkpoint.ranks import Ranks
from thinwire.checkpoint.sealed import CHUNK_BYTES

WARMUP = 10  # steps that are not timed: allocations, compilation, a planner's own measurements
TIMED = 10  # steps without a checkpoint
_MOST = 200  # steps to wait for the trial checkpoint


class Tuner:
    """Step by step: warm up, time plain steps, save one trial checkpoint, time the steps beside it, choose."""

    def __init__(self, *, max_overhead: float, mtbf_s: float, log: bool) -> None:
        self._max_overhead, self._mtbf_s, self._log = max_overhead, mtbf_s, log
        self._first: int | None = None
        self._last_s = 0.0
        self._plain: list[float] = []
        self._beside: list[float] = []
        self._syncs: list[float] = []
        self._optimizer: list[float] = []
        self._began_s = 0.0
        self._trial: int | None = None
        self._written: dict[str, Any] | None = None

    def wants_full(self, step: int) -> bool:
        """Whether this is the step of the trial checkpoint."""
        self._first = step if self._first is None else self._first
        if self._trial is None and step - self._first >= WARMUP + TIMED:
            self._trial = step
            return True
        return False

    def heard(self, answer: dict[str, Any]) -> None:
        """What the writer says of its work."""
        if answer["kind"] == "full" and answer["step"] == self._trial:
            self._written = answer
        elif answer["kind"] == "log" and "seconds" in answer:
            self._syncs.append(answer["seconds"])

    def optimizer_begins(self) -> None:
        """Its steps are what replay does again."""
        self._began_s = time.perf_counter()

    def optimizer_ends(self) -> None:
        """See above."""
        self._optimizer.append(time.perf_counter() - self._began_s)

    def step(self, step: int, ranks: Ranks) -> Intervals | None:
        """Called after every step; the choice, once."""
        now_s = time.perf_counter()
        took_s, self._last_s = now_s - self._last_s, now_s
        if self._first is None or step - self._first <= WARMUP:
            return None
        if self._trial is None:
            self._plain.append(took_s)
            return None
        # The trial's own call counts as its cost: what it keeps the training thread from doing.
        self._beside.append(took_s)
        waited = step - self._trial
        # Looked at on fixed steps only: all ranks must come to this point together.
        if waited == 0 or waited % 10 or not (ranks.all_true(self._written is not None) or waited >= _MOST):
            return None
        return self._choose(ranks)

    def _choose(self, ranks: Ranks) -> Intervals:
        plain_s = median(self._plain)
        written = self._written or {}
        added_s = max(sum(took - plain_s for took in self._beside), 0.01 * plain_s)
        numbers = ranks.largest(
            plain_s, added_s, written.get("seconds", _MOST * plain_s), written.get("bytes", 0),
            median(self._syncs) if self._syncs else 0.0, median(self._optimizer) if self._optimizer else plain_s, _chunk_s(),
        )  # fmt: skip
        step_s, full_s, write_s, total_bytes, sync_s, replay_step_s, chunk_s = numbers
        measured = Measured(step_s, full_s, write_s, int(total_bytes), sync_s, replay_step_s, chunk_s)
        return choose(measured, max_overhead=self._max_overhead, mtbf_s=self._mtbf_s, log=self._log)


def _chunk_s() -> float:
    chunk = bytes(CHUNK_BYTES)
    started_s = time.perf_counter()
    zlib.crc32(chunk)
    return time.perf_counter() - started_s
