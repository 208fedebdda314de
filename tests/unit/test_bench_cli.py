"""`thinwire bench` hands over to a benchmark of the repository, or says where to get it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from thinwire.cli import bench
from thinwire.cli.commands import app

ROOT = Path(__file__).parents[2]


def test_arguments_and_exit_status_are_passed_on(tmp_path: Path) -> None:
    """Run from elsewhere: the benchmark is found beside the source, and its own parser answers."""
    command = [
        sys.executable,
        "-c",
        "from thinwire.cli import main; main()",
        "bench",
        "kernels",
        "--op",
        "sort_everything",
    ]
    environment = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path, env=environment)
    assert done.returncode == 2, done.stderr
    assert "got sort_everything, expected some of" in done.stderr


def test_without_the_repository_one_line_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "find_repository", lambda *starts: None)
    done = CliRunner().invoke(app, ["bench", "contest", "--quick"])
    assert done.exit_code == 2
    assert len(done.output.splitlines()) == 1
    assert "clone thinwire's repository and run 'python -m benchmarks.contest' there" in done.output


def test_the_repository_is_found_from_inside_and_nowhere_else(tmp_path: Path) -> None:
    assert bench.find_repository(tmp_path, ROOT / "src" / "thinwire") == ROOT
    assert bench.find_repository(tmp_path) is None
