"""What thinwire says it sends is what the interfaces send, and on a slow link fewer bytes are less time."""

import json
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from lab.wire_specs import SPECS
from thinwire.lab import Lab

pytestmark = pytest.mark.lab
WORKER = Path(__file__).with_name("wire_worker.py")
RESENT_BYTES = 65_536  # of all hosts and steps together: one segment that TCP sent again


@pytest.fixture(scope="module")
def measured() -> dict[str, list[dict[str, float]]]:
    lines: dict[str, list[dict[str, float]]] = defaultdict(list)

    def on_line(host: int, line: str) -> None:
        if line.startswith("{"):
            values = json.loads(line)
            lines[values.pop("spec")].append(values)

    with Lab(hosts=3, rate="200mbit") as lab:
        result = lab.run([sys.executable, str(WORKER)], on_line=on_line, timeout_s=150)
    assert result.ok, f"exit codes {result.exit_codes}"
    return lines


@pytest.mark.parametrize("spec", SPECS)
def test_told_bytes_are_the_interfaces_bytes(measured: dict[str, list[dict[str, float]]], spec: str) -> None:
    told = sum(host["wire_bytes"] for host in measured[spec])
    counted = sum(host["interface_bytes"] for host in measured[spec])
    assert 0.995 * told <= counted <= 1.03 * told + RESENT_BYTES


def test_fewer_bytes_are_less_time(measured: dict[str, list[dict[str, float]]]) -> None:
    step_s = {spec: max(host["step_s"] for host in hosts) for spec, hosts in measured.items()}
    assert step_s["bf16"] < 0.8 * step_s["dense"]
    assert step_s["int4"] < 0.5 * step_s["dense"]


def test_replicas_agree(measured: dict[str, list[dict[str, float]]]) -> None:
    for spec, hosts in measured.items():
        assert len({host["checksum"] for host in hosts}) == 1, spec
