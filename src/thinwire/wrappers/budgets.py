"""Per-layer budgets: which of several settings each layer gets. Pure functions of measured costs and errors.

``costs[l][s]`` and ``errors[l][s]`` belong to layer l at setting s, the settings of every layer ordered from the strongest
(cheap, inexact) to the gentlest.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Table = Sequence[Sequence[float]]
_BUCKETS = 4096


def cheapest(costs: Table, errors: Table, error_budget: float, buckets: int = _BUCKETS) -> list[int] | None:
    """The settings of least total cost whose errors add up to ``error_budget``; None: there are none.

    L-GreCo-like (Alimohammadi et al., MLSys'24): dynamic programming over the errors in ``buckets`` equal steps. Errors are
    rounded to the nearest step, so the bound holds to within half a step per layer. Rounded up it would hold exactly, but
    then even settings that just fulfil it, such as those the bound was made from, would not be found.
    """
    if not error_budget >= 0:
        raise ValueError(f"error_budget is {error_budget}; expected a number that is not negative")
    width = error_budget / buckets
    used = [[_buckets_for(error, width, buckets) for error in row] for row in errors]
    best = torch.zeros(buckets + 1, dtype=torch.float64)  # least cost so far with at most so many buckets of error
    choices = []
    for row_costs, row_used in zip(costs, used, strict=True):
        options = torch.full((len(row_costs), buckets + 1), torch.inf, dtype=torch.float64)
        for option, cost, taken in zip(options, row_costs, row_used, strict=True):
            if taken <= buckets:
                option[taken:] = best[: buckets + 1 - taken] + cost
        best, choice = options.min(dim=0)
        choices.append(choice)
    if not torch.isfinite(best[-1]):
        return None
    chosen, left = [], buckets
    for choice, row_used in zip(reversed(choices), reversed(used), strict=True):
        chosen.append(int(choice[left]))
        left -= row_used[chosen[-1]]
    return chosen[::-1]


def _buckets_for(error: float, width: float, buckets: int) -> int:
    """To the nearest; one more than there are where it does not fit at all."""
    if width == 0:
        return 0 if error <= 0 else buckets + 1
    return round(min(error / width, buckets + 1.0))


def greedy(costs: Table, errors: Table, cost_budget: float) -> list[int]:
    """Settings of small total error whose costs add up to at most ``cost_budget``, or the strongest ones.

    After the budgeted search for group convolutions (ICCVW'19): all begin at the strongest setting; the layer that gains
    most per cost is relaxed by one setting, until no relaxation fits any more.
    """
    chosen = [0] * len(costs)
    left = cost_budget - sum(row[0] for row in costs)
    while True:
        gains = []
        for layer, now in enumerate(chosen):
            if now + 1 < len(costs[layer]):
                price = costs[layer][now + 1] - costs[layer][now]
                gain = errors[layer][now] - errors[layer][now + 1]
                if price <= left and gain > 0:
                    gains.append((gain / max(price, 1e-300), -layer, price))
        if not gains:
            return chosen
        _, layer, price = max(gains)
        chosen[-layer] += 1
        left -= price


def total(table: Table, chosen: Sequence[int]) -> float:
    """The sum over the layers at their settings."""
    return sum(row[setting] for row, setting in zip(table, chosen, strict=True))


def worthwhile(per_layer: float, uniform: float, margin: float = 0.05) -> bool:
    """Whether per-layer settings win over one for all (less is better) by more than ``margin``; else keep the one."""
    return per_layer < (1 - margin) * uniform


def is_critical(before: float, now: float, change: float = 0.5) -> bool:
    """Accordion-like (Agarwal et al., MLSys'21): a layer whose gradient norm has changed by ``change`` between windows."""
    return now != before and abs(now - before) >= change * abs(before)
