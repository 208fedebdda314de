"""Routing by size and role: small and one-dimensional tensors are not worth compressing, and are sensitive to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from thinwire.compressors.dense import Dense
from thinwire.core import Compressor, Exchange, State, Step, TensorSpec, Wrapper, make, register


@register("route")
@dataclass(frozen=True, kw_only=True)
class Route(Wrapper):
    """Biases, norms and other vectors, and anything tiny, go dense; the rest goes to the wrapped compressor.

    ``attach`` puts it around every spec without a router.

    Args:
        min_elems: tensors with fewer elements stay dense.
        min_dims: tensors with fewer axes stay dense; 1 compresses vectors too.
    """

    maturity = "stable"

    min_elems: int = 1024
    min_dims: int = 2

    def route(self, tensor: TensorSpec) -> Compressor:
        small = tensor.numel < self.min_elems or len(tensor.shape) < self.min_dims
        return Dense().route(tensor) if small else self.inner.route(tensor)

    def exchange(self, x: Tensor, state: State, step: Step) -> Exchange:
        return (yield from self.inner.exchange(x, state, step))

    @classmethod
    def examples(cls) -> Sequence[Compressor]:
        return [cls(inner=make("ef | topk(density=0.1)"))]
