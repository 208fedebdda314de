"""Several machines: one torchrun agent per host finds the others by a c10d rendezvous, exactly as on a real cluster."""

import os
import sys
from pathlib import Path

import pytest

from thinwire.lab import Lab, lab_available

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(not lab_available()[0], reason=lab_available()[1] or "available"),
]
HOSTS = 2
WORKER = """
import datetime, socket, torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
total = torch.full((100_000,), float(dist.get_rank() + 1))
dist.all_reduce(total)
expected = sum(range(1, dist.get_world_size() + 1))
assert torch.equal(total, torch.full_like(total, expected)), total
print(f"sum {expected} on {socket.gethostname()}")
dist.destroy_process_group()
"""
AGENT = (
    f'exec "$0" -m torch.distributed.run --nnodes={HOSTS} --nproc-per-node=1 --rdzv-id=lab --rdzv-backend=c10d '
    '--rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" "$1"'
)


@pytest.mark.timeout(180)
def test_torchrun_agents_all_reduce_over_the_lab(tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    lines: list[str] = []
    with Lab(hosts=HOSTS, rate="200mbit") as lab:
        result = lab.run(
            ["sh", "-c", AGENT, sys.executable, str(worker)],
            timeout_s=120,
            on_line=lambda host, line: lines.append(line),
        )
    assert result.ok, os.linesep.join(lines)
    assert {line for line in lines if line.startswith("sum")} == {f"sum 3 on host{host}" for host in range(HOSTS)}
    assert result.sent_bytes is not None
    assert min(result.sent_bytes) > 100_000 * 4  # the reduction really went over the links
