"""8-bit floats: Micikevicius et al., FP8 Formats for Deep Learning (2022)."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from thinwire.compressors.shared import agreed
from thinwire.compressors.shared.blockwise import FewBits, average_shard, shard_elems, share_shards
from thinwire.compressors.shared.coders import Coder, to_rows
from thinwire.core import (
    AllToAll,
    Compressor,
    ConfigError,
    Exchange,
    Exchanged,
    Layout,
    Request,
    State,
    Step,
    UnitSpec,
    memory,
    register,
)
from thinwire.formats import Encoded, WireFormat, fp8, wire_format


@register("fp8")
@dataclass(frozen=True, kw_only=True)
class Fp8(FewBits):
    """One byte per value as a float: coarser than ``int8`` for large values, finer for small ones; sums in fp32.

    Args:
        variant: ``e4m3`` (3 mantissa bits) or ``e5m2`` (2, for a wider range of magnitudes).
        scale: ``block``: a power of two per 256 values travels with them. ``agreed``: one per tensor, agreed over the
            ranks and measured again every ``refresh`` steps; no scales travel.
        refresh: ``agreed`` only: steps between measurements of the scales.
    """

    variant: str = "e4m3"
    scale: str = "block"
    refresh: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        agreed.check_policy(self.name, self.scale, self.refresh)
        if self.variant not in fp8.VARIANTS:
            raise ConfigError(f"fp8: variant is {self.variant!r}; expected 'e4m3' or 'e5m2'")

    @property
    def format(self) -> WireFormat:
        return wire_format("fp8" if self.variant == "e4m3" else "fp8_e5m2")

    @property
    def exact_bytes(self) -> bool:
        return self.scale == "block"

    def init(self, unit: UnitSpec) -> State:
        return {} if self.scale == "block" else agreed.initial_state(unit)

    def layout(self) -> Mapping[str, Layout]:
        return {} if self.scale == "block" else agreed.state_layout()

    def exchange(self, x: Tensor, state: State, step: Step) -> Exchange:
        if self.scale == "block" or not x.numel():
            return (yield from super().exchange(x, state, step))
        return (yield from self._agreed(x, state, step))

    def _agreed(self, x: Tensor, state: State, step: Step) -> Exchange:
        numel, shard = x.numel(), shard_elems(x.numel(), step.world_size, 1)
        x = pad(x, (0, shard * step.world_size - numel))
        local, amax = agreed.measure(x[:numel], step), state["amax"]
        if agreed.due(state, step, self.refresh):
            amax = yield from agreed.agree(local)
        variant = fp8.VARIANTS[self.variant]
        scales = agreed.TensorScales(step.unit, amax, local, variant.largest, terms=1)
        sent, received, flags = yield from self._sent(x, _TensorCoder(scales, variant, x.numel()), step)
        if bool(flags.any()):
            amax = torch.where(flags, (yield from agreed.agree(local)), amax)
            scales = replace(scales, amax=amax)
            sent, received, _ = yield from self._sent(x, _TensorCoder(scales, variant, x.numel()), step)
        coder = _TensorCoder(scales, variant, x.numel())
        mean = average_shard(received, coder, step, shard, x.device)
        owned = step.generator("owned", per_rank=True) if self.stochastic else None
        whole, residual = yield from share_shards(mean, sent.residual, coder, step, owned)
        return Exchanged(whole[:numel], residual[:numel], agreed.counted(state, amax, flags))

    def _sent(
        self, x: Tensor, coder: _TensorCoder, step: Step
    ) -> Generator[Request, Any, tuple[Encoded, list[Tensor], Tensor]]:
        """The first round: every row ends with one flag per tensor that its scale has become too large."""
        sent = coder.encode(x, 0, step.generator("sent", per_rank=True) if self.stochastic else None)
        flags = coder.scales.outgrown.to(torch.uint8)
        messages = memory.behind_headroom(to_rows(sent, step.world_size))
        flagged = torch.cat([messages, flags.expand(step.world_size, -1)], dim=1)
        received = yield AllToAll(flagged)
        parts = [message.split([message.numel() - flags.numel(), flags.numel()]) for message in received]
        return sent, [codes for codes, _ in parts], torch.stack([raised for _, raised in parts]).amax(dim=0) > 0

    def wire_bytes(self, unit: UnitSpec, world_size: int) -> int:
        """With agreed scales, of a step that does not measure."""
        if self.scale == "block":
            return super().wire_bytes(unit, world_size)
        return (world_size - 1) * (2 * shard_elems(unit.numel, world_size, 1) + len(unit.tensors))

    @classmethod
    def examples(cls) -> Sequence[Compressor]:
        return [
            cls(),
            cls(variant="e5m2"),
            cls(rounding="stochastic"),
            cls(scale="agreed", refresh=2),
            cls(variant="e5m2", scale="agreed", rounding="stochastic"),
        ]


class _TensorCoder(Coder):
    """fp8 under one scale per tensor, known to all."""

    def __init__(self, scales: agreed.TensorScales, variant: fp8.Variant, padded_elems: int) -> None:
        self.scales, self._variant = scales, variant
        self._factors = scales.scaled(torch.ones(padded_elems, device=scales.amax.device))
        self._inverses = scales.scaled(torch.ones(padded_elems, device=scales.amax.device), inverse=True)

    def encode(self, x: Tensor, first: int, generator: torch.Generator | None) -> Encoded:
        window = slice(first, first + x.numel())
        # Cut: only what is not finite can lie outside, and the step that holds it does not count.
        scaled = (x * self._factors[window]).nan_to_num(nan=0.0).clamp(-self._variant.largest, self._variant.largest)
        codes = fp8.to_codes(scaled, self._variant, generator)
        decoded = fp8.values_of(codes, self._variant) * self._inverses[window]
        return Encoded(codes, None, (x - decoded).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0))

    def decode(self, message: Tensor, first: int, weight: float, out: Tensor, accumulate: bool) -> None:
        values = fp8.values_of(message, self._variant) * self._inverses[first : first + out.numel()]
        out.copy_(torch.add(out, values, alpha=weight) if accumulate else values * weight)
