"""What thinwire says it sends is what the interfaces send, and on a slow link fewer bytes are less time."""

import json
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from thinwire.lab import Lab

pytestmark = pytest.mark.lab
STEPS = 4  # of the worker
WORKER = Path(__file__).with_name("wire_worker.py")
# A frame of 1500 bytes carries 1448 of payload under 66 of Ethernet, IP and TCP headers, and acknowledgements travel too.
HEADERS = 1.045


@pytest.fixture(scope="module")
def measured() -> dict[str, list[dict[str, float]]]:
    lines: dict[str, list[dict[str, float]]] = defaultdict(list)

    def on_line(host: int, line: str) -> None:
        if line.startswith("{"):
            values = json.loads(line)
            lines[values.pop("spec")].append(values)

    with Lab(hosts=3, rate="50mbit") as lab:
        result = lab.run([sys.executable, str(WORKER)], on_line=on_line, timeout_s=100)
    assert result.ok, f"exit codes {result.exit_codes}"
    return lines


@pytest.mark.parametrize("spec", ["dense", "bf16", "int4", "topk(density=0.01)", "powersgd(rank=4)"])
def test_told_bytes_are_the_interfaces_bytes(measured: dict[str, list[dict[str, float]]], spec: str) -> None:
    told = sum(host["wire_bytes"] for host in measured[spec])
    counted = sum(host["interface_bytes"] for host in measured[spec])
    # Acknowledgements and gloo's own headers cost about 14 kB per host and step, whatever is sent.
    allowance_bytes = 20_000 * len(measured[spec]) * STEPS
    assert told <= counted <= told * HEADERS * 1.03 + allowance_bytes


def test_fewer_bytes_are_less_time(measured: dict[str, list[dict[str, float]]]) -> None:
    step_s = {spec: max(host["step_s"] for host in hosts) for spec, hosts in measured.items()}
    assert step_s["bf16"] < 0.8 * step_s["dense"]
    assert step_s["int4"] < 0.5 * step_s["dense"]


def test_replicas_agree(measured: dict[str, list[dict[str, float]]]) -> None:
    for spec, hosts in measured.items():
        assert len({host["checksum"] for host in hosts}) == 1, spec
