"""Drift between two measured steps, until ``engine.regroup`` goes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from sim.fusion_models import case
from thinwire.engine.profiling import Measured
from thinwire.fusion import Curve


def _measured(scale: float = 1.0, encode: float = 1.0, message: float = 1.0, cost_s: float = 0.0) -> Measured:
    curves = [Curve(((0.0, 1e-4 * factor), (1000.0, 1e-3 * factor))) for factor in (encode, message)]
    one = case([1000, 10], [0.010 * scale, 0.011 * scale], curves[0], curves[1], density=0.1, bytes_per_elem=8.0)
    return Measured(one.profile, one.costs, cost_s)


@pytest.mark.parametrize("what", ["scale", "encode", "message"])
@pytest.mark.parametrize("factor", [0.8, 1.2])
def test_each_kind_of_drift_is_seen(what: str, factor: float) -> None:
    assert _measured().relative_drift(_measured(**{what: factor})) == pytest.approx(0.2)


def test_drift_counts_the_groups_in_use() -> None:
    """Start-up doubled, bandwidth as before: one message feels it less than two do."""
    before = _measured()
    after = replace(before, costs=replace(before.costs, message=Curve(((0.0, 2e-4), (1000.0, 1.1e-3)))))
    assert before.relative_drift(after, [before.profile.specs]) < before.relative_drift(after)
    assert before.relative_drift(before) == 0.0


def test_other_tensors_are_infinite_drift() -> None:
    before = _measured()
    assert before.relative_drift(replace(before, profile=before.profile.without({"t1"}))) == math.inf


def test_a_message_delays_what_comes_behind_it() -> None:
    free, costly = _measured(), _measured(cost_s=0.5)
    groups = [(tensor,) for tensor in free.profile.specs]
    assert costly.finish_s(groups) >= free.finish_s(groups) + 0.5
