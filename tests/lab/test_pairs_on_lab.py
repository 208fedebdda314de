"""On a slow link a long all-to-all is faster pair by pair."""

import json
import sys
from pathlib import Path
from statistics import median

import pytest

from thinwire.lab import Lab

pytestmark = pytest.mark.lab
WORKER = Path(__file__).with_name("pairs_worker.py")


def test_pairs_are_faster_than_all_at_once() -> None:
    lines: list[str] = []
    with Lab(hosts=4, rate="200mbit") as lab:
        result = lab.run([sys.executable, str(WORKER)], on_line=lambda _, line: lines.append(line), timeout_s=100)
    assert result.ok, f"exit codes {result.exit_codes}"
    (seconds,) = [json.loads(line) for line in lines if line.startswith("{")]
    ratios = [pairs / at_once for pairs, at_once in zip(seconds["pairs"], seconds["at once"], strict=True)]
    assert median(ratios) < 0.9, seconds
