"""No compression: plain averaging, the yardstick and the safe choice."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.core import AllReduce, Compressor, Exchange, Exchanged, State, Step, TensorSpec, UnitSpec, register


@register("dense")
@dataclass(frozen=True, kw_only=True)
class Dense(Compressor):
    """Send everything as fp32, or as fp64 where the parameters are.

    Args:
        double: sum in fp64. Routing sets it for fp64 tensors: what is exact must be so in the tensor's own precision.
    """

    double: bool = False

    maturity = "stable"

    @property
    def rounds(self) -> int:
        return 1

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.double else torch.float32

    def route(self, tensor: TensorSpec) -> Compressor:
        return Dense(double=True) if tensor.dtype is torch.float64 else self

    def exchange(self, x: Tensor, state: State, step: Step) -> Exchange:
        mean = yield AllReduce(x)
        return Exchanged(mean, None, state)

    def wire_bytes(self, unit: UnitSpec, world_size: int) -> int:
        return 2 * (world_size - 1) * self.dtype.itemsize * unit.numel // world_size
