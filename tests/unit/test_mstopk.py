"""MSTopk: exactly k entries from counting alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire.compressors.contrib.mstopk import MSTopK
from thinwire.compressors.shared.sparse import kept
from thinwire.compressors.topk import TopK
from thinwire.core import ConfigError, Step, TensorSpec, UnitSpec

UNIT = UnitSpec((TensorSpec("a", (40, 30)), TensorSpec("none", (0,)), TensorSpec("b", (7,)), TensorSpec("end", (0,))))


@given(st.integers(0, 1000), st.sampled_from([0.003, 0.1, 0.5, 1.0]))
def test_enough_bisections_give_the_exact_top_k(seed: int, density: float) -> None:
    x = torch.randn(UNIT.numel, generator=torch.Generator().manual_seed(seed))
    x[1200:] *= 1e-7
    got = MSTopK(density=density, bisections=60).select(x.clone(), Step(0, UNIT))
    expected = TopK(density=density).select(x.clone(), Step(0, UNIT))
    assert got.indices.tolist() == expected.indices.tolist()
    assert got.counts == expected.counts
    assert torch.equal(got.residual, expected.residual)


@given(st.integers(0, 1000), st.sampled_from([0.01, 0.3, 0.9]), st.integers(1, 5))
def test_ties_and_few_bisections_still_give_exactly_k(seed: int, density: float, bisections: int) -> None:
    x = torch.randint(-2, 3, (UNIT.numel,), generator=torch.Generator().manual_seed(seed)).float()
    chosen = MSTopK(density=density, bisections=bisections).select(x.clone(), Step(0, UNIT))
    assert chosen.indices.numel() == sum(kept(density, size) for size in UNIT.sizes)
    assert chosen.indices.diff().min() > 0
    bounds = torch.tensor(UNIT.offsets)
    assert torch.searchsorted(chosen.indices.long(), bounds).diff().tolist() == list(chosen.counts)


def test_few_bisections_miss_little() -> None:
    x = torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    unit = UnitSpec.flat(20_000)
    best, fast = (one.select(x.clone(), Step(0, unit)).values.square().sum() for one in (TopK(), MSTopK(bisections=5)))
    assert 0.95 * best < fast < best


def test_no_bisection_is_refused() -> None:
    with pytest.raises(ConfigError, match="bisections is 0"):
        MSTopK(bisections=0)
