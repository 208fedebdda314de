"""RedSync: a threshold between mean and maximum, bisected until k to 2k entries exceed it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire.compressors.contrib.redsync import RedSync
from thinwire.compressors.shared.sparse import kept
from thinwire.core import Step, TensorSpec, UnitSpec

UNIT = UnitSpec((TensorSpec("a", (60, 50)), TensorSpec("none", (0,)), TensorSpec("b", (777,)), TensorSpec("c", (3,))))


@given(st.integers(0, 1000), st.sampled_from([0.001, 0.01, 0.1]), st.sampled_from([0.5, 1.0, 3.0]))
def test_every_tensor_sends_between_k_and_2k(seed: int, density: float, power: float) -> None:
    x = torch.randn(UNIT.numel, generator=torch.Generator().manual_seed(seed))
    x = x.sign() * x.abs().pow(power)
    x[3000:] *= 1e5
    counts = RedSync(density=density).select(x, Step(0, UNIT)).counts
    for count, size in zip(counts, UNIT.sizes, strict=True):
        assert kept(density, size) <= count <= 2 * kept(density, size)


@pytest.mark.parametrize(("outlier", "fewest", "most"), [(1e3, 30, 60), (1e5, 1, 1)])
def test_an_outlier_hides_the_rest_only_where_it_lifts_the_mean_above_it(
    outlier: float, fewest: int, most: int
) -> None:
    x = torch.randn(3000, generator=torch.Generator().manual_seed(0))
    x[7] = outlier
    (count,) = RedSync(density=0.01).select(x, Step(0, UnitSpec.flat(3000))).counts
    assert fewest <= count <= most


def test_equal_magnitudes_are_sent_all_the_same() -> None:
    (count,) = RedSync(density=0.01).select(torch.full((500,), 2.0), Step(0, UnitSpec.flat(500))).counts
    assert count == 500
