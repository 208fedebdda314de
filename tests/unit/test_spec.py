"""Specs: sizes, offsets, matrix views, names."""

from __future__ import annotations

import pytest
import torch

from thinwire.core import Step, TensorSpec, UnitSpec


@pytest.mark.parametrize(
    ("shape", "numel", "matrix"),
    [
        ((), 1, (1, 1)),
        ((0,), 0, (1, 0)),
        ((5,), 5, (1, 5)),
        ((3, 4), 12, (3, 4)),
        ((8, 3, 2, 2), 96, (8, 12)),
        ((4, 0), 0, (4, 0)),
        ((0, 4), 0, (0, 0)),
    ],
)
def test_tensor_sizes(shape: tuple[int, ...], numel: int, matrix: tuple[int, int]) -> None:
    tensor = TensorSpec("t", shape)
    assert tensor.numel == numel
    assert tensor.matrix_shape == matrix
    torch.empty(shape).view(tensor.matrix_shape)  # it must be a view of the tensor


def test_unit_offsets() -> None:
    unit = UnitSpec(tuple(TensorSpec(name, shape) for name, shape in (("a", (2, 3)), ("b", ()), ("c", (0,)))))
    assert unit.sizes == (6, 1, 0)
    assert unit.offsets == (0, 6, 7, 7)
    assert unit.numel == 7
    assert unit.dense_bytes == 28
    assert unit.name == "a+b+c"


def test_flat_unit() -> None:
    assert UnitSpec.flat(10).sizes == (10,)


def _draw(step: Step, purpose: str = "x", per_rank: bool = False) -> list[float]:
    return torch.rand(4, generator=step.generator(purpose, per_rank=per_rank)).tolist()


def test_generator_depends_on_seed_step_unit_and_purpose_only() -> None:
    unit = UnitSpec.flat(3)
    base = _draw(Step(1, unit, rank=0, world_size=2))
    assert _draw(Step(1, unit, rank=1, world_size=4)) == base
    assert _draw(Step(1, unit, rank=1), per_rank=True) != _draw(Step(1, unit, rank=0), per_rank=True)
    others = [Step(2, unit), Step(1, UnitSpec.flat(3, "other")), Step(1, unit, seed=1)]
    assert all(_draw(other) != base for other in others)
    assert _draw(Step(1, unit), purpose="y") != base
