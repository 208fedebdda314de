"""Other formats in and out, and the nested state dict."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from checkpoint.loops import Job
from thinwire.checkpoint import Checkpointer, export_dcp, export_safetensors, import_dcp, import_safetensors
from thinwire.core import CheckpointError


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Job]:
    job = Job()
    with Checkpointer(tmp_path / "own", job.model, job.optimizer, extra=job.extra) as checkpoints:
        for _ in range(3):
            job.step()
        checkpoints.save(3)
    return tmp_path / "own", job


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_safetensors_both_ways(saved: tuple[Path, Job], tmp_path: Path) -> None:
    directory, job = saved
    assert export_safetensors(directory, tmp_path / "model.safetensors") == 3
    other = Job(seed=5)
    import_safetensors(tmp_path / "model.safetensors", other.model)
    assert same(job.model, other.model)
    with pytest.raises(CheckpointError, match="of another model"):
        import_safetensors(tmp_path / "model.safetensors", nn.Linear(2, 2))


def test_the_safetensors_package_reads_ours_and_we_read_its(saved: tuple[Path, Job], tmp_path: Path) -> None:
    package = pytest.importorskip("safetensors.torch")
    directory, job = saved
    export_safetensors(directory, tmp_path / "ours.safetensors")
    theirs = package.load_file(tmp_path / "ours.safetensors")
    assert all(torch.equal(theirs[name], value) for name, value in job.model.state_dict().items())
    package.load_file(directory / "step-00000003" / "rank-00000.safetensors")
    package.save_file(job.model.state_dict(), tmp_path / "theirs.safetensors")
    other = Job(seed=5)
    import_safetensors(tmp_path / "theirs.safetensors", other.model)
    assert same(job.model, other.model)


@pytest.mark.filterwarnings("ignore")
def test_dcp_both_ways_and_only_when_trusted(saved: tuple[Path, Job], tmp_path: Path) -> None:
    directory, job = saved
    fresh, other = Job(seed=4), Job(seed=5)
    assert export_dcp(directory, tmp_path / "dcp", fresh.model, fresh.optimizer) == 3
    with pytest.raises(CheckpointError, match="trust=True"):
        import_dcp(tmp_path / "dcp", other.model, other.optimizer)
    import_dcp(tmp_path / "dcp", other.model, other.optimizer, trust=True)
    assert same(job.model, other.model)
    for mine, theirs in zip(job.optimizer.state.values(), other.optimizer.state.values(), strict=True):
        assert torch.equal(mine["exp_avg_sq"], theirs["exp_avg_sq"])


@pytest.mark.filterwarnings("ignore")
def test_nested_in_a_dcp_state_dict(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    job, other = Job(), Job(seed=6)
    job.step()
    other.step()  # DCP loads in place: the optimizer must have state
    with Checkpointer(tmp_path / "a", job.model, job.optimizer, extra=job.extra) as checkpoints:
        save({"training": checkpoints}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    expected = job.everything()
    with Checkpointer(tmp_path / "b", other.model, other.optimizer, extra=other.extra) as checkpoints:
        load({"training": checkpoints}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    got = other.everything()
    assert {k: v for k, v in got.items() if k != "rng"} == {k: v for k, v in expected.items() if k != "rng"}


def test_states_of_all_kinds_come_back(tmp_path: Path) -> None:
    import numpy as np

    kinds = {
        "tuple": (1, 2.5, (None, True)), "odd keys": {3: "x", (1, 2): [4]}, "inf": float("inf"), "bytes": b"\x00\xff",
        "array": np.arange(5), "bf16": torch.ones(3, dtype=torch.bfloat16), "complex": torch.ones(2, dtype=torch.complex64),
        "empty": torch.empty(0, 3), "zero-d": torch.tensor(4), "$x": 1, "nested": {"$tensor": "not one"},
    }  # fmt: skip
    box: dict[str, object] = dict(kinds)
    model = nn.Linear(1, 1)
    with Checkpointer(tmp_path, model, extra={"box": box}) as checkpoints:
        checkpoints.save(1)
        box.clear()
        assert checkpoints.restore() == 1
    assert box.keys() == kinds.keys()
    assert str(box) == str(kinds)
