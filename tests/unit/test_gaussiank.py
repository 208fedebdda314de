"""Gaussian-k: the threshold of a normal law, corrected where the law does not hold."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from thinwire.compressors.contrib.gaussiank import GaussianK
from thinwire.core import ConfigError, Step, TensorSpec, UnitSpec

UNIT = UnitSpec((TensorSpec("wide", (100, 200)), TensorSpec("small", (5000,))))


def normal(seed: int = 0) -> Tensor:
    """Two tensors whose magnitudes are a million apart."""
    drawn = torch.randn(UNIT.numel, generator=torch.Generator().manual_seed(seed))
    drawn[20_000:] *= 1e-6
    return drawn


def sent_fractions(compressor: GaussianK, x: Tensor) -> list[float]:
    counts = compressor.select(x.clone(), Step(0, UNIT)).counts
    return [count / size for count, size in zip(counts, UNIT.sizes, strict=True)]


def test_normal_values_need_no_correction() -> None:
    assert sent_fractions(GaussianK(density=0.02, corrections=0), normal()) == pytest.approx([0.02, 0.02], rel=0.15)


@pytest.mark.parametrize("power", [0.7, 3.0])
def test_corrections_help_where_tails_are_light_or_heavy(power: float) -> None:
    x = normal().sign() * normal().abs().pow(power)
    trusting, correcting = (sent_fractions(GaussianK(density=0.02, corrections=times), x) for times in (0, 6))
    for fraction, corrected in zip(trusting, correcting, strict=True):
        assert not 2 / 3 <= fraction / 0.02 <= 4 / 3, "the law fits: the test shows nothing"
        assert abs(corrected - 0.02) < abs(fraction - 0.02)


def test_a_constant_tensor_is_sent_all_the_same() -> None:
    chosen = GaussianK(density=0.01).select(torch.full((UNIT.numel,), -0.25), Step(0, UNIT))
    assert min(chosen.counts) > 0


def test_negative_corrections_are_refused() -> None:
    with pytest.raises(ConfigError, match="corrections is -1"):
        GaussianK(corrections=-1)


def test_four_bit_values_are_refused_because_counts_vary() -> None:
    with pytest.raises(ConfigError, match="count known beforehand"):
        GaussianK(values="int4")
