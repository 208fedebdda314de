"""What a writer does in a run, over any file system, with what must be true of it afterwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from thinwire.checkpoint import commit, scan
from thinwire.checkpoint import manifest as names
from thinwire.checkpoint.files import Files
from thinwire.checkpoint.writer import Jobs


def contents(step: int, run: str, rank: int) -> bytes:
    """A file that no other step, run or rank has."""
    return f"{step}/{run}/{rank}/".encode() * (20 + step)


@dataclass
class Run:
    """One start of a training: two kinds of jobs, and what they were told to be durable."""

    files: Files
    run: str
    world_size: int = 1
    keep: int = 2
    chain: str = names.START
    step: int = 0
    acknowledged: int = 0  # the newest full checkpoint that is durable
    logged: int = 0  # the newest log record that is durable
    chains: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._jobs = [Jobs(self.files) for _ in range(self.world_size)]
        self._segment = ""

    def advance(self, *, sync: bool = True) -> None:
        """A training step; logged if there is a log."""
        before, self.step = self.chain, self.step + 1
        self.chain = self.chains[self.step] = names.next_chain(before, self.run, self.step)
        if self._segment:
            for rank, jobs in enumerate(self._jobs):
                job = {"file": names.log_name(self._first, self.run, rank), "step": self.step, "before": before,
                       "after": self.chain, "sync": sync}  # fmt: skip
                jobs.log(job, [contents(self.step, self.run, rank)])
            if sync:
                self.logged = self.step

    def save(self) -> None:
        """A full checkpoint of the present step; ranks in the order in which the coordinator comes last."""
        for rank in reversed(range(self.world_size)):
            self._jobs[rank].full(self.job(rank), [contents(self.step, self.run, rank)])
        self.acknowledged, self.logged = self.step, max(self.logged, self.step)

    def begin_log(self) -> None:
        """What follows goes to a new file."""
        self._segment, self._first = "yes", self.step + 1

    def job(self, rank: int) -> dict[str, Any]:
        return {"step": self.step, "chain": self.chain, "run": self.run, "rank": rank, "world_size": self.world_size,
                "fingerprint": "f", "keep": self.keep, "flush_bytes": 1 << 22, "timeout_s": 0.0, "info": {}}  # fmt: skip


def check_recovery(files: Files, run: Run) -> int:
    """Recover as a new run does; raises AssertionError unless all that was acknowledged is there. The step found."""
    commit.sweep(files)
    lines = list(scan.lines(files, run.world_size - 1))
    best = max((line.last_step for line in lines), default=0)
    assert max((line.manifest.step for line in lines), default=0) >= run.acknowledged, (
        "an acknowledged checkpoint is lost"
    )
    assert best >= run.logged, f"step {run.logged} was durable, step {best} is what is left"
    for line in lines:
        manifest = line.manifest
        for rank in range(manifest.world_size):
            data = files.read(f"{names.step_name(manifest.step)}/{names.shard_name(rank)}")
            assert data == contents(manifest.step, manifest.run, rank), "a wrong state was taken for good"
        for record in line.records:
            found = names.log_of(record.file)
            assert found is not None
            assert record.payload(files) == contents(record.step, found[1], found[2])
    return best


Workload = Callable[[Files, Callable[[Run], None]], None]


def plain(files: Files, begun: Callable[[Run], None]) -> None:
    """Checkpoints alone."""
    run = Run(files, "a" * 16)
    begun(run)
    for _ in range(4):
        run.advance()
        run.save()


def with_log(files: Files, begun: Callable[[Run], None]) -> None:
    """Checkpoints, and a log that goes on beside them, synced one by one and in batches."""
    run = Run(files, "b" * 16)
    begun(run)
    run.advance()
    run.save()
    run.begin_log()
    for sync in (True, False, True):
        run.advance(sync=sync)
    run.save()
    run.begin_log()
    for sync in (False, True):
        run.advance(sync=sync)
    run.save()


def two_ranks(files: Files, begun: Callable[[Run], None]) -> None:
    """Two ranks share the writing."""
    run = Run(files, "c" * 16, world_size=2)
    begun(run)
    for _ in range(2):
        run.advance()
        run.save()
        run.begin_log()
    run.advance()


def again(files: Files, begun: Callable[[Run], None]) -> None:
    """A second run that went back one step and saves a step that exists."""
    first = Run(files, "d" * 16)
    begun(first)
    for _ in range(2):
        first.advance()
        first.save()
    second = Run(files, "e" * 16, chain=first.chains[1], step=1, acknowledged=1, logged=1)
    begun(second)
    second.advance()
    second.save()


WORKLOADS = {"plain": plain, "with_log": with_log, "two_ranks": two_ranks, "again": again}
