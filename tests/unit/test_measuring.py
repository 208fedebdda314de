"""Errors on gradients: of a sample that stands for all."""

from __future__ import annotations

import pytest
import torch

import thinwire.api  # noqa: F401  (fills the registry)
from thinwire.core import TensorSpec, UnitSpec, make
from thinwire.engine.groups import Unit
from thinwire.engine.measuring import gradient_errors
from thinwire.engine.norms import Norms


def test_errors_are_of_these_gradients() -> None:
    """What 4 bits cannot hold: one value in sixteen is ten times the others."""
    flat = torch.full((64, 1024), 1.0)
    spiky = flat.clone()
    spiky[:, ::16] = 10.0
    errors = gradient_errors(["dense", "int4"], {"flat": flat, "spiky": spiky, "bias": torch.ones(64)})
    assert errors["dense"] == {"flat": 0.0, "spiky": 0.0, "bias": 0.0}
    assert errors["int4"]["bias"] == 0.0, "vectors go dense"
    assert errors["int4"]["flat"] < 1e-4
    assert errors["int4"]["spiky"] > 1e-2


def test_a_few_tensors_stand_for_many() -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = {f"layer{i}": torch.randn(64, 64, generator=generator) for i in range(300)}
    errors = gradient_errors(["int4"], gradients)["int4"]
    assert errors.keys() == gradients.keys()
    assert len(set(errors.values())) < 100
    assert all(0.005 < error < 0.03 for error in errors.values())


def test_norms_of_steps_that_count() -> None:
    norms = Norms()
    unit = Unit(UnitSpec((TensorSpec("a", (2,)), TensorSpec("b", (1,)))), make("dense"))
    x = torch.tensor([1.0, 2.0, 3.0])
    for wanted, counts in ((False, True), (True, False), (True, True), (True, True)):
        norms.wanted = wanted
        norms.add_local(unit, x)
        norms.add_mean(unit, x / 2)
        norms.end_step(counts)
    assert norms.local_sq == {"a": pytest.approx(10.0), "b": pytest.approx(18.0)}
    assert norms.mean_sq == {"a": pytest.approx(2.5), "b": pytest.approx(4.5)}
    norms.clear()
    assert not norms.local_sq
