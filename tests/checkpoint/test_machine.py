"""Saves, crashes, damage and recovery in any order, against a model of what must be there."""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from checkpoint.forgetful import ForgetfulFiles
from checkpoint.workloads import Run, check_recovery, contents
from thinwire.checkpoint import commit, scan
from thinwire.checkpoint import manifest as names


class Machine(RuleBasedStateMachine):
    """A run after the other on one file system. The model: the newest full step and the newest log step acknowledged."""

    @initialize()
    def begin(self) -> None:
        self.files = ForgetfulFiles()
        self.number = 0
        self.run = self._new_run(names.START, 0, 0, 0)

    def _new_run(self, chain: str, step: int, full: int, logged: int) -> Run:
        self.number += 1
        run = Run(self.files, f"{self.number:016x}", chain=chain, step=step)
        run.acknowledged, run.logged = full, logged
        return run

    @rule(sync=st.booleans())
    def train(self, sync: bool) -> None:
        self.run.advance(sync=sync)

    @rule()
    def save(self) -> None:
        if self.run.step > self.run.acknowledged:
            self.run.save()
            self.run.begin_log()

    @rule(seed=st.integers(0, 1 << 20))
    def crash(self, seed: int) -> None:
        """Any state that the crash may leave; a new run continues from the best point in it."""
        rng = random.Random(seed)
        states = list(self.files.crash_states(rng))
        self.files = rng.choice(states)
        check_recovery(self.files, self.run)
        best = max(scan.lines(self.files, 0), key=lambda line: line.last_step, default=None)
        if best is None:
            self.run = self._new_run(names.START, 0, 0, 0)
        else:
            self.run = self._new_run(best.chains[-1], best.last_step, best.manifest.step, best.last_step)

    @rule(seed=st.integers(0, 1 << 20))
    def flip(self, seed: int) -> None:
        """A bit of a committed checkpoint goes bad: it is passed over, and what it held is not expected any more."""
        steps = scan.fulls(self.files)
        if not steps:
            return
        rng = random.Random(seed)
        step = rng.choice(steps)
        node = self.files._find(f"{names.step_name(step)}/{rng.choice(self.files.names(names.step_name(step)))}")
        spoilt = bytearray(node.data)
        spoilt[rng.randrange(len(spoilt))] ^= 1 << rng.randrange(8)
        node.data = node.synced = bytes(spoilt)
        self.run._segment = ""  # what follows may continue what is gone; the next save begins a log that does not
        self.run.acknowledged = max((line.manifest.step for line in scan.lines(self.files, 0)), default=0)
        self.run.logged = max((line.last_step for line in scan.lines(self.files, 0)), default=0)

    @invariant()
    def everything_acknowledged_is_there(self) -> None:
        if hasattr(self, "run"):
            check_recovery(self.files, self.run)
            for line in scan.lines(self.files, 0):
                data = self.files.read(f"{names.step_name(line.manifest.step)}/{names.shard_name(0)}")
                assert data == contents(line.manifest.step, line.manifest.run, 0)
            assert not commit.sweep(self.files), "sweeping twice finds nothing"


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)
