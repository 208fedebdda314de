"""A restored run goes on bit for bit as if it had never ended: from checkpoints, and from every point of the log."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from checkpoint.loops import OPTIMIZERS, Job
from thinwire.checkpoint import Checkpointer
from thinwire.core import CheckpointError, ConfigError


def run(job: Job, directory: Path, steps: int, **settings: Any) -> list[dict[str, Any]]:
    """Train to ``steps`` from wherever the directory leads; the state after every step."""
    seen = []
    with Checkpointer(directory, job.model, job.optimizer, extra=job.extra, **settings) as checkpoints:
        for step in range(checkpoints.restore(), steps):
            job.step()
            checkpoints.maybe_save(step + 1)
            seen.append(job.everything())
            checkpoints.wait()  # these steps are shorter than starting a writer
        assert not checkpoints.failures
    return seen


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_replay_is_bit_exact(optimizer: str, tmp_path: Path) -> None:
    torch.manual_seed(5)
    job = Job(optimizer, scaler=optimizer == "momentum")
    straight = run(job, tmp_path, 7, every=4, log=True)
    again = Job(optimizer, seed=99, scaler=optimizer == "momentum")
    with Checkpointer(tmp_path, again.model, again.optimizer, extra=again.extra, log=True) as checkpoints:
        assert checkpoints.restore() == 7
        assert checkpoints.restored is not None
        assert (checkpoints.restored.full_step, checkpoints.restored.replayed) == (4, 3)
        assert again.everything() == straight[6]
    with Checkpointer(tmp_path, again.model, again.optimizer, extra=again.extra) as checkpoints:
        assert checkpoints.restore(step=6) == 6
        assert again.everything() == straight[5]
    again.step()
    assert again.everything() == straight[6], "what follows is the same too"


def test_without_a_log_the_last_full_one_counts(tmp_path: Path) -> None:
    straight = run(Job(), tmp_path, 10, every=4)
    again = Job(seed=3)
    resumed = run(again, tmp_path, 10, every=4)
    assert len(resumed) == 2, "steps 9 and 10 are repeated"
    assert resumed == straight[8:]


def test_a_log_goes_on_over_several_runs(tmp_path: Path) -> None:
    straight = run(Job(), tmp_path / "one", 12, every=100, log=True)
    pieces = [run(Job(seed=s), tmp_path / "many", upto, every=100, log=True) for s, upto in ((0, 4), (1, 9), (2, 12))]
    assert [state for piece in pieces for state in piece] == straight


def test_the_state_of_the_interrupted_moment_is_not_needed(tmp_path: Path) -> None:
    """No context manager, no close: a writer process drains what it was given."""
    job = Job()
    checkpoints = Checkpointer(tmp_path, job.model, job.optimizer, extra=job.extra, every=3, log=True)
    for step in range(5):
        job.step()
        checkpoints.maybe_save(step + 1)
    expected = job.everything()
    checkpoints._join_copy()
    checkpoints._client._channel.close()  # as a killed process leaves it
    again = Job(seed=8)
    with Checkpointer(tmp_path, again.model, again.optimizer, extra=again.extra) as restored:
        assert restored.restore() == 5
        assert again.everything() == expected
    checkpoints._client._process.wait(10)


def test_sparse_and_missing_gradients(tmp_path: Path) -> None:
    """Mostly zeros, negative zeros, sparse tensors, no gradient at all."""

    def make() -> tuple[nn.ParameterDict, torch.optim.Optimizer]:
        torch.manual_seed(0)
        names = ("zeros", "odd", "dense", "unused")
        model = nn.ParameterDict({name: nn.Parameter(torch.randn(9001)) for name in names})
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    model, optimizer = make()
    with Checkpointer(tmp_path, model, optimizer, log=True, every=100) as checkpoints:
        for step in range(4):
            for name in ("zeros", "odd", "dense"):
                gradient = torch.randn(9001)
                if name != "dense":
                    gradient[torch.rand(9001) > 0.01] = 0.0
                if name == "odd":
                    gradient[-1], gradient[5] = 1.0, -0.0
                model[name].grad = gradient
            optimizer.step()
            checkpoints.maybe_save(step + 1)
    again, other = make()
    with Checkpointer(tmp_path, again, other) as checkpoints:
        assert checkpoints.restore() == 4
    for name in model:
        assert torch.equal(model[name].view(torch.int32), again[name].view(torch.int32))
        buffer, restored = optimizer.state[model[name]], other.state[again[name]]
        assert buffer.keys() == restored.keys()
        if "momentum_buffer" in buffer:
            assert torch.equal(
                buffer["momentum_buffer"].view(torch.int32), restored["momentum_buffer"].view(torch.int32)
            )
    small = sum(path.stat().st_size for path in tmp_path.glob("log-*"))
    assert small < 3 * (9001 * 4 + 2 * 9001 * 0.02 * 8 + 20_000)


def test_what_cannot_be_logged_is_refused(tmp_path: Path) -> None:
    import thinwire

    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"torch\.optim"):
        Checkpointer(tmp_path, model, thinwire.optim.AdamW(model.parameters()), log=True)
    with pytest.raises(ConfigError, match="needs the optimizer"):
        Checkpointer(tmp_path, model, log=True)


def test_a_closure_pauses_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).square().sum()
        loss.backward()
        return loss

    with caplog.at_level(logging.ERROR), Checkpointer(tmp_path, model, optimizer, log=True) as checkpoints:
        for step in range(3):
            optimizer.step(closure)
            checkpoints.maybe_save(step + 1)
        checkpoints.wait()
        assert checkpoints.last_saved is not None, "full checkpoints take the place of the log"
    assert any("closure" in failure for failure in checkpoints.failures)


def test_another_model_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    job = Job()
    with Checkpointer(tmp_path, job.model, job.optimizer, extra=job.extra) as checkpoints:
        checkpoints.save(1)
    other = Job(width=32)
    before = other.everything()
    with Checkpointer(tmp_path, other.model, other.optimizer, extra=other.extra) as checkpoints:
        with pytest.raises(CheckpointError, match="build the model as in the run that was saved"):
            checkpoints.restore()
        assert other.everything() == before
        with pytest.raises(CheckpointError, match="no point of step 7"):
            checkpoints.restore(step=7)
