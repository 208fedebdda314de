"""Threshold reuse of ADTopk: an exact top-k now and then, in between whatever exceeds the threshold it found.

Everything here belongs to one rank: how many entries it sends may differ from the others'.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.core import State, UnitSpec
from thinwire.kernels import Selected

EXACT_CALLS = 15  # at first the residual builds up and thresholds move fast
MIN_PERIOD = 5
_OVERFULL = 2  # times k, beyond which a threshold is plainly out of date


def initial_state(unit: UnitSpec) -> State:
    """Per tensor: the threshold in use, calls from one exact selection to the next, calls left until then."""
    count = len(unit.tensors)
    return {
        "threshold": torch.zeros(count, device=unit.device),
        "period": torch.full((count,), MIN_PERIOD, device=unit.device),
        "wait": torch.zeros(count, dtype=torch.int64, device=unit.device),
    }


def select(
    x: Tensor, unit: UnitSpec, ks: Sequence[int], state: State, calls: Tensor, *, reuse: bool = True
) -> tuple[Selected, State, Tensor]:
    """Choose about ``ks`` entries of each tensor; the residual is written over ``x``.

    Args:
        calls: per tensor, how many selections came before this one.
        reuse: False selects exactly every time, and only watches the thresholds.

    Returns:
        The entries, the new state, and per tensor 1 where the threshold was found stable, 0 where not, -1 where not asked.
    """
    early = calls < EXACT_CALLS
    exact = early | (state["wait"] <= 0) if reuse else torch.ones_like(early)
    chosen = _choose(x, unit, ks, exact.tolist(), state["threshold"].tolist())
    smallest = _smallest_kept(chosen, len(ks))
    threshold = torch.where(exact, smallest, state["threshold"])
    period, stable = _adapt(state["threshold"], smallest, state["period"])
    asked = exact & ~early
    period = torch.where(asked, period, state["period"])
    wait = torch.where(exact, period - 1, state["wait"] - 1)
    told = torch.where(asked, stable.to(torch.int8), -1)
    return chosen, {"threshold": threshold, "period": period, "wait": wait}, told


def _choose(
    x: Tensor, unit: UnitSpec, ks: Sequence[int], exact: Sequence[bool], thresholds: Sequence[float]
) -> Selected:
    if all(exact):
        return kernels.ef_topk(x, None, unit.offsets, ks, out=x)
    limits = [float("inf") if now else limit for now, limit in zip(exact, thresholds, strict=True)]
    above = _trimmed(kernels.ef_threshold_pack(x, None, unit.offsets, limits, out=x), ks)
    if not any(exact):
        return above
    due = [k if now else 0 for now, k in zip(exact, ks, strict=True)]
    return _joined(kernels.ef_topk(x, None, unit.offsets, due, out=x), above)


def _trimmed(chosen: Selected, ks: Sequence[int]) -> Selected:
    """An overfull tensor cut to its k largest: gradients that grow suddenly would otherwise be sent nearly whole."""
    if all(count <= _OVERFULL * k for count, k in zip(chosen.counts, ks, strict=True)):
        return chosen
    counts = [count if count <= _OVERFULL * k else k for count, k in zip(chosen.counts, ks, strict=True)]
    bounds = (0, *torch.tensor(chosen.counts).cumsum(0).tolist())
    largest = kernels.ef_topk(chosen.values, None, bounds, counts)
    # Everything chosen goes back; `largest` holds zeros where its own entries were.
    chosen.residual[chosen.indices.long()] = largest.residual
    indices = chosen.indices[largest.indices.long()]
    return chosen._replace(values=largest.values, indices=indices, counts=tuple(counts))


def _joined(one: Selected, other: Selected) -> Selected:
    """Two selections of different tensors of a unit, in ascending order."""
    indices, order = torch.cat([one.indices, other.indices]).sort()
    values = torch.cat([one.values, other.values])[order]
    counts = tuple(a + b for a, b in zip(one.counts, other.counts, strict=True))
    return Selected(values, indices, counts, one.residual, one.finite and other.finite)


def _smallest_kept(chosen: Selected, tensors: int) -> Tensor:
    """Per tensor; infinity for one that has sent nothing."""
    counts = torch.tensor(chosen.counts, device=chosen.values.device)
    owner = torch.arange(tensors, device=counts.device).repeat_interleave(counts)
    smallest = torch.full((tensors,), float("inf"), device=counts.device)
    return smallest.scatter_reduce_(0, owner, chosen.values.abs(), "amin")


def _adapt(old: Tensor, new: Tensor, period: Tensor) -> tuple[Tensor, Tensor]:
    """The next period from how far the threshold has moved, and whether it counts as stable."""
    moved, unit = (old - new).abs(), old / 10
    change = torch.zeros_like(period)
    change = torch.where(moved < unit, 1, change)
    change = torch.where(moved < unit / 2, 2, change)
    change = torch.where(moved > unit, -1, change)
    change = torch.where(moved > 2 * unit, -2, change)
    return (period + change).clamp_min(MIN_PERIOD), moved < unit
