"""Model profiles: real steps that leave no trace, FLOPs, ready order, and the gradient noise."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import thinwire.api  # noqa: F401  (fills the registry)
from thinwire.core import ConfigError
from thinwire.plan import ModelProfile, profile_model
from thinwire.plan.noise import cut, noise_of
from thinwire.plan.profiling import default_loss
from thinwire.plan.target import load_target


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(32, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 48), nn.Dropout(0.1)
    )


@pytest.fixture(scope="module")
def profile() -> ModelProfile:
    return profile_model(make_model(), torch.randn(16, 32), specs=["int4"], steps=2)


def test_gradients_are_ready_from_the_back(profile: ModelProfile) -> None:
    names = [tensor.fqn for tensor in profile.specs]
    assert names.index("3.weight") < names.index("0.weight")
    assert all(0 <= one.ready_s <= profile.backward_s * 2 for one in profile.tensors)
    assert profile.elems == 32 * 64 + 64 + 64 + 64 * 48 + 48


def test_flops_are_those_of_the_matrix_products(profile: ModelProfile) -> None:
    """Two per multiply-add, three products per layer, but no gradient with respect to the input of the first."""
    assert profile.flops == 2 * 16 * (2 * 32 * 64 + 3 * 64 * 48)
    assert profile.memory_bytes > 3 * 4 * profile.elems
    assert profile.batch == 16


def test_nothing_is_left_behind() -> None:
    model = make_model()
    model.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    kept = torch.ones_like(model[0].weight)  # type: ignore[arg-type]
    model[0].weight.grad = kept  # type: ignore[union-attr]
    state = torch.get_rng_state()
    profile_model(model, torch.randn(8, 32, generator=torch.Generator().manual_seed(0)), steps=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model[0].weight.grad is kept
    assert model[3].weight.grad is None
    assert not model.training
    assert not model[0].weight._post_accumulate_grad_hooks  # type: ignore[union-attr]


def test_json_round_trip(profile: ModelProfile, tmp_path: Path) -> None:
    profile.save(tmp_path / "profile.json")
    assert ModelProfile.load(tmp_path / "profile.json") == profile
    (tmp_path / "other.json").write_text('{"version": 7}')
    with pytest.raises(ConfigError, match="version"):
        ModelProfile.load(tmp_path / "other.json")


def test_errors_are_measured_on_the_gradients(profile: ModelProfile) -> None:
    error = profile.error("int4")
    assert error is not None
    assert 0 < error < 0.1
    assert profile.errors["int4"]["3.bias"] == 0.0  # too small to be compressed
    assert profile.error("int8") is None


def test_slower_cores_scale_all_times(profile: ModelProfile) -> None:
    slow = profile.scaled(2.0)
    assert slow.compute_s == pytest.approx(2 * profile.compute_s)
    assert slow.slowdown == 2 * profile.slowdown
    assert slow.flops == profile.flops
    assert slow.noise == profile.noise


def test_noise_of_a_known_distribution() -> None:
    """y = w·x with loss w·x: the gradient of a sample is x itself, so its moments are known."""
    generator = torch.Generator().manual_seed(3)
    mean, samples = torch.tensor([3.0, -4.0]), 4096

    class Dot(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ self.w).mean()

    batch = mean + 10 * torch.randn(samples, 2, generator=generator)
    profile = profile_model(Dot(), batch, steps=1)
    found = profile.noise["w"]
    assert found.signal_sq == pytest.approx(25.0, rel=0.2)
    noise_sq = 2 * 100.0 / samples  # few parts estimate it roughly
    assert 0 < found.noise_sq < 8 * noise_sq


@given(
    st.floats(min_value=0, max_value=1e3), st.floats(min_value=0, max_value=1e3), st.integers(min_value=2, max_value=8)
)
def test_noise_formulas_are_solved(signal: float, noise: float, parts: int) -> None:
    found = noise_of(signal + noise, signal + parts * noise, parts)
    assert found.signal_sq == pytest.approx(signal, abs=1e-6)
    assert found.noise_sq == pytest.approx(noise, abs=1e-6)


def test_batches_are_cut_where_they_can_be() -> None:
    x, y = torch.arange(8), torch.arange(16).view(8, 2)
    assert [part.tolist() for part in cut(x, 4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    parts = cut((x, y, "flag"), 2)
    assert [len(part[0]) for part in parts] == [4, 4]
    assert parts[1][1].tolist() == y[4:].tolist()
    assert parts[0][2] == "flag"
    assert cut({"x": x, "y": y}, 2)[0]["y"].shape == (4, 2)
    assert [part.tolist() for part in cut(torch.arange(7), 2)] == [[0, 1, 2], [3, 4, 5]]
    for whole in (torch.zeros(1), torch.tensor(1.0), (torch.zeros(4), torch.zeros(2)), "text", ()):
        assert cut(whole, 2) == []


def test_noise_is_that_of_all_samples_also_where_some_are_left_over() -> None:
    x = torch.randn(7, 4, generator=torch.Generator().manual_seed(5))
    whole, cut_short = (
        profile_model(nn.Linear(4, 1, bias=False), part, lambda m, b: m(b).mean(), steps=1) for part in (x, x[:4])
    )
    assert whole.batch == 7
    assert whole.noise["weight"].noise_sq == pytest.approx(cut_short.noise["weight"].noise_sq * 4 / 7)
    assert whole.noise["weight"].signal_sq == pytest.approx(cut_short.noise["weight"].signal_sq)


def test_a_batch_that_cannot_be_cut_has_no_noise() -> None:
    profile = profile_model(nn.Linear(4, 4), torch.randn(1, 4), steps=1)
    assert profile.noise == {}
    assert profile.relative_noise is None
    assert profile.noise_scale is None
    assert profile.noise_share() is None


def test_nothing_to_train_is_a_message() -> None:
    with pytest.raises(ConfigError, match="trainable"):
        profile_model(nn.ReLU(), torch.randn(2, 2))
    with pytest.raises(ConfigError, match="loss function"):
        default_loss(lambda batch: "words", torch.zeros(1))  # type: ignore[arg-type]


TARGET = """
import torch
from torch import nn

def plain():
    return nn.Linear(4, 2), torch.randn(8, 4)

def with_loss():
    return nn.Linear(4, 2), (torch.randn(8, 4), torch.randint(0, 2, (8,))), nn.functional.cross_entropy

def own_loop():
    def loss(model, batch):
        return model(batch).abs().mean()
    return nn.Linear(4, 2), torch.randn(8, 4), loss

def wrong():
    return "a model"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "planned_target.py").write_text(TARGET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "planned_target", raising=False)
    return tmp_path


@pytest.mark.parametrize("name", ["plain", "with_loss", "own_loop"])
@pytest.mark.parametrize("where", ["planned_target", "planned_target.py"])
def test_targets_are_loaded(folder: Path, where: str, name: str) -> None:
    model, batch, loss = load_target(f"{where}:{name}")
    value: Any = loss(model, batch)
    assert value.numel() == 1
    assert value.requires_grad


@pytest.mark.parametrize(
    "text",
    ["planned_target", "planned_target:nothing", "no_such_module:make", "missing.py:make", "planned_target:wrong"],
)
def test_other_targets_are_messages(folder: Path, text: str) -> None:
    with pytest.raises(ConfigError):
        load_target(text)
