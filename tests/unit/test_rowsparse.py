"""Row-sparse reduction: lossless, cheap where few rows are touched, and balanced."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from contract.world import run_unit
from thinwire.compressors.rowsparse import Plan
from thinwire.core import TensorSpec, UnitSpec, make

ROWS, WIDTH = 2000, 8
UNIT = UnitSpec((TensorSpec("tokens", (ROWS, WIDTH)), TensorSpec("positions", (50, 16)), TensorSpec("bias", (5,))))


def touched_by_zipf(rank: int, tokens: int = 150) -> Tensor:
    """Which rows of a vocabulary, sorted by frequency, a batch touches."""
    generator = torch.Generator().manual_seed(rank)
    frequency = 1 / torch.arange(1, ROWS + 1)
    drawn = torch.multinomial(frequency, tokens, replacement=True, generator=generator)
    return torch.zeros(ROWS, dtype=torch.bool).index_fill_(0, drawn, True)


def embedding_gradient(rank: int) -> Tensor:
    values = torch.randint(-9, 10, (UNIT.numel,), generator=torch.Generator().manual_seed(rank)).float()
    values[: ROWS * WIDTH] *= touched_by_zipf(rank).repeat_interleave(WIDTH)
    return values


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_it_is_the_exact_mean(world_size: int) -> None:
    gradients = [embedding_gradient(rank) for rank in range(world_size)]
    (done,) = run_unit(make("rowsparse"), UNIT, [gradients])
    assert done.results[0].residual is None
    assert torch.equal(done.results[0].mean, torch.stack(gradients).sum(dim=0) / world_size)


def test_few_touched_rows_cost_a_fraction_of_dense_and_all_rows_hardly_more() -> None:
    dense = make("dense").wire_bytes(UNIT, 4)
    (sparse,) = run_unit(make("rowsparse"), UNIT, [[embedding_gradient(rank) for rank in range(4)]])
    (full,) = run_unit(make("rowsparse"), UNIT, [[torch.ones(UNIT.numel) for _ in range(4)]])
    assert max(sparse.sent_bytes) < 0.4 * dense
    bits = 3 * (-(-2051 // 8))
    assert max(full.sent_bytes) <= dense + bits + 3 * 4 * 2 * 16, "a shard may be longer by one row"


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_owners_share_the_work_where_sharding_by_row_number_would_not(world_size: int) -> None:
    touched = torch.stack([touched_by_zipf(rank, tokens=600) for rank in range(world_size)])
    balanced, by_number = (Plan(touched, torch.full((ROWS,), WIDTH)) for _ in range(2))
    by_number.__dict__["owner"] = torch.arange(ROWS) * world_size // ROWS
    costs = [plan.row_message_elems + plan.gathered_elems for plan in (balanced, by_number)]
    least = (int(touched.sum()) / world_size + int(touched.any(dim=0).sum())) / world_size * WIDTH
    assert costs[0] < 1.45 * least
    assert costs[0] < 0.8 * costs[1]


def test_rows_of_one_owner_lie_together_and_every_row_has_one() -> None:
    plan = Plan(torch.stack([touched_by_zipf(rank) for rank in range(3)]), torch.full((ROWS,), WIDTH))
    assert plan.owner.diff().min() >= 0
    assert sorted(set(plan.owner.tolist())) == [0, 1, 2]
    assert sum(plan.owned_elems) == WIDTH * int(plan.touched.any(dim=0).sum())
