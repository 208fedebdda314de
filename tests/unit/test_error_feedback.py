"""Error feedback: the residual is added in a pass that is made anyway, where there is one; NaN and Inf are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import thinwire.compressors  # noqa: F401  (registers them)
from thinwire import kernels
from thinwire.comm import simulate
from thinwire.core import Compressor, Exchanged, Step, TensorSpec, UnitSpec, make
from thinwire.wrappers import ErrorFeedback

RANKS = 4


def unit(*shapes: tuple[int, ...]) -> UnitSpec:
    return UnitSpec(tuple(TensorSpec(f"t{i}", shape) for i, shape in enumerate(shapes)))


WHOLE, PADDED, ODD = unit((64, 64), (8, 256)), unit((64, 65), (8, 256)), unit((63, 64), (7, 9))


def values(spec: UnitSpec, seed: int) -> Tensor:
    return torch.randn(spec.numel, generator=torch.Generator().manual_seed(seed))


def exchanged(
    compressor: Compressor, spec: UnitSpec, inputs: list[Tensor], states: list[dict[str, Tensor]]
) -> list[Exchanged]:
    steps = [Step(0, spec, rank, RANKS) for rank in range(RANKS)]
    return simulate([compressor.exchange(*one) for one in zip(inputs, states, steps, strict=True)])


@pytest.mark.parametrize("spec", [WHOLE, PADDED, ODD], ids=["whole", "padded", "odd"])
@pytest.mark.parametrize("inner", ["int4", "int8", "bf16", "int4(rounding='stochastic')", "topk(density=0.1)"])
def test_one_pass_is_bit_for_bit_the_same_as_two(spec: UnitSpec, inner: str) -> None:
    states = [{"residual": values(spec, 10 + rank)} for rank in range(RANKS)]
    together = exchanged(ErrorFeedback(inner=make(inner)), spec, [values(spec, rank) for rank in range(RANKS)], states)
    sums = [kernels.compensate(values(spec, rank), states[rank]["residual"])[0] for rank in range(RANKS)]
    apart = exchanged(make(inner), spec, sums, [{} for _ in range(RANKS)])
    for one, other in zip(together, apart, strict=True):
        assert torch.equal(one.mean, other.mean)
        assert other.residual is not None
        assert torch.equal(one.state["residual"], other.residual)
    for rank, state in enumerate(states):
        assert torch.equal(state["residual"], values(spec, 10 + rank)), "a step that is skipped needs it again"


@pytest.mark.parametrize(
    ("inner", "spec", "one_pass"),
    [
        ("int4", WHOLE, True),
        ("int8", WHOLE, True),
        ("int4", PADDED, False),
        ("int4", ODD, False),
        ("int4", unit((0,)), False),
        ("int4(rounding='stochastic')", WHOLE, False),
        ("bf16", WHOLE, False),
        ("topk(density=0.1)", WHOLE, False),
    ],
)
def test_who_adds_what_is_owed(inner: str, spec: UnitSpec, one_pass: bool) -> None:
    assert make(inner).adds_residual(Step(0, spec, 0, RANKS)) is one_pass


@pytest.mark.parametrize("spec", [WHOLE, ODD], ids=["whole", "odd"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38], ids=["nan", "inf", "a sum that overflows"])
def test_what_is_not_finite_is_refused_before_the_first_round(spec: UnitSpec, bad: float) -> None:
    refused: list[str] = []
    gradient, residual = values(spec, 0), torch.zeros(spec.numel)
    gradient[5] = bad
    residual[5] = 3e38
    step = replace(Step(0, spec, 0, 1), on_not_finite=lambda: refused.append("told"))
    exchange = ErrorFeedback(inner=make("int4")).exchange(gradient, {"residual": residual}, step)
    next(exchange)
    assert refused == ["told"]
    (done,) = simulate([ErrorFeedback(inner=make("int4")).exchange(values(spec, 0), {"residual": residual}, step)])
    assert refused == ["told"], "what is finite is not refused"
    assert torch.isfinite(done.mean).all()
