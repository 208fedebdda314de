"""The formulas, with the figures that were published for them."""

from __future__ import annotations

from math import isclose
from pathlib import Path

import pytest

from checkpoint.loops import Job
from thinwire.checkpoint import Checkpointer, auto
from thinwire.checkpoint.interval import (
    Measured,
    choose,
    flush_bytes,
    full_interval_steps,
    log_batch_steps,
)  # fmt: skip
from thinwire.core import ConfigError

DISK = Measured(
    step_s=0.5, full_s=0.05, write_s=2.0, total_bytes=240_000_000, sync_s=0.01, replay_step_s=0.1, chunk_s=1e-3
)


def test_flush_size_of_the_paper() -> None:
    best = flush_bytes(total_bytes=409.6e6, startup_s=14.17e-3, chunk_bytes=0.8e6, chunk_s=1.086e-3)
    assert isclose(best, 65.4e6, rel_tol=1e-3)


def test_young_without_a_log() -> None:
    assert full_interval_steps(2.0, 3600.0, 0.5, 0.5) == pytest.approx((2 * 2.0 * 3600.0) ** 0.5 / 0.5)
    assert log_batch_steps(0.02, 3600.0, 0.5) == pytest.approx(24.0)


@pytest.mark.parametrize("log", [False, True])
def test_the_choice_keeps_all_bounds(log: bool) -> None:
    chosen = choose(DISK, max_overhead=0.035, mtbf_s=600.0, log=log)
    assert chosen.every * DISK.step_s * 0.035 >= DISK.full_s
    assert chosen.every * DISK.step_s >= DISK.write_s
    assert chosen.flush_bytes % (4 << 20) == 0
    assert f"every {chosen.every} steps" in chosen.why


def test_auto_measures_and_chooses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "WARMUP", 2)
    monkeypatch.setattr(auto, "TIMED", 3)
    job = Job()
    with Checkpointer.auto(tmp_path, job.model, job.optimizer, extra=job.extra, mtbf_s=0.05) as checkpoints:
        for step in range(1, 400):
            job.step()
            checkpoints.maybe_save(step)
            if checkpoints.every < 1 << 30:
                break
        assert checkpoints.every < 1 << 30, "it has chosen"
        checkpoints.wait()
        assert checkpoints.last_saved is not None
    with pytest.raises(ConfigError, match="max_overhead"):
        Checkpointer.auto(tmp_path, job.model, max_overhead=3.0)
