"""SIDCo: fitted thresholds, and stages that adapt tensor by tensor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from contract.world import run_unit
from thinwire.compressors.contrib.sidco import LAWS, SIDCo
from thinwire.core import ConfigError, Step, TensorSpec, UnitSpec

FLAT = UnitSpec.flat(40_000)


def exponential(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    magnitudes = -torch.rand(FLAT.numel, generator=generator).clamp(min=1e-12).log()
    return magnitudes * torch.randn(FLAT.numel, generator=generator).sign()


def achieved(compressor: SIDCo, x: Tensor, stages: float) -> float:
    """What is sent, over what is wanted."""
    thresholds = compressor.staged(x, FLAT, torch.tensor([stages]))
    return compressor.exceeding(x.clone(), thresholds, FLAT).indices.numel() / (compressor.density * FLAT.numel)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("stages", [1.0, 3.0])
def test_magnitudes_of_the_assumed_law_are_cut_at_the_wanted_density(law: str, stages: float) -> None:
    assert achieved(SIDCo(density=0.01, law=law), exponential(0), stages) == pytest.approx(1, abs=0.2)


def test_more_stages_follow_a_tail_that_one_fit_misses() -> None:
    heavy = exponential(0).sign() * exponential(0).abs().pow(2)
    one, four = (achieved(SIDCo(density=0.01), heavy, stages) for stages in (1.0, 4.0))
    assert one > 1.5
    assert abs(four - 1) < abs(one - 1) / 2


def test_the_stages_of_a_tensor_move_until_it_sends_what_is_wanted() -> None:
    unit = UnitSpec((TensorSpec("heavy", FLAT.tensors[0].shape), TensorSpec("fitting", FLAT.tensors[0].shape)))
    gradients = [[torch.cat([exponential(s).sign() * exponential(s).abs().pow(2), exponential(s)])] for s in range(45)]
    compressor = SIDCo(density=0.01)
    rounds = run_unit(compressor, unit, gradients)
    heavy, fitting = rounds[-1].results[0].state["stages"].tolist()
    assert heavy > 1
    assert fitting == 1
    sent = [int((done.results[0].mean[: FLAT.numel] != 0).sum()) for done in rounds]
    assert sent[0] > 1.5 * 400
    assert sum(sent[-5:]) / 5 == pytest.approx(400, rel=0.35)


def test_tensors_that_travel_together_do_not_influence_each_other() -> None:
    specs = [TensorSpec("a", (90, 50)), TensorSpec("b", (600,))]
    gradients = [torch.randn(5100, generator=torch.Generator().manual_seed(s)).pow(3) for s in range(12)]
    together = run_unit(SIDCo(density=0.05), UnitSpec(tuple(specs)), [[g] for g in gradients])
    first = run_unit(SIDCo(density=0.05), UnitSpec((specs[0],)), [[g[:4500]] for g in gradients])
    second = run_unit(SIDCo(density=0.05), UnitSpec((specs[1],)), [[g[4500:]] for g in gradients])
    for whole, *parts in zip(together, first, second, strict=True):
        assert torch.equal(whole.results[0].mean, torch.cat([part.results[0].mean for part in parts]))


def test_a_high_density_takes_one_stage() -> None:
    x = exponential(1)
    thresholds = SIDCo(density=0.5).staged(x, FLAT, torch.tensor([4.0]))
    assert torch.equal(thresholds, SIDCo(density=0.5).thresholds(x, FLAT))
    assert SIDCo(density=0.5).select(x, Step(0, FLAT)).indices.numel() == pytest.approx(20_000, rel=0.05)


def test_unknown_law_is_refused() -> None:
    with pytest.raises(ConfigError, match="exponential, gamma, pareto"):
        SIDCo(law="normal")
