"""Agreed wire scales and the choice of 4-bit grids: what all ranks decide together, in the simulator."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

import thinwire
from thinwire.comm import simulate
from thinwire.core import Compressor, Exchanged, State, Step, TensorSpec, UnitSpec
from thinwire.formats import choose, grids, with_amax
from thinwire.formats.wire_scale import saturates, scale_exponents

LARGEST_HALF = 65504.0
UNIT = UnitSpec((TensorSpec("a", (50, 20)), TensorSpec("b", (300,))))
AGREED = ("fp16(scale='agreed', refresh=3)", "fp8(scale='agreed', refresh=3)")


def gradients(world_size: int, step: int, scales: Sequence[float] = (1e-6, 10.0)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    parts = [[torch.randn(n, generator=generator) * s for n, s in zip(UNIT.sizes, scales, strict=True)]
             for _ in range(world_size)]  # fmt: skip
    return [torch.cat(each) for each in parts]


def exchange(
    compressor: Compressor, xs: list[Tensor], states: list[State], index: int, unit: UnitSpec = UNIT
) -> list[Exchanged]:
    world = len(xs)
    steps = [Step(index, unit, rank, world) for rank in range(world)]
    return simulate([compressor.exchange(x.clone(), s, t) for x, s, t in zip(xs, states, steps, strict=True)])


def run(
    text: str, world_size: int, steps: int, make: Callable[[int, int], list[Tensor]] = gradients
) -> list[list[Exchanged]]:
    compressor = thinwire.make(text)
    states = [compressor.init(UNIT) for _ in range(world_size)]
    history = []
    for index in range(steps):
        history.append(exchange(compressor, make(world_size, index), states, index))
        states = [result.state for result in history[-1]]
    return history


@pytest.mark.parametrize("amax", [1e-30, 1e-6, 0.37, 1.0, 1e4, 1e30])
@pytest.mark.parametrize("terms", [1, 4, 512])
def test_scale_is_the_largest_power_of_two_with_the_margin(amax: float, terms: int) -> None:
    exponent = scale_exponents(torch.tensor([amax]), LARGEST_HALF, terms)
    scaled = amax * 2.0 ** int(exponent) * terms
    assert scaled <= LARGEST_HALF / 2
    assert 2 * scaled > LARGEST_HALF / 2 * (1 - 1e-6) or int(exponent) == 126
    assert not saturates(torch.tensor([amax * 1.99]), exponent, LARGEST_HALF, terms)
    assert saturates(torch.tensor([amax * 4.01]), exponent, LARGEST_HALF, terms) or int(exponent) == 126


@pytest.mark.parametrize("text", AGREED)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_agree_and_the_mean_is_right(text: str, world_size: int) -> None:
    tolerance = 2e-3 if text.startswith("fp16") else 8e-2
    for index, results in enumerate(run(text, world_size, 7)):
        true = torch.stack(gradients(world_size, index)).double().mean(dim=0)
        for result in results:
            assert torch.equal(result.mean, results[0].mean)
            assert all(torch.equal(result.state[key], results[0].state[key]) for key in result.state)
        for got, right in zip(results[0].mean.split(UNIT.sizes), true.split(UNIT.sizes), strict=True):
            assert (got - right).norm() <= tolerance * right.norm()
        assert results[0].state["saturated"].tolist() == [0, 0]


@pytest.mark.parametrize("text", AGREED)
def test_growth_is_counted_and_answered_in_the_same_step(text: str) -> None:
    def growing(world_size: int, index: int) -> list[Tensor]:
        """Tensor b of rank 1 alone grows by 1000 in step 4, which is no step of measurement."""
        xs = gradients(world_size, index)
        if index >= 4:
            xs[1][UNIT.offsets[1] :] *= 1000
        return xs

    history = run(text, 3, 6, growing)
    for index, results in enumerate(history):
        true = torch.stack(growing(3, index)).double().mean(dim=0)
        assert (results[0].mean - true).norm() <= 0.05 * true.norm(), "something was cut"
        assert results[2].state["saturated"].tolist() == ([0, 0] if index < 4 else [0, 1])


@pytest.mark.parametrize("text", AGREED)
def test_zero_gradients_leave_room_for_what_comes(text: str) -> None:
    def late(world_size: int, index: int) -> list[Tensor]:
        return gradients(world_size, index, (0.0, 0.0) if index == 0 else (1e-9, 1e3))

    history = run(text, 2, 2, late)
    assert torch.equal(history[0][0].mean, torch.zeros(UNIT.numel))
    true = torch.stack(late(2, 1)).double().mean(dim=0)
    for got, right in zip(history[1][0].mean.split(UNIT.sizes), true.split(UNIT.sizes), strict=True):
        assert (got - right).norm() <= 0.08 * right.norm()


@pytest.mark.parametrize("text", AGREED)
def test_scales_are_measured_every_refresh_steps_only(text: str) -> None:
    history = run(text, 2, 7)
    amax = [results[0].state["amax"].tolist() for results in history]
    assert amax[0] == amax[1] == amax[2] != amax[3] == amax[4] == amax[5] != amax[6]
    true = torch.stack(gradients(2, 3)).abs().amax(dim=0)
    assert amax[3] == [float(part.max()) for part in true.split(UNIT.sizes)]


@pytest.mark.parametrize("text", AGREED)
def test_infinity_spoils_neither_residual_nor_agreement(text: str) -> None:
    compressor = thinwire.make(text)
    xs = gradients(2, 0)
    xs[0][7] = torch.inf
    results = exchange(compressor, xs, [compressor.init(UNIT)] * 2, 0)
    assert all(torch.isfinite(result.residual).all() for result in results if result.residual is not None)
    assert results[0].mean.view(torch.int32).equal(results[1].mean.view(torch.int32))


def test_resume_in_other_groups_is_exact() -> None:
    """State is per tensor: two units of one tensor each go on as one unit of two would."""
    compressor = thinwire.make("fp16(scale='agreed', refresh=100)")
    history = run("fp16(scale='agreed', refresh=100)", 2, 2)
    state, xs = history[0][0].state, gradients(2, 1)
    for position, tensor in enumerate(UNIT.tensors):
        alone = UnitSpec((tensor,))
        pieces = {key: value[position : position + 1] for key, value in state.items()}
        window = slice(UNIT.offsets[position], UNIT.offsets[position + 1])
        results = exchange(compressor, [x[window] for x in xs], [pieces] * 2, 1, alone)
        assert torch.equal(results[0].mean, history[1][0].mean[window])


def test_an_amax_table_can_be_put_into_the_state_of_a_wire() -> None:
    state = {"step": 3, "tensors": {"a": {"amax": torch.tensor([-1.0])}, "b": {"residual": torch.ones(2)}, "c": {}}}
    filled = with_amax(state, {"a": 0.5, "b": 9.0})
    assert filled["tensors"]["a"]["amax"].tolist() == [0.5]
    assert filled["tensors"]["b"]["residual"].tolist() == [1.0, 1.0]
    assert state["tensors"]["a"]["amax"].tolist() == [-1.0], "the original was changed"


def test_nothing_underflows_where_halves_do() -> None:
    """The arithmetic of PyTorch's fp16 hook (halve, then divide by the world size) against ours; spec: 21 % at 8 ranks."""
    world_size, numel = 8, 20_000
    unit = UnitSpec.flat(numel)
    xs = [torch.randn(numel, generator=torch.Generator().manual_seed(r)) * 1e-6 for r in range(world_size)]
    hook = torch.stack([x.half() / world_size for x in xs])
    assert 0.20 <= float((hook == 0).float().mean()) <= 0.22
    compressor = thinwire.make("fp16")
    got = exchange(compressor, xs, [{}] * world_size, 0, unit)[0].mean
    true = torch.stack(xs).double().mean(dim=0)
    assert not (got == 0).any()
    assert float((got - true).norm() / true.norm()) <= 2.2e-4


def test_best4_takes_the_grid_that_errs_least() -> None:
    generator = torch.Generator().manual_seed(0)
    even = torch.rand(6400, generator=generator) - 0.5
    wide = torch.randn(6400, generator=generator) * torch.exp(2 * torch.randn(6400, generator=generator))
    unit = UnitSpec((TensorSpec("even", (6400,)), TensorSpec("wide", (6400,)), TensorSpec("empty", (0,))))
    compressor = thinwire.make("best4")
    x = torch.cat([even, wide])
    results = exchange(compressor, [x, -x], [compressor.init(unit)] * 2, 0, unit)
    names = [grids.GRID_NAMES[choose.CANDIDATES[c][0]] for c in results[0].state["choice"].tolist()]
    assert names[0] == "int4"
    assert names[1] in ("pot4", "flint4")


@pytest.mark.parametrize("seed", range(3))
def test_best4_errs_no_more_than_the_best_fixed_grid(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randn(2, 1 << 14, generator=generator)
    x = draws[0].abs() ** (1 + seed) * draws[1].sign()
    unit = UnitSpec.flat(x.numel())
    errors = {
        name: float(exchange(c, [x], [c.init(unit)], 0, unit)[0].mean.sub(x).norm())
        for name, c in ((n, thinwire.make(n)) for n in ("best4", "int4", "float4", "pot4", "flint4"))
    }
    assert errors["best4"] <= min(value for name, value in errors.items() if name != "best4") * 1.02, errors


def test_best4_choice_is_kept_between_refreshes_and_agreed_from_unlike_ranks() -> None:
    history = run("best4(refresh=2)", 3, 4, lambda world, step: gradients(world, step, (1.0, 1.0)))
    choices = [[result.state["choice"].tolist() for result in results] for results in history]
    assert all(each == step[0] for step in choices for each in step)
    assert choices[0] == choices[1]
    assert choices[2] == choices[3]
    assert all(c >= 0 for c in choices[0][0])


def test_stochastic_best4_never_clips() -> None:
    errors = torch.rand(5, len(choose.CANDIDATES), generator=torch.Generator().manual_seed(0))
    errors[:, 1] = -1.0  # the clipped second candidate would win
    assert (choose.chosen(errors, may_clip=True) == 1).all()
    assert all(choose.CANDIDATES[c][1] == 1.0 for c in choose.chosen(errors, may_clip=False).tolist())
