"""int2 and int1: what they decode to, what a short tensor gets, and the residual of the mean."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import thinwire
from thinwire import kernels
from thinwire.comm import simulate
from thinwire.compressors.shared.mean_feedback import MEAN_RESIDUAL
from thinwire.core import Compressor, Exchanged, State, Step, TensorSpec, UnitSpec
from thinwire.kernels import Coarse

BITS: list[Coarse] = [1, 2]


def normal(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def round_trip(bits: Coarse, x: Tensor) -> Tensor:
    coded = kernels.coarse_encode(x, None, bits=bits)
    return kernels.coarse_decode(coded.codes, coded.scales, x.numel(), bits=bits)


def test_levels_and_bytes() -> None:
    x = torch.tensor([3.0, -1.0, 0.0, -4.0, 2.0])  # the mean magnitude is 2
    two, one = (kernels.coarse_encode(x, None, bits=bits) for bits in (2, 1))
    assert two.codes.tolist() == [0b11_00_10_01, 0b00]
    assert one.codes.tolist() == [0b01010]
    assert (two.scales.tolist(), one.scales.tolist()) == ([2.5], [2.0])
    assert round_trip(2, x).tolist() == [3.75, -1.25, 1.25, -3.75, 1.25]
    assert round_trip(1, x).tolist() == [2.0, -2.0, 2.0, -2.0, 2.0]
    assert two.residual.tolist() == [-0.75, 0.25, -1.25, -0.25, 0.75]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("exponent", [-100, -60, 90])
def test_small_and_large_values_lose_no_more_than_others(bits: Coarse, exponent: int) -> None:
    """fp16 scales would be subnormal below 6e-5; the error here is the same to the last bit."""
    x = normal(1000)
    assert torch.equal(round_trip(bits, x * 2.0**exponent), round_trip(bits, x) * 2.0**exponent)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("value", [3.4e38, 2.0**127, 1e-39, 0.0])
def test_the_ends_of_fp32_stay_finite_and_are_contracted(bits: Coarse, value: float) -> None:
    for x in (torch.full((70,), value), torch.full((64,), -value), torch.tensor([value, *[0.0] * 63])):
        rest = kernels.coarse_encode(x, None, bits=bits).residual
        assert torch.isfinite(rest).all()
        assert rest.double().norm() <= x.double().norm()


@pytest.mark.parametrize("bits", BITS)
def test_the_residual_is_that_of_the_rounded_scale(bits: Coarse) -> None:
    x = normal(640)
    rest = kernels.coarse_encode(x, None, bits=bits).residual
    assert torch.equal(rest, x - round_trip(bits, x))


@pytest.mark.parametrize("bits", BITS)
def test_a_block_that_is_not_finite_decodes_to_nan_and_leaves_no_residual(bits: Coarse) -> None:
    x = torch.ones(192)
    x[70] = torch.inf
    coded = kernels.coarse_encode(x, None, bits=bits)
    decoded = round_trip(bits, x)
    assert not coded.finite
    assert torch.isnan(decoded[64:128]).all()
    assert torch.isfinite(decoded[:64]).all()
    assert torch.isfinite(decoded[128:]).all()
    assert torch.all(coded.residual[64:128] == 0)


def test_codes_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match=r"codes: got .* with 9 elements, expected .* with 8"):
        kernels.coarse_decode(torch.zeros(9, dtype=torch.uint8), torch.zeros(1, dtype=torch.bfloat16), 64, bits=1)


def exchanged(compressor: Compressor, unit: UnitSpec, xs: list[Tensor], states: list[State]) -> list[Exchanged]:
    world = len(xs)
    return simulate(
        [
            compressor.exchange(x.clone(), state, Step(0, unit, rank, world))
            for rank, (x, state) in enumerate(zip(xs, states, strict=True))
        ]
    )


def test_a_short_tensor_is_not_scaled_down_by_padding() -> None:
    """One value in a padded block of 64: with zeros for padding a 64th of it would arrive."""
    unit = UnitSpec(tuple(TensorSpec(f"t{n}", (n,)) for n in (1, 65, 3)))
    x = torch.full((69,), 0.75)
    int1 = thinwire.make("int1")
    for done in exchanged(int1, unit, [x] * 3, [int1.init(unit)] * 3):
        assert torch.equal(done.mean, x)


def test_blocks_of_mipd_are_not_scaled_down_by_padding() -> None:
    unit = UnitSpec((TensorSpec("a", (1,)), TensorSpec("b", (300,))))
    x, mipd = torch.full((301,), -0.75), thinwire.make("mipd(density=1.0, values='int1')")
    for done in exchanged(mipd, unit, [x] * 2, [mipd.init(unit)] * 2):
        assert torch.equal(done.mean, x)


@pytest.mark.parametrize("name", ["int1", "int2"])
def test_nothing_is_lost_when_elements_change_their_owner(name: str) -> None:
    """Tensors are regrouped: what a rank keeps for a mean that is formed elsewhere now goes into what it sends."""
    compressor, world = thinwire.make(name), 3
    first, second = TensorSpec("a", (640,)), TensorSpec("b", (100,))
    before = exchanged(
        compressor,
        UnitSpec((first, second)),
        [normal(740, rank) for rank in range(world)],
        [compressor.init(UnitSpec((first, second)))] * world,
    )
    swapped = [{key: torch.cat([v[640:], v[:640]]) for key, v in done.state.items()} for done in before]
    xs = [normal(740, 10 + rank) for rank in range(world)]
    after = exchanged(compressor, UnitSpec((second, first)), xs, swapped)
    given = torch.stack([x + state[MEAN_RESIDUAL] for x, state in zip(xs, swapped, strict=True)])
    kept = torch.stack([done.residual + done.state[MEAN_RESIDUAL] for done in after if done.residual is not None])
    torch.testing.assert_close((given - kept).mean(dim=0), after[0].mean, rtol=1e-4, atol=1e-5)
    assert all((done.state[MEAN_RESIDUAL] != 0).sum() <= 256 for done in after), "a rank keeps what it owns, no more"


def test_a_residual_of_the_mean_beats_sending_it_again() -> None:
    """Ranks that agree on much of the gradient: each mean is nearer than with all error in one residual (1.3 times in the
    long run)."""
    unit, world, steps = UnitSpec.flat(4096), 4, 60
    int2, signal = thinwire.make("int2"), normal(4096, 99)
    errors = []
    for initial in (int2.init(unit), {}):  # without a state the error of the mean goes into the residual of its owner
        states, residuals, error = [initial] * world, [torch.zeros(4096)] * world, 0.0
        for step in range(steps):
            xs = [signal + normal(4096, world * step + rank) for rank in range(world)]
            done = exchanged(int2, unit, [x + old for x, old in zip(xs, residuals, strict=True)], states)
            states, residuals = [one.state for one in done], [one.residual for one in done if one.residual is not None]
            if step >= steps // 2:
                error += float((done[0].mean - torch.stack(xs).mean(dim=0)).square().sum())
        errors.append(error**0.5)
    assert errors[1] >= 1.1 * errors[0], errors
