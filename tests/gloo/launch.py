"""Starts real processes that talk through gloo, collects what they report, and leaves none behind.

A suite is a module beside this one whose functions are marked ``@case``. All of a suite's cases run in one launch, because
starting four Python processes with torch takes longer than most cases; each case is then asserted by a test of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Report:
    """What the ranks of one launch have left: per rank, the outcome of each case by name; exit codes; log texts."""

    outcomes: list[dict[str, dict[str, Any]]]
    exit_codes: list[int | None]
    logs: list[str]
    pids: list[int]
    duration_s: float

    def values(self, case: str) -> list[Any]:
        """What the case returned on each rank; fails with the ranks' own tracebacks if it failed on any."""
        got = [outcome.get(case, {"error": f"never reported; its log:\n{self.logs[rank][-3000:]}"})
               for rank, outcome in enumerate(self.outcomes)]  # fmt: skip
        errors = [f"--- rank {rank}\n{one['error']}" for rank, one in enumerate(got) if "error" in one]
        assert not errors, "\n".join(errors)
        return [one["value"] for one in got]


def launch(suite: str, world_size: int, *, timeout_s: float = 110.0, folder: str = "") -> Report:
    """Run all cases of ``suite`` on ``world_size`` processes; whoever is still there at the end is killed.

    Args:
        folder: where cases may leave files for a later launch.
    """
    with tempfile.TemporaryDirectory(prefix="thinwire-gloo-") as scratch:
        started_s = time.monotonic()
        processes = [_start(suite, rank, world_size, Path(scratch), folder) for rank in range(world_size)]
        try:
            _wait(processes, started_s + timeout_s)
        finally:
            codes = [process.poll() for process in processes]
            for process in processes:
                process.kill()
                process.wait()
        ranks = range(world_size)
        return Report(
            outcomes=[_read(Path(scratch) / f"{rank}.jsonl") for rank in ranks],
            exit_codes=codes,
            logs=[(Path(scratch) / f"{rank}.log").read_text(errors="replace") for rank in ranks],
            pids=[process.pid for process in processes],
            duration_s=time.monotonic() - started_s,
        )


@lru_cache
def shared_launch(suite: str, world_size: int, timeout_s: float = 110.0) -> Report:
    """One launch for all tests that ask about its cases."""
    return launch(suite, world_size, timeout_s=timeout_s)


def _start(suite: str, rank: int, world_size: int, scratch: Path, folder: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(HERE / "worker.py"), suite, str(rank), str(world_size), str(scratch), folder]
    # Loopback only, whatever the host name resolves to; one thread per process, for there are more processes than cores.
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with (scratch / f"{rank}.log").open("wb") as log:
        return subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=environment, stdin=subprocess.DEVNULL
        )


def _wait(processes: list[subprocess.Popen[bytes]], deadline_s: float) -> None:
    """Until all have ended, or the time is up, or only stopped ones (SIGSTOP) are left."""
    while time.monotonic() < deadline_s:
        if all(process.poll() is not None or _is_stopped(process.pid) for process in processes):
            return
        time.sleep(0.05)


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def _read(path: Path) -> dict[str, dict[str, Any]]:
    if not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["case"]: line for line in lines}
