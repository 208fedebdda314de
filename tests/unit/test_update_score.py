"""Top-k by what Adam makes of a gradient: the score ranks, the gradient travels."""

from __future__ import annotations

import pytest
import torch

from thinwire.compressors.topk import TopK
from thinwire.core import ConfigError, Step, TensorSpec, UnitSpec, make
from thinwire.engine.base import ParameterSide
from thinwire.fusion.groups import make_group
from thinwire.fusion.prepare import prepare

UNIT = UnitSpec((TensorSpec("a", (2, 4)), TensorSpec("b", (4,))))
X = torch.tensor([8.0, -7, 6, 5, 4, 3, 2, 1, 1, 2, 3, -4])


def test_the_score_ranks_and_the_gradient_travels() -> None:
    weights = torch.tensor([0.1, 1, 1, 1, 1, 1, 1, 9, 5, 1, 1, 1])
    chosen = TopK(density=0.25, score="update").select(X.clone(), Step(0, UNIT, importance=weights))
    assert chosen.indices.tolist() == [1, 7, 8]  # 8 · 0.1 loses, 1 · 9 and 1 · 5 win
    assert chosen.values.tolist() == [-7.0, 1.0, 1.0]
    assert chosen.counts == (2, 1)
    sent = torch.zeros_like(X)
    sent[chosen.indices.long()] = chosen.values
    assert torch.equal(chosen.residual + sent, X)


def test_without_importance_it_is_the_magnitude() -> None:
    by_update, by_magnitude = (
        TopK(density=0.25, score=s).select(X.clone(), Step(0, UNIT)) for s in ("update", "magnitude")
    )
    assert torch.equal(by_update.indices, by_magnitude.indices)
    assert torch.equal(by_update.residual, by_magnitude.residual)


def test_equal_importance_changes_nothing() -> None:
    weighed = TopK(density=0.25, score="update").select(X.clone(), Step(0, UNIT, importance=torch.full_like(X, 3.0)))
    plain = TopK(density=0.25).select(X.clone(), Step(0, UNIT))
    assert torch.equal(weighed.indices, plain.indices)
    assert torch.equal(weighed.values, plain.values)


def test_importance_comes_from_adams_second_moment() -> None:
    parameters = {name: torch.nn.Parameter(torch.zeros(64, 64)) for name in ("a", "b")}
    tensors = [TensorSpec(name, (64, 64)) for name in parameters]
    (unit,) = make_group(tensors, prepare("topk(density=0.1, score='update')")).units
    optimizer = torch.optim.Adam(parameters.values())
    assert unit.compressor.needs_importance
    assert ParameterSide(parameters, []).importance(unit) is None
    assert ParameterSide(parameters, [optimizer]).importance(unit) is None, (
        "before the first step there is no second moment"
    )
    for parameter in parameters.values():
        parameter.grad = torch.rand(64, 64) + 0.01
    optimizer.step()
    found = ParameterSide(parameters, [optimizer]).importance(unit)
    assert found is not None
    for name, part in zip(parameters, found.split(unit.spec.sizes), strict=True):
        deviation = optimizer.state[parameters[name]]["exp_avg_sq"].reshape(-1).sqrt()
        torch.testing.assert_close(part, (deviation + 0.1 * deviation.mean()).pow(-0.5))


def test_a_tensor_that_never_had_a_gradient_has_finite_importance() -> None:
    parameter = torch.nn.Parameter(torch.zeros(64, 64))
    (unit,) = make_group([TensorSpec("a", (64, 64))], prepare("topk(score='update')")).units
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = torch.zeros(64, 64)
    optimizer.step()
    found = ParameterSide({"a": parameter}, [optimizer]).importance(unit)
    assert found is not None
    assert bool(found.isfinite().all())


def test_other_scores_are_refused() -> None:
    with pytest.raises(ConfigError, match="score is 'size'; expected 'magnitude' or 'update'"):
        make("topk(score='size')")
