"""Settings per layer: the searches, and the wrappers that use them."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor

from contract.world import run_unit
from thinwire.core import ConfigError, TensorSpec, UnitSpec, make
from thinwire.wrappers.budgets import cheapest, greedy, is_critical, total, worthwhile


def _tables(seed: int, layers: int = 4, settings: int = 3) -> tuple[list[list[float]], list[list[float]]]:
    """Costs that rise and errors that fall with the setting."""
    draw = random.Random(seed)
    costs = [sorted(draw.uniform(1, 10) for _ in range(settings)) for _ in range(layers)]
    errors = [sorted((draw.uniform(0, 5) for _ in range(settings)), reverse=True) for _ in range(layers)]
    return costs, errors


def _best(costs: list[list[float]], errors: list[list[float]], bound: float) -> float:
    fitting = [c for c in itertools.product(range(3), repeat=4) if total(errors, c) <= bound]
    return min((total(costs, chosen) for chosen in fitting), default=float("inf"))


@pytest.mark.parametrize("seed", range(20))
def test_dynamic_programming_finds_what_trying_all_finds(seed: int) -> None:
    costs, errors = _tables(seed)
    bound = total(errors, [1] * 4)
    chosen = cheapest(costs, errors, bound, buckets=20_000)
    assert chosen is not None
    # Errors are rounded by half a step per layer: as good as the best of a slightly smaller bound, and within a larger one.
    off = bound * 4 / 2 / 20_000
    assert total(errors, chosen) <= bound + off + 1e-9
    assert total(costs, chosen) <= _best(costs, errors, bound - off) + 1e-9


def test_dynamic_programming_says_when_nothing_fits() -> None:
    assert cheapest([[1, 2]], [[3, 2]], 1.0) is None
    assert cheapest([[1, 2]], [[3, 0]], 0.0) == [1]
    with pytest.raises(ValueError, match="not negative"):
        cheapest([[1]], [[1]], -1.0)


@pytest.mark.parametrize("seed", range(10))
def test_greedy_keeps_to_the_budget_and_stops_only_when_nothing_fits(seed: int) -> None:
    costs, errors = _tables(seed)
    budget = total(costs, [1] * 4)
    chosen = greedy(costs, errors, budget)
    assert total(costs, chosen) <= budget
    left = budget - total(costs, chosen)
    assert all(
        now == 2 or costs[layer][now + 1] - costs[layer][now] > left or errors[layer][now] <= errors[layer][now + 1]
        for layer, now in enumerate(chosen)
    )


def test_greedy_relaxes_the_layer_with_the_best_gain() -> None:
    assert greedy([[1, 2], [1, 2]], [[5, 4], [5, 1]], 3.0) == [0, 1]
    assert greedy([[4, 5]], [[1, 0]], 1.0) == [0], "the strongest setting even where that is too much"


def test_one_setting_is_kept_unless_per_layer_wins_clearly() -> None:
    assert worthwhile(94, 100)
    assert not worthwhile(96, 100)


def test_critical_means_changed_by_half() -> None:
    assert is_critical(2.0, 1.0)
    assert is_critical(2.0, 3.0)
    assert not is_critical(2.0, 2.9)
    assert not is_critical(0.0, 0.0)


UNIT = UnitSpec((TensorSpec("peaked", (20, 50)), TensorSpec("flat", (80, 50))))


def _gradients(steps: int, alike: bool = False) -> list[list[Tensor]]:
    """In the first tensor 40 entries hold nearly everything, in the second all are alike."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(5000, generator=generator)
    if not alike:
        x[:40] *= 50
        x[40:1000] *= 0.01
    return [[x + 0.001 * torch.randn(5000, generator=generator) for _ in range(2)] for _ in range(steps)]


def _first_with_new_levels(spec: str, gradients: list[list[Tensor]]) -> tuple[list[int], int]:
    rounds = run_unit(make(spec), UNIT, gradients)
    return rounds[0].results[0].state["density_level"].tolist(), rounds[1].sent_bytes[0]


def test_lgreco_sends_fewer_bytes_at_no_more_error() -> None:
    levels, sent = _first_with_new_levels("lgreco(reference=0.08) | topk", _gradients(2))
    assert levels[0] < 2 == levels[1], "only where it costs no error"
    assert sent < 0.95 * make("topk(density=0.08)").wire_bytes(UNIT, 2)


def test_greedy_search_spends_the_same_bytes_where_they_help_most() -> None:
    levels, sent = _first_with_new_levels("lgreco(reference=0.02, search='greedy') | topk", _gradients(2))
    assert levels[0] > 2 > levels[1]
    assert sent <= 1.1 * make("topk(density=0.02)").wire_bytes(UNIT, 2)


def test_alike_tensors_keep_the_reference() -> None:
    levels, _ = _first_with_new_levels("lgreco(reference=0.04, search='greedy') | topk", _gradients(2, alike=True))
    assert levels == [2, 2]


def test_accordion_is_gentle_at_first_and_after_a_change() -> None:
    norms = (1.0, 1.0, 1.0, 1.0, 4.0, 4.0, 4.0, 4.0)
    gradients = [[x * norm for x in ranks] for ranks, norm in zip(_gradients(8), norms, strict=True)]
    rounds = run_unit(make("accordion(gentle=0.5, strong=0.01, window=2) | topk"), UNIT, gradients)
    applied = [int((done.results[0].mean != 0).sum()) for done in rounds]
    # Windows end after steps 1, 3, 5 and 7 (counted from 0); what they decide holds from the next step on.
    gentle = [count > 1000 for count in applied]
    assert gentle == [True, True, True, True, False, False, True, True]


def test_small_tensors_of_routers_are_left_alone() -> None:
    compressor = make("lgreco | ef | adtopk")
    assert str(compressor.route(TensorSpec("bias", (5000,)))) == "ef | dense"
    assert compressor.route(TensorSpec("weight", (50, 100))) is compressor


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("lgreco | int4", "has none"),
        ("lgreco(search='best') | topk", "'dp' or 'greedy'"),
        ("lgreco(reference=2) | topk", "reference is 2"),
        ("lgreco(refresh=0) | topk", "refresh is 0"),
        ("lgreco | lgreco | topk", "twice"),
        ("accordion(gentle=0) | topk", "gentle is 0"),
        ("accordion(window=0) | topk", "window is 0"),
        ("accordion(change=0) | topk", "change is 0"),
    ],
)
def test_what_makes_no_sense_is_refused(spec: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        make(spec)
