"""ADTopk: all-dimension top-k (HPDC'24, extended TACO'26)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.compressors.dense import Dense
from thinwire.compressors.shared import threshold_reuse
from thinwire.compressors.shared.places import FlatPlaces, Places, row_places
from thinwire.compressors.shared.sparse import Sparsifier, check_density, kept
from thinwire.core import (
    AllGather,
    Compressor,
    ConfigError,
    Exchange,
    Exchanged,
    Layout,
    Payload,
    Role,
    State,
    Step,
    TensorSpec,
    UnitSpec,
    memory,
    register,
)
from thinwire.core.part import Part, parts_by_kind
from thinwire.formats import wire_format
from thinwire.kernels import Selected

_SAME_EVERYWHERE = Layout(lambda tensor: 1, Role.REPLICATED)
_PER_RANK = Layout(lambda tensor: 1)
_REUSED = ("threshold", "period", "wait")


@dataclass(frozen=True, eq=False)
class _Sent:
    """What a rank sends for one part of the unit, and what becomes of its state."""

    payload: Payload
    places: Places
    residual: Tensor
    reused: State
    varying: bool


@register("adtopk")
@dataclass(frozen=True, kw_only=True)
class ADTopK(Sparsifier):
    """Every row of a weight sends its own k = max(1, floor(density·row length)) largest magnitudes: no row goes missing.

    Weights are seen as matrices, convolutions as (out, in·kh·kw). Positions are written inside rows. As in the authors'
    code, each tensor alternates between this and a top-k of the whole tensor, beginning with the rows. Vectors are never
    sparsified; with the usual routing they and small tensors go by all-reduce.

    With ``reuse``, as in the authors' code, the top-k is exact for 15 calls and from then on every τ calls; in between
    whatever exceeds the smallest magnitude it had kept is sent, and τ (5 or more) grows while that threshold stays put.
    Off by default: that threshold is found when entries have piled up, so it lets through about a quarter less than k,
    in messages of unknown size, and exact selection is not the bottleneck here.

    This project's own: phases follow a call count that is the same on all ranks; a tensor whose threshold lets through more
    than 2 k is cut to its k largest; "stable" means stable on all ranks, who tell each other.

    Args:
        density: fraction of the entries to send. On rows shorter than 1/density one entry each is more than that.
        interleave: False stays with the rows: constant size, and every row in every step.
        reuse: reuse thresholds in between exact selections; the size then varies.
        planned_steps: length of the training; in its last quarter tensors with stable thresholds stay with the rows.
            0: unknown, they go on alternating.
    """

    scheduled = ("density",)

    density: float = 0.01
    interleave: bool = True
    reuse: bool = False
    planned_steps: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_density(self.density)
        if self.planned_steps < 0:
            raise ConfigError(
                f"adtopk: planned_steps is {self.planned_steps}; expected the length of the training, or 0"
            )
        if wire_format(self.values).bits < 8 and self.interleave and self.reuse:
            raise ConfigError(
                f"adtopk: {self.values} values need a count known beforehand; leave out reuse, or use int8 or wider"
            )

    @property
    def exact_bytes(self) -> bool:
        return not self.interleave and super().exact_bytes

    def init(self, unit: UnitSpec) -> State:
        count = len(unit.tensors)
        calls = torch.zeros(count, dtype=torch.int64, device=unit.device)
        stable = torch.zeros(count, dtype=torch.bool, device=unit.device)
        return {"calls": calls, "stable": stable, **threshold_reuse.initial_state(unit)}

    def layout(self) -> Mapping[str, Layout]:
        return {"calls": _SAME_EVERYWHERE, "stable": _SAME_EVERYWHERE, **dict.fromkeys(_REUSED, _PER_RANK)}

    def route(self, tensor: TensorSpec) -> Compressor:
        return self if len(tensor.shape) > 1 else Dense()

    def exchange(self, x: Tensor, state: State, step: Step) -> Exchange:
        now = self.at(step.index)
        parts = parts_by_kind(step.unit, now._by_rows(state).tolist())
        sent = {rows: now._send(part.take(x), part, state, bool(rows)) for rows, part in parts.items()}
        asked = tuple(AllGather(one.payload.to_bytes(), varying=one.varying) for one in sent.values())
        replies = yield asked
        mean, stable = memory.empty(x.numel(), device=x.device), state["stable"].clone()
        reused = {key: state[key].clone() for key in _REUSED}
        for (rows, part), one, reply in zip(parts.items(), sent.values(), replies, strict=True):
            payloads = [Payload.from_bytes(message) for message in reply]
            mean = part.put(now._mean(payloads, one.places, part.unit, bool(rows)), mean)
            x = part.put(one.residual, x)
            members = torch.tensor(part.members, device=x.device)
            for key, value in one.reused.items():
                reused[key][members] = value
            if "stable" in one.payload:
                stable[members] = _agreed([payload["stable"] for payload in payloads], stable[members])
        return Exchanged(mean, x, {"calls": state["calls"] + 1, "stable": stable, **reused})

    def _by_rows(self, state: State) -> Tensor:
        """Per tensor, whether this call selects by rows. The same on all ranks, because calls and stable are."""
        if not self.interleave:
            return torch.ones_like(state["stable"])
        settled = (
            4 * state["calls"] >= 3 * self.planned_steps if self.planned_steps else torch.zeros_like(state["stable"])
        )
        return (state["calls"] % 2 == 0) | (settled & state["stable"])

    def _send(self, x: Tensor, part: Part, state: State, rows: bool) -> _Sent:
        if rows:
            chosen, places = self._select_rows(x, part.unit), self._row_places(part.unit)
            return _Sent(*self._packed(chosen, places), {}, False)
        members = torch.tensor(part.members, device=x.device)
        flat_calls = state["calls"][members] // 2
        varying = self.reuse and bool((flat_calls >= threshold_reuse.EXACT_CALLS).any())
        ks, places = self._flat_ks(part.unit), FlatPlaces(part.unit.numel, self.indices)
        if not self.reuse and not self.planned_steps:
            chosen = kernels.ef_topk(x, None, part.unit.offsets, ks, out=x)
            return _Sent(*self._packed(chosen, places), {}, False)
        before = {key: state[key][members] for key in _REUSED}
        chosen, after, told = threshold_reuse.select(x, part.unit, ks, before, flat_calls, reuse=self.reuse)
        sent = _Sent(*self._packed(chosen, places), after, varying)
        if self.planned_steps:
            sent.payload["stable"] = told
        return sent

    def _packed(self, chosen: Selected, places: Places) -> tuple[Payload, Places, Tensor]:
        payload, residual = self.pack(chosen, places)
        return payload, places, residual

    def _mean(self, payloads: Sequence[Payload], places: Places, unit: UnitSpec, rows: bool) -> Tensor:
        expected = self._row_elems(unit) if rows else sum(self._flat_ks(unit))
        entries = [self.entries(payload, places, expected) for payload in payloads]
        return kernels.scatter_mean(entries, unit.numel, world_size=len(payloads))

    def select(self, x: Tensor, step: Step) -> Selected:
        """By rows: the phase that is this method's own."""
        return self._select_rows(x, step.unit)

    def selected_elems(self, unit: UnitSpec) -> int:
        return self._row_elems(unit)

    def places(self, unit: UnitSpec) -> Places:
        return self._row_places(unit)

    def wire_bytes(self, unit: UnitSpec, world_size: int) -> int:
        """The average of the two phases; thresholds let through about what they are meant to."""
        by_rows = self.payload_bytes(unit)
        if not self.interleave:
            return (world_size - 1) * by_rows
        flat = self.entries_bytes(sum(self._flat_ks(unit)), FlatPlaces(unit.numel, self.indices))
        return (world_size - 1) * (by_rows + flat) // 2

    def _select_rows(self, x: Tensor, unit: UnitSpec) -> Selected:
        return kernels.row_topk(x, None, unit.offsets, _row_lengths(unit), self._row_ks(unit), out=x)

    def _row_places(self, unit: UnitSpec) -> Places:
        return row_places(unit.offsets, _row_lengths(unit), self._row_ks(unit), unit.device)

    def _row_ks(self, unit: UnitSpec) -> tuple[int, ...]:
        return tuple(kept(self.density, length) for length in _row_lengths(unit))

    def _row_elems(self, unit: UnitSpec) -> int:
        rows = (tensor.matrix_shape[0] for tensor in unit.tensors)
        return sum(count * k for count, k in zip(rows, self._row_ks(unit), strict=True))

    def _flat_ks(self, unit: UnitSpec) -> list[int]:
        return [kept(self.density, size) for size in unit.sizes]

    @classmethod
    def examples(cls) -> Sequence[Compressor]:
        return [cls(density=0.05, reuse=True), cls(density=0.05, values="int8", interleave=False)]


def _row_lengths(unit: UnitSpec) -> tuple[int, ...]:
    return tuple(tensor.matrix_shape[1] for tensor in unit.tensors)


def _agreed(told: Sequence[Any], before: Tensor) -> Tensor:
    """A threshold is stable if nobody found it unstable and somebody found it stable; what nobody was asked stays."""
    words = torch.stack(list(told))
    asked = words.amax(dim=0) >= 0
    return torch.where(asked, ~(words == 0).any(dim=0), before)
