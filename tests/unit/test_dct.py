"""DCT top-k: the transform itself, and what it is good for."""

from __future__ import annotations

import math

import pytest
import torch

from contract.world import run_unit
from thinwire.compressors.dct import DCT, _basis
from thinwire.core import ConfigError, Step, TensorSpec, UnitSpec, make

UNIT = UnitSpec((TensorSpec("a", (20, 32)), TensorSpec("b", (77,)), TensorSpec("c", ())))


@pytest.mark.parametrize("length", [1, 2, 13, 64])
def test_the_basis_is_orthonormal_and_of_the_second_kind(length: int) -> None:
    basis = _basis(length, torch.device("cpu")).double()
    assert torch.allclose(basis @ basis.T, torch.eye(length, dtype=torch.float64), atol=1e-6)
    expected = [math.cos(math.pi * (2 * j + 1) / (2 * length)) for j in range(length)]
    if length > 1:
        assert (basis[1] * math.sqrt(length / 2)).tolist() == pytest.approx(expected, abs=1e-6)


def test_everything_sent_is_everything_received_also_in_short_last_blocks() -> None:
    x = torch.randn(UNIT.numel, generator=torch.Generator().manual_seed(0))
    (done,) = run_unit(DCT(density=1.0, block=32), UNIT, [[x]])
    assert torch.allclose(done.results[0].mean, x, atol=1e-5)


def test_one_coefficient_moves_a_whole_block() -> None:
    x = torch.full((64,), 3.0)
    (done,) = run_unit(DCT(density=1 / 64, block=64), UnitSpec.flat(64), [[x]])
    assert torch.allclose(done.results[0].mean, x, atol=1e-5)
    assert done.results[0].residual is not None
    assert float(done.results[0].residual.abs().max()) < 1e-5


def test_smooth_gradients_keep_more_energy_than_with_topk_of_equal_density() -> None:
    smooth = torch.randn(4096, generator=torch.Generator().manual_seed(0)).cumsum(0)
    unit, kept = UnitSpec.flat(4096), []
    for compressor in (DCT(density=1 / 32), make("topk(density=0.03125)")):
        (result,) = run_unit(compressor, unit, [[smooth]])[0].results
        kept.append(float(result.mean.square().sum() / smooth.square().sum()))
    assert kept[0] > 0.95
    assert kept[0] > 2 * kept[1]


def test_every_block_sends_equally_many_coefficients() -> None:
    chosen = DCT(density=0.1, block=32).select(torch.randn(UNIT.numel), Step(0, UNIT))
    assert chosen.counts == (20 * 3, 2 * 3 + 3, 1)


def test_a_density_below_one_coefficient_per_block_is_refused_with_what_would_do() -> None:
    with pytest.raises(ConfigError, match="block=100 or more"):
        DCT(density=0.01, block=64)
    with pytest.raises(ConfigError, match="block is 1"):
        DCT(density=1.0, block=1)
    with pytest.raises(ConfigError, match="less than one coefficient"):
        make("dct(density=linear(0.5, 0.001, steps=10))")
