"""Ok-Topk-like: a volume that does not grow with the ranks, conservation, balance, and thresholds that are reused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from contract.world import run_unit
from thinwire.compressors.oktopk import OkTopK, _due
from thinwire.compressors.shared.sparse import kept
from thinwire.core import TensorSpec, UnitSpec, make

UNIT = UnitSpec((TensorSpec("a", (100, 80)), TensorSpec("none", (0,)), TensorSpec("b", (3000,))))


def gradient(rank: int, step: int, skew: bool = False) -> Tensor:
    """Ranks have a part in common, as they do in training; tensors differ in magnitude. Skewed: the front is larger."""
    common, own = (torch.Generator().manual_seed(seed) for seed in (step, 1000 * step + rank + 1))
    drawn = torch.randn(UNIT.numel, generator=common) + torch.randn(UNIT.numel, generator=own)
    drawn[8000:] *= 1e-4
    return drawn * torch.linspace(3, 0.1, UNIT.numel).square() if skew else drawn


def test_measured_volume_stays_below_6k_words_from_2_to_8_ranks() -> None:
    density = 0.02
    k = sum(kept(density, size) for size in UNIT.sizes)
    words = {}
    for world_size in range(2, 9):
        gradients = [[gradient(rank, step) for rank in range(world_size)] for step in range(6)]
        rounds = run_unit(make(f"ef | oktopk(density={density})"), UNIT, gradients)
        words[world_size] = max(max(done.sent_bytes) for done in rounds[3:]) / 4 / k
    assert max(words.values()) < 6
    assert max(words.values()) < 4.6, "and below the 4.5k that the rooms allow, but for what is rounded up"
    # (p - 1)/p of the entries leave a rank: half of them with two ranks, nearly all with eight.
    per_share = [volume * p / (p - 1) for p, volume in words.items()]
    assert max(per_share) < 1.1 * min(per_share)
    gathered = [make(f"topk(density={density})").wire_bytes(UNIT, p) / 4 / k for p in (2, 8)]
    assert gathered[1] > 6 * gathered[0], "an all-gather grows with the ranks"


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_nothing_is_lost(world_size: int) -> None:
    """Whole numbers: sums are exact, and equality is meant."""
    gradients = [[(4 * gradient(rank, step)).round() for rank in range(world_size)] for step in range(5)]
    for done in run_unit(OkTopK(density=0.05), UNIT, gradients):
        left = torch.stack([result.residual for result in done.results if result.residual is not None])
        applied = (torch.stack(done.inputs) - left).sum(dim=0)
        assert torch.equal(applied, (done.results[0].mean * world_size).round())
        assert int((applied != 0).sum()) > 0


def test_an_exact_step_applies_nearly_the_top_k_of_the_sum_of_all_top_k() -> None:
    inputs = [gradient(rank, 0) for rank in range(4)]
    (done,) = run_unit(OkTopK(density=0.02), UNIT, [inputs])
    (gathered,) = run_unit(make("topk(density=0.02)"), UNIT, [inputs])
    parts = (round_.results[0].mean.split(UNIT.sizes) for round_ in (done, gathered))
    for mean, union in zip(*parts, strict=True):
        if k := kept(0.02, union.numel()):
            assert mean.square().sum() > 0.85 * union.abs().topk(k).values.square().sum()


def test_borders_follow_the_selected_entries_so_that_no_owner_is_flooded() -> None:
    """All large entries lie in front; still nearly everything that is selected finds room."""
    inputs = [gradient(rank, 0, skew=True) for rank in range(4)]
    (done,) = run_unit(OkTopK(density=0.02), UNIT, [inputs])
    applied = int((done.results[0].mean != 0).sum())
    assert applied > 0.9 * sum(kept(0.02, size) for size in UNIT.sizes)
    spread = done.results[0].state["spread"]
    assert spread[:8].sum() > 10 * spread[24:32].sum(), "the data are not skewed: the test shows nothing"


def test_thresholds_are_set_every_32_calls_and_at_the_powers_of_two_before() -> None:
    assert [n for n in range(140) if _due(torch.tensor([float(n)]), 32)] == [0, 1, 2, 4, 8, 16, 32, 64, 96, 128]


def test_between_exact_calls_thresholds_stay_and_still_about_k_entries_are_applied() -> None:
    world_size, density = 3, 0.02
    gradients = [[gradient(rank, step) for rank in range(world_size)] for step in range(24)]
    rounds = run_unit(make(f"ef | oktopk(density={density})"), UNIT, gradients)
    states = [done.results[1].state for done in rounds]
    assert torch.equal(states[17]["local"], states[23]["local"])
    assert not torch.equal(states[15]["local"], states[16]["local"])
    k = sum(kept(density, size) for size in UNIT.sizes)
    for done in rounds[8:]:
        assert 0.9 * k < int((done.results[0].mean != 0).sum()) <= k + world_size


def test_feedback_brings_everything_through_in_the_end() -> None:
    inputs = [gradient(rank, 0) for rank in range(2)]
    rounds = run_unit(make("ef | oktopk(density=0.05)"), UNIT, [inputs] * 60)
    late = torch.stack([done.results[0].mean for done in rounds[20:]]).mean(dim=0)
    wanted = torch.stack(inputs).mean(dim=0)
    for got, expected in zip(late.split(UNIT.sizes), wanted.split(UNIT.sizes), strict=True):
        if expected.numel():
            assert float((got - expected).norm() / expected.norm()) < 0.6
