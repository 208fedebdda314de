"""``thinwire checkpoint ls | verify | inspect | repair``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from checkpoint.loops import Job
from thinwire.checkpoint import Checkpointer
from thinwire.cli.commands import app


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    job = Job()
    with Checkpointer(tmp_path, job.model, job.optimizer, extra=job.extra, every=2, keep=3, log=True) as checkpoints:
        for step in range(1, 6):
            job.step()
            checkpoints.maybe_save(step)
            checkpoints.wait()
    return tmp_path


def call(*words: object, status: int = 0) -> Any:
    done = CliRunner().invoke(app, ["checkpoint", *map(str, words)])
    assert done.exit_code == status, done.output
    return json.loads(done.stdout) if "--json" in words else done.output


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_ls(directory: Path) -> None:
    rows = call("ls", directory, "--json")
    assert [row["step"] for row in rows if row["kind"] == "full"] == [1, 2, 4]
    assert "step-00000004" in call("ls", directory)


def test_verify_and_repair(directory: Path) -> None:
    assert call("verify", directory, "--json")["newest_point"] == 5
    damage(directory / "step-00000004" / "rank-00000.safetensors")
    log = max(directory.glob("log-00000005-*"))
    with log.open("ab") as file:
        file.write(b"torn")
    (directory / "step-00000009.tmp-abc").mkdir()
    found = call("verify", directory, "--json", status=1)
    assert found["newest_point"] == 5, "an older checkpoint and its log lead there too"
    assert "is damaged between bytes 0 and" in str(found)
    assert "torn tail of 4 bytes" in str(found)
    assert "newest point: step 5" in call("verify", directory, status=1)
    planned = call("repair", directory, "--json")
    assert not planned["done"]
    assert sorted(one["action"] for one in planned["actions"]) == ["cut", "move", "remove"]
    call("repair", directory, "--yes")
    assert call("verify", directory, "--json")["newest_point"] == 5
    assert (directory / "damaged" / "0000-step-00000004").exists()
    assert "nothing to repair" in call("repair", directory)


def test_inspect(directory: Path) -> None:
    found = call("inspect", directory, "--json")
    assert found["step"] == 4
    assert {"replicated/model/0.weight"} <= {row["tensor"] for row in found["tensors"]}
    assert "BF16" not in call("inspect", directory, "--step", 2)
    call("inspect", directory, "--step", 77, status=2)


def test_what_is_no_directory_is_said(tmp_path: Path) -> None:
    call("ls", tmp_path / "nowhere", status=2)
    call("inspect", tmp_path, status=2)


def test_the_commands_start_without_torch(directory: Path) -> None:
    code = (
        "import sys; from thinwire.cli.commands import app\n"
        "try: app(['checkpoint', 'verify', sys.argv[1], '--json'])\n"
        "finally: assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code, str(directory)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
