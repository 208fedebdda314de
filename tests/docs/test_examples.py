"""Every file in ``examples/`` runs, on two ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
STEPS = {"plain_module.py": 20, "sparse_adamw.py": 8}  # long enough for a plan, and for updates with an age
RANKS = 2

# A store in a file: torchrun's own would listen on every interface.
_RANK = """
import runpy, sys, torch, torch.distributed as dist
path, store, rank, ranks, steps = sys.argv[1:]
init = dist.init_process_group
dist.init_process_group = lambda backend: init(
    backend, init_method="file://" + store, rank=int(rank), world_size=int(ranks)
)
torch.set_num_threads(1)
sys.argv = [path, "--steps", steps]
runpy.run_path(path, run_name="__main__")
"""


@pytest.mark.gloo
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_examples_run(example: Path, tmp_path: Path) -> None:
    steps = str(STEPS.get(example.name, 4))
    commands = [
        [sys.executable, "-c", _RANK, str(example), str(tmp_path / "store"), str(rank), str(RANKS), steps]
        for rank in range(RANKS)
    ]
    ranks = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
        for command in commands
    ]
    try:
        said = [rank.communicate(timeout=90) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * RANKS, "\n".join(errors for _, errors in said)
    assert "loss" in said[0][0] or "sent" in said[0][0]


def test_every_example_is_a_section_of_the_page() -> None:
    page = (ROOT / "docs/how-to/examples.md").read_text(encoding="utf-8")
    assert all(f'"examples/{path.name}"' in page for path in [*EXAMPLES, ROOT / "examples/slurm.sh"])
