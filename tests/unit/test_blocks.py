"""Tensors of a unit do not share blocks: a large neighbour must not round a small tensor to nothing."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import thinwire
from thinwire.comm import simulate
from thinwire.core import Step, TensorSpec, UnitSpec
from thinwire.core.blocks import aligned_elems, from_blocks, to_blocks


def unit_of(sizes: list[int]) -> UnitSpec:
    return UnitSpec(tuple(TensorSpec(f"t{index}", (size,)) for index, size in enumerate(sizes)))


@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=6), block=st.sampled_from([1, 8, 16]))
def test_padding_is_undone(sizes: list[int], block: int) -> None:
    unit = unit_of(sizes)
    x = torch.arange(float(unit.numel)) + 1
    aligned = to_blocks(x, unit, block)
    assert torch.equal(from_blocks(aligned, unit, block), x)
    assert aligned.numel() <= aligned_elems(unit, block)
    starts = [sum(-(-size // block) * block for size in sizes[:index]) for index in range(len(sizes))]
    for start, offset, size in zip(starts, unit.offsets, sizes, strict=False):
        assert torch.equal(aligned[start : start + size], x[offset : offset + size])


@pytest.mark.parametrize("spec", ["int8", "int4", "qsgd(bits=8)", "fp8", "fp16"])
def test_a_large_neighbour_takes_nothing_away(spec: str) -> None:
    unit = unit_of([100, 100, 100])
    small = torch.linspace(0.5, 1.5, 100)
    x = torch.cat([small, 1e6 * small, small])
    compressor = thinwire.make(spec)
    results = simulate([compressor.exchange(x.clone(), {}, Step(0, unit, rank, 2)) for rank in range(2)])
    for part in (results[0].mean[:100], results[0].mean[200:]):
        torch.testing.assert_close(part, small, rtol=0.35, atol=0)
