"""Ok-Topk-like: Li & Hoefler, Near-Optimal Sparse Allreduce for Distributed Deep Learning (PPoPP'22)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.compressors.shared import regions
from thinwire.compressors.shared.entries import ENTRY_BYTES, Entries, contains, from_rows, summed, to_rows
from thinwire.compressors.shared.magnitudes import just_below
from thinwire.compressors.shared.sparse import check_density, kept
from thinwire.core import (
    AllGather,
    AllReduce,
    AllToAll,
    Compressor,
    Exchange,
    Exchanged,
    Layout,
    Role,
    State,
    Step,
    UnitSpec,
    register,
)

THRESHOLD_PERIOD = 32
REGION_PERIOD = 64
# Capacity of a message, in multiples of a fair share k/p. An entry is two words: together 4.5k words, below the paper's 6k.
_CAPACITIES = (1.25, 1.0)  # to an owner, and from an owner
_PER_TENSOR = Layout(lambda tensor: 1)


@register("oktopk")
@dataclass(frozen=True, kw_only=True)
class OkTopK(Compressor):
    """Apply k entries in all, k summed over the tensors, for less than 6k words sent per rank however many ranks there are.

    Every rank owns a region of the unit. (1) Each selects what exceeds its threshold per tensor and sends it to the owners.
    (2) Owners add up what they get and give the most important sums to all. Thresholds are set by an exact selection
    every 32 calls, region borders every 64, so that owners get equally many entries. Scheme, periods and bound are the
    paper's. Our own: importance is magnitude over the owner's threshold for that tensor, and every owner gives k/p sums,
    where the paper compares with one global threshold. Messages have a fixed capacity of 1.25 and 1 fair shares, so the bound
    holds for any data and nobody waits for lengths; the least important entries that do not fit are not sent. Thresholds
    are also set at calls 1, 2, 4, 8 and 16, while the residual still grows. An entry leaves the residual only if its
    position is in the final result: what owners drop stays with those who sent it.

    Args:
        density: fraction of the entries to apply: k = max(1, floor(density·n)) per tensor, over all ranks together.
    """

    feedback = True
    scheduled = ("density",)

    density: float = 0.01

    def __post_init__(self) -> None:
        check_density(self.density)

    @property
    def exact_bytes(self) -> bool:
        """Steps that set the borders send a few bytes more; ``wire_bytes`` is the mean over the steps."""
        return False

    @property
    def sparse(self) -> bool:
        return True

    def init(self, unit: UnitSpec) -> State:
        device = unit.tensors[0].device if unit.tensors else torch.device("cpu")
        per_tensor = {key: torch.zeros(len(unit.tensors), device=device) for key in ("calls", "local")}
        return {**per_tensor, "spread": torch.zeros(regions.bucket_elems(unit), device=device)}

    def layout(self) -> Mapping[str, Layout]:
        calls, spread = (Layout(numel, Role.REPLICATED) for numel in (_PER_TENSOR.numel, regions.buckets))
        return {"calls": calls, "local": _PER_TENSOR, "spread": spread}

    def exchange(self, x: Tensor, state: State, step: Step) -> Exchange:
        now = self.at(step.index)
        selected, local = now._select(x, state, step.unit)
        spread = state["spread"]
        if _due(state["calls"], REGION_PERIOD):
            spread = yield AllReduce(regions.histogram(selected.indices, step.unit), "sum")

        borders = regions.borders(spread, step.unit, step.world_size)
        to_owner, from_owner = (now._capacity(step.unit, step.world_size, share) for share in _CAPACITIES)
        sent = _most_important(selected, selected.bounds(borders), to_owner, local, step.unit)
        rows = yield AllToAll(to_rows(sent, sent.bounds(borders), to_owner))
        owned = summed(*from_rows(rows))
        best = _most_important(owned, (0, owned.indices.numel()), from_owner, local, step.unit)
        gathered = yield AllGather(to_rows(best, (0, best.indices.numel()), from_owner)[0])
        total = Entries(*from_rows(gathered))

        _give_back(x, selected, sent, total)
        mean = torch.zeros_like(x)
        mean[total.indices.long()] = total.values / step.world_size
        return Exchanged(mean, x, {"calls": state["calls"] + 1, "local": local, "spread": spread})

    def _select(self, x: Tensor, state: State, unit: UnitSpec) -> tuple[Entries, Tensor]:
        """This rank's entries, taken out of ``x``, and its thresholds from here on."""
        if not _due(state["calls"], THRESHOLD_PERIOD):
            limits = just_below(state["local"]).tolist()
            chosen = kernels.ef_threshold_pack(x, None, unit.offsets, limits, out=x)
            return Entries(chosen.indices, chosen.values), state["local"]
        chosen = kernels.ef_topk(x, None, unit.offsets, self._ks(unit), out=x)
        selected = Entries(chosen.indices, chosen.values)
        return selected, _smallest(selected, unit)

    def wire_bytes(self, unit: UnitSpec, world_size: int) -> int:
        entries = sum(self._capacity(unit, world_size, share) for share in _CAPACITIES)
        balancing = 2 * 4 * regions.bucket_elems(unit) // (world_size * REGION_PERIOD)
        return (world_size - 1) * (ENTRY_BYTES * entries + balancing)

    def _capacity(self, unit: UnitSpec, world_size: int, fair_shares: float) -> int:
        """Entries that a message can hold."""
        return -int(-fair_shares * sum(self._ks(unit)) // world_size)

    def _ks(self, unit: UnitSpec) -> list[int]:
        return [kept(self.density, size) for size in unit.sizes]

    @classmethod
    def examples(cls) -> Sequence[Compressor]:
        return [cls(density=0.1)]


def _due(calls: Tensor, period: int) -> bool:
    """At every multiple of the period and, before the first, at powers of two: equal on all ranks."""
    counts = [int(count) for count in calls.tolist()]
    return any(count % period == 0 or (count < period and count & (count - 1) == 0) for count in counts)


def _tensor_of(entries: Entries, unit: UnitSpec) -> Tensor:
    """Which tensor each entry belongs to."""
    ends = torch.tensor(unit.offsets[1:], device=entries.indices.device, dtype=torch.int32)
    return torch.bucketize(entries.indices, ends, right=True)


def _most_important(entries: Entries, bounds: Sequence[int], capacity: int, scale: Tensor, unit: UnitSpec) -> Entries:
    """Between each two bounds at most ``capacity`` entries, the largest in relation to the ``scale`` of their tensor.

    Without the scale, tensors with large gradients would crowd the others out.
    """
    counts = [min(capacity, stop - start) for start, stop in pairwise(bounds)]
    if sum(counts) == entries.indices.numel():
        return entries
    tiny = torch.finfo(torch.float32).tiny
    importance = entries.values / scale[_tensor_of(entries, unit)].clamp(min=tiny)
    return entries.take(kernels.ef_topk(importance, None, tuple(bounds), counts).indices.long())


def _smallest(entries: Entries, unit: UnitSpec) -> Tensor:
    """The smallest magnitude among the entries of each tensor; 0 where it has none."""
    lengths = torch.tensor(entries.bounds(unit.offsets), device=entries.values.device).diff()
    smallest = torch.segment_reduce(entries.values.abs(), "min", lengths=lengths)
    return torch.where(lengths > 0, smallest, 0.0)


def _give_back(residual: Tensor, selected: Entries, sent: Entries, total: Entries) -> None:
    """Put into the residual what was selected but is no part of the result: the message was full, or the owner dropped it."""
    applied = contains(sent.indices, selected.indices) & contains(total.indices, selected.indices)
    kept_back = selected.take(~applied)
    residual[kept_back.indices.long()] = kept_back.values
