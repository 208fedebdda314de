"""Errors on gradients: of a sample that stands for all."""

from __future__ import annotations

import pytest
import torch

import thinwire.api  # noqa: F401  (fills the registry)
from sim.threads import ThreadedWorld
from thinwire.autopilot.measure import gradient_errors
from thinwire.comm import Link
from thinwire.core import TensorSpec, make
from thinwire.exchange import Channel, Fixed
from thinwire.fusion.groups import GroupPlan


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


def test_squared_norms_of_transactions_that_commit() -> None:
    """Only where they are asked for: they cost a pass over the gradients."""
    tensors = [TensorSpec("a", (2,)), TensorSpec("b", (1,))]
    link = Link(ThreadedWorld(1).transport(0))
    channel = Channel("grad", tensors, Fixed(link), make("dense"), [GroupPlan(("a",)), GroupPlan(("b",))])
    reports = []
    for wanted, commits in ((False, True), (True, False), (True, True)):
        channel.measure(norms=wanted)
        transaction = channel.begin(scale=4.0)
        transaction.add("a", 4 * torch.tensor([1.0, 2.0]))
        transaction.add("b", 4 * torch.tensor([3.0 if commits else float("nan")]))
        transaction.close()
        outcome = transaction.wait()
        assert outcome.committed is commits
        reports.append(outcome.report)
    link.close()
    assert not reports[0].local_sq
    assert not reports[0].mean_sq
    assert not reports[1].local_sq, "a transaction that is dropped must not enter any statistic"
    assert not reports[1].mean_sq
    assert reports[2].local_sq == {"a": pytest.approx(5.0), "b": pytest.approx(9.0)}
    assert reports[2].mean_sq == {"a": pytest.approx(5.0), "b": pytest.approx(9.0)}
