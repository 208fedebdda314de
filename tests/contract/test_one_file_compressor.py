"""A newcomer's compressor: one file dropped into the package, and everything that lists compressors knows it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import thinwire

HERE = Path(__file__).parent
SOURCE = HERE / "one_file_compressor.py.txt"  # not .py: the package must learn of it from the folder alone


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a Python that sees a copy of the package with one file more."""
    root = tmp_path_factory.mktemp("package")
    package = Path(thinwire.__file__).parent
    shutil.copytree(package, root / "thinwire", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(SOURCE, root / "thinwire" / "compressors" / "terngrad.py")
    return {**os.environ, "PYTHONPATH": str(root), "COLUMNS": "200"}


def _run(environment: dict[str, str], *arguments: str) -> str:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, cwd=HERE.parents[1])
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_is_one_short_file() -> None:
    assert len(SOURCE.read_text().splitlines()) <= 60


def test_registry_and_table_know_it(environment: dict[str, str]) -> None:
    assert "terngrad" not in {listing.name for listing in thinwire.available()}, "this process must not know it"
    table = _run(
        environment, "-c", "from thinwire.cli.commands import app; app(['compressors'], standalone_mode=False)"
    )
    assert "terngrad" in table
    assert "Send -s, 0 or s per entry" in table


def test_contract_covers_it(environment: dict[str, str]) -> None:
    contract = str(HERE / "test_contract.py")
    out = _run(environment, "-m", "pytest", contract, "-k", "terngrad", "-vv", "-p", "no:cacheprovider")
    assert "test_law[terngrad-agreement] PASSED" in out
    assert "test_law[route | terngrad-resumes_exactly] PASSED" in out
    assert "failed" not in out
