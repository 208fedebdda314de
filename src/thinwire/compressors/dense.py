"""No compression: plain averaging, the yardstick and the safe choice."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from thinwire.core import AllReduce, Compressor, Exchange, Exchanged, State, Step, UnitSpec, register


@register("dense")
@dataclass(frozen=True, kw_only=True)
class Dense(Compressor):
    """Send everything as fp32."""

    maturity = "stable"

    @property
    def rounds(self) -> int:
        return 1

    def exchange(self, x: Tensor, state: State, step: Step) -> Exchange:
        mean = yield AllReduce(x)
        return Exchanged(mean, None, state)

    def wire_bytes(self, unit: UnitSpec, world_size: int) -> int:
        return 2 * (world_size - 1) * unit.dense_bytes // world_size
