"""gTop-k: what all ranks end with, what returns to whom, and what it costs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from contract.world import run_unit
from thinwire.compressors.gtopk import GTopK, pairings
from thinwire.compressors.shared.sparse import kept
from thinwire.core import TensorSpec, UnitSpec, make

UNIT = UnitSpec((TensorSpec("a", (20, 30)), TensorSpec("none", (0,)), TensorSpec("b", (50,))))


def whole_numbers(rank: int, step: int = 0) -> Tensor:
    """Sums of these are exact, and many magnitudes are equal."""
    generator = torch.Generator().manual_seed(31 * step + rank)
    return torch.randint(-9, 10, (UNIT.numel,), generator=generator).float()


@pytest.mark.parametrize("world_size", range(1, 10))
def test_every_rank_meets_every_other_directly_or_not(world_size: int) -> None:
    known = [{rank} for rank in range(world_size)]
    for partners in pairings(world_size):
        assert [partners[partner] for partner in partners] == list(range(world_size))
        known = [known[rank] | known[partner] for rank, partner in enumerate(partners)]
    assert known == [set(range(world_size))] * world_size


@pytest.mark.parametrize("world_size", range(1, 9))
def test_nothing_is_lost_and_k_entries_are_applied(world_size: int) -> None:
    gradients = [[whole_numbers(rank, step) for rank in range(world_size)] for step in range(3)]
    for done in run_unit(GTopK(density=0.05), UNIT, gradients):
        mean = done.results[0].mean
        given, left = (
            torch.stack(done.inputs),
            torch.stack([r.residual for r in done.results if r.residual is not None]),
        )
        assert torch.equal((given - left).sum(dim=0), (mean * world_size).round())
        for part in mean.split(UNIT.sizes):
            assert int((part != 0).sum()) <= kept(0.05, part.numel())


def test_a_rank_takes_back_what_its_group_dropped_although_another_group_carries_the_position() -> None:
    """Ranks 0 and 1 drop position 1, ranks 2 and 3 bring it into the result."""
    gradients = [torch.zeros(10) for _ in range(4)]
    gradients[0][1], gradients[1][0] = 3.0, 5.0
    gradients[2][1], gradients[3][1] = 4.0, 4.0
    (done,) = run_unit(GTopK(density=0.1), UnitSpec.flat(10), [gradients])
    assert done.results[0].mean.tolist() == [0, 8 / 4] + [0] * 8
    residuals = [result.residual for result in done.results]
    assert [None if r is None else r[:2].tolist() for r in residuals] == [[0, 3], [5, 0], [0, 0], [0, 0]]


def test_what_two_ranks_agree_on_is_the_top_k_of_their_sum() -> None:
    gradients = [whole_numbers(0), whole_numbers(1) * 0.01]
    (done,) = run_unit(GTopK(density=1.0), UNIT, [gradients])
    assert torch.allclose(done.results[0].mean, (gradients[0] + gradients[1]) / 2)


def test_volume_grows_with_the_logarithm_and_beats_the_all_gather_beyond_8_ranks() -> None:
    unit = UnitSpec.flat(1_000_000)
    k_bytes = 8 * 10_000
    sent = {p: make("gtopk(density=0.01)").wire_bytes(unit, p) for p in (1, 2, 4, 8, 16, 32)}
    assert sent[1] == 0
    assert sent[2] == k_bytes
    assert all(sent[p] <= 2 * k_bytes * (p.bit_length() - 1) for p in sent)
    gathered = {p: make("topk(density=0.01)").wire_bytes(unit, p) for p in sent}
    assert [p for p in sent if sent[p] < 0.95 * gathered[p]] == [16, 32]
