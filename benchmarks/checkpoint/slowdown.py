"""How much slower training is with checkpoints: all contestants do the same steps in turns, in one process each.

One *block* is a number of steps; blocks without any checkpoint stand between those of the contestants, so that a machine
that is busy with other things slows all of them alike. What counts is the median of paired block times.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from benchmarks.checkpoint.model import Gpt, make, parameters, train_step
from torch.distributed.checkpoint.state_dict import get_state_dict

import thinwire
from thinwire.checkpoint import Checkpointer

CONTESTANTS = ("thinwire", "thinwire log", "torch.save", "dcp.save", "dcp.async thread", "dcp.async process")


@dataclass(frozen=True)
class Slowdown:
    """Of one contestant, over paired blocks."""

    name: str
    every: int
    blocks: int
    steps: int
    plain_step_s: float
    median: float  # share of time added
    quartiles: tuple[float, float]
    processor: float  # share of processor time added, child processes included
    stall_ms: float  # of a call that saves, median
    bytes: int


class Contestant:
    """Trains a block of steps and saves as it does."""

    def __init__(self, name: str, folder: Path, every: int) -> None:
        self.name, self._folder, self._every = name, folder, every
        self._stalls: list[float] = []
        self._pending: Any = None
        self._count = 0

    @contextlib.contextmanager
    def attached(self, model: Gpt, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        self._model, self._optimizer = model, optimizer
        if self.name.startswith("thinwire"):
            log = self.name.endswith("log")
            every = 10**9 if log else self._every
            with Checkpointer(self._folder, model, optimizer, every=every, log=log) as self._checkpoints:
                yield
                if self._checkpoints.failures:
                    raise RuntimeError(self._checkpoints.failures[0])
        else:
            yield
            self._finish()

    def after_step(self, step: int) -> None:
        started_s = time.perf_counter()
        if self.name.startswith("thinwire"):
            self._checkpoints.maybe_save(step)
        elif step % self._every == 0:
            self._save(step)
        if step % self._every == 0:
            self._stalls.append(time.perf_counter() - started_s)

    def warm(self, step: int) -> None:
        """Save whatever the step."""
        if self.name.startswith("thinwire"):
            self._checkpoints.save(step)
        else:
            self._save(step)

    def settle(self) -> None:
        """Between blocks: whatever is still being written must not slow others down."""
        if self.name.startswith("thinwire"):
            self._checkpoints.wait()
        else:
            self._finish()

    def _save(self, step: int) -> None:
        self._count += 1
        target = self._folder / str(self._count % 2)
        if self.name == "torch.save":
            state = {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}
            torch.save(state, target.with_suffix(".tmp"))
            target.with_suffix(".tmp").replace(target.with_suffix(".pt"))
            return
        self._finish()
        weights, moments = get_state_dict(self._model, self._optimizer)
        state = {"model": weights, "optimizer": moments}
        if self.name == "dcp.save":
            dcp.save(state, checkpoint_id=target)
            return
        kind = getattr(dcp.state_dict_saver.AsyncCheckpointerType, self.name.split()[-1].upper())
        self._pending = dcp.async_save(state, checkpoint_id=target, async_checkpointer_type=kind)

    def _finish(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            (pending.result() if hasattr(pending, "result") else pending.upload_completion.result())

    @property
    def stall_ms(self) -> float:
        return statistics.median(self._stalls) * 1e3 if self._stalls else 0.0


def measure(name: str, *, every: int, blocks: int, steps: int, sequences: int, compress: str, threads: int) -> Slowdown:
    """One contestant against no checkpoints, block by block in turns."""
    torch.set_num_threads(threads)
    model, optimizer = make()
    wire = thinwire.attach(model, optimizer, compress=compress) if compress else None
    folder = Path(tempfile.mkdtemp(prefix="thinwire-bench-"))
    plain, shares, cpu_shares, done = list[float](), list[float](), list[float](), 0
    contestant = Contestant(name, folder, every)

    def block(saving: bool) -> float:
        nonlocal done
        started_s = time.perf_counter()
        for _ in range(steps):
            done += 1
            train_step(model, optimizer, done, sequences)
            if saving:
                contestant.after_step(done)
        return time.perf_counter() - started_s

    try:
        block(False)
        for index in range(blocks + 1):
            cpu_s = _processor_s()
            plain_s = block(False)
            plain_cpu_s = _processor_s() - cpu_s
            with contestant.attached(model, optimizer):
                _warm(contestant, model, optimizer, done)
                cpu_s = _processor_s()
                saving_s = block(True)
                contestant.settle()
                saving_cpu_s = _processor_s() - cpu_s
            if index:  # the first pair warms up
                plain.append(plain_s)
                shares.append(saving_s / plain_s - 1)
                cpu_shares.append(saving_cpu_s / plain_cpu_s - 1)
        used = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if wire is not None:
            wire.detach()
    step_s = statistics.median(plain) / steps
    assert parameters(model) >= 20_000_000
    low, middle, high = statistics.quantiles(shares, n=4)
    processor = statistics.median(cpu_shares)
    return Slowdown(name, every, blocks, steps, step_s, middle, (low, high), processor, contestant.stall_ms, used)


def _processor_s() -> float:
    """Of this process and of the children that it has now."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    total, ticks = own.ru_utime + own.ru_stime, os.sysconf("SC_CLK_TCK")
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[1]) == os.getpid():
                total += (int(fields[11]) + int(fields[12])) / ticks
    return total


def _warm(contestant: Contestant, model: Gpt, optimizer: torch.optim.Optimizer, done: int) -> None:
    """A save, unmeasured: processes start, buffers are allocated, a log gets its base. ``done`` is where steps continue."""
    train_step(model, optimizer, done, 1)
    contestant.warm(done)
    contestant.settle()
