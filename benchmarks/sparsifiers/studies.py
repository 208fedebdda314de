"""The three questions: which rows get nothing, which tensors get nothing, and how much of the gradient gets through."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from benchmarks.sparsifiers.budget import Fitted, depends_on_data, innermost
from benchmarks.sparsifiers.lanes import Method, Outcome, fused, routed
from benchmarks.sparsifiers.stream import Sample
from torch import Tensor

from thinwire.compressors.dgc import DGC
from thinwire.core import TensorSpec, make


@dataclass(frozen=True)
class RowsMissing:
    """Of the rows of a weight that have anything to send, the part of which nothing arrives in a step (mean).

    Args:
        tensor: its name.
        missing: by spec.
    """

    tensor: str
    rows: int
    row_elems: int
    missing: dict[str, float]


class RowStudy:
    """Rows missing, by weight and method."""

    def __init__(self, tensors: Sequence[TensorSpec], specs: Sequence[str], ignored_steps: int) -> None:
        self._tensors, self._ignored = tensors, ignored_steps
        self._methods = {spec: Method(routed(tensors, spec)) for spec in specs}
        self._shares: dict[tuple[str, str], list[float]] = defaultdict(list)

    def add(self, sample: Sample) -> None:
        """Take in a step."""
        for spec, method in self._methods.items():
            outcome = method.exchange(sample)
            for tensor in self._tensors if sample.step >= self._ignored else ():
                if tensor.fqn in outcome.offered:
                    self._shares[tensor.fqn, spec].append(rows_missing(outcome, tensor))

    def result(self) -> list[RowsMissing]:
        """One row per weight that is sparsified, in the model's order."""
        return [
            RowsMissing(t.fqn, *t.matrix_shape, {s: fmean(self._shares[t.fqn, s]) for s in self._methods})
            for t in reversed(self._tensors)
            if (t.fqn, next(iter(self._methods))) in self._shares
        ]


def rows_missing(outcome: Outcome, tensor: TensorSpec) -> float:
    """The part of the rows with something to send of which nothing arrived."""
    has = outcome.offered[tensor.fqn].view(tensor.matrix_shape).any(dim=1)
    arrived = outcome.means[tensor.fqn].view(tensor.matrix_shape).any(dim=1)
    return float((has & ~arrived).sum() / has.sum().clamp_min(1))


@dataclass(frozen=True)
class TensorsMissing:
    """A top-k over so many tensors at once.

    Args:
        degree: tensors that are one vector to the top-k; 1 is a segmented top-k.
        missing: the part of the tensors of which nothing arrives in a step (mean).
        longest_wait: the most steps in a row in which nothing arrived of a tensor.
        kept: the part of the energy that was sent (mean).
    """

    degree: int
    groups: int
    missing: float
    longest_wait: int
    kept: float


class TensorStudy:
    """Tensors missing, by fusion degree."""

    def __init__(self, tensors: Sequence[TensorSpec], degrees: Sequence[int], spec: str, ignored_steps: int) -> None:
        self._ignored = ignored_steps
        usable = list(dict.fromkeys(min(degree, len(tensors)) for degree in degrees))
        self._methods = {degree: Method(fused(tensors, spec, degree)) for degree in usable}
        self._groups = {degree: -(-len(tensors) // degree) for degree in usable}
        self._arrived: dict[int, list[list[bool]]] = {degree: [] for degree in usable}  # by step, by tensor
        self._kept: dict[int, list[float]] = {degree: [] for degree in usable}

    def add(self, sample: Sample) -> None:
        """Take in a step."""
        for degree, method in self._methods.items():
            outcome = method.exchange(sample)
            if sample.step >= self._ignored:
                self._arrived[degree].append([bool(mean.any()) for mean in outcome.means.values()])
                self._kept[degree].append(outcome.kept)

    def result(self) -> list[TensorsMissing]:
        """One row per degree."""
        return [self._of(degree) for degree in self._methods]

    def _of(self, degree: int) -> TensorsMissing:
        arrived = self._arrived[degree]
        missing = 1 - fmean(flag for flags in arrived for flag in flags)
        waits = [longest_run([not flag for flag in flags]) for flags in zip(*arrived, strict=True)]
        return TensorsMissing(degree, self._groups[degree], missing, max(waits), fmean(self._kept[degree]))


def longest_run(flags: Sequence[bool]) -> int:
    """How many in a row are set, at most."""
    longest = current = 0
    for flag in flags:
        current = current + 1 if flag else 0
        longest = max(longest, current)
    return longest


@dataclass(frozen=True)
class EnergyKept:
    """A method at its setting.

    Args:
        sent_bytes: by one rank per step, on average; small tensors, which go dense, included.
        kept_first: the part of the energy that was sent in the first step, where nothing waits in residuals.
        kept: the same later, mean over the counted steps.
        lag: ‖sum of what arrived − sum of the mean gradients‖ over the norm of the latter, after all steps. None where the
            method sends something else than gradients (a velocity).
        varies: how much is sent depends on the data, and was calibrated on these gradients.
    """

    label: str
    spec: str
    sent_bytes: float
    kept_first: float
    kept: float
    lag: float | None
    varies: bool


class EnergyStudy:
    """Energy kept, by method."""

    def __init__(self, tensors: Sequence[TensorSpec], fitted: Sequence[Fitted], ignored_steps: int) -> None:
        self._ignored = ignored_steps
        self._runs = [_EnergyRun(tensors, one) for one in fitted]
        self._wanted: dict[str, Tensor] = {}

    def add(self, sample: Sample) -> None:
        """Take in a step."""
        for tensor in sample.gradients[0]:
            mean = torch.stack([mine[tensor] for mine in sample.gradients]).mean(dim=0)
            self._wanted[tensor] = self._wanted[tensor] + mean if tensor in self._wanted else mean
        for run in self._runs:
            run.add(sample)

    def result(self) -> list[EnergyKept]:
        """One row per method, in the order given."""
        return [run.result(self._wanted, self._ignored) for run in self._runs]


class _EnergyRun:
    def __init__(self, tensors: Sequence[TensorSpec], fitted: Fitted) -> None:
        self._fitted, self._method = fitted, Method(routed(tensors, fitted.spec))
        self._kept: list[float] = []
        self._sent: list[int] = []
        self._arrived: dict[str, Tensor] = {}

    def add(self, sample: Sample) -> None:
        outcome = self._method.exchange(sample)
        self._kept.append(outcome.kept)
        self._sent.append(outcome.sent_bytes)
        for name in outcome.offered:
            mean = outcome.means[name]
            self._arrived[name] = self._arrived[name] + mean if name in self._arrived else mean.clone()

    def result(self, wanted: dict[str, Tensor], ignored_steps: int) -> EnergyKept:
        label, spec = self._fitted.label, self._fitted.spec
        lag = None if isinstance(innermost(make(spec)), DGC) else self._lag(wanted)
        later = fmean(self._kept[ignored_steps:])
        return EnergyKept(label, spec, fmean(self._sent), self._kept[0], later, lag, depends_on_data(spec))

    def _lag(self, wanted: dict[str, Tensor]) -> float:
        missing = sum(float((wanted[name] - sent).double().square().sum()) for name, sent in self._arrived.items())
        return float((missing / sum(float(wanted[name].double().square().sum()) for name in self._arrived)) ** 0.5)
