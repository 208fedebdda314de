"""Round every value to 16-bit floats under power-of-two scales: half the bytes, nothing underflows."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from thinwire.compressors.shared import agreed
from thinwire.compressors.shared.blockwise import Blockwise
from thinwire.core import AllReduce, Compressor, Exchange, Exchanged, Layout, Request, State, Step, UnitSpec, register

_LARGEST_HALF = torch.finfo(torch.float16).max


@register("fp16")
@dataclass(frozen=True, kw_only=True)
class Fp16(Blockwise):
    """Round every value to 16-bit floats under power-of-two scales: half the bytes, nothing underflows.

    Args:
        scale: ``block``: a scale per 256 values travels with them, sums are formed in fp32, the error does not grow with
            the world. ``agreed``: a scale per tensor, agreed over the ranks, and one plain all-reduce of IEEE halves, which
            NCCL does well. The network then adds in half precision: an error of about 2e-4·sqrt(world size / 2) of the
            mean is in no residual, so conservation holds to that precision only.
        refresh: ``agreed`` only: steps between measurements of the scales. Lower: scales follow falling gradients sooner
            (growing ones are followed at once).
    """

    maturity = "stable"

    scale: str = "block"
    refresh: int = 100

    def __post_init__(self) -> None:
        agreed.check_policy(self.name, self.scale, self.refresh)

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
        """One message: the halves, and one flag per tensor that its scale has become too large."""
        local, amax = agreed.measure(x, step), state["amax"]
        if agreed.due(state, step, self.refresh):
            amax = yield from agreed.agree(local)
        scales = agreed.TensorScales(step.unit, amax, local, _LARGEST_HALF, step.world_size)
        halves, total, flags = yield from _summed(x, scales)
        if bool(flags.any()):
            amax = torch.where(flags, (yield from agreed.agree(local)), amax)
            scales = replace(scales, amax=amax)
            halves, total, _ = yield from _summed(x, scales)
        # 1/world and 1/scale are one multiplication, in fp32: dividing halves is what makes small gradients vanish.
        mean = scales.scaled(total.float(), inverse=True, weight=1 / step.world_size)
        residual = x - scales.scaled(halves.float(), inverse=True)
        if not bool(torch.isfinite(local).all()):
            residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        return Exchanged(mean, residual, agreed.counted(state, amax, flags))

    def wire_bytes(self, unit: UnitSpec, world_size: int) -> int:
        """With agreed scales, of a step that does not measure."""
        if self.scale == "block":
            return super().wire_bytes(unit, world_size)
        return 2 * (world_size - 1) * 2 * (unit.numel + len(unit.tensors)) // world_size

    @classmethod
    def examples(cls) -> Sequence[Compressor]:
        return [cls()]


def _summed(x: Tensor, scales: agreed.TensorScales) -> Generator[Request, Any, tuple[Tensor, Tensor, Tensor]]:
    """What this rank sent, the sum over the ranks, and for which tensors anybody raised the flag."""
    halves = scales.scaled(x).to(torch.float16)
    flags = scales.outgrown
    reply = yield AllReduce(torch.cat([halves, flags.to(torch.float16)]), "sum")
    total, raised = reply.split([halves.numel(), flags.numel()])
    return halves, total, raised > 0
