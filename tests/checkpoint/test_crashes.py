"""Every state that a crash may leave, at every operation: real recovery on each."""

from __future__ import annotations

import random

import pytest

from checkpoint.forgetful import ForgetfulFiles
from checkpoint.workloads import WORKLOADS, Run, check_recovery
from thinwire.checkpoint import commit


def crash_everywhere(name: str, seed: int = 0) -> tuple[int, int, list[str]]:
    """Operations of the workload, crash states recovered from, and what was violated in them."""
    files, rng = ForgetfulFiles(), random.Random(seed)
    runs: list[Run] = []
    operations = states = 0
    violations: list[str] = []

    def after() -> None:
        nonlocal operations, states
        operations += 1
        if not runs:
            return
        for found in files.crash_states(rng):
            states += 1
            try:
                check_recovery(found, runs[-1])
                if states % 7 == 0:  # and goes on: the next save works and is found
                    run = Run(found, "f" * 16, runs[-1].world_size, step=50)
                    run.advance()
                    run.save()
                    assert check_recovery(found, run) == 51
            except AssertionError as violation:
                violations.append(f"after operation {operations}: {violation}")

    files.after = after
    WORKLOADS[name](files, runs.append)
    return operations, states, violations


@pytest.mark.parametrize("name", WORKLOADS)
def test_nothing_acknowledged_is_lost(name: str) -> None:
    operations, states, violations = crash_everywhere(name)
    assert not violations
    assert operations > 20
    assert states > 100


def test_the_file_system_finds_a_missing_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test of the test: without any one of the syncs some state is lost."""
    monkeypatch.setattr(ForgetfulFiles, "sync_directory", lambda self, path="": None)
    assert crash_everywhere("plain")[2]


def test_a_shard_that_was_not_synced_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    write = commit.write_shard

    def without_sync(files: ForgetfulFiles, *rest: object) -> object:
        create = files.create

        def forgets(path: str) -> object:
            output = create(path)
            output.sync = lambda: None  # type: ignore[method-assign]
            return output

        files.create = forgets  # type: ignore[assignment, method-assign]
        try:
            return write(files, *rest)  # type: ignore[arg-type]
        finally:
            files.create = create  # type: ignore[method-assign]

    monkeypatch.setattr(commit, "write_shard", without_sync)
    assert crash_everywhere("plain")[2]
