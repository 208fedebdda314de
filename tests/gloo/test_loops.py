"""Models and loops that plain DDP runs, on two real processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gloo import disjoint_cases
from gloo.launch import shared_launch
from gloo.loop_cases import CASES

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(200)]


@pytest.mark.parametrize("case", CASES)
def test_on_two_ranks(case: str) -> None:
    shared_launch("loop_cases", 2, timeout_s=190.0).values(case)


@pytest.mark.parametrize("case", disjoint_cases.CASES)
def test_on_some_of_four_ranks(case: str) -> None:
    shared_launch("disjoint_cases", 4).values(case)


_FORGETFUL = """
import sys, torch, torch.distributed as dist, thinwire
dist.init_process_group("gloo", init_method=sys.argv[1], rank=int(sys.argv[2]), world_size=2)
model = torch.nn.Linear(64, 64)
if sys.argv[3] == "ddp":
    model = torch.nn.parallel.DistributedDataParallel(model)
wire = thinwire.attach(model, compress="int4")
for _ in range(3):
    model(torch.ones(2, 64)).sum().backward()
dist.destroy_process_group()  # without it gloo's own threads abort the process now and then, also under stock DDP
"""


@pytest.mark.parametrize("engine", ["plain", "ddp"])
def test_a_script_may_end_without_detach(engine: str, tmp_path: Path) -> None:
    """No abort when Python ends: no thread of ours is inside torch then."""
    for attempt in range(3):
        store = f"file://{tmp_path}/store{attempt}"
        command = [sys.executable, "-c", _FORGETFUL, store]
        ranks = [subprocess.Popen([*command, str(rank), engine], stderr=subprocess.PIPE) for rank in range(2)]
        for rank in ranks:
            _, errors = rank.communicate(timeout=60)
            assert rank.returncode == 0, errors.decode()
