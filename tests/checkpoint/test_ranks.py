"""Several ranks: one copy shared out, one point agreed on, and the same result after one of them was killed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gloo
SCRIPT = Path(__file__).with_name("rank_script.py")


def launch(folder: Path, name: str, **changes: Any) -> list[Any]:
    """Two ranks; what each printed, None for one that was killed or had to give up."""
    options = {"world_size": 2, "store": str(folder / f"store-{name}"), "engine": "dense", "every": 4, "log": True,
               "shared": True, "directory": str(folder / "checkpoints"), "residuals": "exact", "steps": 7,
               "kill": None, **changes}  # fmt: skip
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), json.dumps(options), str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(options["world_size"])
    ]
    try:
        if options["kill"]:
            processes[options["kill"][0]].wait(60)
            for process in processes:
                process.kill()
        outputs = [process.communicate(timeout=60) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if not options["kill"]:
        assert all(process.returncode == 0 for process in processes), [error[-2000:] for _, error in outputs]
    return [json.loads(out.splitlines()[-1]) if out.strip() else None for out, _ in outputs]


@pytest.mark.parametrize(("engine", "restored"), [("dense", 6), ("topk(density=0.1)", 4)])
def test_a_killed_rank_changes_nothing(engine: str, restored: int, tmp_path: Path) -> None:
    """With residuals the log is not enough: ``exact`` goes back to the full checkpoint, and repeats two steps."""
    calm_folder, fast_folder = tmp_path / "calm", tmp_path / "fast"
    calm_folder.mkdir()
    calm = launch(calm_folder, "calm", engine=engine)
    launch(tmp_path, "killed", engine=engine, kill=[1, 6])
    shutil.copytree(tmp_path / "checkpoints", fast_folder / "checkpoints")
    again = launch(tmp_path, "again", engine=engine)
    for one, other in zip(calm, again, strict=True):
        assert other["start"] == restored
        assert other["lost"] == 6 - restored
        assert other["exact"]
        assert (other["digest"], other["wire"]) == (one["digest"], one["wire"])
        assert not other["failures"]
    if engine == "dense":
        _check_written_once(calm_folder / "checkpoints" / "step-00000004")
    else:
        fast = launch(fast_folder, "fast", engine=engine, residuals="fast")
        assert [one["start"] for one in fast] == [6, 6], "replayed to the end of the log"
        assert not any(one["exact"] for one in fast), "residuals began at zero, and that is said"


def _check_written_once(step: Path) -> None:
    """One copy, shared out over the ranks."""
    sizes = [path.stat().st_size for path in step.glob("*.safetensors")]
    parameters = 32 * 64 + 64 + 64 + 64 + 64 * 4 + 4
    assert len(sizes) == 2
    assert sum(sizes) < 3 * 4 * parameters + 2 * 40_000, "weights and moments once, small things twice"
    assert min(sizes) > max(sizes) / 3


def test_the_point_is_one_that_all_ranks_can_load(tmp_path: Path) -> None:
    """Disks of their own, and the newest checkpoint of one of them is damaged."""
    launch(tmp_path, "first", engine="ddp", shared=False, log=False, every=2, steps=6)
    spoilt = tmp_path / "checkpoints" / "rank-00001" / "step-00000006" / "rank-00000.safetensors"
    data = bytearray(spoilt.read_bytes())
    data[-1] ^= 1
    spoilt.write_bytes(data)
    again = launch(tmp_path, "again", engine="ddp", shared=False, log=False, every=2, steps=6)
    assert [one["start"] for one in again] == [4, 4]
