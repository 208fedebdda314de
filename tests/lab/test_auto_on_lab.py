"""A link that falls from 1 Gbit/s to 20 Mbit/s in the middle of a run: noticed, measured, and answered by all hosts."""

import json
import sys
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from thinwire.autopilot.controller import PLANNING_STEPS
from thinwire.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(100)]
WORKER = Path(__file__).with_name("auto_worker.py")
FALLS_AT = PLANNING_STEPS + 5


def test_auto_switches_when_the_link_falls() -> None:
    lines: dict[int, list[dict[str, Any]]] = defaultdict(list)
    falls = threading.Event()

    def on_line(host: int, line: str) -> None:
        if line.startswith("{"):
            lines[host].append(json.loads(line))
            if host == 0 and lines[0][-1].get("step") == FALLS_AT:
                falls.set()

    with Lab(hosts=2, rate="1gbit") as lab:
        running = lab.start([sys.executable, str(WORKER)], on_line=on_line)
        assert falls.wait(60), lines
        lab.set_rate(None, "20mbit")
        result = running.wait(80)
    assert result.ok, f"exit codes {result.exit_codes}"
    first, second = lines[0], lines[1]
    assert first == second, "the hosts have come apart"
    chosen = [line["compress"] for line in first[:-1]]
    assert chosen[FALLS_AT] == "dense", "0.82 MB hide behind 0.2 s of backward at 1 Gbit/s"
    assert chosen[-1] != "dense"
    assert len(chosen) - FALLS_AT < 200
