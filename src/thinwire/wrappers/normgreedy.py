"""Norm-greedy layer selection: the layers with most to send for their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.core import Compressor, State, Step, make, register
from thinwire.wrappers.layers import Layers
from thinwire.wrappers.selection import LayerSelection, layer_norms


@register("normgreedy")
@dataclass(frozen=True, kw_only=True)
class NormGreedy(LayerSelection):
    """Layers with the largest ‖g + e‖ / sqrt(byte share) are exchanged, as many as the byte budget allows.

    g is the gradient and e the residual, so a layer that waits moves up. The norms are averaged over the ranks: four bytes
    per layer. See ``LayerSelection`` in ``selection.py`` for what all selections do.

    Args:
        budget: fraction of the bytes that may be sent. Lower: fewer bytes, older updates.
        warmup: in the first so many steps all layers go; over as many again the budget falls to its value. 0: none.
        max_age: a layer that has waited for so many steps goes in any case.
        always_bytes: tensors smaller than this always go.
        merge_bytes: neighbours are merged to layers of this size.
    """

    def numbers(self, x: Tensor, layers: Layers, state: State, step: Step) -> Tensor | None:
        return layer_norms(x + state[self.residual_name], step.unit, layers).float() if layers.count else None

    def rank_layers(
        self, agreed: Tensor | None, layers: Layers, ages: Sequence[int], state: State, step: Step
    ) -> tuple[list[float], State]:
        norms = [] if agreed is None else agreed.tolist()
        return [norm / share**0.5 for norm, share in zip(norms, layers.shares, strict=True)], {}

    def numbers_bytes(self, layers: Layers, world_size: int) -> int:
        return 2 * (world_size - 1) * torch.float32.itemsize * layers.count // world_size

    @classmethod
    def examples(cls) -> Sequence[Compressor]:
        return [cls(budget=0.5, warmup=1, always_bytes=0, merge_bytes=0, inner=make("topk(density=0.1)"))]
