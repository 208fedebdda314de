"""SIGKILL at a random moment while saving: what was acknowledged before must be there after.

The writer's own code, in a process without torch (which takes seconds to start): it saves one checkpoint after the other,
logs steps in between, and says on a pipe what is durable. ``trainers`` does the same with a whole training process.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from thinwire.checkpoint import commit, scan
from thinwire.checkpoint import manifest as names
from thinwire.checkpoint.files import LocalFiles

ROOT = Path(__file__).parents[2]
_CHILD = """
import os, sys
sys.path[:0] = [{root!r}, {tests!r}]
from checkpoint.workloads import Run
from thinwire.checkpoint.files import LocalFiles
import checkpoint.workloads as w
w.contents = lambda step, run, rank: ("%d/%s/%d/" % (step, run, rank)).encode() * {repeat}
run = Run(LocalFiles(sys.argv[1]), sys.argv[2], step=int(sys.argv[3]))
os.write(1, b"ready\\n")
while True:
    run.advance(); run.save(); os.write(1, b"%d\\n" % run.step)
    run.begin_log()
    for _ in range(3):
        run.advance(); os.write(1, b"%d\\n" % run.logged)
"""
_TRAINER = """
import sys
sys.path[:0] = [{root!r}]
import torch
from thinwire.checkpoint import Checkpointer
torch.manual_seed(0); torch.set_num_threads(1)
model = torch.nn.Linear(512, 1024); optimizer = torch.optim.Adam(model.parameters())
with Checkpointer(sys.argv[1], model, optimizer, every=3, log=True) as c:
    step = c.restore(); print("ready", flush=True)
    while True:
        optimizer.zero_grad(); model(torch.randn(8, 512)).square().mean().backward(); optimizer.step(); step += 1
        c.maybe_save(step); c._hear()
        if c.last_saved: print(c.last_saved, flush=True)
"""


@dataclass(frozen=True)
class Survived:
    """Kills, runs in which everything acknowledged was recovered, and how many kills hit an unfinished save."""

    kills: int
    recovered: int
    unfinished: int
    silently_wrong: int


def writers(kills: int, seed: int, file_bytes: int = 4 << 20) -> Survived:
    """Kill writers. One directory for all: each run goes on where recovery from the last one led."""
    rng, recovered, unfinished, wrong = random.Random(seed), 0, 0, 0
    with tempfile.TemporaryDirectory(prefix="thinwire-sigkill-") as scratch:
        files = LocalFiles(scratch)
        repeat = file_bytes // 24
        code = _CHILD.format(root=str(ROOT / "src"), tests=str(ROOT / "tests"), repeat=repeat)
        reached = 0
        for index in range(kills):
            run = f"{index:016x}"
            acknowledged = _kill([sys.executable, "-S", "-c", code, scratch, run, str(reached)], rng.uniform(0.0, 0.12))
            unfinished += any(names.is_temporary(name) for name in files.names())
            commit.sweep(files)
            best = 0
            for line in scan.lines(files, 0):
                best = max(best, line.last_step)
                manifest = line.manifest
                expected = f"{manifest.step}/{manifest.run}/0/".encode() * repeat
                wrong += files.read(f"{names.step_name(manifest.step)}/{names.shard_name(0)}") != expected
            recovered += best >= max(acknowledged, reached)
            reached = best
    return Survived(kills, recovered, unfinished, wrong)


def trainers(kills: int, seed: int) -> Survived:
    """Kill whole training processes, writers left to finish."""
    rng, recovered, wrong = random.Random(seed), 0, 0
    with tempfile.TemporaryDirectory(prefix="thinwire-sigkill-") as scratch:
        from thinwire.checkpoint.client import wait_for_writers

        for _ in range(kills):
            command = [sys.executable, "-c", _TRAINER.format(root=str(ROOT / "src")), scratch]
            acknowledged = _kill(command, rng.uniform(0.05, 0.8))
            wait_for_writers(Path(scratch), 30.0)
            files = LocalFiles(scratch)
            commit.sweep(files)
            best = max((line.last_step for line in scan.lines(files, 0)), default=0)
            recovered += best >= acknowledged
    return Survived(kills, recovered, 0, wrong)


def _kill(command: list[str], after_s: float) -> int:
    """Start, wait until it saves, kill; the newest step that it said was durable."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    line = process.stdout.readline()
    if line != b"ready\n":
        process.kill()
        raise RuntimeError(f"the child said {line!r}")
    time.sleep(after_s)
    process.send_signal(signal.SIGKILL)
    said = process.stdout.read().split(b"\n")[:-1]  # an unfinished line was not said
    process.wait()
    return int(said[-1]) if said else 0
