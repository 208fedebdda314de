"""Top-k: Aji & Heafield, Sparse Communication for Distributed Gradient Descent (EMNLP'17); error feedback by default."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from thinwire import kernels
from thinwire.compressors.sparse import Sparsifier, check_density, kept
from thinwire.core import Compressor, Step, UnitSpec, register
from thinwire.kernels import Selected


@register("topk")
@dataclass(frozen=True, kw_only=True)
class TopK(Sparsifier):
    """Send the k = max(1, floor(density·n)) largest magnitudes of every tensor; the rest waits in the residual.

    The selection is exact; of equal magnitudes the lower index wins, on every device.

    Args:
        density: fraction of the entries to send. Lower: fewer bytes, older updates.
    """

    scheduled = ("density",)

    density: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        check_density(self.density)

    def select(self, x: Tensor, step: Step) -> Selected:
        ks = [kept(self.density, size) for size in step.unit.sizes]
        return kernels.ef_topk(x, None, step.unit.offsets, ks, out=x)

    def selected_elems(self, unit: UnitSpec) -> int:
        return sum(kept(self.density, size) for size in unit.sizes)

    @classmethod
    def examples(cls) -> Sequence[Compressor]:
        return [cls(density=0.01), cls(density=0.25, values="fp16"), cls(density=0.1, values="int8", indices="int32")]
