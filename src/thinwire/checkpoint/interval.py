"""How often, and in what pieces: the formulas, and the choice that ``Checkpointer.auto`` makes from what it measured."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, sqrt

from thinwire.checkpoint.sealed import CHUNK_BYTES

WRITE_STARTUP_S = 0.2e-3  # assumed: on the disks tried, writes of 8 to 128 MiB at a time took the same in total


def flush_bytes(total_bytes: float, startup_s: float, chunk_bytes: float, chunk_s: float) -> float:
    """B* = sqrt(C·T_s·c/T_c): chunks to hand to the disk together (AsymCheck, batched flushing).

    Fewer, larger writes save start-ups; smaller ones let writing begin while later chunks are still being prepared.

    Args:
        total_bytes: C.
        startup_s: T_s of one write.
        chunk_bytes, chunk_s: c, and T_c to prepare one chunk (compress, checksum).
    """
    return sqrt(total_bytes * startup_s * chunk_bytes / chunk_s)


def full_interval_steps(full_s: float, mtbf_s: float, step_s: float, replay_step_s: float) -> float:
    """f* = sqrt(2·C_f·M/(t·t_r)): steps between full checkpoints where a log is replayed after a failure.

    Without a log the step itself is repeated: t_r = t, which is Young's sqrt(2·C_f·M)/t.
    """
    return sqrt(2 * full_s * mtbf_s / (step_s * replay_step_s))


def log_batch_steps(sync_s: float, mtbf_s: float, step_s: float) -> float:
    """b* = sqrt(2·D·M)/t: log records to make durable together, at a fixed cost D each time."""
    return sqrt(2 * sync_s * mtbf_s) / step_s


@dataclass(frozen=True)
class Measured:
    """What the first steps have shown; the largest over the ranks.

    Args:
        step_s: a step without a checkpoint.
        full_s: what one full checkpoint adds to the time of the steps around it.
        write_s: until it was durable.
        total_bytes: of this rank's file.
        sync_s: to make a log record durable; 0 without a log.
        replay_step_s: an optimizer step, as replay does it.
        chunk_s: to make the checksum of ``CHUNK_BYTES``.
    """

    step_s: float
    full_s: float
    write_s: float
    total_bytes: int
    sync_s: float
    replay_step_s: float
    chunk_s: float


@dataclass(frozen=True)
class Intervals:
    """What to do, and why in words."""

    every: int
    log_batch: int
    flush_bytes: int
    why: str


def choose(measured: Measured, *, max_overhead: float, mtbf_s: float, log: bool) -> Intervals:
    """The interval that loses least in the long run, but never costs more than ``max_overhead`` of training time."""
    m = measured
    best = full_interval_steps(m.full_s, mtbf_s, m.step_s, m.replay_step_s if log else m.step_s)
    cheap = m.full_s / (max_overhead * m.step_s)
    done = m.write_s / m.step_s
    every = max(ceil(best), ceil(cheap), ceil(done), 1)
    # The log is written beside the training: only a sync that takes longer than a step needs company.
    batch = max(1, min(ceil(m.sync_s / m.step_s), ceil(log_batch_steps(m.sync_s, mtbf_s, m.step_s)))) if log else 1
    size = flush_bytes(max(m.total_bytes, 1), WRITE_STARTUP_S, CHUNK_BYTES, m.chunk_s)
    flush = max(CHUNK_BYTES, ceil(size / CHUNK_BYTES) * CHUNK_BYTES)
    bound = {ceil(best): "loses least", ceil(cheap): "the overhead allowed", ceil(done): "the disk"}.get(every, "")
    why = (
        f"a step takes {m.step_s * 1e3:.0f} ms, a full checkpoint of {m.total_bytes / 1e6:.0f} MB adds "
        f"{m.full_s * 1e3:.0f} ms and is durable after {m.write_s:.2f} s: one every {every} steps ({bound}; failures every "
        f"{mtbf_s:.0f} s would have {best:.0f}, an overhead of {max_overhead:.1%} {cheap:.0f}, the disk {done:.0f})"
    )
    return Intervals(every, batch, flush, why)
