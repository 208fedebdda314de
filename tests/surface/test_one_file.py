"""A policy, an engine, an observer: one new file and at most one line of registration, then ``attach`` uses it.

Each is put into a copy of the package and used on one gloo rank. For compressors see contract/test_one_file_compressor.py.
"""

from __future__ import annotations

import difflib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import thinwire

PACKAGE = Path(thinwire.__file__).parent
NEW = Path(__file__).parent / "one_file"  # not .py: the package must learn of them by the registration alone
# Where the file goes; the registry, a line in it, and the line that goes before that one. Observers need none.
ADDED: dict[str, tuple[str, tuple[str, str, str] | None]] = {
    "policy": (
        "sync/rarely.py",
        (
            "sync/policy.py",
            '    "every_step": "thinwire.sync.every_step:EveryStep",\n',
            '    "rarely": "thinwire.sync.rarely:Rarely",\n',
        ),
    ),
    "engine": (
        "engine/on_demand.py",
        (
            "engine/target.py",
            '    Kind("plain", lambda m: True, "thinwire.engine.plain:PlainEngine"),\n',
            '    Kind("on_demand", lambda m: hasattr(m, "asks"), "thinwire.engine.on_demand:OnDemandEngine"),\n',
        ),
    ),
    "observer": ("observe/notes.py", None),
}
HEAD = """
import sys, torch, torch.distributed as dist, thinwire
from thinwire.core import ConfigError
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step():
    optimizer.zero_grad()
    model(torch.ones(5, 4)).square().sum().backward()
    optimizer.step()
"""
USES = {
    "policy": """
from thinwire.sync import policies
assert "rarely" in policies(), policies()
for bad in ("rarely(every=0)", "rarely(often=1)", "seldom"):
    try:
        thinwire.attach(model, optimizer, sync=bad)
    except ConfigError as error:
        print(error)
    else:
        raise AssertionError(bad)
from sim.threads import ThreadedWorld, run_ranks
world = ThreadedWorld(2, lanes=2)
def train(rank):
    model = torch.nn.Linear(4, 3)
    optimizer, averaged = torch.optim.SGD(model.parameters(), lr=0.1), []
    with thinwire.attach(model, optimizer, sync="rarely(every=2)", transport=world.transport(rank)) as wire:
        for _ in range(10):
            model(torch.full((5, 4), 1.0 + rank)).square().sum().backward()
            optimizer.step()
            averaged.append(wire.stats().steps)
            weights = model.weight.tolist()
    return averaged, weights
first, second = run_ranks(train, 2)
assert first[0] == second[0] == [0, 1, 1, 1, 1, 2, 2, 2, 2, 2], first
assert first[1] != second[1], "gradients stay local"
""",
    "engine": """
from thinwire.engine.target import KINDS
assert [kind.name for kind in KINDS] == ["ddp", "on_demand", "plain"]
model.asks = True
with thinwire.attach(model, optimizer, compress="dense") as wire:
    step()
    assert wire.stats().steps == 0, "backward averages nothing"
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.average()
    assert wire.stats().steps == 1
    assert all(torch.equal(p.grad, one) for p, one in zip(model.parameters(), expected))
    model[0].bias.grad[0] = float("nan")
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model.average()
    optimizer.step()
    assert wire.stats().skipped_steps == 1
    assert all(torch.equal(p, one) for p, one in zip(model.parameters(), before)), "the step is skipped"
    assert wire.state_dict()["step"] == 2
assert not hasattr(model, "average")
""",
    "observer": """
import logging
from thinwire.observe.notes import Notes
class Failing(Notes):
    def on_step(self, report):
        super().on_step(report)
        raise OSError("the disk is full")
notes, failing = Notes(), Failing()
said = []
logging.getLogger("thinwire.observe.observer").addHandler(logging.Handler())
logging.getLogger("thinwire.observe.observer").addFilter(lambda record: said.append(record.getMessage()))
with thinwire.attach(model, optimizer, compress="dense", observers=[failing, notes]) as wire:
    for _ in range(3):
        step()
    assert set(notes.norms) == {name for name, _ in model.named_parameters()}
    assert notes.norms["1.bias"] == float(model[1].bias.grad.norm())
    assert notes.wire_bytes == wire.stats().wire_bytes
assert notes.calls == ["commit 0", "step 0", "commit 1", "step 1", "commit 2", "step 2", "close"], notes.calls
assert failing.calls == ["commit 0", "step 0"], "one that raises is dropped, and training goes on"
assert said == ["Failing failed in on_step and is dropped"], said
""",
}


@pytest.mark.parametrize("kind", ADDED)
def test_it_is_one_short_file_and_one_line(kind: str) -> None:
    assert len((NEW / f"{kind}.py.txt").read_text().splitlines()) <= 60
    path, registration = ADDED[kind]
    assert not (PACKAGE / path).exists()
    if registration is not None:
        registry, beside, _ = registration
        assert (PACKAGE / registry).read_text().count(beside) == 1


@pytest.mark.parametrize("kind", ADDED)
def test_attach_uses_it(kind: str, tmp_path: Path) -> None:
    copy = tmp_path / "root" / "thinwire"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    path, registration = ADDED[kind]
    shutil.copy(NEW / f"{kind}.py.txt", copy / path)
    if registration is not None:
        _register(copy, *registration)
    command = [sys.executable, "-W", "error::UserWarning:thinwire", "-c", HEAD + USES[kind] + "print('used')\n"]
    helpers = Path(__file__).parents[1]  # ranks as threads: a policy has nothing to do on one rank
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(copy.parent), str(helpers)])}
    done = subprocess.run(
        [*command, str(tmp_path / "store")], env=environment, capture_output=True, text=True, timeout=100, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("used\n")
    if kind == "policy":
        assert "expected one of adacomm, diloco, every_step" in done.stdout


def _register(copy: Path, registry: str, beside: str, line: str) -> None:
    """The more special kind goes first: the first one that accepts a module is used."""
    before = (copy / registry).read_text()
    after = before.replace(beside, line + beside)
    changed = [one for one in difflib.ndiff(before.splitlines(), after.splitlines()) if one[0] in "+-"]
    assert changed == [f"+ {line.rstrip()}"], "one line"
    (copy / registry).write_text(after)
