"""Round-robin layer selection: the plain baseline that a learned choice has to beat at equal bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from thinwire.core import Compressor, State, Step, make, register
from thinwire.wrappers.layers import Layers
from thinwire.wrappers.selection import LayerSelection


@register("roundrobin")
@dataclass(frozen=True, kw_only=True)
class RoundRobin(LayerSelection):
    """Layers take turns: those that have waited longest are exchanged, as many as the byte budget allows.

    See ``LayerSelection`` in ``selection.py`` for what all selections do. Nothing is measured, no number is sent.

    Args:
        budget: fraction of the bytes that may be sent. Lower: fewer bytes, older updates.
        warmup: in the first so many steps all layers go; over as many again the budget falls to its value. 0: none.
        max_age: a layer that has waited for so many steps goes in any case.
        always_bytes: tensors smaller than this always go.
        merge_bytes: neighbours are merged to layers of this size.
    """

    def numbers(self, x: Tensor, layers: Layers, state: State, step: Step) -> Tensor | None:
        return None

    def rank_layers(
        self, agreed: Tensor | None, layers: Layers, ages: Sequence[int], state: State, step: Step
    ) -> tuple[list[float], State]:
        return [float(age) for age in ages], {}

    @classmethod
    def examples(cls) -> Sequence[Compressor]:
        return [cls(budget=0.3, warmup=0, always_bytes=0, merge_bytes=0, inner=make("topk(density=0.1)"))]
