"""``python -m benchmarks.checkpoint kills``: random SIGKILLs of random ranks under torchrun, and the result of no kill."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "examples" / "restarts.py"


@dataclass(frozen=True)
class Killed:
    """What a campaign has shown."""

    ranks: int
    kills: int
    same_weights: bool
    lost: list[int]
    seconds: float


def campaign(*, ranks: int, kills: int, steps: int, seed: int, compress: str, every: int) -> Killed:
    """One run with ``kills`` SIGKILLs, one without."""
    with tempfile.TemporaryDirectory(prefix="thinwire-kills-") as scratch:
        expected, _ = _run(Path(scratch) / "calm", ranks, 0, steps, seed, compress, every)
        started_s = time.monotonic()
        got, output = _run(Path(scratch) / "killed", ranks, kills, steps, seed, compress, every)
        lost = [int(one) for one in re.findall(r"(\d+) steps lost", output)]
        return Killed(ranks, len(lost), got == expected, lost, time.monotonic() - started_s)


def _run(directory: Path, ranks: int, kills: int, steps: int, seed: int, compress: str, every: int) -> tuple[str, str]:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
        "--max-restarts", str(kills + 5), "--monitor-interval", "0.1", str(SCRIPT), "--directory", str(directory),
        "--steps", str(steps), "--compress", compress, "--every", str(every),
        "--step-seconds", "0.1" if kills else "0",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1",
                   # Otherwise ranks that start again may read the addresses of those that were killed (torch 2.13).
                   "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # fmt: skip
    log = directory.with_suffix(".log")
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            if kills:
                _kill_ranks(process, log, kills, random.Random(seed))
            process.wait(300)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    text = log.read_text()
    found = re.search(r"weights ([0-9a-f]{16})", text)
    if found is None:
        raise RuntimeError(f"the run did not end well:\n{text[-3000:]}")
    return found[1], text


def _kill_ranks(process: subprocess.Popen[bytes], log: Path, kills: int, rng: random.Random) -> None:
    """Each time the ranks are training again, wait a random while and kill one."""
    done = 0
    directory = log.with_suffix("")
    while done < kills and process.poll() is None:
        before = _progress(directory)
        until_s = time.monotonic() + 60
        while _progress(directory) <= before + 1 and process.poll() is None and time.monotonic() < until_s:
            time.sleep(0.05)
        time.sleep(rng.uniform(0.0, 1.0))
        workers = _workers(process.pid)
        if workers and process.poll() is None:
            os.kill(rng.choice(workers), signal.SIGKILL)
            done += 1
            time.sleep(1.0)  # torchrun must see it before the next one is chosen


def _progress(directory: Path) -> int:
    files = list(directory.glob("progress-rank-*"))
    return max((int.from_bytes(path.read_bytes()[:8], "little", signed=True) for path in files), default=0)


def _workers(parent: int) -> list[int]:
    """The ranks: children of torchrun that run the script."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            command = (path / "cmdline").read_bytes()
        except OSError:
            continue
        if int(fields[1]) == parent and str(SCRIPT).encode() in command:
            found.append(int(path.name))
    return found
