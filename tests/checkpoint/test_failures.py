"""Full disks, I/O errors, killed writers, slow disks, read-only directories: training goes on and the user is told."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from checkpoint.faults import failing_writer
from checkpoint.loops import Job
from thinwire.checkpoint import Checkpointer
from thinwire.checkpoint.arena import Ring
from thinwire.core import CheckpointError, ConfigError


def _newest(directory: Path) -> int:
    job = Job(seed=7)
    with Checkpointer(directory, job.model, job.optimizer, extra=job.extra) as checkpoints:
        return checkpoints.restore()


@pytest.mark.parametrize(("when", "number"), [("write", errno.ENOSPC), ("sync", errno.EIO), ("write", errno.EROFS)])
def test_a_failing_disk_leaves_the_one_before(
    when: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trigger = failing_writer(monkeypatch, tmp_path, when, number)
    root, job, told = tmp_path / "checkpoints", Job(), list[str]()
    with Checkpointer(root, job.model, job.optimizer, extra=job.extra, every=2, on_failure=told.append) as checkpoints:
        for step in range(1, 9):
            if step == 4:
                trigger.touch()
            if step == 7:
                trigger.unlink()
            job.step()
            checkpoints.maybe_save(step)
            checkpoints.wait()
            if step == 6:
                assert checkpoints.last_saved == 2
                with pytest.raises(CheckpointError, match=os.strerror(number)):
                    checkpoints.save(step)
        assert checkpoints.last_saved == 8, "it goes on when the disk does"
    assert told
    assert told == checkpoints.failures
    assert all(os.strerror(number) in one and "step 2" in one for one in told)
    assert not list(root.glob("*.tmp-*")), "what failed is removed"
    assert _newest(root) == 8


def test_a_failing_disk_ends_the_log_until_the_next_full_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trigger = failing_writer(monkeypatch, tmp_path, "write")
    root, job = tmp_path / "checkpoints", Job()
    with Checkpointer(root, job.model, job.optimizer, extra=job.extra, every=100, log=True) as checkpoints:
        for step in range(1, 9):
            if step == 4:
                trigger.touch()
            if step == 6:
                trigger.unlink()
            job.step()
            checkpoints.maybe_save(step)
            checkpoints.wait()
        expected = job.everything()
    assert "No space left" in checkpoints.failures[0]
    again = Job(seed=5)
    with Checkpointer(root, again.model, again.optimizer, extra=again.extra) as restored:
        assert restored.restore() == 8
        assert again.everything() == expected


def test_a_killed_writer_is_replaced(tmp_path: Path) -> None:
    job = Job()
    with Checkpointer(tmp_path, job.model, job.optimizer, extra=job.extra, every=1) as checkpoints:
        job.step()
        checkpoints.save(1)
        os.kill(checkpoints._client.pid, signal.SIGSTOP)
        job.step()
        checkpoints.maybe_save(2)
        checkpoints._join_copy()
        os.kill(checkpoints._client.pid, signal.SIGKILL)
        checkpoints.wait()
        assert "killed by that signal" in checkpoints.failures[0]
        assert checkpoints.last_saved == 1
        job.step()
        checkpoints.save(3)
        assert checkpoints.last_saved == 3
    assert _newest(tmp_path) == 3


def test_a_slow_writer_bounds_memory_and_never_blocks(tmp_path: Path) -> None:
    job = Job()
    with Checkpointer(
        tmp_path, job.model, job.optimizer, extra=job.extra, every=2, log=True, log_bytes=100_000
    ) as checkpoints:
        job.step()
        checkpoints.save(1)
        os.kill(checkpoints._client.pid, signal.SIGSTOP)
        started_s = time.monotonic()
        for step in range(2, 30):
            job.step()
            checkpoints.maybe_save(step)
        assert time.monotonic() - started_s < 5
        os.kill(checkpoints._client.pid, signal.SIGCONT)
        checkpoints.wait()
        job.step()
        checkpoints.maybe_save(30)
        checkpoints.wait()
        assert checkpoints.last_saved == 30
    assert any("left out" in one for one in checkpoints.failures)
    assert any("too far behind" in one for one in checkpoints.failures)
    assert _newest(tmp_path) == 30


def test_a_directory_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="give a directory that can be written to"):
        Checkpointer(tmp_path / "file" / "x", nn.Linear(1, 1))


def test_two_runs_do_not_share_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.checkpoint.checkpointer._TAKEOVER_S", 0.3)
    job = Job()
    with (
        Checkpointer(tmp_path, job.model, job.optimizer) as first,
        pytest.raises(CheckpointError, match=f"process {first._client.pid} still writes"),
    ):
        Checkpointer(tmp_path, job.model, job.optimizer)


def test_weights_changed_behind_our_back_drop_the_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from thinwire.checkpoint import snapshot

    fill = snapshot.fill

    def slow(*arguments: object) -> None:
        if threading.current_thread().name == "thinwire-snapshot":
            time.sleep(0.2)
        fill(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(snapshot, "fill", slow)
    model = nn.Linear(100, 100)
    with Checkpointer(tmp_path, model, None, every=1) as checkpoints:
        checkpoints.maybe_save(1)
        with torch.no_grad():
            model.weight.add_(1)
        checkpoints.wait()
        assert "was changed while it was copied" in checkpoints.failures[0]
        checkpoints.maybe_save(2)
        with torch.no_grad():
            model.weight.add_(1)
        checkpoints.wait()
        assert checkpoints.last_saved == 2, "from then on it copies first"


def test_mistakes_are_told(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(ConfigError, match="keep is 1"):
        Checkpointer(tmp_path, model, keep=1)
    with pytest.raises(ConfigError, match=r"extra\['x'\] is a int"):
        Checkpointer(tmp_path, model, extra={"x": 3})
    with Checkpointer(tmp_path, model, extra={"d": {"odd": object()}}) as checkpoints:
        checkpoints.maybe_save(5)
        with pytest.raises(ConfigError, match="only grows"):
            checkpoints.maybe_save(4)
        with pytest.raises(CheckpointError, match=r"local/extra/d/odd is a builtins\.object"):
            checkpoints.save(6)


def test_ring_hands_out_each_byte_once() -> None:
    ring, taken = Ring(100), []
    for size in (40, 40):
        taken.append((ring.take(size), size))
    assert ring.take(30) is None
    ring.give_back()
    assert ring.take(30) == 0
    assert ring.take(30) is None
    ring.give_back()
    assert ring.take(40) == 30
    assert ring.take(101) is None


def test_no_process_is_left_behind(tmp_path: Path) -> None:
    code = (
        "import sys, torch; from thinwire.checkpoint import Checkpointer\n"
        "m = torch.nn.Linear(9, 9); c = Checkpointer(sys.argv[1], m, every=1); c.maybe_save(1)\n"
        "print(c._client.pid, flush=True); sys.exit(0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60)
    pid = int(done.stdout)
    until_s = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < until_s:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()
    assert (tmp_path / "step-00000001" / "MANIFEST.json").exists(), "what was handed over is still written"
