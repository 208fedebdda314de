"""MIPD-style: after Zhang et al., significance-driven adaptive gradient sparsification (TPDS'22); formulas our own."""

from __future__ import annotations

import math
import zlib
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.compressors.shared import shared_mask, significance
from thinwire.compressors.shared.padding import fill_padding
from thinwire.compressors.shared.significance import BLOCK, as_blocks, blocks_of
from thinwire.compressors.shared.sparse import check_density
from thinwire.compressors.shared.water_filling import layer_blocks
from thinwire.core import (
    ELEMENTWISE,
    AllReduce,
    Compressor,
    ConfigError,
    Exchange,
    Exchanged,
    Layout,
    Role,
    State,
    Step,
    UnitSpec,
    memory,
    register,
)
from thinwire.core.blocks import from_blocks
from thinwire.formats import coarse

_UNKNOWN = -1.0
_MAX_AGE = 400
_MAX_REFRESH = 8
_SCORES_SHARE = 8  # the values take at least so many times the bytes of the scores
_PER_BLOCK = Layout(lambda tensor: -(-tensor.numel // BLOCK), Role.REPLICATED)


@register("mipd")
@dataclass(frozen=True, kw_only=True)
class MIPD(Compressor):
    """Blocks of 256 weights that matter most go, the same ones on all ranks: no indices, plain averaging of the values.

    From the paper's abstract: layer-wise sparsification by the significance that model interpretability gives to parameters,
    exponential smoothing in place of dropped gradients, half of the parameters per step, encoding by each layer's
    distribution. Its formulas are not public; everything below is this project's reconstruction, and no result of the
    paper is claimed for it.

    A block's score is the mean of (|w| + rms(w)/2)·|x| over its elements, x being gradient plus residual, averaged over the
    ranks every ``refresh`` steps. x grows while a block waits, so the score divided by sqrt(1 + age) is smoothed, and
    multiplied by the present sqrt(1 + age) to rank the blocks of a layer. How many blocks a layer sends is proportional to
    the root of its mean score (``water_filling``), among the layers that travel together: *the result depends on the
    grouping*. Blocks unsent for min(400, 4 / density) steps go first, up to half of the budget.

    Args:
        density: fraction of the blocks to send (of those of the active half, with ``half``).
        score: ``significance``, ``product`` (|w·x|), ``fisher`` (root mean square of x) or ``magnitude``. The first two need
            the weights; where the driver of the exchange gives none, they are the magnitude.
        values: how the values travel: bf16, fp32, fp16, fp8, int8, int4, int2, int1, or ``laplace4`` and ``laplace8``, a
            codebook for the Laplace law (``laplace``). Fewer bits: more blocks for the same bytes, each less exact.
        refresh: steps between measurements of the scores, which cost as many bytes as 0.8 % of the values in bf16.
            0: as many (at most 8) as keep the scores below an eighth of the values.
        smoothing: weight of the old score, and of the old forecast. Higher: steadier choice.
        half: two sets of layers of equal size take turns; the other one only adds to its residual.
        compensation: ``feedback``: error feedback. ``predictive``: all ranks also apply a forecast, the smoothed mean of
            what was applied before, and send what differs from it; the mean is then no longer sparse.
    """

    feedback = True
    scheduled = ("density",)

    density: float = 0.05
    score: str = "significance"
    values: str = "bf16"
    refresh: int = 0
    smoothing: float = 0.9
    half: bool = False
    compensation: str = "feedback"

    def __post_init__(self) -> None:
        check_density(self.density)
        shared_mask.check_values("mipd", self.values, (*shared_mask.VALUES, *shared_mask.LAPLACE))
        if self.score not in significance.SCORES:
            raise ConfigError(f"mipd: score is {self.score!r}; expected one of {', '.join(significance.SCORES)}")
        if self.refresh < 0:
            raise ConfigError(f"mipd: refresh is {self.refresh}; expected a number of steps, or 0 to choose it")
        if not 0 <= self.smoothing < 1:
            raise ConfigError(f"mipd: smoothing is {self.smoothing}; expected 0 or more and below 1")
        if self.compensation not in ("feedback", "predictive"):
            raise ConfigError(f"mipd: compensation is {self.compensation!r}; expected 'feedback' or 'predictive'")

    @property
    def exact_bytes(self) -> bool:
        return self._every == 1 and not self.half and super().exact_bytes

    @property
    def sparse(self) -> bool:
        return self.compensation == "feedback"

    @property
    def needs_weights(self) -> bool:
        return self.score in significance.WITH_WEIGHTS

    def init(self, unit: UnitSpec) -> State:
        count = blocks_of(unit).count
        state = {
            "rate": torch.full((count,), _UNKNOWN, device=unit.device),
            "age": torch.zeros(count, dtype=torch.int32, device=unit.device),
        }
        return state | ({"applied": torch.zeros(unit.numel, device=unit.device)} if self._predicts else {})

    def layout(self) -> Mapping[str, Layout]:
        applied = {"applied": replace(ELEMENTWISE, role=Role.REPLICATED)} if self._predicts else {}
        return {"rate": _PER_BLOCK, "age": _PER_BLOCK, **applied}

    @property
    def _predicts(self) -> bool:
        return self.compensation == "predictive"

    @property
    def _every(self) -> int:
        """Steps from one measurement to the next."""
        value_bits = BLOCK * self.density * shared_mask.bits(self.values)
        return self.refresh or min(_MAX_REFRESH, math.ceil(_SCORES_SHARE * 32 / value_bits))

    def exchange(self, x: Tensor, state: State, step: Step) -> Exchange:
        if not x.numel():
            return Exchanged(x, x.clone(), state)
        now, unit = self.at(step.index), step.unit
        rate = state["rate"]
        if step.index % now._every == 0 or bool((rate < 0).any()):
            weights = None if step.weights is None else step.weights()
            local = significance.score(self.score, as_blocks(x, unit), weights, unit)
            rate = self._smoothed(rate, (yield AllReduce(local)), state["age"])
        active = now._active(unit, step.index)
        forecast = self._forecast(state, active, unit)
        if forecast is not None:
            x -= forecast
        picked = now._pick(rate, state["age"], active, unit)
        mean, residual = yield from self._average(x, picked, step)
        age = (state["age"] + 1).index_fill_(0, picked, 0)
        if forecast is None:
            return Exchanged(mean, residual, {"rate": rate, "age": age})
        mean += forecast
        applied = state["applied"] * self.smoothing + mean * (1 - self.smoothing)
        kept = torch.where(self._elements(active, unit), applied, state["applied"])
        return Exchanged(mean, residual, {"rate": rate, "age": age, "applied": kept})

    def _smoothed(self, rate: Tensor, measured: Tensor, age: Tensor) -> Tensor:
        new = measured / (1 + age).sqrt()
        return torch.where(rate < 0, new, self.smoothing * rate + (1 - self.smoothing) * new)

    def _average(self, x: Tensor, picked: Tensor, step: Step) -> Generator[Any, Any, tuple[Tensor, Tensor]]:
        """The mean of the picked blocks, zero elsewhere, and what is left of ``x``."""
        blocks = as_blocks(x, step.unit)
        mean = memory.zeros(blocks.numel(), device=x.device).view(-1, BLOCK)
        if picked.numel():
            fill_padding(blocks.view(-1, coarse.BLOCK), step.unit.sizes, together=BLOCK // coarse.BLOCK)
            done = yield from shared_mask.averaged(blocks[picked].view(-1), self.values, step)
            mean[picked] = done.mean.view(-1, BLOCK)
            blocks[picked] = 0.0 if done.residual is None else done.residual.view(-1, BLOCK)
        whole, rest = (from_blocks(one.view(-1), step.unit, BLOCK) for one in (mean, blocks))
        return whole, rest

    def _forecast(self, state: State, active: Tensor, unit: UnitSpec) -> Tensor | None:
        if not self._predicts:
            return None
        return torch.where(self._elements(active, unit), state["applied"], 0.0)

    def _elements(self, active: Tensor, unit: UnitSpec) -> Tensor:
        return active.repeat_interleave(torch.tensor(unit.sizes, device=active.device))

    def _active(self, unit: UnitSpec, index: int) -> Tensor:
        """Per tensor, whether it takes part in this step."""
        if not self.half:
            return torch.ones(len(unit.tensors), dtype=torch.bool, device=unit.device)
        return torch.tensor([side == index % 2 for side in halves(unit)], device=unit.device)

    def _budget(self, blocks: int) -> int:
        return min(blocks, max(1, round(self.density * blocks)))

    def _pick(self, rate: Tensor, age: Tensor, active: Tensor, unit: UnitSpec) -> Tensor:
        """The blocks to send, ascending. Everything here is replicated, so the ranks pick alike."""
        blocks = blocks_of(unit)
        usable = blocks.of_tensors(active)
        budget = self._budget(int(usable.sum()))
        overdue = _oldest(torch.where(usable, age, -1), min(_MAX_AGE, 4 / self.density), max(1, budget // 2))
        free = usable.index_fill(0, overdue, False)
        counts = torch.tensor(blocks.per_tensor, device=rate.device)
        owner = blocks.of_tensors(torch.arange(len(blocks.per_tensor), device=rate.device))
        priority = rate * (1 + age).sqrt()
        totals, _ = kernels.segment_moments(priority, blocks.offsets)
        capacity = torch.zeros_like(counts).index_add_(0, owner, free.long())
        ks = layer_blocks(totals / counts.clamp_min(1), counts * active, budget - overdue.numel(), capacity)
        # A block that is free comes before one that is not, even if its score is zero.
        candidates = torch.where(free, priority.clamp_min(torch.finfo(torch.float32).tiny), 0.0)
        chosen = kernels.ef_topk(candidates, None, blocks.offsets, ks.tolist()).indices.long()
        return torch.cat([chosen, overdue]).sort().values

    def wire_bytes(self, unit: UnitSpec, world_size: int) -> int:
        """On average over the steps: scores are sent in some only, and the halves take turns."""
        blocks = blocks_of(unit)
        if not blocks.count:
            return 0
        turns = [self._active(unit, index) for index in range(2 if self.half else 1)]
        budgets = [self._budget(int(blocks.of_tensors(active).sum())) for active in turns]
        payloads = [shared_mask.mean_bytes(BLOCK * budget, self.values, world_size) for budget in budgets]
        scores_bytes = 2 * (world_size - 1) * 4 * blocks.count // world_size
        return scores_bytes // self._every + sum(payloads) // len(payloads)

    @classmethod
    def examples(cls) -> Sequence[Compressor]:
        return [
            cls(density=0.1, refresh=1),
            cls(density=0.2, half=True, values="laplace4"),
            cls(density=0.5, score="magnitude", values="int1"),
        ]


def halves(unit: UnitSpec) -> list[int]:
    """For each tensor 0 or 1: two sets of about equal size, the larger tensors dealt out first."""
    totals, sides = [0, 0], [0] * len(unit.tensors)
    first = zlib.crc32(unit.name.encode()) % 2  # or all units of one tensor would have the same turn
    for index in sorted(range(len(unit.tensors)), key=lambda i: -unit.sizes[i]):
        side = first if totals[first] <= totals[1 - first] else 1 - first
        sides[index] = side
        totals[side] += unit.sizes[index]
    return sides


def _oldest(age: Tensor, limit: float, at_most: int) -> Tensor:
    """Blocks that have waited for ``limit`` steps, the longest waiting first, no more than ``at_most``."""
    overdue = (age >= limit).nonzero().squeeze(1)
    order = age[overdue].sort(descending=True, stable=True).indices
    return overdue[order[:at_most]]
