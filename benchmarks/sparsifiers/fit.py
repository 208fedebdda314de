"""A method at a budget, on gradients where they decide how much it sends."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from benchmarks.convergence.tasks import WORKERS
from benchmarks.sparsifiers.budget import Family, Fitted, calibrate, depends_on_data, solve
from benchmarks.sparsifiers.lanes import Method, routed
from benchmarks.sparsifiers.stream import Sample

from thinwire.core import TensorSpec


def fit(family: Family, tensors: Sequence[TensorSpec], budget_bytes: int, taken: Sequence[Sample]) -> Fitted:
    """The method at the budget; on these gradients, where they decide how much is sent."""
    if not depends_on_data(family.spec(family.high)):
        return solve(family, tensors, budget_bytes, WORKERS)
    return calibrate(family, tensors, budget_bytes, WORKERS, lambda spec: sent_bytes(spec, tensors, taken))


def sent_bytes(spec: str, tensors: Sequence[TensorSpec], taken: Sequence[Sample]) -> float:
    """What one rank really sends per step."""
    method = Method(routed(tensors, spec))
    return fmean(method.exchange(sample).sent_bytes for sample in taken)
