"""A training process needs torch and numpy only; the command says what else it needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import thinwire.cli
from surface.test_imports import ROOT, SOURCES, imports_of

EXTRA = thinwire.cli.EXTRA
MAY_USE_IT = ("cli/", "demo/", "observe/html/")

_TRAINING = """
import sys
import thinwire
import torch
import torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
model = torch.nn.Linear(4, 4)
optimizer = thinwire.optim.SGD(model.parameters(), lr=0.1)
with thinwire.attach(model, optimizer, events=sys.argv[1] + ".jsonl") as wire:
    for _ in range(2):
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
    wire.explain()
    wire.state_dict()
import thinwire.amp, thinwire.plan, thinwire.observe.events
print(sorted(sys.modules.keys() & set(sys.argv[2:])))
"""


def test_training_loads_nothing_of_the_extra(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _TRAINING, str(tmp_path / "store"), *sorted(EXTRA)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("source", [source for source in SOURCES if not source.startswith(MAY_USE_IT)])
def test_the_extra_is_imported_on_top_only(source: str) -> None:
    assert not EXTRA & {module.split(".")[0] for module in imports_of(ROOT / source)}


@pytest.mark.parametrize("missing", sorted(EXTRA))
def test_the_command_names_the_extra(missing: str, tmp_path: Path) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from thinwire.cli import main; main()"
    command = [sys.executable, "-c", code, "report", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [f"thinwire: the command needs {missing}; run: pip install 'thinwire[cli]'"]
