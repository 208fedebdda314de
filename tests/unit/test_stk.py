"""Chunked sign top-k: what arrives, how many bits a position takes, and what damaged bytes do."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import thinwire
from thinwire.comm import simulate
from thinwire.core import PayloadError, Step, UnitSpec
from thinwire.formats import elias_fano


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 5000), share=st.floats(0.0, 1.0), rows=st.integers(1, 4), seed=st.integers(0, 1000))
def test_positions_come_back(n: int, share: float, rows: int, seed: int) -> None:
    k = max(1, round(share * n))
    generator = torch.Generator().manual_seed(seed)
    positions = torch.stack([torch.randperm(n, generator=generator)[:k].sort().values for _ in range(rows)])
    mask = elias_fano.mask_rows(positions.int(), n)
    assert mask.shape == (rows, elias_fano.row_bits(k, n))
    assert torch.equal(elias_fano.positions_in(mask, k, n), positions)


@pytest.mark.parametrize(("k", "above"), [(8, 0.08), (41, 0.08), (204, 0.10), (409, 0.13)])
def test_positions_take_little_more_than_their_entropy(k: int, above: float) -> None:
    entropy_bits = math.log2(math.comb(4096, k))
    assert entropy_bits < elias_fano.row_bits(k, 4096) <= (1 + above) * entropy_bits


def test_damaged_positions_are_refused() -> None:
    mask = elias_fano.mask_rows(torch.tensor([[3, 70, 99], [0, 1, 2]]), 100)
    unary = mask.shape[1] - 3 * elias_fano.low_bits(3, 100)
    fewer = mask.clone()
    fewer[0, int(mask[0].nonzero()[0])] = False
    moved = fewer.clone()
    moved[1, int((~mask[1, :unary]).nonzero()[0])] = True  # as many in all, but not in each row
    beyond = mask.clone()
    beyond[0, unary:] = True
    for bad, told in ((fewer, "has not 3"), (moved, "has not 3"), (beyond, "one beyond 99")):
        with pytest.raises(PayloadError, match=told):
            elias_fano.positions_in(bad, 3, 100)


def test_one_rank_sends_signs_of_the_largest_with_their_mean() -> None:
    x = torch.zeros(4096)
    x[torch.tensor([5, 100, 4000, 77])] = torch.tensor([3.0, -1.0, 2.0, 0.1])
    stk, unit = thinwire.make("stk(density=0.00075)"), UnitSpec.flat(4096)  # three of 4096
    (done,) = simulate([stk.exchange(x.clone(), stk.init(unit), Step(0, unit))])
    expected = torch.zeros(4096)
    expected[torch.tensor([5, 100, 4000])] = torch.tensor([2.0, -2.0, 2.0])
    assert torch.equal(done.mean, expected)
    assert torch.equal(done.residual, x - expected)


@pytest.mark.parametrize(("numel", "world"), [(1, 4), (5000, 4), (100_000, 3), (4096 * 8, 8)])
def test_chunks_waste_little(numel: int, world: int) -> None:
    """Padding to equal shards of chunks of 4096 would make a unit of 5000 values three times as long."""
    unit = UnitSpec.flat(numel)
    for density in (0.01, 0.05):
        sent = thinwire.make(f"stk(density={density})").wire_bytes(unit, world)
        k = density * numel
        entropy_bytes = k * (1 + math.log2(math.e / density)) / 8
        shares = 2 * (world - 1) / world
        assert sent <= shares * (1.15 * entropy_bytes + 6 * world * (1 + numel / world / 4096))
