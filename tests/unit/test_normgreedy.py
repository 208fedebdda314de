"""The layers with most to send go first."""

from __future__ import annotations

import torch
from torch import Tensor

from contract.world import run_unit
from thinwire.core import TensorSpec, UnitSpec, make

UNIT = UnitSpec(tuple(TensorSpec(f"block{i}.weight", (8, 8)) for i in range(5)))
COMPRESSOR = make("normgreedy(budget=0.2, max_age=50, warmup=0, always_bytes=0, merge_bytes=0) | dense")


def _gradients(scales: list[float], steps: int) -> list[list[Tensor]]:
    """Two ranks with the same magnitudes per layer."""
    generator = torch.Generator().manual_seed(3)
    factors = torch.tensor(scales).repeat_interleave(64)
    return [[torch.randn(320, generator=generator) * factors for _ in range(2)] for _ in range(steps)]


def _counts(scales: list[float], steps: int = 40) -> list[int]:
    rounds = run_unit(COMPRESSOR, UNIT, _gradients(scales, steps))
    flags = [[bool(part.any()) for part in done.results[0].mean.split(UNIT.sizes)] for done in rounds[1:]]
    return [sum(step[layer] for step in flags) for layer in range(5)]


def test_larger_gradients_go_more_often_and_nobody_waits_for_ever() -> None:
    counts = _counts([3.0, 1.0, 1.0, 1.0, 1.0])
    assert counts[0] > 2 * max(counts[1:])
    assert min(counts[1:]) > 0, "a residual grows until its layer is picked"
    assert sum(counts) == 39, "one fifth of five layers per step"


def test_ranks_that_see_different_norms_pick_alike() -> None:
    mine, other = _gradients([5.0, 1, 1, 1, 1], 1)[0][0], _gradients([1, 1, 1, 1, 9.0], 1)[0][0]
    done = run_unit(COMPRESSOR, UNIT, [[mine, other]])[0]
    picked = [result.state["layer_picked"].tolist() for result in done.results]
    assert picked[0] == picked[1] == [False] * 4 + [True]


def test_the_norms_cost_four_bytes_per_layer() -> None:
    sent = [done.sent_bytes[0] for done in run_unit(COMPRESSOR, UNIT, _gradients([1.0] * 5, 6))[1:]]
    one_layer = make("dense").wire_bytes(UnitSpec(UNIT.tensors[:1]), 2)
    assert sent == [one_layer + 4 * 5] * 5
    assert COMPRESSOR.wire_bytes(UNIT, 2) == one_layer + 4 * 5
