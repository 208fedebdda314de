"""Top-k: Aji & Heafield, Sparse Communication for Distributed Gradient Descent (EMNLP'17); error feedback by default."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.compressors.shared.sparse import Sparsifier, check_density, kept
from thinwire.core import Compressor, ConfigError, Step, UnitSpec, memory, register
from thinwire.kernels import Selected


@register("topk")
@dataclass(frozen=True, kw_only=True)
class TopK(Sparsifier):
    """Send the k = max(1, floor(density·n)) largest magnitudes of every tensor; the rest waits in the residual.

    The selection is exact; of equal magnitudes the lower index wins, on every device.

    Args:
        density: fraction of the entries to send. Lower: fewer bytes, older updates.
        score: what is largest. ``magnitude`` of the gradient; or ``update``: magnitude times v^(-1/4), v being Adam's second
            moment, half way between the gradient and the step that Adam makes of it. That is this project's own, and needs
            ``attach(model, optimizer)`` with an optimizer of the Adam family; without one, and in the first step, it is the
            magnitude. See docs/explanation/optimizers.md.
    """

    scheduled = ("density",)

    density: float = 0.01
    score: str = "magnitude"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_density(self.density)
        if self.score not in ("magnitude", "update"):
            raise ConfigError(f"topk: score is {self.score!r}; expected 'magnitude' or 'update'")

    @property
    def needs_importance(self) -> bool:
        return self.score == "update"

    def select(self, x: Tensor, step: Step) -> Selected:
        ks = [kept(self.density, size) for size in step.unit.sizes]
        if step.importance is None:
            return kernels.ef_topk(x, None, step.unit.offsets, ks, out=x)
        scores = torch.mul(x, step.importance, out=memory.empty(x.numel(), device=x.device))
        chosen = kernels.ef_topk(scores, None, step.unit.offsets, ks, out=scores)
        at = chosen.indices.long()
        values = x[at]
        x[at] = 0
        return chosen._replace(values=values, residual=x)

    def selected_elems(self, unit: UnitSpec) -> int:
        return sum(kept(self.density, size) for size in unit.sizes)

    @classmethod
    def examples(cls) -> Sequence[Compressor]:
        return [
            cls(density=0.01),
            cls(density=0.25, values="fp16", score="update"),
            cls(density=0.1, values="int8", indices="int32"),
        ]
